"""Runs of Trainer and of Accelerate loops, whole or broken off, told in plain data; here or in a process of a pool."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, DistributedType
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.utils import logging

import holdfast
from holdfast.trainers.accelerate import epoch_of, state_of
from holdfast.trainers.huggingface import HoldfastCallback

logging.set_verbosity_error()


class Broken(Exception):
    """What ends a run in its middle."""


def fresh() -> None:
    """Forget the Accelerator before: in a new process there would be none."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    if "RANK" in os.environ:
        os.environ["LOCAL_RANK"] = os.environ["RANK"]
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    random.seed(5)
    torch.manual_seed(5)


def shard(accelerator: Accelerator) -> None:
    """Have it prepare models with FSDP2, which accelerate itself does not do on CPUs: there it falls back to DDP."""
    state: Any = accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"]
    )
    state.distributed_type = DistributedType.FSDP


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of all that training goes on with, the generators of this rank included."""
    sha = hashlib.sha256(repr(random.getstate()).encode() + torch.get_rng_state().numpy().tobytes())
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    for tensor in [*model.state_dict().values(), *(state[key] for state in states for key in sorted(state))]:
        sha.update((tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).numpy().tobytes())
    return sha.hexdigest()


# Trainer


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": (torch.arange(8) * (1 + index)) % 64}


def masked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 0), "labels": tokens}


def unmasked(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    tokens = torch.stack([row["input_ids"] for row in rows])
    return {"input_ids": tokens, "labels": tokens}


class Breaks(TrainerCallback):
    def __init__(self, at: int | None, by_signal: bool) -> None:
        self.at, self.by_signal = at, by_signal

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at and self.by_signal and int(os.environ.get("RANK", 0)) == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.at and not self.by_signal:
            raise Broken


class Counts(TrainerCallback, ExportableState):
    """A callback with a state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def trainer_of(root: Any, *, workers: int = 0, more: tuple[Any, ...] = (), draws: bool = True, **args: Any) -> Trainer:
    fresh()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            attention_dropout=0.1,
        )  # fmt: skip
    )
    chosen = {
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 3, "logging_steps": 3,
        "eval_strategy": "epoch", "save_strategy": "no", **args,
    }  # fmt: skip
    trainer = Trainer(
        model,
        TrainingArguments(
            os.fspath(root), report_to=[], use_cpu=True, disable_tqdm=True, dataloader_num_workers=workers, seed=3,
            restore_callback_states_from_checkpoint=True, **chosen,
        ),
        train_dataset=Tokens(), eval_dataset=Tokens(), data_collator=masked if draws else unmasked,
        callbacks=[Counts(), *more],
    )  # fmt: skip
    # On a CPU accelerate makes none itself.
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    return trainer


def train(
    root: Any, broken_at: int | None = None, by_signal: bool = False, every: int | None = 2, workers: int = 0,
    fsdp: bool = False, args: dict[str, Any] | None = None, kept: dict[str, Any] | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """Train to the end, or until it is broken off; None where it broke."""
    breaks = Breaks(broken_at, by_signal)
    # What workers draw while they collate starts anew with them: their collator draws nothing here.
    trainer = trainer_of(root, workers=workers, more=(breaks,), draws=not workers, **(args or {}))
    if fsdp:
        shard(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    callback = HoldfastCallback(root, every=every, worker="thread", deadline=240, **(kept or {})).attach(trainer)
    try:
        trained = trainer.train()
    except Broken:
        return None
    counts = next(found for found in trainer.callback_handler.callbacks if isinstance(found, Counts))
    return {
        "step": trainer.state.global_step,
        "restored": callback.restored.step if callback.restored is not None else None,
        "stopped": callback.should_stop,
        "steps": callback.manager.steps() if callback.manager is not None else [],
        "log": [
            {key: value for key, value in line.items() if key in ("step", "loss", "grad_norm", "eval_loss", "epoch")}
            for line in trainer.state.log_history
        ],
        "mean": trained.training_loss,
        "flos": trainer.state.total_flos,
        "counted": counts.steps,
        "scale": trainer.accelerator.scaler.state_dict(),
        "digest": digest(trainer.model, trainer.optimizer.optimizer),
        "sharded": any(isinstance(p, DTensor) for p in trainer.model.parameters()),
        "weights": sum(
            (p.full_tensor() if isinstance(p, DTensor) else p).detach().double().sum().item()
            for p in trainer.model.parameters()
        ),
    }


def whole_and_resumed(root: Any, broken_at: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """A run that nothing interrupts, and one that is broken off and goes on."""
    whole = train(os.path.join(root, "whole"), **options)
    assert train(os.path.join(root, "broken"), broken_at, **options) is None
    return whole, train(os.path.join(root, "broken"), **options)


# Accelerate


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 28)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return (torch.full((4,), index / 28) for index in range(28))


def noisy(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(rows) + torch.rand(len(rows), 4)


class Average:
    """Something of the user's own with a state."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def loop(
    root: Any, broken_at: int | None = None, workers: int = 0, accumulate: int = 2, fsdp: bool = False,
    stateful: bool = False, stream: bool = False, seedable: bool = False,
) -> dict[str, Any] | None:  # fmt: skip
    """A loop to its end, or until it is broken off; None where it broke."""
    fresh()
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(
            use_stateful_dataloader=stateful, dispatch_batches=False, use_seedable_sampler=seedable
        ),
    )  # fmt: skip
    # On a CPU accelerate makes none itself.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    if fsdp:
        shard(accelerator)
        accelerator.state.fsdp_plugin.auto_wrap_policy = None
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 4))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    loader: Any = DataLoader(
        Stream() if stream else Numbers(), batch_size=2, shuffle=not stream, num_workers=workers,
        collate_fn=torch.stack if workers else noisy,
    )  # fmt: skip
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    average = Average()
    accelerator.register_for_checkpointing(average)
    state = state_of(accelerator, also={"step": 0})
    log: list[Any] = []
    with holdfast.CheckpointManager(root, every=1, worker="thread", deadline=240) as manager:
        loaded = manager.restore(state)
        first = epoch_of(loader)
        for epoch in range(first, 3):
            for x in loader:
                with accelerator.accumulate(model):
                    loss = F.mse_loss(model(x), x)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    state["step"] += 1
                    average.value = 0.9 * average.value + state["step"]
                    log.append((state["step"], epoch, loss.item(), x.sum().item()))
                    manager.step(state["step"], state)
                    if state["step"] == broken_at:
                        return None
            log.append(("end", epoch, torch.rand(1).item()))  # as an evaluation that draws
    return {
        "log": log,
        "digest": digest(model, optimizer.optimizer),
        "average": average.value,
        "restored": loaded.step if loaded is not None else None,
        "first": first,
        "rate": optimizer.param_groups[0]["lr"],
        "scale": accelerator.scaler.state_dict(),
        "sharded": any(isinstance(p, DTensor) for p in model.parameters()),
    }


def loop_and_resumed(root: Any, broken_at: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """A loop that nothing interrupts, and one that is broken off and goes on."""
    whole = loop(os.path.join(root, "whole"), **options)
    assert loop(os.path.join(root, "broken"), broken_at, **options) is None
    return whole, loop(os.path.join(root, "broken"), **options)
