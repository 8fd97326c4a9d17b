"""Roots that take no saves: told when the manager is made, prepares, or takes its first step; not at the first save."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from holdfast import CheckpointManager
from holdfast.errors import StorageError
from holdfast.run import saves
from tests import pool, rights


def _manager(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, every=100, signals=(), **options)


def _state() -> dict[str, Any]:
    return {"w": torch.zeros(3)}


@pytest.fixture
def read_only() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=rights.OPEN) as folder:
        os.chmod(folder, 0o555)
        with rights.refused():
            yield Path(folder)


@pytest.mark.parametrize("below", ["", "runs/run1"])
def test_a_file_is_no_root(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("notes")
    with pytest.raises(StorageError, match=f"cannot save steps in {file / below}: {file} is not a folder") as caught:
        _manager(file / below)
    assert caught.value.errno == errno.ENOTDIR


@pytest.mark.parametrize("below", ["", "runs/run1"])
@pytest.mark.parametrize("worker", ["thread", "none"])
def test_prepare_refuses_a_folder_that_cannot_be_written(worker: str, below: str, read_only: Path) -> None:
    with _manager(read_only / below, worker=worker) as manager:
        assert manager.restore(_state()) is None, "reading is not refused"
        with pytest.raises(StorageError, match=f"{read_only} may not be written to .no permission") as caught:
            manager.prepare(_state())
    assert caught.value.errno == errno.EACCES


def _prepare(root: str) -> str:
    def refuse(root: Path) -> None:
        if dist.get_rank() == 1:
            raise OSError(errno.EACCES, "this rank's disk alone", str(root))

    with (
        patch.object(saves, "refuse_read_only", refuse),
        _manager(Path(root), worker="thread") as manager,
        pytest.raises(StorageError, match="this rank's disk alone.*rank 1 .*phase root") as caught,
    ):
        manager.prepare(_state())
    return str(caught.value)


def test_what_one_rank_may_not_do_all_raise(tmp_path: Path) -> None:
    assert len(set(pool.run(2, _prepare, str(tmp_path / "run")))) == 1


def test_the_first_step_warns_of_a_folder_that_cannot_be_written(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with _manager(read_only / "run", worker="none") as manager, caplog.at_level(logging.WARNING, "holdfast"):
        for step in (1, 2, 3):
            assert manager.step(step, _state()) is None
    told = [record.getMessage() for record in caplog.records if "no step can be saved" in record.getMessage()]
    assert len(told) == 1 and f"cannot save steps in {read_only}/run" in told[0]


def test_a_folder_that_takes_saves_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _manager(tmp_path / "run", worker="none") as manager, caplog.at_level(logging.WARNING, "holdfast"):
        manager.prepare(_state())
        manager.step(1, _state())
    assert not caplog.records
