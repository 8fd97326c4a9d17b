"""A tensor whose storage is freed is named, before a save and in the middle of one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.write import filling


def test_a_freed_tensor_is_refused_by_name(tmp_path: Path) -> None:
    tensor = torch.ones(1000)
    views = (tensor, tensor[10:], tensor.reshape(10, 100).t())
    start = tensor[:3]
    tensor.untyped_storage().resize_(0)
    for value in views:
        with pytest.raises(holdfast.SaveFailed, match="t has no memory: its storage was freed"):
            holdfast.save({"t": value}, tmp_path / "c")
    holdfast.save({"t": torch.ones(3), "empty": torch.ones(0)}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Unsupported, match="t has no memory"):
        holdfast.load(tmp_path / "c", {"t": start, "empty": torch.ones(0)})


@pytest.mark.parametrize("scattered", [False, True])
def test_a_tensor_that_is_freed_in_mid_save_is_named(
    scattered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    fill = filling.FilledFile.fill

    def late(self: Any) -> None:
        assert gone.wait(240)
        fill(self)

    monkeypatch.setattr(filling.FilledFile, "fill", late)
    model = nn.Linear(300, 400)
    if scattered:
        model.weight = nn.Parameter(torch.rand(300, 400).t())
    state = {"m": model, "o": torch.optim.SGD(model.parameters(), lr=0.1)}
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(state, tmp_path / "c")
        model.weight.untyped_storage().resize_(0)
        gone.set()
        with pytest.raises(holdfast.SaveFailed, match="lost its memory while it was being saved"):
            saving.wait()
        model.weight = nn.Parameter(torch.rand(400, 300))
        saver.save({"m": model}, tmp_path / "d").wait()
    assert torch.equal(holdfast.open(tmp_path / "d").read("m/weight"), model.weight.detach())
