"""Real DeepSpeed engines on CPU ranks; run by `test_deepspeed.py`."""

from __future__ import annotations

import logging
import os
import random
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import numpy
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from torch import nn

import holdfast
from holdfast.trainers.deepspeed import engine_state
from tests.trainers.lives import die
from tests.trainers.scripts import play

WIDTH = 8
ON_DISK: dict[str, Any] = {
    "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "offload_param": DeepSpeedZeroOffloadParamConfig,
}
# An allreduce over shared memory that DeepSpeed would compile first, for minutes; without it torch's own is taken.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
# DeepSpeed asks whether a CPU multiplies 16-bit floats fast, and takes no for an answer; torch computes with them.
get_accelerator().is_fp16_supported = lambda: True


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 13), nn.GELU(), nn.Dropout(0.1), nn.Linear(13, WIDTH))
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale[0]


def settings(stage: int, dtype: str, *, offload: bool = False) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    for part in ("offload_optimizer", *(["offload_param"] if stage == 3 else [])) if offload else ():
        found["zero_optimization"][part] = {"device": "cpu"}
    if dtype != "fp32":
        found[dtype] = {
            "enabled": True,
            **({"initial_scale_power": 4, "loss_scale_window": 3} if dtype == "fp16" else {}),
        }
    return found


def make_engine(stage: int, dtype: str, *, offload: bool = False) -> Any:
    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    torch.manual_seed(0)
    net = Net()
    groups = [{"params": net.body.parameters(), "weight_decay": 0.1}, {"params": net.head.parameters(), "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        lr_scheduler=schedule,
        config=settings(stage, dtype, offload=offload),
        dist_init_required=True,
    )[0]


def train(
    root: Path, stage: int, dtype: str, steps: int, dies_after: int = 0, offload: bool = False
) -> list[str]:  # fmt: skip
    """Train to ``steps`` steps of the optimizer, saved every 2; the losses of this life, as exact texts."""
    deepspeed.init_distributed("gloo", verbose=False)
    engine = make_engine(stage, dtype, offload=offload)
    assert bool(engine.zero_cpu_offload() if stage < 3 else engine.optimizer.offload_optimizer) == offload
    rank = torch.distributed.get_rank()
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(5 + rank)
    state = {**engine_state(engine), "rng": holdfast.RNG(), "step": 0}
    losses = []
    with holdfast.CheckpointManager(root, every=2, keep=holdfast.Keep(last=20), deadline=240) as manager:
        manager.restore(state)
        for step in range(state["step"] + 1, steps + 1):
            for micro in range(2):
                x = torch.sin(torch.arange(4.0 * WIDTH).view(4, WIDTH) * (step + micro + rank))
                loss = engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean()
                engine.backward(loss)
                engine.step()
            losses.append(loss.item().hex())
            state["step"] = step
            manager.step(step, state)
            if step == dies_after:
                manager.wait()
                if rank == 0:
                    die()
        manager.save(steps, state)
    return losses


def resave(root: Path, stage: int, dtype: str) -> None:
    """Load the newest step below ``root`` into an engine that never made one, and save that as ``again``."""
    deepspeed.init_distributed("gloo", verbose=False)
    state = {**engine_state(make_engine(stage, dtype)), "rng": holdfast.RNG(), "step": 0}
    with holdfast.CheckpointManager(root, every=2, deadline=240) as manager:
        assert manager.restore(state) is not None
    holdfast.save(state, root / "again")


def play_deepspeed(root: Path, dies_at: str) -> list[str]:
    """`examples/deepspeed_engine.py`."""
    return play("deepspeed_engine.py", root, [], {}, dies_at)


def refusals(stage: int, settings: list[tuple[str, str, Any]]) -> list[str]:
    """What `engine_state` says of a real engine, each time with one attribute, of the part named first, set so.

    To offload is to NVMe, in that folder. Set afterwards, as a CPU has none of the operators that DeepSpeed would make
    these engines with.
    """
    deepspeed.init_distributed("gloo", verbose=False)
    engine = make_engine(stage, "fp32")
    parts = {"engine": engine, "zero": engine._config.zero_config, "parallel": engine._config.tensor_parallel_config}
    said = []
    for part, name, value in settings:
        kept = getattr(parts[part], name)
        if name.startswith("offload_"):
            value = ON_DISK[name](device="nvme", nvme_path=value)
        object.__setattr__(parts[part], name, value)
        try:
            engine_state(engine)
            said.append("")
        except holdfast.errors.Unsupported as error:
            said.append(str(error))
        finally:
            object.__setattr__(parts[part], name, kept)
    return said


def one_bit() -> str:
    """What `engine_state` says of an engine whose optimizer is the ``OnebitAdam`` that DeepSpeed had up to 0.18."""
    deepspeed.init_distributed("gloo", verbose=False)
    engine = make_engine(0, "fp32")
    engine.optimizer.__class__ = type("OnebitAdam", (torch.optim.AdamW,), {})
    try:
        engine_state(engine)
    except holdfast.errors.Unsupported as error:
        return str(error)
    return ""
