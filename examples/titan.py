"""A trainer written like torchtitan's, FSDP2, on holdfast: one import is another one.

    torchrun --standalone --nproc-per-node 2 examples/titan.py

Kill it whenever you like and start it again: it goes on with the same bits.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

# from torchtitan.components.checkpoint import CheckpointManager
from holdfast.trainers.titan import CheckpointManager


@dataclass
class CheckpointConfig:
    """The fields of torchtitan's that matter here."""

    enable: bool = True
    folder: str = "checkpoint"
    interval: int = 5
    keep_latest_k: int = 3
    async_mode: str = "async"
    last_save_model_only: bool = False


class OptimizersContainer:
    """An optimizer for each part of the model."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class LRSchedulersContainer:
    """They all have the same state."""

    def __init__(self, optimizers: OptimizersContainer) -> None:
        self.schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in optimizers.optimizers]

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return self.schedulers[0].state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for scheduler in self.schedulers:
            scheduler.load_state_dict(state)


class DataLoader:
    """Keeps the position of each data-parallel rank under a key of its own."""

    def __init__(self, rank: int) -> None:
        self.key, self.position = f"dp_rank_{rank}", 0
        self.rank = rank

    def __next__(self) -> torch.Tensor:
        self.position += 1
        return torch.sin(torch.arange(128.0).view(8, 16) * (self.position + 100 * self.rank))

    def state_dict(self) -> dict[str, Any]:
        return {self.key: {"position": self.position}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state.get(self.key, {"position": 0})["position"]


class Trainer:
    def __init__(self, root: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16)) for _ in range(2)]
        # Two parts, as a stage of a pipeline may have them, with the names that they have in the whole model.
        self.model_parts = [nn.ModuleDict({str(i): layer}) for i, layer in enumerate(layers)]
        for layer in layers:
            fully_shard(layer)
        torch.manual_seed(1 + dist.get_rank())
        self.step = 0
        self.optimizers = OptimizersContainer(self.model_parts)
        self.lr_schedulers = LRSchedulersContainer(self.optimizers)
        self.dataloader = DataLoader(dist.get_rank())
        self.checkpointer = CheckpointManager(
            CheckpointConfig(), dataloader=self.dataloader, model_parts=self.model_parts, optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers, states={"train_state": self}, sd_adapter=None, base_folder=root,
        )  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])

    def train(self, steps: int) -> None:
        self.checkpointer.load(step=-1)
        while self.step < steps:
            self.step += 1
            x = next(self.dataloader)
            y = x
            for i, part in enumerate(self.model_parts):
                y = part[str(i)](y)
            loss = (y - x.flip(1)).square().mean()
            loss.backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.lr_schedulers.step()
            self.checkpointer.save(self.step, last_step=self.step == steps)
            print(f"step {self.step}: loss {loss.item():.8f}", flush=True)
        self.checkpointer.close()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(os.environ.get("ROOT", "runs/titan")).train(int(os.environ.get("STEPS", "20")))
    dist.destroy_process_group()
