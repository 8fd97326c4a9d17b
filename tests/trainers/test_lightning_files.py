"""Lightning's checkpoints as single files: read by everything that reads Lightning's own, whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.lives import live

RUNS = "tests.trainers.lightning_files_runs"  # imported by the rank alone: Lightning takes seconds


def on_a_rank(name: str, *args: Any) -> Any:
    outcome = live(1, f"{RUNS}:{name}", *args)
    assert isinstance(outcome, list)
    return outcome[0]


@pytest.mark.slow
def test_it_is_found_where_lightning_and_its_users_look(tmp_path: Path) -> None:
    found = on_a_rank("found_as_a_file", tmp_path)
    assert found.pop("left") == ["epoch=2-step=6.ckpt"]
    assert found == {
        "is a file": True, "load_from_checkpoint": True, "overridden": "/other", "data module": 5, "torch.load": 6,
        "hyperparameters": {"width": 3, "data": "/data", "sizes": {1: "one"}, "act": None}, "opened": 6,
        "names": ["model/layer.bias", "model/layer.weight", "model/more.bias", "model/more.weight"], "threads": [],
        "validate": True, "test": True, "predict": True, "went on": 8,
    }  # fmt: skip


def test_folders_that_earlier_versions_saved(tmp_path: Path) -> None:
    assert on_a_rank("where_a_folder_was", tmp_path) == {
        "loaded": 1, "is a file": True, "mine": "SaveFailed", "kept": ["notes"],
        "loaded.ckpt": 1, "replaced.ckpt": 2, "mine.ckpt": "NotACheckpoint",
    }  # fmt: skip


def test_a_folder_is_replaced_where_names_cannot_be_exchanged(tmp_path: Path) -> None:
    assert on_a_rank("without_exchange", tmp_path) == {
        "failed": "SaveFailed", "after": {"saved.ckpt": 1}, "file": True, "saved.ckpt": 3,
    }  # fmt: skip


def test_a_save_that_fails_leaves_the_file_before_it(tmp_path: Path) -> None:
    assert on_a_rank("faults", tmp_path) == (["failed", "perhaps", "saved"], True)


@pytest.mark.slow
def test_a_byte_that_was_altered_is_found(tmp_path: Path) -> None:
    assert on_a_rank("flipped_bytes", tmp_path) == []


def test_where_a_file_is_loaded_to_and_whose_it_is(tmp_path: Path) -> None:
    assert on_a_rank("read_with_map_location", tmp_path) == {
        "nothing": "cpu", "device": "cpu", "text": "meta", "function": "cpu", "theirs": True,
        "missing": "NotACheckpoint",
    }  # fmt: skip


@pytest.mark.timeout(120)
def test_a_name_that_repeats_is_told(tmp_path: Path) -> None:
    assert on_a_rank("a_name_that_repeats", tmp_path) == {"told": True, "same.ckpt": 2}
