"""A default device (`torch.set_default_device`) is where the user's tensors are made, never where ours have to lie.

The meta device has no memory at all: whatever of ours is made there by mistake shows at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import DeviceContext

import holdfast
from holdfast.inspect import reading, statistics
from holdfast.read import ranges


def state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.BatchNorm1d(50))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 30)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "turned": torch.randn(40, 30).t(),
        "none": torch.empty(0, 3),
        "mine": holdfast.PerRank({"t": torch.randn(6)}),
        "rng": holdfast.RNG(),
        "keeper": Keeper(seed),
    }


class Keeper:
    """Its tensors come back as fresh ones."""

    def __init__(self, seed: int) -> None:
        self.kept = {"ema": torch.full((300, 5), float(seed))}

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.kept = kept


@pytest.fixture
def nowhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def tensors(of: dict[str, Any]) -> list[torch.Tensor]:
        kept = [value for slots in of["optimizer"].state.values() for value in slots.values()]
        return [
            *of["model"].state_dict().values(),
            *kept,
            of["turned"],
            of["mine"].value["t"],
            of["keeper"].kept["ema"],
        ]

    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return all(b.device.type == "cpu" and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", ["blocking", "background"])
@pytest.mark.parametrize("windows", [False, True], ids=["in place", "through windows"])
def test_saves_and_loads(
    how: str, windows: bool, tmp_path: Path, nowhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.device("cpu"):
        one, other = state(1), state(2)
    if how == "blocking":
        holdfast.save(one, tmp_path / "c")
    else:
        with holdfast.Saver(worker="thread") as saver:
            saver.prepare(one)
            saver.save(one, tmp_path / "c").wait()
    if windows:
        monkeypatch.setattr(ranges, "_in_place", lambda share: False)
    holdfast.load(tmp_path / "c", other)
    assert same(one, other)


def test_reads(tmp_path: Path, nowhere: None) -> None:
    with torch.device("cpu"):
        one = state(1)
    holdfast.save(one, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    assert torch.equal(checkpoint.read("model/0.weight"), one["model"][0].weight)
    assert torch.equal(checkpoint.state_dict()["turned"], one["turned"])
    assert torch.equal(reading.read_together(checkpoint, ["turned"])["turned"], one["turned"])
    assert statistics.statistics(checkpoint, "turned", bins=4).count == 1200
    holdfast.convert(tmp_path / "c", tmp_path / "c.pt", to="torch")
    assert torch.equal(holdfast.open(tmp_path / "c.pt").read("turned"), one["turned"])


def test_without_a_default_device_no_call_of_a_tensor_goes_through_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does within `torch.device(...)`: with many small tensors that is half of a load."""
    holdfast.save(state(0), tmp_path / "c")
    calls: list[object] = []
    through = DeviceContext.__torch_function__

    def counted(mode: Any, function: Any, *args: Any) -> Any:
        calls.append(function)
        return through(mode, function, *args)

    monkeypatch.setattr(DeviceContext, "__torch_function__", counted)
    holdfast.load(tmp_path / "c", state(1))
    assert calls == []
