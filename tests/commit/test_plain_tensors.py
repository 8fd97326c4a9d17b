"""Tensors that pass for replicas and are none: found if they are small; buffers come from one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from tests import pool


class Generator:
    """An object that keeps a tensor of its own on every rank."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"state": torch.full((5000,), dist.get_rank(), dtype=torch.uint8)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


def own_tensors(path: str, kind: str) -> None:
    rank = dist.get_rank()
    states: dict[str, dict[str, Any]] = {
        "plain": {"a": {"same": torch.ones(9), "rng": torch.full((5056,), rank, dtype=torch.uint8)}},
        "stateful": {"a": Generator()},
        "scattered": {"a": {"rng": torch.arange(40.0).reshape(5, 8).t() + rank}},
        "large": {"a": {"rng": torch.rand(1 << 20, generator=torch.Generator().manual_seed(rank))}},
        "large and scattered": {"a": {"rng": (torch.arange(float(1 << 20)).reshape(1024, -1) + rank).t()}},
        "last": {"a": {"rng": torch.cat([torch.zeros(1 << 20), torch.full((1,), rank)])}},
    }
    holdfast.save(states[kind], path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("plain", "a/rng"), ("stateful", "a/state"), ("scattered", "a/rng"), ("large", "a/rng"),
        ("large and scattered", "a/rng"), ("last", "a/rng"),
    ],
)  # fmt: skip
def test_a_tensor_of_each_rank_is_no_replica(kind: str, name: str, tmp_path: Path) -> None:
    for error in pool.attempt(3, own_tensors, str(tmp_path / "c"), kind):
        assert {"SaveFailed", "Mismatch"} <= set(error.kinds)
        assert f"{name} differs between ranks 0 and 1" in error.text and "PerRank" in error.text
    assert not (tmp_path / "c").exists()


def some_hold_some(path: str) -> None:
    rank = dist.get_rank()
    holdfast.save({"common": torch.arange(9), f"own {rank}": {"t": torch.full((3,), rank)}}, path)


def test_tensors_that_only_some_ranks_hold(tmp_path: Path) -> None:
    pool.run(3, some_hold_some, str(tmp_path / "c"))
    state = holdfast.open(tmp_path / "c").state_dict()
    assert [state[f"own {rank}"]["t"].tolist() for rank in range(3)] == [[rank] * 3 for rank in range(3)]


def batch_norm(path: str) -> list[float]:
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 3000), nn.BatchNorm1d(3000))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        for buffer in model.buffers():
            buffer.fill_(rank + 5)  # as after a forward pass on its own batch
    holdfast.save({"model": model}, path)
    return [rank]


def test_buffers_come_whole_from_the_first_rank(tmp_path: Path) -> None:
    pool.run(4, batch_norm, str(tmp_path / "c"))
    opened = holdfast.open(tmp_path / "c")
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert (opened.read(f"model/1.{name}") == 5).all(), name
