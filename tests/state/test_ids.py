"""Optimizer state saved under torch's integer ids goes to the parameters at the same places of a live optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast


def _trained(seed: int, *groups: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [params[i] for i in group]} for group in groups], lr=0.1 * seed)
    for group, lr in zip(optimizer.param_groups, (0.1, 0.2, 0.3), strict=False):
        group["lr"] = lr * seed
    for _ in range(seed):
        model(torch.randn(5, 3)).pow(2).sum().backward()
        optimizer.step()
    return model, optimizer


GROUPS = ([5, 0, 2], [4, 1])  # parameter 3 is in none


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = _trained(2, *GROUPS)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize("stepped", [0, 1])
def test_each_state_finds_its_parameter(saved: Path, stepped: int) -> None:
    model, optimizer = _trained(1, *GROUPS) if stepped else _untrained(*GROUPS)
    loaded = holdfast.load(saved, {"model": model, "optimizer": optimizer})
    theirs_model, theirs = _trained(2, *GROUPS)
    assert all(map(torch.equal, model.parameters(), theirs_model.parameters()))
    for mine, other in zip(optimizer.param_groups, theirs.param_groups, strict=True):
        assert mine["lr"] == other["lr"]
        for p, q in zip(mine["params"], other["params"], strict=True):
            for key in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(optimizer.state[p][key], theirs.state[q][key])
    assert loaded.renamed["optimizer/state/0/exp_avg"] == "optimizer/state/2.bias/exp_avg"


def _untrained(*groups: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, _ = _trained(1, *groups)
    params = list(model.parameters())
    return model, torch.optim.AdamW([{"params": [params[i] for i in group]} for group in groups])


def test_other_groups_are_refused(saved: Path) -> None:
    model, optimizer = _untrained([5, 0], [2, 4, 1])
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(holdfast.errors.Mismatch, match=r"groups of \[3, 2\].*groups of \[2, 3\]"):
        holdfast.load(saved, {"model": model, "optimizer": optimizer})
    assert all(map(torch.equal, model.parameters(), before))


def test_another_name_for_the_optimizer(saved: Path) -> None:
    model, optimizer = _untrained(*GROUPS)
    holdfast.load(saved, {"net": model, "opt": optimizer}, rename={"model": "net", "optimizer": "opt"})
    assert float(optimizer.state[model[2].bias]["step"]) == 2


def test_without_the_model_ids_stay_ids(saved: Path) -> None:
    _, optimizer = _untrained(*GROUPS)
    holdfast.load(saved, {"optimizer": optimizer})
    assert float(optimizer.state[optimizer.param_groups[0]["params"][0]]["step"]) == 2
