"""PyTorch Lightning: a `CheckpointIO` plugin that keeps Lightning's checkpoints as folders of holdfast.

Given to `Trainer(plugins=[…])`, called by Lightning's strategies and by `ModelCheckpoint`. Never writes a pickle; what
other plugins wrote as files it hands to Lightning's own to be read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.engine.ranks import DEADLINE, Ranks
from holdfast.engine.storage import delete, delete_empty_folders, files_below
from holdfast.engine.stores.urls import location
from holdfast.events import log
from holdfast.ondisk import values
from holdfast.ondisk.containers import check_key, mapped
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.saver import Saver
from holdfast.saving import Saving

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
except ImportError as error:
    raise ImportError("holdfast.trainers.lightning needs Lightning: pip install lightning") from error

_SETTINGS = ("hyper_parameters", "datamodule_hyper_parameters")


class HoldfastCheckpointIO(CheckpointIO):
    """Lightning's checkpoints, saved in the background as folders that `holdfast.open` reads.

        trainer = pl.Trainer(plugins=[HoldfastCheckpointIO()])

    What is saved is the state at the call: `save_checkpoint` returns once it is copied, and `teardown`, at the end of
    `fit`, waits until it is committed. A save that failed raises SaveFailed in the next one, or there. A checkpoint
    that `ModelCheckpoint` replaces is removed once the new one is committed. Hyperparameters that are neither numbers,
    texts nor containers of those (functions, classes, paths) are left out, with a warning.

    Lightning gathers the state on rank 0 before it calls a plugin; `HoldfastCheckpoint` saves it as it lies.
    ``worker`` and ``deadline`` as of `holdfast.Saver`.
    """

    def __init__(self, *, worker: Literal["process", "thread"] = "process", deadline: float = DEADLINE) -> None:
        self._worker, self._deadline = worker, deadline
        self._saver: Saver | None = None
        self._last: Saving | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Begin to save ``checkpoint`` to the folder ``path``; raises SaveFailed for an earlier one that failed.

        Called on one rank alone. Raises TypeError for ``storage_options``, of which there are none.
        """
        if storage_options is not None:
            raise TypeError("HoldfastCheckpointIO has no storage_options: give credentials as docs/stores.md says")
        if self._saver is None:
            self._saver = Saver(worker=self._worker, deadline=self._deadline, group=Ranks(0, 1))
        kept = {**checkpoint, **{key: _plain(key, checkpoint[key]) for key in _SETTINGS if key in checkpoint}}
        step = checkpoint.get("global_step")
        self._last = self._saver.save(kept, path, overwrite=True, step=step if type(step) is int else None)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint as Lightning made it, on the CPU or where ``map_location``, a device, says.

        A file that is no folder of holdfast is read as Lightning reads it.
        """
        if self._last is not None:
            self._last.wait()
        if os.fspath(path).endswith(".ckpt") and Path(path).is_file():
            return dict(TorchCheckpointIO().load_checkpoint(Path(path), map_location, weights_only))
        loaded = open_checkpoint(path).state_dict()
        if isinstance(map_location, (str, torch.device)):
            return dict(_moved(loaded, torch.device(map_location)))
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: at once, or if a save is under way once that is committed."""
        if self._last is None or self._last.done:
            _remove(path)
        else:
            self._last.add_done_callback(partial(_remove_after, path))

    def teardown(self) -> None:
        """Wait for the saves under way. Raises SaveFailed for one that failed and has not been raised yet."""
        saver, self._saver, self._last = self._saver, None, None
        if saver is not None:
            saver.close()


def _remove_after(path: str | os.PathLike[str], saving: Saving) -> None:
    if saving.failed is None:
        _remove(path)
    else:
        log.warning("%s is kept: what was to replace it, %s, has failed", path, saving.path)


def _remove(path: str | os.PathLike[str]) -> None:
    if Path(path).is_file():
        TorchCheckpointIO().remove_checkpoint(Path(path))
        return
    folder = location(path)
    delete(folder / FILE_NAME)  # first: half a checkpoint is none
    delete(*(folder / name for name in files_below(folder)))
    delete_empty_folders(folder)


def _plain(path: str, node: Any) -> Any:
    """A copy of a nest of settings with what the format keeps."""
    if isinstance(node, dict):
        return _kept(path, ((_key(key), value) for key, value in node.items()), dict)
    if isinstance(node, (list, tuple)):
        kept = _kept(path, ((str(i), value) for i, value in enumerate(node)), lambda pairs: [v for _, v in pairs])
        return tuple(kept) if isinstance(node, tuple) else kept
    return node


def _key(key: Any) -> Any:
    try:
        check_key(key)
    except values.Refused:
        return str(key)
    return key


def _kept(path: str, items: Any, made: Callable[[Any], Any]) -> Any:
    found = []
    for key, value in items:
        at = f"{path}/{key}"
        if not isinstance(value, (dict, list, tuple, torch.Tensor)):
            try:
                values.encode_tree(value, str)
            except values.Refused as error:
                log.warning("%s is left out of the checkpoint: %s", at, error.reason)
                continue
        found.append((key, _plain(at, value)))
    return made(found)


def _moved(node: Any, device: torch.device) -> Any:
    return mapped(node, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
