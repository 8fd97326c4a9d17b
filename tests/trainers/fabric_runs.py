"""Programs of Lightning Fabric on ranks, whose state holdfast saves; run by `test_fabric.py`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from holdfast.ranks.ranks import Ranks

WIDTH, BATCH = 6, 4


class Samples(Dataset):
    """Those of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(WIDTH)) * (100 * self.rank + index + 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 8)
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def sharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in (module.first, module.second):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(module, mesh=mesh["data_parallel"])


def make(kind: str, seed: int) -> tuple[Fabric, dict[str, Any]]:
    """A program's state: what `fabric.setup` returned."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = {
        "alone": "auto",
        "compiled": "auto",
        "ddp": DDPStrategy(process_group_backend="gloo"),
        "fsdp2": ModelParallelStrategy(
            sharded, data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }[kind]
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(seed)
    net = Net()
    module = fabric.setup(torch.compile(net, backend="eager") if kind == "compiled" else net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 2)
    loader = StatefulDataLoader(Samples(fabric.global_rank), batch_size=BATCH)
    state = {"model": module, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    return fabric, {**state, "loader": holdfast.PerRank(loader)}


def batches(fabric: Fabric, state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return iter(fabric.setup_dataloaders(state["loader"].value, use_distributed_sampler=False))


def train(fabric: Fabric, state: dict[str, Any], batches: Iterator[torch.Tensor], steps: int) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        fabric.backward(state["model"](next(batches)).square().mean())
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1


def save(root: Path, kind: str, background: bool) -> dict[str, Any]:
    """Save after two steps, train on, and tell the weights at the end."""
    fabric, state = make(kind, 0)
    data = batches(fabric, state)
    train(fabric, state, data, 2)
    if background:
        manager = holdfast.CheckpointManager(root, every=1, deadline=240, worker="thread")
        manager.step(2, state)
        train(fabric, state, data, 2)
        manager.close()
    else:
        holdfast.save(state, root / "step-000000002", deadline=240)
        train(fabric, state, data, 2)
    fabric.barrier()
    return full(state["model"])


def go_on(root: Path, kind: str) -> dict[str, Any]:
    """Restore into another start, train on, and tell the weights at the end."""
    fabric, state = make(kind, 1)
    manager = holdfast.CheckpointManager(root, every=100, deadline=240)
    assert manager.restore(state) is not None
    assert state["step"] == 2 and state["scheduler"].last_epoch == 2
    train(fabric, state, batches(fabric, state), 2)
    manager.close()
    fabric.barrier()
    return full(state["model"])


def full(module: nn.Module) -> dict[str, Any]:
    """All weights, by their names, as numbers."""
    found = {}
    for key, value in module.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[key.removeprefix("_orig_mod.")] = whole.tolist()
    return found


def go_on_without_fabric(path: Path) -> dict[str, Any]:
    """The same steps on one process with plain torch: the weights at the end."""
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {"model": module, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    holdfast.load(path, state, only=list(state))
    for step in (2, 3):
        optimizer.zero_grad()
        for rank in range(2):
            batch = torch.stack([Samples(rank)[BATCH * step + i] for i in range(BATCH)])
            (module(batch).square().mean() / 2).backward()
        optimizer.step()
        scheduler.step()
    return full(module)


def load_what_torch_saved(root: Path, kind: str) -> dict[str, Any]:
    """A checkpoint of the plain objects, loaded into those of Fabric."""
    if int(os.environ["RANK"]) == 0:
        torch.manual_seed(7)
        module = Net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.25)
        module(torch.rand(4, WIDTH)).square().mean().backward()
        optimizer.step()
        holdfast.save({"model": module, "optimizer": optimizer}, root / "plain", group=Ranks(0, 1))
    fabric, state = make(kind, 1)
    fabric.barrier()
    holdfast.load(root / "plain", {name: state[name] for name in ("model", "optimizer")}, deadline=240)
    assert state["optimizer"].param_groups[0]["lr"] == 0.25
    fabric.barrier()  # the store of the group ends with the first rank
    return full(state["model"])
