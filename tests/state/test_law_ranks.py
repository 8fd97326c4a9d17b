"""The law on real ranks: FSDP2 that was evaluated, classes with methods of their own, optimizers of which each
rank has a part, settings that differ."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests import pool
from tests.state.test_law import OwnLoad, Renaming, Shared

State = dict[str, Any]


class Rows(torch.optim.Optimizer):
    """A sum for each row, of another shape than the parameter, and a number of one element."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            rows = p.grad.square().mean(-1, keepdim=True) if p.dim() > 1 else p.grad.square()
            state["rows"] = state["rows"].add_(rows) if state else rows.clone()
            state["count"] = state.get("count", torch.zeros(1)) + 1
            assert type(state["count"]) is torch.Tensor and type(state["rows"]) is type(p.detach())
            p.sub_(p.grad / (1 + state["rows"]), alpha=0.1 / state["count"].item())


class ByBeta(torch.optim.Optimizer):
    """A dict of momenta for each parameter, with numbers as keys, as AggMo keeps them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.0, 0.9)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            momenta = self.state[p].setdefault("momenta", {b: torch.zeros_like(p) for b in (0.0, 0.9)})
            for beta, momentum in momenta.items():
                p.sub_(momentum.mul_(beta).add_(p.grad), alpha=0.01)


def sharded(seed: int, kind: Any = torch.optim.AdamW, layer: Any = nn.Linear, **options: Any) -> State:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 6), layer(6, 8))
    fully_shard(model[0])
    fully_shard(model)
    return {"optimizer": kind(model.parameters(), **options), "model": model}


def step(state: State) -> None:
    state["optimizer"].zero_grad()
    state["model"](torch.ones(2, 8)).square().mean().backward()
    state["optimizer"].step()


def evaluate(state: State) -> None:
    with torch.no_grad():
        state["model"](torch.ones(1, 8))


def weights(state: State) -> list[torch.Tensor]:
    return [
        p.full_tensor().detach().clone() if hasattr(p, "full_tensor") else p.detach().clone()
        for p in state["model"].parameters()
    ]


def evaluated_before(path: str) -> bool:
    """Save and load a model that holds unsharded parameters, the optimizer first."""
    state, into = sharded(1), sharded(2)
    step(state)
    evaluate(state)
    holdfast.save(state, path)
    evaluate(into)
    holdfast.load(path, into)
    step(state)
    step(into)
    return all(map(torch.equal, weights(state), weights(into)))


def test_fsdp2_that_was_evaluated(tmp_path: Path) -> None:
    assert pool.run(2, evaluated_before, str(tmp_path / "c")) == [True, True]
    assert "optimizer/state/0.weight/exp_avg" in holdfast.open(tmp_path / "c").tensors


def into_one_process(path: str, kind: Any, layer: Any) -> list[torch.Tensor]:
    """What two ranks save goes on alike on two fresh ranks; returns the weights after one more step."""
    state = sharded(1, kind, layer)
    if layer is OwnLoad:
        state["model"][1].scale = 3.0
    step(state)
    step(state)
    holdfast.save(state, path)
    into = sharded(2, kind, layer)
    holdfast.load(path, into)
    step(state)
    step(into)
    assert all(map(torch.equal, weights(state), weights(into)))
    return weights(into)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [(Rows, nn.Linear), (ByBeta, nn.Linear), (Shared, nn.Linear), (torch.optim.AdamW, OwnLoad),
     (torch.optim.AdamW, Renaming)],
)  # fmt: skip
def test_two_ranks_and_one(kind: Any, layer: Any, tmp_path: Path) -> None:
    after = pool.run(2, into_one_process, str(tmp_path / "c"), kind, layer)[0]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 6), layer(6, 8))
    alone: State = {"optimizer": kind(model.parameters()), "model": model}
    holdfast.load(tmp_path / "c", alone)
    step(alone)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(weights(alone), after, strict=True))


def with_zero(path: str) -> tuple[bool, list[torch.Tensor]]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        return {"model": model, "optimizer": optimizer}

    state, into = make(1), make(2)
    step(state)
    holdfast.save(state, path)
    holdfast.load(path, into)
    step(state)
    step(into)
    return all(map(torch.equal, weights(state), weights(into))), weights(into)


def test_zero_needs_no_consolidation(tmp_path: Path) -> None:
    (same, after), (other, _) = pool.run(2, with_zero, str(tmp_path / "c"))
    assert same and other
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 8))
    alone: State = {"model": model, "optimizer": torch.optim.Adam(model.parameters())}
    holdfast.load(tmp_path / "c", alone)
    step(alone)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(weights(alone), after, strict=True))


def other_settings(path: str) -> str:
    state = sharded(1)
    state["optimizer"].param_groups[0]["d"] = float(dist.get_rank())
    try:
        holdfast.save(state, path)
    except holdfast.SaveFailed as error:
        return str(error)
    return "saved"


def test_settings_that_differ_by_rank_are_refused(tmp_path: Path) -> None:
    said = pool.run(2, other_settings, str(tmp_path / "c"))
    assert said[0] == said[1] and "the group of 0.bias has another d on rank 1" in said[0]


def refuses_on_one_rank(path: str) -> tuple[str, bool, int]:
    class Loader:
        n = 1

        def state_dict(self) -> State:
            return {"n": self.n}

        def load_state_dict(self, state: State) -> None:
            if dist.get_rank() == 1 and state["n"] == 1:
                raise ValueError("no such file")
            self.n = state["n"]

    state = {**sharded(1), "loader": Loader()}
    holdfast.save(state, path)
    into = {**sharded(2), "loader": Loader()}
    into["loader"].n = 2
    before = copy.deepcopy(weights(into))
    try:
        holdfast.load(path, into)
    except holdfast.errors.Mismatch as error:
        return str(error), all(map(torch.equal, before, weights(into))), into["loader"].n
    return "", False, 0


def test_an_object_that_refuses_on_one_rank_leaves_all_ranks_as_they_were(tmp_path: Path) -> None:
    for said, same, n in pool.run(2, refuses_on_one_rank, str(tmp_path / "c")):
        assert "loader refused what was saved of it" in said and "rank 1" in said and same and n == 2
