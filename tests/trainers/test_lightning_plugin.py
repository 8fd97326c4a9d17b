"""Lightning's own checkpoints on `HoldfastCheckpointIO`: links, who waits for a save, hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainers.lives import live

PLUGIN = "tests.trainers.lightning_plugin"  # imported by the rank alone: Lightning takes seconds


def on_a_rank(name: str, *args: Any) -> Any:
    outcome = live(1, f"{PLUGIN}:{name}", *args)
    assert isinstance(outcome, list)
    return outcome[0]


FILES_AND_FOLDERS = pytest.mark.parametrize("extension", [".ckpt", ""])


@pytest.mark.slow
@FILES_AND_FOLDERS
def test_a_link_that_is_removed_takes_no_checkpoint_along(tmp_path: Path, extension: str) -> None:
    steps = {f"epoch={epoch}{extension}": 2 * epoch + 2 for epoch in range(3)}
    found = on_a_rank("links_with_names_that_change", tmp_path, extension)
    assert found == {**steps, f"last-epoch=2{extension}": f"-> epoch=2{extension}"}


@pytest.mark.parametrize("target", ["first.ckpt", "ROOT/first.ckpt", "folder", "file.ckpt", "nothing"])
@pytest.mark.parametrize("link", ["link.ckpt", "link"])
@pytest.mark.fast_cases("link.ckpt-ROOT/first.ckpt", "link-folder")
def test_a_link_itself_is_removed_or_replaced(tmp_path: Path, target: str, link: str) -> None:
    others = {"folder": 1, "first.ckpt": 1, "file.ckpt": "a file"}
    (tmp_path / "removed").mkdir()
    (tmp_path / "replaced").mkdir()
    assert on_a_rank("remove_link", tmp_path / "removed", target, link) == others
    assert on_a_rank("save_over_link", tmp_path / "replaced", target, link) == {**others, link: 2}


@pytest.mark.parametrize("link", ["link.ckpt", "link"])
def test_a_save_that_fails_leaves_the_link_that_it_was_to_replace(tmp_path: Path, link: str) -> None:
    others = {"folder": 1, "first.ckpt": 1, "file.ckpt": "a file"}
    found = on_a_rank("save_over_link_that_fails", tmp_path, link)
    assert found == ("SaveFailed", {**others, link: "-> first.ckpt"})


@FILES_AND_FOLDERS
@pytest.mark.parametrize(("fails", "last"), [(False, 2), (True, "-> first")])
def test_a_save_of_training_goes_through_no_link(tmp_path: Path, fails: bool, last: Any, extension: str) -> None:
    failed, found = on_a_rank("fit_over_link", tmp_path, fails, extension)
    assert failed == ("SaveFailed" if fails else "none")
    assert found == {"first": 100, f"last{extension}": last}


@FILES_AND_FOLDERS
def test_what_has_taken_a_name_meanwhile_is_not_removed(tmp_path: Path, extension: str) -> None:
    found = on_a_rank("names_taken_meanwhile", tmp_path, extension)
    assert found == {
        f"1{extension}": 1, f"2{extension}": "-> elsewhere", "elsewhere": 2, "moved": f"-> 3{extension}",
    }  # fmt: skip


@pytest.mark.parametrize(("worker", "extension"), [("thread", ""), ("process", ""), ("process", ".ckpt")])
@pytest.mark.fast_cases("thread-", "process-.ckpt")
def test_a_save_outside_of_training_is_whole_when_it_returns(tmp_path: Path, worker: str, extension: str) -> None:
    assert on_a_rank("saves_around_fit", tmp_path, worker, extension) == {
        "before all": 0, "in validate": 0, "teardown of validate": 0, "after validate": 0, "start of fit": 0,
        "end of fit": 2, "teardown of fit": 2, "after fit": 2, "in test": 2, "teardown of test": 2,
        "after the second fit": 4, "threads after fit": [], "threads after all": [],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["inside.ckpt", "inside"])
def test_a_save_of_training_is_in_the_background(tmp_path: Path, name: str) -> None:
    found = on_a_rank("saves_inside_of_fit", tmp_path, name)
    assert found == {"at once": "NotACheckpoint", "after fit": 1, "as it was": True, "threads": []}


@pytest.mark.parametrize(("worker", "extension"), [("thread", ""), ("process", ""), ("process", ".ckpt")])
def test_a_failure_is_raised(tmp_path: Path, worker: str, extension: str) -> None:
    assert on_a_rank("failures", tmp_path, worker, extension) == {
        "after fit": "SaveFailed", "well": 2, "at_the_end": "SaveFailed", "in_the_middle": "SaveFailed", "threads": [],
    }  # fmt: skip


def test_training_that_raises_keeps_its_saves(tmp_path: Path) -> None:
    found = on_a_rank("an_exception_in_training", tmp_path)
    assert found == {"raised": "InterruptedError", "threads": [], "before": 1, "saved.ckpt": 1}


def test_as_a_part_of_another_plugin(tmp_path: Path) -> None:
    found = on_a_rank("as_a_part_of_another_plugin", tmp_path)
    assert found == {"step=1.ckpt": 1, "step=2.ckpt": 2, "threads": []}


def test_another_trainer_inside_of_fit_is_outside_of_its_own(tmp_path: Path) -> None:
    assert on_a_rank("a_trainer_inside_of_fit", tmp_path) == {"inner": 0, "threads": []}


def test_arguments_are_restored(tmp_path: Path) -> None:
    kept = on_a_rank("restored_arguments", tmp_path)
    assert kept.pop("act").__name__ == "relu"  # the default: what was given is no value
    assert kept == {"where": "/data", "sizes": {1: "one"}, "scale": 2.0}


def test_hyperparameters_of_omegaconf_are_restored(tmp_path: Path) -> None:
    pytest.importorskip("omegaconf")
    kept = {"lr": 0.1, "net": {"width": 4, "twice": [0.1, 0.1], "to come": "???"}}
    assert on_a_rank("restored_from_omegaconf", tmp_path) == {
        "kept": kept, "type": "DictConfig", "width": 4, "alike": True, "by hand": 4, "missing": True,
    }  # fmt: skip
