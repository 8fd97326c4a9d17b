"""The law of a state, as a function: what comes back goes on exactly as after torch's own `load_state_dict`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import holdfast

State = dict[str, Any]
Step = Callable[[State, int], Any]


def train(state: State, step: Step, first: int, count: int) -> list[Any]:
    """What ``count`` steps from number ``first`` on give, as copies."""
    return [copy.deepcopy(step(state, number)) for number in range(first, first + count)]


def objects_of(node: Any) -> list[Any]:
    """All objects with a state dict, in the order of the state."""
    if hasattr(node, "load_state_dict"):
        return [node]
    if isinstance(node, dict):
        return [found for value in node.values() for found in objects_of(value)]
    return [found for value in node for found in objects_of(value)] if isinstance(node, (list, tuple)) else []


def as_torch_does(make: Callable[[int], State], saved: State) -> State:
    """A fresh state with what torch's own methods carry over."""
    fresh = make(7)
    for old, new in zip(objects_of(saved), objects_of(fresh), strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))
    return fresh


def holds(make: Callable[[int], State], step: Step, path: Path, *, steps: int = 3, saver: bool = False) -> None:
    """Train, save, load into a fresh state; both it and torch's go on alike for ten steps, and as without a stop."""
    state = make(1)
    train(state, step, 0, steps)
    if saver:
        with holdfast.Saver(worker="thread") as background:
            background.save(state, path / "c").wait()
    else:
        holdfast.save(state, path / "c")
    theirs, ours = as_torch_does(make, state), make(9)
    loaded = holdfast.load(path / "c", ours)
    assert not loaded.kept and not loaded.skipped
    on, again, expected = (train(s, step, steps, 10) for s in (state, ours, theirs))
    assert_same(again, expected)
    assert_same(again, on)


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other
