"""A load keeps nothing of its target: what you delete afterwards is gone at once, not when the collector looks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from tests.damaging import flip


class Noted(nn.Linear):
    """A module with state that is no tensor."""

    note = 0

    def get_extra_state(self) -> Any:
        return {"note": self.note, "tensor": torch.ones(3)}

    def set_extra_state(self, state: Any) -> None:
        self.note = state["note"]


class Loader:
    """An object that takes its state by a method of its own."""

    def __init__(self) -> None:
        self.tensor = torch.ones(9)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def state_of() -> dict[str, Any]:
    """A state whose optimizer has none of its own yet."""
    model = Noted(6, 6)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    return {
        "model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "loader": Loader(), "pair": (torch.ones(3), 4), "random": holdfast.RNG(),
        "own": holdfast.PerRank({"a": torch.ones(2)}),
    }  # fmt: skip


def step(state: dict[str, Any]) -> None:
    state["model"](torch.ones(2, 6)).sum().backward()
    state["optimizer"].step()


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept(state: dict[str, Any]) -> dict[str, Callable[[], object]]:
    """What of a state to look for once it is deleted."""
    parts = {"weight": state["model"].weight, "tensor": state["pair"][0], "loader": state["loader"].tensor}
    parts |= {name: state[name] for name in ("model", "optimizer")}
    moments = state["optimizer"].state.get(state["model"].weight, {})
    return {name: weakref.ref(part) for name, part in {**parts, **moments}.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = state_of()
    step(state)
    holdfast.save(state, tmp_path / "c")
    return tmp_path / "c"


@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "stepped"])
@pytest.mark.parametrize("fails", ["", "damaged", "unlike"])
def test_what_was_loaded_into_is_freed_with_its_last_name(saved: Path, fails: str, *, stepped: bool) -> None:
    if fails == "damaged":
        file = next((saved / "model").glob("*.safetensors"))
        flip(file, file.stat().st_size - 5)
    state = state_of()
    if stepped:
        step(state)
    if fails == "unlike":
        state["more"] = torch.ones(3)
    with without_collector():
        with suppress(holdfast.errors.Damaged, holdfast.errors.Mismatch):
            holdfast.load(saved, state)
            assert not fails, "it was to fail"
        refs = kept(state)
        del state
        assert [name for name, ref in refs.items() if ref() is not None] == []
