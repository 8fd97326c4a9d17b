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


def test_a_link_that_is_removed_takes_no_checkpoint_along(tmp_path: Path) -> None:
    steps = {"epoch=0.ckpt": 2, "epoch=1.ckpt": 4, "epoch=2.ckpt": 6}
    assert on_a_rank("links_with_names_that_change", tmp_path) == {**steps, "last-epoch=2.ckpt": "-> epoch=2.ckpt"}


@pytest.mark.parametrize("target", ["first.ckpt", "ROOT/first.ckpt", "file.ckpt", "nothing"])
def test_a_link_itself_is_removed_or_replaced(tmp_path: Path, target: str) -> None:
    others = {"first.ckpt": 1, "file.ckpt": "a file"}
    (tmp_path / "removed").mkdir()
    (tmp_path / "replaced").mkdir()
    assert on_a_rank("remove_link", tmp_path / "removed", target) == others
    assert on_a_rank("save_over_link", tmp_path / "replaced", target) == {**others, "link.ckpt": 2}


def test_a_save_that_fails_leaves_the_link_that_it_was_to_replace(tmp_path: Path) -> None:
    others = {"first.ckpt": 1, "file.ckpt": "a file"}
    found = on_a_rank("save_over_link_that_fails", tmp_path)
    assert found == ("SaveFailed", {**others, "link.ckpt": "-> first.ckpt"})


@pytest.mark.parametrize(("fails", "last"), [(False, 2), (True, "-> first.ckpt")])
def test_a_save_of_training_goes_through_no_link(tmp_path: Path, fails: bool, last: Any) -> None:
    failed, found = on_a_rank("fit_over_link", tmp_path, fails)
    assert (failed, found) == ("SaveFailed" if fails else "none", {"first.ckpt": 100, "last.ckpt": last})


def test_what_has_taken_a_name_meanwhile_is_not_removed(tmp_path: Path) -> None:
    found = on_a_rank("names_taken_meanwhile", tmp_path)
    assert found == {"1.ckpt": 1, "2.ckpt": "-> elsewhere.ckpt", "elsewhere.ckpt": 2, "moved": "-> 3.ckpt"}


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_save_outside_of_training_is_whole_when_it_returns(tmp_path: Path, worker: str) -> None:
    assert on_a_rank("saves_around_fit", tmp_path, worker) == {
        "before all": 0, "in validate": 0, "teardown of validate": 0, "after validate": 0, "start of fit": 0,
        "end of fit": 2, "teardown of fit": 2, "after fit": 2, "in test": 2, "teardown of test": 2,
        "after the second fit": 4, "threads after fit": [], "threads after all": [],
    }  # fmt: skip


def test_a_save_of_training_is_in_the_background(tmp_path: Path) -> None:
    found = on_a_rank("saves_inside_of_fit", tmp_path)
    assert found == {"at once": "NotACheckpoint", "after fit": 1, "threads": []}


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_failure_is_raised(tmp_path: Path, worker: str) -> None:
    assert on_a_rank("failures", tmp_path, worker) == {
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
