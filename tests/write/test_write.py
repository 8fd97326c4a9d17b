"""The writer: direct or not, whatever the file system says; sums of what was written; failures that come home."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.write.datafiles import OpenFiles
from holdfast.write.pool import Ring
from holdfast.write.worker import ThreadWorker


def _save_and_check(folder: Path) -> None:
    tensor = torch.arange(5_000_001, dtype=torch.int32)  # 20 MB and a bit: windows, blocks and a ragged end
    holdfast.save({"model": {"t": tensor, "s": torch.tensor(3, dtype=torch.uint8)}}, folder)
    checkpoint = holdfast.open(folder)
    checkpoint.verify()
    assert torch.equal(checkpoint.read("model/t"), tensor) and checkpoint.read("model/s") == 3


def test_direct(tmp_path: Path) -> None:
    _save_and_check(tmp_path / "c")


def test_open_refuses_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open
    asked = []

    def picky(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            asked.append(path)
            raise OSError(errno.EINVAL, "Invalid argument", path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", picky)
    _save_and_check(tmp_path / "c")
    assert asked


def test_first_write_refuses_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    real = os.pwrite
    refused = []

    def picky(fd: int, data: Any, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", picky)
    _save_and_check(tmp_path / "c")
    assert refused


def test_direct_writes_that_two_threads_are_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, both = os.pwrite, threading.Barrier(2)
    refused: list[int] = []

    def picky(fd: int, data: Any, offset: int) -> int:
        if len(refused) < 2:
            refused.append(fd)
            both.wait(240)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", picky)
    _save_and_check(tmp_path / "c")
    assert len(refused) == 2


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[: max(4096, len(data) // 3)], offset))
    _save_and_check(tmp_path / "c")


@pytest.mark.parametrize("nth", range(6))
def test_a_failing_write_fails_the_save(nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    calls = iter(range(1000))

    def failing(fd: int, data: Any, offset: int) -> int:
        if next(calls) == nth:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, data, offset)

    holdfast.save({"t": torch.ones(3)}, tmp_path / "before")
    monkeypatch.setattr(os, "pwrite", failing)
    state = {"a": {"t": torch.ones(9_000_000)}, "b": {"t": torch.ones(9_000_000)}}
    with pytest.raises(holdfast.SaveFailed, match="the device failed") as caught:
        holdfast.save(state, tmp_path / "c")
    assert isinstance(caught.value, OSError) and caught.value.errno == errno.EIO
    assert caught.value.file is not None and caught.value.file.endswith(".safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["before"]


def test_failing_sync_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync
    count = sum(1 for _ in _synced(tmp_path / "count", monkeypatch, real))
    assert count >= 6, "data file, header, folders, manifest"
    for nth in range(count):
        calls = iter(range(1000))

        def failing(fd: int, nth: int = nth, calls: Any = calls) -> None:
            if next(calls) == nth:
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        monkeypatch.setattr(os, "fsync", failing)
        with pytest.raises(holdfast.SaveFailed):
            holdfast.save({"m": {"t": torch.ones(3)}}, tmp_path / f"c{nth}" / "step")
        monkeypatch.setattr(os, "fsync", real)
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.open(tmp_path / f"c{nth}" / "step")
        holdfast.save({"m": {"t": torch.ones(3)}}, tmp_path / f"c{nth}" / "step")
        holdfast.open(tmp_path / f"c{nth}" / "step").verify()


def _synced(path: Path, monkeypatch: pytest.MonkeyPatch, real: Any) -> list[int]:
    seen: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: (seen.append(fd), real(fd)))
    holdfast.save({"m": {"t": torch.ones(3)}}, path / "step")
    monkeypatch.setattr(os, "fsync", real)
    return seen


def test_file_descriptors_and_threads_do_not_grow(tmp_path: Path) -> None:
    import threading

    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    state = {"m": {"t": torch.ones(1000)}}
    for step in range(20):
        holdfast.save(state, tmp_path / str(step))
        holdfast.load(tmp_path / str(step), state)
        if step == 4:
            early = counts()
    assert counts() == early


def test_windows_are_few_for_small_saves() -> None:
    with Ring() as ring:
        assert ring.take([10], pinned=False).nbytes == 4096
        assert ring.take([1 << 40, 10], pinned=False).nbytes <= 128 << 20


def test_a_folder_that_was_deleted_while_it_was_empty(tmp_path: Path) -> None:
    opened, worker = OpenFiles(), ThreadWorker()
    path = tmp_path / "step-1" / "model" / "a.safetensors"
    path.parent.make_folder()
    (tmp_path / "step-1").delete_empty_folders()  # as a rank does that takes its part of a failed save back
    opened.open(path, 100, worker)
    opened.close()
    worker.close()
    assert opened.paths == [path] and path.is_file()
