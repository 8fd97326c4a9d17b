"""A real torchtitan training on CPU ranks, with its own trainer, whose configuration names one manager or the other.

`python train_titan.py MANAGER FOLDER KEY=VALUE…` is one rank; `resume_titan.py` starts two. MANAGER is `holdfast`,
`torchtitan`, or `over_dcp`: torchtitan's own, with holdfast.dcp in the place of torch.distributed.checkpoint. The keys
are fields of the checkpoint configuration, and `steps`, and `die`: kill this rank after so many steps, once its last
save is done.

torchtitan runs on accelerators: its device type is set to cpu here, its backend to gloo, modules of GPU kernels that it
imports are empty, gradients are summed in the one way that gloo knows, and `torch.distributed.set_timeout`, which torch
2.13 lacks, does nothing. Prints each step's loss.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import signal
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.runtime.triton_compat  # before there is something that it takes for triton
from torch.distributed.fsdp import FSDPModule


class Cpu(ModuleType):
    """The parts of `torch.cuda` that torchtitan's trainer calls."""

    set_device = empty_cache = reset_peak_memory_stats = synchronize = staticmethod(lambda *_: None)
    current_device, device_count = staticmethod(lambda: 0), staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda *_: "cpu")
    get_device_properties = staticmethod(lambda *_: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda *_: {})
    is_available = staticmethod(lambda: False)


class Kernels(ModuleType):
    """In the place of triton, which builds of torch for the CPU do not have: whatever is asked for."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock()


def on_the_cpu() -> None:
    """Before torchtitan is imported: what it asks torch about the device is answered with cpu."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[assignment]
    torch._utils._get_device_module = lambda kind: Cpu("cpu")  # type: ignore[assignment]
    as_it_was = FSDPModule.set_gradient_divide_factor

    def summed(self: FSDPModule, factor: float) -> None:
        as_it_was(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = summed  # type: ignore[method-assign]
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_: None  # type: ignore[attr-defined]
    for name in ("triton", "triton.language"):
        module = sys.modules[name] = Kernels(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)


on_the_cpu()

from torchtitan.components.checkpointer import CheckpointManager as Theirs  # noqa: E402
from torchtitan.components.checkpointer import dcp as their_module  # noqa: E402
from torchtitan.components.data.loader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.common.config_utils import decoder_vocab_size  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import holdfast.dcp  # noqa: E402
from holdfast.trainers.titan import CheckpointManager as Ours  # noqa: E402

TOKENS = 32


class Sines(BaseDataLoader):
    """Batches made of the step and the rank; its state is like that of torchtitan's own loader."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, **_: Any) -> None:
        self.key, self.rank, self.position = f"dp_rank_{dp_rank}", dp_rank, 0

    def __iter__(self) -> Any:
        while True:
            self.position += 1
            words = torch.arange(TOKENS + 1) * (7 + self.position) + 31 * self.rank
            yield {"input": words[:-1] % 500, "positions": torch.arange(TOKENS)}, words[1:] % 500

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, self.key: {"position": self.position}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state[self.key]["position"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 500


class Dying(Trainer):
    """torchtitan's trainer, which may be killed after a step, and prints its losses."""

    dies = 0

    def train_step(self, data_iterator: Any) -> None:
        if Dying.dies and self.step == Dying.dies + 1:
            self.checkpointer.maybe_wait_for_saving()
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        super().train_step(data_iterator)


class Printed(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step: int, global_avg_loss: float, *_: Any, **__: Any) -> None:
        print(f"step {step}: loss {global_avg_loss:.9f}", flush=True)


def main(manager: str, folder: str, settings: dict[str, Any]) -> None:
    utils.get_local_device.__globals__["get_local_device"] = lambda: torch.device("cpu")
    utils.get_local_device = lambda: torch.device("cpu")
    Dying.dies, steps = settings.pop("die", 0), settings.pop("steps")
    llama3.get_attention_config = lambda backend: ScaledDotProductAttention.Config()  # the others compile kernels
    spec = llama3.model_registry("debugmodel")
    CheckpointManager = {"holdfast": Ours, "torchtitan": Theirs, "over_dcp": Theirs}[manager]
    if manager == "over_dcp":
        their_module.dcp = holdfast.dcp
    config = Trainer.Config(
        model_spec=spec, dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        tokenizer=NoTokenizer.Config(), dataloader=Sines.Config(),
        optimizer=default_adamw(lr=1e-3, implementation="foreach"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=TOKENS, max_context_length=TOKENS, steps=steps,
            disable_cuda_graphs=True, mixed_precision_param="float32",
        ),
        metrics=Printed.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        activation_checkpoint=None, debug=DebugConfig(seed=1),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, **settings),
    )  # fmt: skip
    trainer = Dying(config)
    if config.checkpoint.create_seed_checkpoint:  # as torchtitan's own train.py
        trainer.checkpointer.save(curr_step=0, last_step=True)
    else:
        trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    pairs = (argument.split("=", 1) for argument in sys.argv[3:])
    main(sys.argv[1], sys.argv[2], {name: ast.literal_eval(value) for name, value in pairs})
