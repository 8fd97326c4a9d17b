"""A training loop of one's own with all that people keep beside the model; run on ranks by `test_plain_loops.py`.

`train` goes on from whatever is below its root, and may kill itself in the middle.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import holdfast
from holdfast.trainers.gradients import Gradients
from tests.trainers.lives import die

WIDTH = 8
SAMPLES = 40


class Samples(Dataset):
    """Made from their number, and blurred with noise of the process that fetches them if there is ``noise``."""

    def __init__(self, noise: float) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.sin(torch.arange(float(WIDTH)) * (index + 1)) + self.noise * torch.rand(WIDTH)
        return x, x.flip(0) * 0.5


class Net(nn.Module):
    def __init__(self, *, parametrized: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.stem.weight.requires_grad_(False)
        if parametrized:
            parametrizations.weight_norm(self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.stem(x)))


def wrapped(kind: str, net: Net) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(net)
    if kind == "ddp, compiled and checkpointed":
        net.body = checkpoint_wrapper(net.body)
        # What compiling changes here are the names of parameters; the code that it makes is torch's affair.
        return DistributedDataParallel(torch.compile(net, backend="eager"))
    if kind == "fsdp1":
        return FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "fsdp2":
        fully_shard(net.body)
        return fully_shard(net)
    return net


def accumulating(model: nn.Module, *, last: bool) -> Any:
    """Gradients are exchanged in the last micro-batch alone, where the wrapper has a way to say so."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()


def train(
    root: Path, kind: str, micro_batches: int, *, every: int, dies_after: int | None = None, workers: int = 0,
    gradients: bool = False, elsewhere: Any = "error",
) -> list[str]:  # fmt: skip
    """Train to ``micro_batches`` in all, two of them for each step of the optimizers; the losses, as exact texts.

    Saves every so many micro-batches, and at the end.
    """
    rank, world = 0, 1
    if kind != "alone":
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = Net(parametrized=kind in ("alone", "ddp"))
    model = wrapped(kind, net)
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(7 + rank)

    body = [p for name, p in model.named_parameters() if "head" not in name and p.requires_grad]
    head = [p for name, p in model.named_parameters() if "head" in name]
    if kind == "fsdp1":  # one flat parameter: one optimizer
        body, head = [p for p in model.parameters() if p.requires_grad], []
    optimizers = [torch.optim.AdamW(body, lr=0.01), *([torch.optim.SGD(head, lr=0.05, momentum=0.9)] if head else [])]
    warm_up, cosine = LinearLR(optimizers[0], 0.1, total_iters=2), CosineAnnealingLR(optimizers[0], 9)
    schedulers: list[Any] = [SequentialLR(optimizers[0], [warm_up, cosine], milestones=[2])]
    if head:
        schedulers.append(ReduceLROnPlateau(optimizers[1], patience=0, threshold=0.5))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    # Processes of the loader have generators of their own, which it does not save.
    samples = Samples(noise=0.0 if workers else 0.01)
    sampler = StatefulDistributedSampler(samples, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = StatefulDataLoader(samples, batch_size=2, sampler=sampler, num_workers=workers)

    state: dict[str, Any] = {
        "model": model,
        "optimizers": {str(i): optimizer for i, optimizer in enumerate(optimizers)},
        "schedulers": schedulers,
        "scaler": scaler,
        "loader": holdfast.PerRank(loader, elsewhere=elsewhere),
        "rng": holdfast.RNG(),
        "step": 0,
        "best": float("inf"),
    }
    if kind in ("alone", "ddp"):
        state["ema"] = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    else:
        state["ema"] = {name: p.detach().clone() for name, p in model.named_parameters()} if kind == "fsdp2" else {}
    if gradients and kind == "fsdp2":
        state["gradients"] = Gradients(model)
    elif gradients:
        state["gradients"] = holdfast.PerRank(Gradients(model), elsewhere=Gradients.mean)

    manager = holdfast.CheckpointManager(root, every=every, keep=holdfast.Keep(last=20), deadline=240)
    restored = manager.restore(state)
    drawn = iter(loader)
    if restored is not None:
        state["rng"].rewind()  # the iterator has drawn a seed
    losses = []
    for step in range(state["step"] + 1, micro_batches + 1):
        batch = next(drawn, None)
        if batch is None:
            drawn = iter(loader)
            batch = next(drawn)
        x, y = batch
        x = x + 0.01 * random.random() + 0.01 * numpy.random.rand()
        last = step % 2 == 0
        with accumulating(model, last=last):
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss / 2).backward()
        if last:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
            schedulers[0].step()
            if head:
                mean = loss.detach().clone()
                if world > 1:
                    dist.all_reduce(mean)
                schedulers[1].step(mean.item())
                state["best"] = min(state["best"], mean.item())
            if kind in ("alone", "ddp"):
                state["ema"].update_parameters(net)
            else:
                for name, average in state["ema"].items():
                    average.lerp_(dict(model.named_parameters())[name].detach(), 0.1)
        losses.append(loss.item().hex())
        state["step"] = step
        manager.step(step, state)
        if step == dies_after:
            manager.wait()
            if rank == world - 1:
                die()
    manager.save(micro_batches, state)
    manager.close()
    return losses


def train_so(root: Path, kind: str, micro_batches: int, options: dict[str, Any]) -> list[str]:
    """`train` with its options as a dict, to be called on ranks."""
    return train(root, kind, micro_batches, **options)


def refused() -> str:
    """What `Gradients` says of a module whose gradients torch holds back."""
    dist.init_process_group("gloo")
    model = fully_shard(Net())
    model.set_requires_gradient_sync(False)
    try:
        Gradients(model).state_dict()
    except holdfast.errors.Unsupported as error:
        return str(error)
    return ""
