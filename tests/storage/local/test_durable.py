"""Small files that are on the disk, whole, when a call returns."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from holdfast.storage.local import durable


def test_a_small_file_replaces_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    durable.write_small(str(path), b"old")
    durable.write_small(str(path), b"new")
    assert path.read_bytes() == b"new" and [p.name for p in path.parent.iterdir()] == ["b"]


def test_a_small_file_that_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    durable.write_small(str(path), b"old")

    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output"):
        durable.write_small(str(path), b"new")
    assert path.read_bytes() == b"old" and len(list(tmp_path.iterdir())) == 1
