"""Trainers and bare calls of `HoldfastCheckpointIO` on one rank; run by `test_lightning_plugin.py`."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO

import holdfast
from holdfast.errors import HoldfastError
from holdfast.saving import Saving
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.trainers.lightning import HoldfastCheckpointIO


class Does(Callback):
    """Calls a function in each of the hooks that it is given for."""

    def __init__(self, **hooks: Callable[[pl.Trainer], None]) -> None:
        for name, does in hooks.items():
            setattr(self, name, lambda trainer, *_, does=does, **__: does(trainer))


def make_trainer(root: Path, *callbacks: Callback, plugin: Any = None, **options: Any) -> pl.Trainer:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    plugin = plugin or HoldfastCheckpointIO(worker="thread")
    checkpoints = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return pl.Trainer(
        default_root_dir=root, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=list(callbacks), plugins=[plugin],
        **{"max_steps": 2, "limit_val_batches": 1, "enable_checkpointing": checkpoints, **options},
    )  # fmt: skip


def state(step: int) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"weight": torch.full((3,), float(step))}}


def step_of(path: Path) -> int | str:
    """The step of a checkpoint that opens and is whole; else what is wrong with it."""
    try:
        checkpoint = holdfast.open(path)
        return checkpoint.values["global_step"] if checkpoint.verify() else "damaged"
    except (HoldfastError, OSError) as error:
        return type(error).__name__


def seen(root: Path) -> dict[str, Any]:
    """What is in a folder: steps of checkpoints, where links point to, texts of other files."""

    def look(path: Path) -> Any:
        if path.is_symlink():
            return f"-> {path.readlink()}"
        return step_of(path) if path.is_dir() or path.read_bytes()[:2] == b"PK" else path.read_text()

    return {path.name: look(path) for path in sorted(root.iterdir())}


def threads() -> list[str]:
    """The threads that a save or its writer has left."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast")]


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "none"


@contextmanager
def held_back() -> Iterator[threading.Event]:
    """Inside the block no thread but this one commits anything, until the event is set.

    Files may be opened and written: a step of the optimizer waits until all is copied into files that are open.
    """
    go, here = threading.Event(), threading.current_thread()

    def hold(call: disk.Call, do: Callable[[], Any]) -> Any:
        commits = call.verb in ("link", "replace", "rename") and call.target.endswith(("manifest.json", ".ckpt"))
        if commits and threading.current_thread() is not here:
            go.wait(240)
        return do()

    with disk.hooked(hold):
        yield go


# Links


def links_with_names_that_change(root: Path, extension: str) -> dict[str, Any]:
    saves = ModelCheckpoint(root, filename="{epoch}", save_top_k=-1, save_last="link")
    saves.FILE_EXTENSION = extension
    saves.CHECKPOINT_NAME_LAST = "last-{epoch}"
    make_trainer(root, saves, max_steps=-1, max_epochs=3, limit_train_batches=2).fit(BoringModel())
    return seen(root)


def _with_link(root: Path, target: str, link: str) -> HoldfastCheckpointIO:
    """Two checkpoints, a folder and a file, and another file in ``root``, and a link to one of them, or to nothing."""
    plugin = HoldfastCheckpointIO()
    plugin.save_checkpoint(state(1), root / "folder")
    plugin.save_checkpoint(state(1), root / "first.ckpt")
    (root / "file.ckpt").write_text("a file")
    (root / link).symlink_to(target.replace("ROOT", str(root)))
    return plugin


def remove_link(root: Path, target: str, link: str) -> dict[str, Any]:
    _with_link(root, target, link).remove_checkpoint(root / link)
    return seen(root)


def save_over_link(root: Path, target: str, link: str) -> dict[str, Any]:
    _with_link(root, target, link).save_checkpoint(state(2), str(root / link) + "/")
    return seen(root)


def save_over_link_that_fails(root: Path, link: str) -> tuple[str, dict[str, Any]]:
    plugin = _with_link(root, "first.ckpt", link)
    failed = failure(lambda: plugin.save_checkpoint({**state(2), "code": print}, root / link))
    return failed, seen(root)


def fit_over_link(root: Path, fails: bool, extension: str) -> tuple[str, dict[str, Any]]:
    """`ModelCheckpoint` goes on where another one has left a link as the last checkpoint."""
    plugin = HoldfastCheckpointIO(worker="thread")
    plugin.save_checkpoint(state(100), root / "first")
    (root / f"last{extension}").symlink_to("first")
    saves = ModelCheckpoint(root, save_top_k=0, save_last=True, every_n_train_steps=2, enable_version_counter=False)
    saves.FILE_EXTENSION = extension

    class Model(BoringModel):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["code"] = print if fails else "none"

    return failure(lambda: make_trainer(root, saves, plugin=plugin).fit(Model())), seen(root)


def names_taken_meanwhile(root: Path, extension: str) -> dict[str, Any]:
    """What is to be removed once a save is committed, and has another thing in its place by then."""
    plugin = HoldfastCheckpointIO()
    first, second, third = (f"{step}{extension}" for step in (1, 2, 3))
    for step, name in enumerate((first, second, third), 1):
        plugin.save_checkpoint(state(step), root / name)
    (root / "link").symlink_to(first)
    (root / "moved").symlink_to(first)
    (root / "gone").symlink_to(first)
    plugin._last = saving = Saving(root / "new", 4)
    for name in ("link", "moved", "gone", second, third):
        plugin.remove_checkpoint(root / name)
    (root / "moved").unlink()
    (root / "moved").symlink_to(third)
    (root / "gone").unlink()
    (root / second).rename(root / "elsewhere")
    (root / second).symlink_to("elsewhere")
    saving.finish(None)
    return seen(root)


# Who waits for a save


def saves_around_fit(root: Path, worker: Any, extension: str) -> dict[str, Any]:
    """For each save that is not one of training: the step that the checkpoint opens with when the call returns."""
    found: dict[str, Any] = {}

    def save(name: str) -> Callable[[pl.Trainer], None]:
        def call(trainer: pl.Trainer) -> None:
            trainer.save_checkpoint(root / f"{name}{extension}")
            found[name] = step_of(root / f"{name}{extension}")

        return call

    does = Does(
        on_fit_start=save("start of fit"), on_fit_end=save("end of fit"), on_test_end=save("in test"),
        teardown=lambda trainer: save(f"teardown of {trainer.state.fn.value}")(trainer),
    )  # fmt: skip
    trainer, model = make_trainer(root, does, plugin=HoldfastCheckpointIO(worker=worker)), BoringModel()
    validates = Does(on_validation_end=lambda trainer: None if trainer.training else save("in validate")(trainer))
    trainer.strategy.connect(model)
    save("before all")(trainer)
    trainer.callbacks.append(validates)
    trainer.validate(model, verbose=False)
    save("after validate")(trainer)
    trainer.callbacks.remove(validates)
    trainer.fit(model)
    found["threads after fit"] = threads()
    save("after fit")(trainer)
    trainer.test(model, verbose=False)
    found["threads after all"] = threads()
    trainer.callbacks.remove(does)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(model)
    save("after the second fit")(trainer)
    return found


def saves_inside_of_fit(root: Path, name: str) -> dict[str, Any]:
    """What there is of a save that training makes, when the call returns and after `fit`; its weights are of then."""
    found: dict[str, Any] = {}
    weights: dict[str, torch.Tensor] = {}

    def save(trainer: pl.Trainer) -> None:
        if trainer.global_step == 1:
            weights.update({key: value.clone() for key, value in trainer.lightning_module.state_dict().items()})
            trainer.save_checkpoint(root / name)
            found["at once"] = step_of(root / name)

    with held_back() as go:
        does = Does(on_train_batch_end=save, on_train_end=lambda _: go.set())
        make_trainer(root, does).fit(BoringModel())
    saved = HoldfastCheckpointIO().load_checkpoint(root / name)["state_dict"]
    same = saved.keys() == weights.keys() and all(torch.equal(saved[key], weights[key]) for key in weights)
    return {**found, "after fit": step_of(root / name), "as it was": same, "threads": threads()}


def failures(root: Path, worker: Any, extension: str) -> dict[str, Any]:
    """Who hears of a save to a path that cannot be."""
    (root / "file").write_text("")

    def save(trainer: pl.Trainer) -> None:
        trainer.save_checkpoint(root / "file" / f"below{extension}")

    def save_badly_in(hook: str) -> str:
        does, plugin = Does(**{hook: save}), HoldfastCheckpointIO(worker=worker)
        return failure(lambda: make_trainer(root, does, plugin=plugin).fit(BoringModel()))

    trainer = make_trainer(root, plugin=HoldfastCheckpointIO(worker=worker))
    trainer.fit(BoringModel())
    found: dict[str, Any] = {"after fit": failure(lambda: save(trainer))}
    trainer.save_checkpoint(root / "well")
    found.update(well=step_of(root / "well"), at_the_end=save_badly_in("on_train_end"))
    found.update(in_the_middle=save_badly_in("on_train_batch_end"), threads=threads())
    return found


def an_exception_in_training(root: Path) -> dict[str, Any]:
    """Saves that `ModelCheckpoint` makes on an exception, after one in the background."""

    class Breaks(BoringModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trainer.global_step == 1:
                self.trainer.save_checkpoint(root / "before")
                raise InterruptedError
            return super().training_step(batch, batch_idx)

    saves = ModelCheckpoint(root, filename="saved", save_on_exception=True)
    failed = failure(lambda: make_trainer(root, saves).fit(Breaks()))
    return {"raised": failed, "threads": threads(), **seen(root)}


def as_a_part_of_another_plugin(root: Path) -> dict[str, Any]:
    saves = ModelCheckpoint(root, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    make_trainer(root, saves, plugin=AsyncCheckpointIO(HoldfastCheckpointIO())).fit(BoringModel())
    return {"threads": threads(), **seen(root)}


def a_trainer_inside_of_fit(root: Path) -> dict[str, Any]:
    """Another trainer's save, while one fits: nobody calls the teardown of its plugin."""
    found: dict[str, Any] = {}

    def save(_: pl.Trainer) -> None:
        inner = make_trainer(root, plugin=HoldfastCheckpointIO())
        inner.strategy.connect(BoringModel())
        inner.save_checkpoint(root / "inner")
        found.update(inner=step_of(root / "inner"), threads=threads())

    make_trainer(root, Does(on_train_end=save)).fit(BoringModel())
    return found


# Hyperparameters


def restored_from_omegaconf(root: Path) -> dict[str, Any]:
    """A module of a DictConfig, made again as `load_from_checkpoint` does it."""
    from omegaconf import OmegaConf

    class Model(BoringModel):
        def __init__(self, cfg: Any) -> None:
            super().__init__()
            self.save_hyperparameters(cfg)
            self.width = cfg.net.width

    config = OmegaConf.create({"lr": 0.1, "net": {"width": 4, "twice": ["${lr}", "${lr}"], "to come": "???"}})
    trainer = make_trainer(root)
    trainer.fit(Model(config))
    trainer.save_checkpoint(root / "saved")
    checkpoint = HoldfastCheckpointIO().load_checkpoint(root / "saved")
    model = _load_state(Model, checkpoint)
    return {
        "kept": holdfast.open(root / "saved").values["hyper_parameters"],
        "type": type(model.hparams).__name__,
        "width": model.width,
        "alike": OmegaConf.to_container(model.hparams) == OmegaConf.to_container(config, resolve=True),
        "by hand": Model(OmegaConf.create(checkpoint["hyper_parameters"])).width,
        "missing": OmegaConf.is_missing(model.hparams.net, "to come"),
    }


def restored_arguments(root: Path) -> dict[str, Any]:
    """A module of plain arguments, and one that is no value, made again as `load_from_checkpoint` does it."""

    class Model(BoringModel):
        def __init__(self, where: Path, sizes: dict[int, str], scale: float = 1.0, act: Any = torch.relu) -> None:
            super().__init__()
            self.save_hyperparameters()

    trainer = make_trainer(root)
    trainer.fit(Model(LocalPlace("/data"), {1: "one"}, scale=2.0))
    trainer.save_checkpoint(root / "saved")
    return dict(_load_state(Model, HoldfastCheckpointIO().load_checkpoint(root / "saved")).hparams)
