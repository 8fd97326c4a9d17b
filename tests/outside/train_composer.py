"""One rank of a training with Composer's own trainer, with DDP on CPUs, and examples/holdfast_in_composer.py.

`python train_composer.py FOLDER DIE`: DIE is the step after which all ranks are killed, or 0. Prints each step's loss,
and at the end a digest of weights, optimizer and random generators.

Composer imports torchvision, which has to be built for this very torch: in its place is a package of empty classes.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import random
import signal
import sys
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset


class Empty(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class InThePlaceOfTorchvision:
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(InThePlaceOfTorchvision())  # type: ignore[arg-type]

from composer import Callback, Trainer  # noqa: E402
from composer.models import ComposerModel  # noqa: E402
from composer.optim import DecoupledAdamW, LinearScheduler  # noqa: E402
from composer.utils import dist  # noqa: E402
from holdfast_in_composer import HoldfastSaver  # noqa: E402


class Numbers(Dataset[torch.Tensor]):
    """Samples that are drawn as they are read."""

    def __len__(self) -> int:
        return 28

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 28) + torch.rand(4)


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(outputs, batch)


class Watch(Callback):
    def __init__(self, die: int, saver: HoldfastSaver) -> None:
        self.die, self.saver = die, saver

    def batch_end(self, state: Any, logger: Any) -> None:
        if dist.get_global_rank() == 0:
            print(f"step {int(state.timestamp.batch)}: {state.loss.item():.9f}", flush=True)

    def batch_start(self, state: Any, logger: Any) -> None:
        if self.die and int(state.timestamp.batch) == self.die:
            self.saver.manager.wait()
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, die: int) -> None:
    torch.manual_seed(0)
    model, saver = Model(), HoldfastSaver(folder, every=2)
    data = Numbers()
    loader = DataLoader(data, batch_size=2, sampler=dist.get_sampler(data, shuffle=True))
    optimizer = DecoupledAdamW(model.parameters(), lr=0.01)
    trainer = Trainer(
        model=model, train_dataloader=loader, optimizers=optimizer, schedulers=LinearScheduler(), max_duration="3ep",
        device="cpu", callbacks=[saver, Watch(die, saver)], progress_bar=False, seed=7, dist_timeout=60,
    )  # fmt: skip
    trainer.fit()
    sha = hashlib.sha256(repr(random.getstate()).encode() + torch.get_rng_state().numpy().tobytes())
    states = [state[key] for state in optimizer.state.values() for key in sorted(state)]
    for tensor in [*model.state_dict().values(), *states]:
        sha.update(tensor.numpy().tobytes())
    print("end", dist.get_global_rank(), sha.hexdigest(), optimizer.param_groups[0]["lr"], flush=True)
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
