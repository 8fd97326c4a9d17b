"""Compressed archives through `open`: a bomb leaves nothing behind, and what is unpacked is so once, and goes again."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.formats.machine import scratch
from tests.formats.truth import Truth


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for entry, data in entries:
            archive.addfile(entry, io.BytesIO(data))
    return path


def entry(name: str, nbytes: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = nbytes
    return made


def composers(path: Path, mode: str, nbytes: int = 0) -> Path:
    """An archive that begins as Composer's do, with zeros, which pack well, in its state."""
    data = io.BytesIO()
    torch.save({"state": {"model": {"w": torch.zeros(nbytes // 4)}, "rank_zero_seed": 1}, "rng": []}, data)
    return pack(path, (entry("composer_states.pt", len(data.getvalue())), data.getvalue()), mode=mode)


def left() -> list[str]:
    root = Path(tempfile.gettempdir()) / f"holdfast-scratch-{os.geteuid()}"
    return os.listdir(root) if root.exists() else []


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
@pytest.mark.slow_cases("w:bz2", "w:xz")
def test_a_bomb_is_refused_and_leaves_nothing(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = composers(tmp_path / "ep0-ba1-rank0.tar.gz", mode, 50_000_000)
    assert path.stat().st_size < 500_000
    monkeypatch.setenv(scratch.LIMIT, "10000000")
    with pytest.raises(holdfast.HoldfastError, match=scratch.LIMIT):
        holdfast.open(path)
    assert left() == []
    monkeypatch.setenv(scratch.LIMIT, "100000000")
    assert holdfast.open(path).tensors["model/w"].nbytes == 50_000_000


def test_unpacked_once_and_gone_in_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = Truth("composer_targz_2r").path
    calls = []
    monkeypatch.setattr(scratch, "_unpack", lambda *a, real=scratch._unpack: (calls.append(a), real(*a)))
    first, second = holdfast.open(path), holdfast.open(path)
    assert len(calls) == 1 and len(left()) == 2, "a folder and its lock"
    assert torch.equal(first.read("model/mix"), second.read("model/mix"))
    del first
    second.read("model/mix")
    del second
    assert left() == []
