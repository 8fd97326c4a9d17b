"""A loop of one's own that was killed goes on as the one that was not, bit for bit, with all that stands beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.trainers.lives import KILLED, differences, live
from tests.trainers.plain import refused, train_so

KINDS = ["alone", "ddp", "ddp, compiled and checkpointed", "fsdp1", "fsdp2"]


def lives(tmp_path: Path, kind: str, world: int, **options: Any) -> None:
    """One life without trouble, and one that is cut off; both end with the same state, and the same losses."""
    whole = live(world, train_so, tmp_path / "whole", kind, 12, options)
    assert live(world, train_so, tmp_path / "killed", kind, 12, {**options, "dies_after": 8}) == KILLED
    again = live(world, train_so, tmp_path / "killed", kind, 12, options)
    assert [losses[-len(again[0]) :] for losses in whole] == again
    assert len(again[0]) == 12 - options["every"] * (8 // options["every"])
    assert differences(tmp_path / "whole" / "step-000000012", tmp_path / "killed" / "step-000000012") == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[:-1])])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    lives(tmp_path, kind, 1 if kind == "alone" else 2, every=6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_goes_on_in_the_middle_of_an_accumulation(tmp_path: Path, kind: str) -> None:
    # Saved after the 5th micro-batch, the first of two; the loader has a process of its own.
    lives(tmp_path, kind, 2, every=5, gradients=True, workers=1)


@pytest.mark.slow
def test_what_was_accumulated_is_lost_without_them(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        lives(tmp_path, "ddp", 2, every=5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_goes_on_with_fewer_ranks(tmp_path: Path, kind: str) -> None:
    options = {"every": 5, "gradients": True, "elsewhere": "first"}
    live(2, train_so, tmp_path, kind, 5, options)
    (losses,) = live(1, train_so, tmp_path, kind, 8, options)
    assert len(losses) == 3 and all(float.fromhex(loss) < 1 for loss in losses)


def test_gradients_that_cannot_be_had_are_refused() -> None:
    assert "set_requires_gradient_sync" in str(live(1, refused))


def test_generators_rewind_to_what_was_loaded() -> None:
    rng = holdfast.RNG()
    rng.rewind()  # nothing was loaded
    state = rng.state_dict()
    first = torch.rand(3)
    rng.load_state_dict(state)
    torch.rand(1)
    rng.rewind()
    assert torch.equal(torch.rand(3), first)
