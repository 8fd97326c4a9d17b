"""One Ctrl-C is one KeyboardInterrupt, wherever it comes, and the saves after it work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast import events, saver
from holdfast.buffers import stable
from holdfast.saving import background
from holdfast.saving.background import BackgroundSave
from tests.tearing import patched

PLACES: list[tuple[Any, str]] = [
    (background, "hold_still"), (background, "gather"), (saver.Saver, "_hook"), (saver, "label_of"),
    (BackgroundSave, "gather"), (BackgroundSave, "__init__"),
    (stable.Copying, "begin"), (events, "begin"),
]  # fmt: skip
"""What a call of `save` passes in the calling thread."""


@contextmanager
def interrupted(owner: Any, name: str, *, after: bool) -> Iterator[None]:
    """The first call of ``owner.name`` in the block is interrupted, before or after it did its work."""
    whole = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, whole)
        if after:
            whole(*args, **kwargs)
        raise KeyboardInterrupt

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, whole)


def trained() -> dict[str, Any]:
    model = nn.Linear(50, 50)
    state = {"m": model, "o": torch.optim.AdamW(model.parameters()), "n": [1, 2]}
    model(torch.ones(1, 50)).sum().backward()
    state["o"].step()
    return state


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
def test_an_interrupt_is_raised_once_where_it_comes(place: tuple[Any, str], after: bool, tmp_path: Path) -> None:
    state = trained()
    with holdfast.Saver(worker="thread") as background:
        background.save(state, tmp_path / "0").wait()
        with interrupted(*place, after=after), pytest.raises(KeyboardInterrupt):
            background.save(state, tmp_path / "1")
        for number in (2, 3):
            background.save(state, tmp_path / str(number)).wait()
            assert torch.equal(holdfast.open(tmp_path / str(number)).read("m/weight"), state["m"].weight.detach())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_blocking_save_that_is_interrupted(after: bool, tmp_path: Path) -> None:
    state = trained()
    with interrupted(import_module("holdfast.save"), "gather", after=after), pytest.raises(KeyboardInterrupt):
        holdfast.save(state, tmp_path / "1")
    holdfast.save(state, tmp_path / "1")
    assert torch.equal(holdfast.open(tmp_path / "1").read("m/weight"), state["m"].weight.detach())


@pytest.mark.parametrize("place", [(background, "hold_still"), (background, "gather")], ids=lambda place: place[1])
def test_a_manager_goes_on_after_an_interrupt(place: tuple[Any, str], tmp_path: Path) -> None:
    state = trained()
    with holdfast.CheckpointManager(tmp_path / "run", every=1) as manager:
        manager.step(1, state)
        with interrupted(*place, after=True), pytest.raises(KeyboardInterrupt):
            manager.step(2, state)
        manager.step(3, state)
    assert holdfast.open(tmp_path / "run" / "step-000000003").step == 3


def test_an_interrupt_between_the_agreement_and_the_plan_reaches_the_other_ranks(tmp_path: Path) -> None:
    """They wait for this rank to settle: the save fails there, and is not taken for one that was skipped."""
    with patched(hold=0, small=0), holdfast.Saver(worker="thread") as background_saver:
        with interrupted(background, "value_of", after=False), pytest.raises(KeyboardInterrupt):
            background_saver.save({"w": torch.ones(10)}, tmp_path / "1")
        saving = background_saver._earlier.last
        assert saving is not None and not saving.settled(240)
        assert "was interrupted" in str(saving.failed) and not saving.skipped
        background_saver.save({"w": torch.ones(10)}, tmp_path / "2").wait()
    assert not (tmp_path / "1").exists()
