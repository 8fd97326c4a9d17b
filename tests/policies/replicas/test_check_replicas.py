"""`check_replicas`: a rank that holds other bytes than its replicas is named, and nothing is committed."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.policies.replicas.compare import _verdict
from tests import pool

WORLD = 4


def _model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _flip(tensor: torch.Tensor) -> None:
    """One bit, the lowest of the last byte of this rank's own memory."""
    _local(tensor).view(torch.uint8).view(-1)[-1] ^= 1


def _trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    torch.manual_seed(5)  # all ranks train on the same, so that plain replicas stay equal without DDP too
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def save_flipped(path: str, kind: str, what: str, by: str, checked: Any) -> str:
    model, optimizer = _trained(kind)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    if dist.get_rank() == 2 and what:
        parameter = inner[0].weight
        _flip(parameter if what == "parameter" else optimizer.state[parameter]["exp_avg"])
    state = {"model": model, "optimizer": optimizer}
    if by == "save":
        holdfast.save(state, path, check_replicas=checked)
    else:
        with holdfast.Saver(worker="thread", check_replicas=checked) as saver:
            saver.save(state, path).wait()
    return "saved"


@pytest.mark.parametrize("by", ["save", "saver"])
@pytest.mark.parametrize("what", ["parameter", "moment"])
@pytest.mark.parametrize("kind", ["ddp", "hsdp", "tp"])
@pytest.mark.fast_cases(
    "ddp-parameter-save",
    "ddp-moment-saver",
    "hsdp-parameter-saver",
    "hsdp-moment-save",
    "tp-parameter-saver",
    "tp-moment-save",
)
def test_one_flipped_bit_is_named(kind: str, what: str, by: str, tmp_path: Path) -> None:
    results = pool.attempt(WORLD, save_flipped, str(tmp_path / "c"), kind, what, by, True)
    name = "model/0.weight" if what == "parameter" else "optimizer/state/0.weight/exp_avg"
    for error in results:
        assert {"SaveFailed", "Mismatch"} <= set(error.kinds)
        assert "1 replicated tensor differs" in error.text and name in error.text and "rank 2 (" in error.text
        if kind == "ddp":
            assert f"{name}: on rank 2 (" in error.text and "3 that agree (ranks 0, 1, 3)" in error.text
        else:
            assert f"{name}[" in error.text and "between rank 0 (" in error.text and "no majority" in error.text
    assert len({error.text for error in results}) == 1
    assert not (tmp_path / "c").exists()
    assert pool.run(WORLD, save_flipped, str(tmp_path / "c"), kind, "", by, True) == ["saved"] * WORLD
    holdfast.open(tmp_path / "c").verify()


def test_it_is_asked_for_and_patterns_say_of_what(tmp_path: Path) -> None:
    for number, checked in enumerate([False, "*.bias", ("*", "!model/0.weight"), ["!model/*"], "optimizer"]):
        pool.run(WORLD, save_flipped, str(tmp_path / f"{number}"), "ddp", "parameter", "save", checked)
    for error in pool.attempt(WORLD, save_flipped, str(tmp_path / "c"), "ddp", "parameter", "save", "model/*.weight"):
        assert "model/0.weight" in error.text


def odd_bytes(path: str, kind: str) -> None:
    """Replicas that are equal as bytes, or differ in what a comparison of numbers would not see."""
    rank = dist.get_rank()
    big = torch.arange(600_000, dtype=torch.float32).reshape(600, 1000)  # above what is always compared
    state: dict[str, Any] = {"big": big, "seen": big.t(), "empty": torch.zeros(0, 3)}
    mesh = init_device_mesh("cpu", (WORLD,))
    state["spread"] = distribute_tensor(torch.randn(16, 3), mesh, [Replicate()])
    state["cut"] = distribute_tensor(torch.randn(16, 3) + rank, mesh, [Shard(0)], src_data_rank=None)
    if kind == "nan":  # another payload
        bits = torch.full((600_000,), 0x7FC00000, dtype=torch.int32)
        bits[5000] += 1 if rank == 3 else 0  # between the blocks that every save compares
        state["big"] = bits.view(torch.float32)
    elif kind == "zero":
        state["seen"] = torch.zeros(1000, 600).t()
        state["seen"][5] *= -1.0 if rank == 3 else 1.0
    holdfast.save({"a": state}, path, check_replicas=True)


@pytest.mark.parametrize(("kind", "name"), [("nan", "a/big"), ("zero", "a/seen"), ("alike", "")])
def test_bytes_are_compared(kind: str, name: str, tmp_path: Path) -> None:
    results = pool.attempt(WORLD, odd_bytes, str(tmp_path / "c"), kind)
    for error in results if name else ():
        assert f"{name}: on rank 3 (" in error.text
    assert name or not any(results)


def running_statistics(path: str, checked: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
        model[1].running_mean += dist.get_rank()
    holdfast.save({"model": model}, path, check_replicas=checked)


def test_running_statistics_are_told_from_faults(tmp_path: Path) -> None:
    for error in pool.attempt(WORLD, running_statistics, str(tmp_path / "c"), True):
        assert "model/1.running_mean" in error.text and "BatchNorm" in error.text and '"!*running_*"' in error.text
    pool.run(WORLD, running_statistics, str(tmp_path / "c"), ("*", "!*running_*"))


def managed(root: str) -> list[int]:
    manager = holdfast.CheckpointManager(root, every=1, worker="none", check_replicas=True, signals=())
    weight = torch.ones(4000)
    manager.save(1, {"w": {"x": weight}})
    if dist.get_rank() == 1:
        weight[7] = 2.0
    with suppress(holdfast.SaveFailed):
        manager.save(2, {"w": {"x": weight}})
    weight.fill_(3.0)
    manager.save(3, {"w": {"x": weight}})
    manager.close()
    return manager.steps()


def test_a_manager_goes_on_after_it(tmp_path: Path) -> None:
    assert pool.run(WORLD, managed, str(tmp_path)) == [[1, 3]] * WORLD


def test_the_majority_is_right_and_a_tie_names_all() -> None:
    assert "on rank 2 and rank 5, against 3 that agree (ranks 0, 1, 7)" in _verdict(
        "x", {b"a": [0, 1, 7], b"b": [2], b"c": [5]}, None
    )
    assert "between rank 0 and rank 1 and rank 2 and rank 3" in _verdict("x", {b"a": [0, 1], b"b": [2, 3]}, None)
