"""What a local file is read by: cached or cold, in parts that a sum can follow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.cache import make_cold, make_warm
from holdfast.buffers.stage import host_view
from holdfast.errors import Damaged
from holdfast.read.source import STRIDE, ReadStats, Source, source_of
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.local.large import open_to_read
from holdfast.storage.urls import location

DATA = os.urandom(3 * STRIDE + 4567)
SIZE = len(DATA)


@pytest.fixture(scope="module", params=["warm", "cold"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Source:
    path: Path = tmp_path_factory.mktemp("source") / "file"
    path.write_bytes(DATA)
    cached, direct = open_to_read(path)
    request.addfinalizer(lambda: [os.close(fd) for fd in (cached, direct) if fd is not None])
    (make_warm if request.param == "warm" else make_cold)(path.parent)
    return source_of(location(path), (cached, direct), ReadStats())


@given(st.integers(0, SIZE), st.integers(0, SIZE))
def test_a_reader_sees_every_byte_once_and_in_order(source: Source, one: int, other: int) -> None:
    begin, end = sorted((one, other))
    target = torch.zeros(end - begin, dtype=torch.uint8)
    memory, parts = host_view(target.data_ptr(), target.nbytes), bytearray()
    source.read(begin, memory, target.data_ptr(), parts.extend)
    assert parts == DATA[begin:end]
    assert bytes(memory) == DATA[begin:end]


@pytest.mark.parametrize("seen", [True, False])
def test_a_file_that_ends_too_early_is_damaged(source: Source, *, seen: bool) -> None:
    target, parts = torch.zeros(SIZE, dtype=torch.uint8), bytearray()
    memory = host_view(target.data_ptr(), target.nbytes)
    with pytest.raises(Damaged, match=f"ends at byte {SIZE}"):
        source.read(100, memory, target.data_ptr(), parts.extend if seen else None)


@pytest.mark.parametrize("seen", [True, False])
def test_the_kernel_may_bring_fewer_bytes_than_were_asked_for(
    source: Source, monkeypatch: pytest.MonkeyPatch, *, seen: bool
) -> None:
    full = os.preadv

    def short(fd: int, memory: list[memoryview], offset: int) -> int:
        return full(fd, [memory[0][: SECTOR + len(memory[0]) // 2]], offset)

    monkeypatch.setattr(os, "preadv", short)
    target, parts = torch.zeros(SIZE - 100, dtype=torch.uint8), bytearray()
    source.read(100, host_view(target.data_ptr(), target.nbytes), target.data_ptr(), parts.extend if seen else None)
    assert bytes(target.numpy()) == DATA[100:]
    assert parts == (DATA[100:] if seen else b"")
    assert source.fetch(100, SIZE - 100).view == DATA[100:]
    assert b"".join(map(bytes, source.parts(100, SIZE - 100))) == DATA[100:]
