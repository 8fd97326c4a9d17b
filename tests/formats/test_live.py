"""Every peer's checkpoint into a live model and optimizer, sharded over ranks, in one call."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from tests import pool
from tests.formats.truth import NAMES, Truth, faults, module_of, optimizer_of

TRAINED = [name for name in NAMES if Truth(name).optimizer]


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def load_each(names: list[str]) -> list[str]:
    """What differs from the truth after loading each, on this rank."""
    wrong = []
    for name in names:
        try:
            wrong += [f"{name}: {why}" for why in _load(Truth(name))]
        except holdfast.HoldfastError as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:2000]}")
    return wrong


def _load(truth: Truth) -> list[str]:
    model = module_of(truth)
    if dist.is_initialized():
        fully_shard(model)
    into: dict[str, Any] = {"model": model}
    if truth.optimizer:
        into["optimizer"] = optimizer_of(truth, model)
    holdfast.load(truth.path, into)
    wrong = faults(truth, truth.model, {k: _whole(v) for k, v in model.state_dict().items()})
    if truth.optimizer:
        state = into["optimizer"].state
        of = {fqn: state[p] for fqn, p in model.named_parameters()}
        for (fqn, key), tensor in truth.optimizer.items():
            if why := tensor.fault(_whole(of[fqn].get(key)), truth.tensors):
                wrong.append(why)
        for mine, theirs in zip(into["optimizer"].param_groups, truth.facts["param_groups"], strict=True):
            wrong += [k for k in ("lr", "weight_decay", "eps") if mine[k] != theirs[k]]
    return wrong


@pytest.mark.parametrize("name", NAMES)
def test_into_one_process(name: str) -> None:
    assert load_each([name]) == []


# Each takes half a second: the quick run has every second one, which is some of every peer.
@pytest.mark.parametrize(
    ("world", "names"), [(2, NAMES[1::2]), *(pytest.param(n, NAMES, marks=pytest.mark.slow) for n in (2, 3))],
    ids=["2-half", "2-all", "3-all"],
)  # fmt: skip
@pytest.mark.slow
def test_into_fsdp2(world: int, names: list[str]) -> None:
    for some in (names[:17], names[17:34], names[34:]):  # ranks have to answer within minutes
        for rank, wrong in enumerate(pool.run(world, load_each, some)):
            assert wrong == [], rank


def test_the_golden_ones_are_all_there() -> None:
    assert len(NAMES) == 51 and len(TRAINED) == 44
