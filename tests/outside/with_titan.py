"""torchtitan's checkpoint tests with `holdfast.trainers.titan` in the place of torchtitan's own manager.

A pytest plugin: it replaces the class before the tests import it. The tests put doubles in the place of torch's
`dcp.save`, `dcp.async_save` and `dcp.load`, and look at how these are called. So this shim tells such a double of each
save and load of our manager, with the state as torchtitan lays it out and the folder that is used:

- a save that training waits for is made by holdfast first, into the same folder, then told;
- a save beside training, and a load, are the double's alone, whose futures and files the test looks at;
- what is logged under the name holdfast is told to the logger that a test puts in the place of torchtitan's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed.checkpoint as torch_dcp
from torchtitan.components import checkpointer
from torchtitan.components.checkpointer import dcp as theirs

from holdfast.trainers.titan import CheckpointManager

AS_THEY_ARE = {name: getattr(CheckpointManager, name) for name in ("_write", "_write_model", "_begin", "_read")}


def double_of(name: str) -> Callable[..., Any] | None:
    """What a test has put in the place of one of torch's functions; None if it has not."""
    function = getattr(torch_dcp, name)
    return function if isinstance(function, mock.Mock) else None


def folder_of(manager: CheckpointManager, step: int) -> str:
    return os.path.join(manager.folder, f"step-{step}")


def write(self: CheckpointManager, step: int) -> None:
    AS_THEY_ARE["_write"](self, step)
    if (save := double_of("save")) is not None:
        save(whole_state(self), checkpoint_id=folder_of(self, step), storage_writer=None)


def write_model(self: CheckpointManager, step: int, weights: dict[str, Any]) -> None:
    AS_THEY_ARE["_write_model"](self, step, weights)
    if (save := double_of("save")) is not None:
        save(weights, checkpoint_id=folder_of(self, step), storage_writer=None)


def begin(self: CheckpointManager, step: int) -> tuple[Any, Any]:
    async_save = double_of("async_save")
    if async_save is None:
        return AS_THEY_ARE["_begin"](self, step)
    pinned = self._setting("async_mode", "disabled") == "async_with_pinned_mem"
    said = async_save(whole_state(self), checkpoint_id=folder_of(self, step), async_stager=object() if pinned else None)
    return (said.staging_completion, said.upload_completion) if pinned else (None, said)


def read(self: CheckpointManager, path: Any, *, model_only: bool, newest: bool) -> None:
    load = double_of("load")
    if load is None:
        AS_THEY_ARE["_read"](self, path, model_only=model_only, newest=newest)
        return
    states = self._as_torchtitan(model_only=model_only)
    load(states, checkpoint_id=str(path))
    self._take_weights(states)


def whole_state(manager: CheckpointManager) -> dict[str, Any]:
    """All that is saved; `exclude_from_loading` is for loads."""
    others = {name: value for name, value in manager.states.items() if name != "model"}
    return {**manager._weights(), **others}


class ToTheirLogger(logging.Handler):
    """Tells the logger in torchtitan's module what holdfast logs, if a test has put a double there."""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(theirs.logger, mock.Mock):
            getattr(theirs.logger, record.levelname.lower())(record.getMessage())


CheckpointManager._write = write  # type: ignore[method-assign]
CheckpointManager._write_model = write_model  # type: ignore[method-assign]
CheckpointManager._begin = begin  # type: ignore[method-assign]
CheckpointManager._read = read  # type: ignore[method-assign]
theirs.CheckpointManager = checkpointer.CheckpointManager = CheckpointManager
logging.getLogger("holdfast").addHandler(ToTheirLogger())
logging.getLogger("holdfast").setLevel(logging.INFO)
