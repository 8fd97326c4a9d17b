"""Programs of Lightning Fabric: what `fabric.setup` returns is saved by plain names, and loaded back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from tests.trainers.lives import live

RUNS = "tests.trainers.fabric_runs"  # imported by the ranks alone: Lightning takes seconds
NAMES = {f"{layer}.{kind}" for layer in ("first", "second.1") for kind in ("weight", "bias")}


def about(weights: dict[str, Any]) -> dict[str, Any]:
    return {key: pytest.approx(torch.tensor(value).flatten().tolist(), abs=1e-6) for key, value in weights.items()}


@pytest.mark.parametrize(("kind", "world"), [("alone", 1), ("compiled", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.fast_cases("False-alone-1")
def test_a_program_goes_on_by_plain_names(tmp_path: Path, kind: str, world: int, background: bool) -> None:
    ended = live(world, f"{RUNS}:save", tmp_path, kind, background)
    step = tmp_path / "step-000000002"
    saved = holdfast.open(step).tensors
    assert {name for name in saved if name.startswith("model/")} == {f"model/{name}" for name in NAMES}
    moments = {f"optimizer/state/{name}/{key}" for name in NAMES for key in ("step", "exp_avg", "exp_avg_sq")}
    assert {name for name in saved if name.startswith("optimizer/state/")} == moments
    assert live(world, f"{RUNS}:go_on", tmp_path, kind) == ended
    if world == 2:
        plain = live(1, f"{RUNS}:go_on_without_fabric", step)[0]
        assert {key: torch.tensor(value).flatten().tolist() for key, value in plain.items()} == about(ended[0])


@pytest.mark.parametrize(("kind", "world"), [("alone", 1), ("ddp", 2), ("fsdp2", 2)])
@pytest.mark.fast_cases("alone-1", "ddp-2")
def test_what_plain_objects_saved_loads_into_those_of_fabric(tmp_path: Path, kind: str, world: int) -> None:
    loaded = live(world, f"{RUNS}:load_what_torch_saved", tmp_path, kind)
    plain = holdfast.open(tmp_path / "plain").state_dict()["model"]
    assert loaded == [{key: value.tolist() for key, value in plain.items()}] * world
