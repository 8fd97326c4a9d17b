"""One rank of a training with OLMo-core's own trainer, with FSDP on CPUs.

`python train_olmo.py FOLDER DIE MANAGER`: DIE is the step after which all ranks are killed, or 0, and MANAGER is
`holdfast` for examples/holdfast_in_olmo.py, or `torch`. Prints each step's loss.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from olmo_core.config import DType
from olmo_core.data import TextDataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    Trainer,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.callbacks import Callback, CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

if sys.argv[3] == "holdfast":
    import holdfast_in_olmo  # noqa: F401

LENGTH, STEPS = 16, 6

record_metric = Trainer.record_metric


def record_metric_of_step(trainer: Trainer, name: str, *arguments: Any, **named: Any) -> None:
    """Record every metric except the time that a save beside training took.

    OLMo-core 3.0.0 records that time from a callback, which may run at another step on each rank. The ranks then
    reduce different metrics, and the training hangs, with torch's writer too. OLMo-core's pull request 831 is about it.
    """
    if name != "checkpoint/save_async_duration_s":
        record_metric(trainer, name, *arguments, **named)


Trainer.record_metric = record_metric_of_step


class Sines(TextDataLoaderBase):
    """Batches made of the step and the rank."""

    total_batches = 100

    def _iter_batches(self) -> Iterator[dict[str, torch.Tensor]]:
        for number in range(self.batches_processed, self.total_batches):
            words = torch.arange(2 * LENGTH).view(2, LENGTH) * (7 + number) + 31 * self.dp_rank
            yield {"input_ids": words % 128}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches_processed, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches_processed, self._epoch = state_dict["batches"], state_dict["epoch"]

    def reshuffle(self, epoch: int | None = None, **_: Any) -> None:
        self._epoch = epoch or 1

    def get_mock_batch(self) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.zeros(2, LENGTH, dtype=torch.long)}


@dataclass
class Watch(Callback):
    die: int = 0

    def pre_step(self, batch: Any) -> None:
        if self.die and self.step == self.die + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        if get_rank() == 0 and "train/CE loss" in metrics:
            print(f"step {step}: {metrics['train/CE loss']:.9f}", flush=True)


def main(folder: str, die: int) -> None:
    prepare_training_environment(seed=1, backend="gloo")
    model = TransformerConfig.llama_like(d_model=32, vocab_size=128, n_layers=2, n_heads=2, dtype=DType.float32)
    module = TransformerTrainModuleConfig(
        rank_microbatch_size=2 * LENGTH, max_sequence_length=LENGTH, optim=AdamWConfig(lr=1e-2, foreach=True),
        scheduler=CosWithWarmup(warmup=2),
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.float32, reduce_dtype=DType.float32
        ),
    ).build(model.build(init_device="cpu"), device=torch.device("cpu"))  # fmt: skip
    ranks = get_world_size()
    loader = Sines(
        collator=None, work_dir=folder, global_batch_size=2 * LENGTH * ranks, dp_world_size=ranks, dp_rank=get_rank()
    )
    saving = CheckpointerCallback(
        save_interval=2, save_async=bool(os.environ.get("BACKGROUND")), pre_train_checkpoint=False
    )
    trainer = TrainerConfig(
        save_folder=folder, work_dir=f"{folder}-work", device="cpu", metrics_collect_interval=1, save_overwrite=True,
        max_duration=Duration.steps(STEPS), no_evals=True, callbacks={"checkpointer": saving, "watch": Watch(die=die)},
    ).build(module, loader)  # fmt: skip
    trainer.fit()
    print("end", get_rank(), trainer.global_step, flush=True)
    teardown_training_environment()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
