"""PyTorch Lightning: the steps of a run as ``ckpt_path`` names them, and one step's model loaded into a trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.load import load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.run.steps import Steps
from holdfast.storage.place import Place
from holdfast.storage.urls import location

_HOOKS = "callbacks"
"""Where a step keeps the states of callbacks, and what hooks add to a checkpoint."""


def newest(steps: Steps) -> Place | None:
    """The newest committed step; None if there is none."""
    return next(reversed(steps.current().values()), None)


def take_steps(trainer: pl.Trainer) -> None:
    """Let ``ckpt_path=`` of `validate`, `test` and `predict` name a step, until `leave_steps`.

    Strategies read a checkpoint each in its own way, and tell no callback which: so their method is replaced.
    """
    strategy = trainer.strategy
    if "load_checkpoint" in vars(strategy):
        return
    theirs = strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> dict[str, Any]:
        if _is_step_at(checkpoint_path):
            return _load_step(trainer, checkpoint_path)
        return theirs(checkpoint_path, weights_only=weights_only)  # type: ignore[arg-type]

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign]


def leave_steps(trainer: pl.Trainer) -> None:
    """Take `take_steps` back."""
    vars(trainer.strategy).pop("load_checkpoint", None)


def is_step(checkpoint: Checkpoint) -> bool:
    """Whether a `HoldfastCheckpoint` has saved this."""
    return _HOOKS in checkpoint.manifest.per_rank


def as_lightning(checkpoint: Checkpoint) -> dict[str, Any]:
    """A step's model as a checkpoint of Lightning's, and what hooks and callbacks restore from."""
    return {**checkpoint.per_rank(_HOOKS, 0), "state_dict": checkpoint.state_dict("model")["model"]}


def _is_step_at(path: str | os.PathLike[str]) -> bool:
    try:
        folder = location(path)
    except ValueError:  # a URL that only Lightning knows
        return False
    return (folder / FILE_NAME).is_file() and is_step(open_checkpoint(folder))


def _load_step(trainer: pl.Trainer, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a step's model into the trainer's, each rank what it holds; the rest as Lightning's hooks expect it."""
    if trainer.state.fn == TrainerFn.FITTING:
        raise ValueError(
            f"fit(ckpt_path={str(path)!r}) names a step of a HoldfastCheckpoint, which goes on from the newest step of "
            "its own root: leave out ckpt_path. To begin a new run with these weights, call "
            'holdfast.load(path, {"model": module}, only="model") before fit'
        )
    strategy = trainer.strategy
    load(path, {"model": strategy.model}, only="model")
    frame: dict[str, Any] = open_checkpoint(path).per_rank(_HOOKS, 0)
    # Those that restore after their setup have loaded by now; the others load this, which is what they have.
    module = trainer.lightning_module
    frame["state_dict"] = {} if strategy.restore_checkpoint_after_setup else module.state_dict()
    return frame
