"""Archives as torch makes them: read by zip readers and by torch, also beyond four gigabytes."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.export import pickles, torch_file, zip_file
from holdfast.export.zip_file import Ending


@given(st.lists(st.binary(max_size=300), max_size=6))
def test_sums_of_parts_are_the_sum_of_the_whole(parts: list[bytes]) -> None:
    assert zip_file.joined((crc32(part), len(part)) for part in parts) == crc32(b"".join(parts))


def test_sum_of_a_long_text() -> None:
    part = os.urandom(1 << 20)
    assert zip_file.joined([(crc32(part), len(part))] * 9) == crc32(part * 9)


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=8))
def test_members_are_aligned_and_read_by_any_zip_reader(contents: list[bytes]) -> None:
    ending = Ending(0)
    for number, data in enumerate(contents):
        ending.add(f"data/{number}", data)
    data = ending.close()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert [archive.read(f"archive/data/{i}") for i in range(len(contents))] == contents
        at = 0
        for number, content in enumerate(contents):
            m = zip_file.member(f"data/{number}", at, len(content))
            assert m.data % 64 == 0 and data[m.data : m.data + len(content)] == content
            at = m.end


def test_as_torch_lays_it_out() -> None:
    """Local headers, padding and what follows the data are byte for byte those of torch."""
    tensor = torch.arange(1000.0)
    buffer = io.BytesIO()
    torch.save({"w": tensor}, buffer)
    theirs = buffer.getvalue()
    with zipfile.ZipFile(buffer) as archive:
        info = archive.getinfo("archive/data/0")
    m = zip_file.member("data/0", info.header_offset, tensor.nbytes)
    assert theirs[m.header : m.data] == zip_file.before(m)
    assert theirs[m.data + m.nbytes : m.end] == zip_file.after(m, info.CRC)


def test_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A tensor of 5 GiB of zeros and one behind it, in a file with holes."""
    numel = 5 << 30
    big = zip_file.member("data/0", 0, numel, 4096)
    small = zip_file.member("data/1", big.end, 12)
    step = 1 << 20
    total = zip_file.joined([(crc32(bytes(step)), step)] * (numel // step))
    tail = torch_file.data_of(torch.tensor([1.0, 2.0, 3.0]))
    ending = Ending(small.end, [(big, total), (small, crc32(tail))])
    tree = {"big": pickles.tensor("uint8", (numel,), numel, "0"), "small": pickles.tensor("float32", (3,), 12, "1")}
    torch_file.add_small(ending, pickles.dumps(tree))
    path = tmp_path / "big.pt"
    with path.open("wb") as file:
        file.write(zip_file.before(big))
        file.seek(big.data + numel)
        file.write(zip_file.after(big, total) + zip_file.before(small))
        file.write(tail + zip_file.after(small, crc32(tail)) + ending.close())
    if path.stat().st_blocks * 512 > 64 << 20:
        pytest.skip("this file system has no holes")
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded["big"].shape == (numel,) and not loaded["big"][:: 1 << 28].any()
    assert loaded["small"].tolist() == [1, 2, 3]
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.CRC) == (numel, total)
        assert archive.read("archive/data/1") == tail  # checks its sum, and its local header
