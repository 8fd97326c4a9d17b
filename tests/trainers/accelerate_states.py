"""Loops of Accelerate that save by `save_state` and load by `load_state`, attached to holdfast; for a pool of ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from holdfast.trainers.accelerate import attach
from tests.trainers import hf_runs


class Loop:
    """A model, an optimizer, a scheduler, a loader, a scaler and an object of the user's own, all prepared."""

    def __init__(
        self, root: Any, *, fsdp: bool = False, stateful: bool = False, loaders: bool = False, attached: bool = True,
        limit: int | None = None, accumulate: int = 1,
    ) -> None:  # fmt: skip
        hf_runs.fresh()
        self.accelerator = Accelerator(
            cpu=True, project_dir=os.fspath(root), gradient_accumulation_steps=accumulate,
            project_config=ProjectConfiguration(automatic_checkpoint_naming=True, total_limit=limit),
            dataloader_config=DataLoaderConfiguration(
                use_stateful_dataloader=stateful, dispatch_batches=False, use_seedable_sampler=True
            ),
        )  # fmt: skip
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        if fsdp:
            hf_runs.shard(self.accelerator)
            self.accelerator.state.fsdp_plugin.auto_wrap_policy = None
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        loader: Any = DataLoader(hf_runs.Numbers(), batch_size=2, shuffle=True)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared
        self.average = hf_runs.Average()
        self.accelerator.register_for_checkpointing(self.average)
        if attached:
            attach(self.accelerator, loaders=loaders)

    def step(self, batch: torch.Tensor) -> float:
        with self.accelerator.accumulate(self.model):
            loss = F.mse_loss(self.model(batch), batch)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.average.value = 0.9 * self.average.value + 1
        return loss.item()

    def epoch(self, loader: Any, save_after: int | None = None) -> list[float]:
        losses = []
        for number, batch in enumerate(loader):
            losses.append(self.step(batch))
            if number + 1 == save_after:
                self.accelerator.save_state()
                self.saved = self.digest()
        return losses

    def digest(self) -> Any:
        return hf_runs.digest(self.model, self.optimizer.optimizer), self.average.value


def saved_and_loaded(root: str, after: int, **options: Any) -> dict[str, Any]:
    """An epoch and its save after so many batches, and the rest of it by another loop, as accelerate's examples do."""
    first = Loop(root, **options)
    losses = first.epoch(first.loader, save_after=after)
    second = Loop(root, **options)
    second.accelerator.load_state()
    loaded = second.digest()
    by_itself = options.get("stateful") or options.get("loaders")
    loader = second.loader if by_itself else skip_first_batches(second.loader, after)
    rest = second.epoch(loader)
    return {
        "losses": losses[after:],
        "rest": rest,
        "saved": first.saved,
        "loaded": loaded,
        "digests": (first.digest(), second.digest()),
        "rates": (first.optimizer.param_groups[0]["lr"], second.optimizer.param_groups[0]["lr"]),
        "scales": (first.accelerator.scaler.state_dict(), second.accelerator.scaler.state_dict()),
        "sharded": any(isinstance(p, DTensor) for p in second.model.parameters()),
    }


def sum_of(model: nn.Module) -> float:
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return sum(tensor.detach().double().sum().item() for tensor in whole)
