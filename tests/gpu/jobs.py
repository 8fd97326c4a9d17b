"""What ranks do together on one device: DDP, tensors on a mesh, sharded models, replicas that are compared or shared.

Run by `tests.gpu.ranks`; each job returns what can be told as JSON.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.gpu import states
from tests.gpu.lab import Lab
from tests.read.share_trials import eager
from tests.tearing import differences


def _adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, foreach=False)


def replicas(lab: Lab, root: str, worker: str | None) -> list[str]:
    """Two replicas under DDP: equal ones are saved; then a bit of rank 1's flips, and the save says whose."""
    training = states.Training(_adam, lab.kind, 3)
    training.model = DistributedDataParallel(training.model)
    torch.manual_seed(5)
    training.run(2)
    said = []
    for number in range(2):
        if number and dist.get_rank() == 1:
            training.model.module.up.weight.detach().view(torch.int32)[3, 3] ^= 1
        state = {"model": training.model, "optimizer": training.optimizer}
        try:
            if worker is None:
                holdfast.save(state, Path(root, str(number)), check_replicas=True)
            else:
                with holdfast.Saver(worker=worker, check_replicas=True) as saver:
                    lab.late(30)
                    saver.save(state, Path(root, str(number))).wait()
            said.append("saved")
        except holdfast.SaveFailed as error:
            said.append(str(error))
    return said


def shares(lab: Lab, root: str, big: bool) -> dict[str, Any]:
    """A state that all ranks want whole is read once, and goes through windows into tensors of the device."""
    count = 20_000_000 if big else 700_000
    there = {
        "a": states.noise((count,), torch.float32, "cpu", 1),
        "b": states.noise((3001, 37), torch.bfloat16, "cpu", 2),
    }
    holdfast.save({"s": there}, Path(root, "c"))
    here = {name: torch.zeros_like(tensor, device=lab.kind) for name, tensor in there.items()}
    turned = torch.zeros(37, 3001, dtype=torch.bfloat16, device=lab.kind).t()
    here["b"] = turned
    with eager(block=None if big else 1 << 16):
        loaded = holdfast.load(Path(root, "c"), {"s": here})
    wrong = differences({name: tensor.cpu() for name, tensor in here.items()}, there)
    return {"wrong": wrong, "read": loaded.bytes_read, "received": loaded.bytes_received, "needed": loaded.bytes_needed}


def plain(lab: Lab, root: str) -> list[str]:
    """Plain tensors that a stream far behind is still to fill, on all ranks alike: their sums are those of the call."""
    wrong = []
    with lab.another_stream(), holdfast.Saver(worker="thread") as saver:
        for number in range(3):
            state = {"small": torch.zeros(1000, device=lab.kind), "large": torch.zeros(1 << 20, device=lab.kind)}
            lab.synchronize()
            if dist.get_rank() == 1:
                lab.busy(200)
            for tensor in state.values():
                tensor.fill_(number + 1)
            checkpoint = saver.save({"s": state}, Path(root, str(number))).wait()
            wrong += [name for name in state if not (checkpoint.read(f"s/{name}") == number + 1).all()]
    return wrong


def on_a_mesh(lab: Lab, root: str) -> list[str]:
    """DTensors that each rank holds a part of, saved in the background, loaded replicated and cut the other way."""
    mesh = init_device_mesh(lab.kind, (dist.get_world_size(),))
    whole = states.noise((64, 48), torch.float32, lab.kind, 1)

    def laid(placement: Any, source: torch.Tensor) -> DTensor:
        local = source
        if isinstance(placement, Shard):
            local = source.chunk(mesh.size(), placement.dim)[mesh.get_rank()].clone(
                memory_format=torch.contiguous_format
            )
        return DTensor.from_local(local, mesh, [placement], run_check=False)

    with holdfast.Saver(worker="thread") as saver:
        lab.late(30)
        rows = laid(Shard(0), whole)
        saving = saver.save({"t": rows, "r": laid(Replicate(), whole * 2)}, Path(root, "c"))
        rows.to_local().zero_()
        saving.wait()
    wrong = []
    for placement in (Replicate(), Shard(0), Shard(1)):
        target = {"t": laid(placement, torch.zeros_like(whole)), "r": laid(placement, torch.zeros_like(whole))}
        holdfast.load(Path(root, "c"), target)
        expected = {"t": laid(placement, whole).to_local().cpu(), "r": laid(placement, whole * 2).to_local().cpu()}
        wrong += differences({name: tensor.to_local().cpu() for name, tensor in target.items()}, expected)
    return wrong


def sharded(lab: Lab, root: str, how: str) -> list[str]:
    """FSDP2, mixed precision or offloaded to the host: late copies, steps at once, and a run that goes on."""

    def build(seed: int) -> states.Training:
        training = states.Training(lambda p: torch.optim.SGD(p), lab.kind, seed)
        mesh = init_device_mesh(lab.kind, (dist.get_world_size(),))
        options: dict[str, Any] = {}
        if how == "mixed":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if how == "offloaded":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=lab.kind == "cuda")
        training.model.drop.p = 0.0  # else ranks and runs draw apart
        fully_shard(training.model.up, mesh=mesh, **options)
        fully_shard(training.model, mesh=mesh, **options)
        training.optimizer = _adam(list(training.model.parameters()))
        return training

    training, wrong = build(3), []
    training.run(2)
    with holdfast.Saver() as saver:
        for number in range(3):
            training.learn()
            there = {name: _local(tensor) for name, tensor in training.tensors()}
            lab.late(30)
            saving = saver.save(training.state, Path(root, str(number)))
            training.update()
            training.run(1)
            saving.wait()
            other = build(4)
            holdfast.load(Path(root, str(number)), other.state)
            wrong += differences({name: _local(tensor) for name, tensor in other.tensors()}, there)
    return wrong


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def alone(lab: Lab, root: str) -> list[str]:
    """A group that can do nothing but NCCL: no collective is used, so it makes no difference."""
    training, wrong = states.Training(_adam, lab.kind, 3), []
    manager = holdfast.CheckpointManager(root, every=1)
    training.run(1)
    for step in (1, 2):
        manager.step(step, training.state)
        there = training.copy()
        training.run(1)
        manager.wait()
        other = states.Training(_adam, lab.kind, 4)
        holdfast.load(Path(root, f"step-{step:09d}"), other.state)
        wrong += differences(other.copy(), there)
    manager.close()
    return wrong
