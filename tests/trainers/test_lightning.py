"""Lightning's own trainer, killed in the middle of an epoch, goes on as if it had not been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.trainers.lives import KILLED, differences, live

FITS = "tests.trainers.lightning_fits"  # imported by the ranks alone: Lightning takes seconds


def lives(
    tmp_path: Path, kind: str, *, every: int, dies_after: int, goes_on_after: int, plateau: bool = False,
    **options: Any,
) -> None:  # fmt: skip
    """``goes_on_after`` so many batches: with what the killed run had saved last."""
    world = 1 if kind == "alone" else 2
    whole = live(world, f"{FITS}:fit", tmp_path / "whole", kind, every, 0, "error", plateau, options)
    assert live(world, f"{FITS}:fit", tmp_path / "killed", kind, every, dies_after, "error", plateau, options) == KILLED
    again = live(world, f"{FITS}:fit", tmp_path / "killed", kind, every, 0, "error", plateau, options)
    assert [(losses[goes_on_after:], seen) for losses, seen in whole] == again
    last = max(tmp_path.glob("whole/step-*"))
    assert differences(last, tmp_path / "killed" / last.name) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "alone", "fsdp2"])
def test_inside_of_an_epoch(tmp_path: Path, kind: str) -> None:
    lives(tmp_path, kind, every=4, dies_after=11, goes_on_after=8)


@pytest.mark.slow
def test_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    lives(tmp_path, "alone", every=6, dies_after=14, goes_on_after=12, plateau=True)


@pytest.mark.slow
def test_schedulers_that_watch_a_metric_do_not_miss_a_step(tmp_path: Path) -> None:
    lives(tmp_path, "alone", every=5, dies_after=22, goes_on_after=20, plateau=True)


@pytest.mark.slow
def test_accumulated_gradients(tmp_path: Path) -> None:
    lives(tmp_path, "alone", every=2, dies_after=11, goes_on_after=8, accumulate_grad_batches=2)


@pytest.mark.slow
def test_validation_inside_of_the_epoch(tmp_path: Path) -> None:
    lives(tmp_path, "alone", every=5, dies_after=17, goes_on_after=15, val_check_interval=0.5)


@pytest.mark.slow
def test_counted_in_steps(tmp_path: Path) -> None:
    lives(tmp_path, "ddp", every=5, dies_after=12, goes_on_after=10, max_steps=16, max_epochs=-1)
    lives(tmp_path / "end", "alone", every=6, dies_after=14, goes_on_after=12, max_steps=30, max_epochs=-1)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_that_has_ended_goes_on_with_more_epochs(tmp_path: Path, epochs: int) -> None:
    ((whole, seen),) = live(1, f"{FITS}:fit", tmp_path / "whole", "alone", 5, 0, "error", True)
    live(1, f"{FITS}:fit", tmp_path / "parts", "alone", 5, 0, "error", True, {"max_epochs": epochs})
    assert live(1, f"{FITS}:fit", tmp_path / "parts", "alone", 5, 0, "error", True) == [(whole[12 * epochs :], seen)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_on_another_number_of_ranks(tmp_path: Path, kind: str) -> None:
    assert live(2, f"{FITS}:fit", tmp_path, kind, 4, 11) == KILLED
    with pytest.raises(AssertionError, match='Here it is HoldfastCheckpoint that takes elsewhere="first"'):
        live(1, f"{FITS}:fit", tmp_path, "alone", 4)
    ((losses, _),) = live(1, f"{FITS}:fit", tmp_path, "ddp" if kind == "ddp" else "fsdp2", 4, 0, "first")
    assert len(losses) == 22  # the loader of one rank has 12 batches an epoch: 10 of the second, and the third


@pytest.mark.slow
def test_a_signal_leaves_a_last_step(tmp_path: Path) -> None:
    ((whole, seen),) = live(1, f"{FITS}:fit", tmp_path / "whole", "alone", 100)
    ((first, _),) = live(1, f"{FITS}:fit_and_stop", tmp_path / "stopped", 15, "SIGTERM")
    ((second, _),) = live(1, f"{FITS}:fit_and_stop", tmp_path / "stopped", 5, "SIGUSR1")
    ((third, counted),) = live(1, f"{FITS}:fit", tmp_path / "stopped", "alone", 100)
    assert first + second + third == whole and counted == seen and 15 <= len(first) < 18


@pytest.mark.slow
def test_it_takes_what_a_manager_takes(tmp_path: Path) -> None:
    assert live(1, f"{FITS}:arguments_that_are_missing", tmp_path) == [[]]


@pytest.mark.slow
def test_a_fit_that_raised_goes_on_when_it_is_called_again(tmp_path: Path) -> None:
    """With the gradient scaler that it had."""
    whole = live(1, f"{FITS}:fit_again", tmp_path / "whole", 0)
    assert live(1, f"{FITS}:fit_again", tmp_path / "again", 11) == whole


@pytest.mark.slow
def test_what_asks_for_two_things_at_once(tmp_path: Path) -> None:
    (found,) = live(1, f"{FITS}:fit_wrongly", tmp_path / "run")
    assert found["a trial"] == 1 and found["left by a trial"] == []
    assert (found["first"], found["theirs alone"], found["done"], found["no data"]) == (2, 3, 3, 0)
    assert "has restored step 3" in found["theirs and ours"] and "leave out ckpt_path" in found["theirs and ours"]
    assert "earlier run, up to 3" in found["afresh"]


def test_the_plugin_keeps_lightnings_own_checkpoints(tmp_path: Path) -> None:
    ((whole, first),) = live(1, f"{FITS}:fit_with_plugin", tmp_path, "alone", "")
    assert len(list(tmp_path.iterdir())) == 2  # the best one and the last: those that they replaced are gone
    assert all(path.is_file() and path.suffix == ".ckpt" for path in tmp_path.iterdir())
    assert holdfast.open(tmp_path / "last.ckpt").verify()
    assert holdfast.open(tmp_path / "last.ckpt").values["hyper_parameters"]["sharded"] is False
    assert whole and first


@pytest.mark.slow
def test_the_plugin_goes_on(tmp_path: Path) -> None:
    whole = live(2, f"{FITS}:fit_with_plugin", tmp_path / "whole", "ddp", "", 2)
    live(2, f"{FITS}:fit_with_plugin", tmp_path / "parts", "ddp", "", 1)
    again = live(2, f"{FITS}:fit_with_plugin", tmp_path / "parts", "ddp", "last.ckpt", 2)
    assert [weights for _, weights in again] == [weights for _, weights in whole]


@pytest.mark.slow
def test_the_example(tmp_path: Path) -> None:
    whole = live(2, f"{FITS}:play_lightning", tmp_path / "whole", "")
    assert live(2, f"{FITS}:play_lightning", tmp_path / "killed", "step 14:") == KILLED
    again = live(2, f"{FITS}:play_lightning", tmp_path / "killed", "")
    assert len(whole[0]) == 24 and len(again[0]) in (14, 19) and again[0] == whole[0][-len(again[0]) :]


@pytest.mark.parametrize("kind", ["alone", pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
@pytest.mark.fast_cases("alone")
def test_the_best_step_and_the_last(tmp_path: Path, kind: str) -> None:
    found = live(1 if kind == "alone" else 2, f"{FITS}:fit_and_look_back", tmp_path, kind)
    assert found == [
        {
            "before": ("", None, ""), "best": "step-000000008", "score": 2.0, "last": "step-000000018", "there": True,
            "validate best": True, "validate step-000000008": True, "validate step-000000018": True,
            "test": True, "predict": True, "patched": False,
            "fit": " which goes on from the newest step of its own root",
        }
    ] * len(found)  # fmt: skip


def test_steps_that_training_left_behind_are_neither_the_best_nor_the_last(tmp_path: Path) -> None:
    metrics = {4: 3.0, 8: 2.0, 12: 1.0}
    with holdfast.CheckpointManager(tmp_path, every=4, keep=holdfast.Keep(last=9)) as manager:
        for step, metric in metrics.items():
            manager.save(step, {"step": step}, metric=metric)
            manager.wait()
        manager.restore({"step": 0}, step=4)
        manager.save(6, {"step": 6}, metric=2.5)
    assert live(1, f"{FITS}:look_back", tmp_path) == [["step-000000006", 2.5, "step-000000006"]]
