"""Real Lightning on ranks: a small module with a loader that has a position; run by `test_lightning.py`."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import warnings
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import holdfast
from holdfast.trainers.lightning import HoldfastCheckpoint, HoldfastCheckpointIO
from tests.trainers import arguments
from tests.trainers.lives import die
from tests.trainers.scripts import play

WIDTH = 8


class Samples(Dataset):
    def __init__(self, count: int = 24, noise: float = 0.01) -> None:
        self.count, self.noise = count, noise

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(float(WIDTH)) * (index + 1)) + self.noise * torch.rand(WIDTH)


class Data(pl.LightningDataModule):
    """A module of data with a state of its own: how many batches went through it."""

    def __init__(self) -> None:
        super().__init__()
        self.moved, self.noise = 0, 0.01

    def on_before_batch_transfer(self, batch: torch.Tensor, dataloader_idx: int) -> torch.Tensor:
        self.moved += self.trainer.training
        return batch

    def train_dataloader(self) -> StatefulDataLoader:
        world = self.trainer.world_size
        if isinstance(self.trainer.strategy, SingleDeviceStrategy):
            return StatefulDataLoader(Samples(noise=self.noise), batch_size=2, shuffle=True)
        # Lightning's own wrapper around a shuffling sampler has an order that no state tells.
        sampler = StatefulDistributedSampler(
            Samples(noise=self.noise), num_replicas=world, rank=self.trainer.global_rank, seed=3
        )
        return StatefulDataLoader(Samples(noise=self.noise), batch_size=2, sampler=sampler)

    def val_dataloader(self) -> StatefulDataLoader:
        return StatefulDataLoader(Samples(4, self.noise), batch_size=2)

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moved = state["moved"]


class Net(pl.LightningModule):
    def __init__(self, *, sharded: bool = False, plateau: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, WIDTH))
        self.losses: list[str] = []
        self.added = 0

    def configure_model(self) -> None:
        if self.hparams["sharded"]:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch), batch.flip(-1))
        self.losses.append(loss.item().hex())
        self.added += 1
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.net(batch), batch.flip(-1))
        self.log("val", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.hparams["plateau"]:
            scheduler = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}
        cycle = OneCycleLR(optimizer, 0.02, total_steps=100)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = self.added

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"]


class Count(Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.seen = torch.zeros(())

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += 1

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Dies(Callback):
    """Ends the last rank after so many batches of this life."""

    def __init__(self, after: int, saves: HoldfastCheckpoint | None) -> None:
        self.after, self.saves = after, saves

    def on_train_batch_start(self, trainer: pl.Trainer, module: Net, batch: Any, batch_idx: int) -> None:
        if len(module.losses) == self.after:
            if self.saves is not None and self.saves.manager is not None:
                self.saves.manager.wait()
            if trainer.global_rank == trainer.world_size - 1:
                die()


def make_trainer(kind: str, callbacks: list[Callback], **options: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    world = int(os.environ["WORLD_SIZE"])
    strategy: Any = {
        "alone": "auto",
        "ddp": DDPStrategy(process_group_backend="gloo"),
        "fsdp2": ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, process_group_backend="gloo"),
    }[kind]
    pl.seed_everything(3, verbose=False)
    return pl.Trainer(
        accelerator="cpu", devices=world, strategy=strategy, callbacks=callbacks, logger=False,
        enable_progress_bar=False, use_distributed_sampler=False, enable_model_summary=False,
        **{"max_epochs": 3, **options},
    )  # fmt: skip


def fit(
    root: Path, kind: str, every: int, dies_after: int = 0, elsewhere: Any = "error", plateau: bool = False,
    options: dict[str, Any] | None = None,
) -> tuple[list[str], int]:  # fmt: skip
    """The losses of this life, as exact texts, and how many batches a callback counts over all lives."""
    saves = HoldfastCheckpoint(root, every=every, keep=holdfast.Keep(last=30), elsewhere=elsewhere, deadline=240)
    count = Count()
    trainer = make_trainer(kind, [saves, count, *([Dies(dies_after, saves)] if dies_after else [])], **(options or {}))
    rank = trainer.global_rank
    module = Net(sharded=kind == "fsdp2", plateau=plateau)
    torch.manual_seed(50 + rank)
    trainer.fit(module, datamodule=Data())
    assert module.added == count.seen
    return module.losses, int(count.seen)


def fit_and_stop(root: Path, after: int, name: str) -> tuple[list[str], int]:
    """`fit` on one rank that gets a signal after so many batches of this life."""

    class Signalled(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Net, batch: Any, batch_idx: int) -> None:
            if len(module.losses) == after:
                os.kill(os.getpid(), getattr(signal, name))

    saves, count = HoldfastCheckpoint(root, every=100), Count()
    trainer = make_trainer("alone", [saves, count, Signalled()])
    module = Net()
    torch.manual_seed(50)
    before = signal.getsignal(signal.SIGTERM)
    with suppress(SIGTERMException):
        trainer.fit(module, datamodule=Data())
    assert signal.getsignal(signal.SIGTERM) == before
    return module.losses, int(count.seen)


def arguments_that_are_missing(root: Path) -> list[str]:
    """Of what a manager takes: what `HoldfastCheckpoint` does not take or does not hand on."""
    trainer = SimpleNamespace(strategy=None)
    return arguments.lost(HoldfastCheckpoint, lambda saves: saves.on_fit_start(trainer, None))


def fit_wrongly(root: Path) -> dict[str, Any]:
    """What comes of calls that ask for two things at once, by the name of each; ``root`` holds a step at the end."""
    found: dict[str, Any] = {}

    def fit(name: str, saves: HoldfastCheckpoint, ckpt_path: Path | None = None, **options: Any) -> pl.Trainer:
        trainer = make_trainer("alone", [saves], **{"max_steps": 2, "max_epochs": -1, **options})
        try:
            trainer.fit(Net(), datamodule=Data(), ckpt_path=ckpt_path, weights_only=False)
            found[name] = trainer.global_step
        except ValueError as error:
            found[name] = str(error)
        return trainer

    fit("a trial", HoldfastCheckpoint(root, every=1), fast_dev_run=True)
    found["left by a trial"] = sorted(path.name for path in root.glob("*"))
    theirs = root.parent / "theirs.ckpt"
    fit("first", HoldfastCheckpoint(root.parent / "other", every=1)).save_checkpoint(theirs)
    fit("theirs alone", HoldfastCheckpoint(root, every=1), theirs, max_steps=3)
    fit("theirs and ours", HoldfastCheckpoint(root, every=1), theirs, max_steps=4)
    fit("afresh", HoldfastCheckpoint(root, every=1, resume=False))
    fit("done", HoldfastCheckpoint(root, every=1), max_steps=3)
    fit("no data", HoldfastCheckpoint(root.parent / "none", every=1), limit_train_batches=0)
    return found


def fit_again(root: Path, after: int) -> tuple[list[str], dict[str, Any]]:
    """Losses of a fit that raises after so many batches and is called again, and at the end the gradient scaler."""

    class Raises(Callback):
        def on_train_batch_start(self, trainer: pl.Trainer, module: Net, batch: Any, batch_idx: int) -> None:
            if after and len(module.losses) == after and not self.raised:
                self.raised = True
                raise InterruptedError

        raised = False

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
    saves = HoldfastCheckpoint(root, every=4, keep=holdfast.Keep(last=30), deadline=240)
    trainer = make_trainer("alone", [saves, Raises()], plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)])
    module = Net()
    torch.manual_seed(50)
    with suppress(InterruptedError):
        trainer.fit(module, datamodule=Data())
    if after:
        scaler.update(1.0)  # what it is now counts for nothing
        del module.losses[after - after % 4 :]
        trainer.fit(module, datamodule=Data())
    return module.losses, scaler.state_dict()


def fit_with_plugin(root: Path, kind: str, goes_on_from: str, epochs: int = 3) -> tuple[list[str], str]:
    """`ModelCheckpoint` as ever, on the plugin; the losses, and the weights at the end."""
    saves = ModelCheckpoint(root, save_last=True, monitor="val", mode="max", save_top_k=1)
    saves.filename = "{epoch}-{step}"
    # The same generators everywhere: the plugin saves none, as Lightning does not.
    trainer = make_trainer(kind, [saves], plugins=[HoldfastCheckpointIO()], max_epochs=epochs)
    module = Net(plateau=True)
    module.net[2].p = 0.0
    data = Data()
    data.noise = 0.0
    trainer.fit(module, datamodule=data, ckpt_path=root / goes_on_from if goes_on_from else None)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in module.parameters())).hexdigest()
    if goes_on_from:
        trainer.validate(module, datamodule=data, ckpt_path=saves.last_model_path, verbose=False)
    return module.losses, weights


def play_lightning(root: Path, dies_at: str) -> list[str]:
    """`examples/lightning_fit.py`, as torchrun would start it."""
    os.environ["TORCHELASTIC_RUN_ID"] = "test"
    return play("lightning_fit.py", root, [], {}, dies_at)


class Logs(Net):
    """Logs a loss that falls and rises again. A step inside of an epoch is saved with what was logged before it."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", torch.tensor(abs(self.trainer.global_step - 8.0)))

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("weight", next(self.parameters()).sum())

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).detach()

    def test_dataloader(self) -> Any:
        return StatefulDataLoader(Samples(2, 0.0), batch_size=2)

    predict_dataloader = test_dataloader


def fit_and_look_back(root: Path, kind: str) -> dict[str, Any]:
    """What `HoldfastCheckpoint` says of its steps, and what other calls of a trainer make of them."""
    found: dict[str, Any] = {}
    weights: dict[int, Any] = {}

    class Notes(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Logs, *_: Any) -> None:
            weights[trainer.global_step] = full(module)

    def full(module: pl.LightningModule) -> list[torch.Tensor]:
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in module.parameters()]

    def is_step(module: pl.LightningModule, step: int) -> bool:
        return all(map(torch.equal, full(module), weights[step]))

    keep = holdfast.Keep(last=2, best=1)
    saves = HoldfastCheckpoint(root, every=4, keep=keep, monitor="val", deadline=240)
    trainer = make_trainer(kind, [saves, Notes()], val_check_interval=2, limit_train_batches=6)
    found["before"] = (saves.best_model_path, saves.best_model_score, saves.last_model_path)
    module = Logs(sharded=kind == "fsdp2")
    trainer.fit(module, datamodule=Data())
    best, last = Path(saves.best_model_path), Path(saves.last_model_path)
    score = saves.best_model_score
    found.update(best=best.name, score=None if score is None else score.item(), last=last.name, there=best.is_dir())
    for path, step in (("best", 8), (str(best), 8), (last, trainer.global_step)):
        module = Logs(sharded=kind == "fsdp2")  # `configure_model` shards a module once
        trainer.validate(module, datamodule=Data(), ckpt_path=path, verbose=False)
        found[f"validate {Path(path).name}"] = is_step(module, step) and module.added == step
    again = Logs(sharded=kind == "fsdp2")
    trainer.test(again, ckpt_path=best, verbose=False)
    found["test"] = is_step(again, 8)
    again = Logs(sharded=kind == "fsdp2")
    trainer.predict(again, ckpt_path=last)
    found["predict"] = is_step(again, trainer.global_step)
    if kind != "fsdp2":  # whose strategy asks no plugin
        other, again = make_trainer(kind, [], plugins=[HoldfastCheckpointIO()], enable_checkpointing=False), Logs()
        other.test(again, ckpt_path=best, verbose=False)
        found["test"] = found["test"] and is_step(again, 8)
    found["patched"] = "load_checkpoint" in vars(trainer.strategy)
    try:
        trainer.fit(Logs(sharded=kind == "fsdp2"), datamodule=Data(), ckpt_path=best)
    except ValueError as error:
        found["fit"] = str(error).partition(":")[0].rpartition(",")[2]
    return found


def look_back(root: Path) -> list[Any]:
    """What `HoldfastCheckpoint` says of the steps in ``root``, without a fit."""
    saves = HoldfastCheckpoint(root, every=4, monitor="val")
    score = saves.best_model_score
    return [Path(saves.best_model_path).name, None if score is None else score.item(), Path(saves.last_model_path).name]
