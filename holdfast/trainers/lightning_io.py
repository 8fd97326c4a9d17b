"""PyTorch Lightning: a `CheckpointIO` plugin that saves Lightning's checkpoints in the background."""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import Any

import torch

from holdfast.checkpoint import open_checkpoint
from holdfast.errors import NotACheckpoint
from holdfast.events import log
from holdfast.ondisk.containers import mapped
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import Ranks
from holdfast.save import save
from holdfast.saver import Saver
from holdfast.saving import Saving
from holdfast.saving.options import WorkerOptions, takes, values_of
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.storage import delete
from holdfast.storage.urls import location
from holdfast.trainers.lightning_files import FileSaver, check_file, is_file_path
from holdfast.trainers.lightning_settings import with_plain_settings, with_settings_types

try:
    from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
    from lightning.pytorch import Trainer
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError("holdfast.trainers.lightning needs Lightning: pip install lightning") from error

from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.trainers.lightning_steps import as_lightning, is_step

_RUN_STAGE = Trainer._run_stage.__code__
"""Runs sanity checks, training and validation. Once it has returned, or raised, Lightning tears down its plugins."""


class HoldfastCheckpointIO(CheckpointIO):
    """Saves Lightning's checkpoints in the background of `fit`.

        trainer = pl.Trainer(plugins=[HoldfastCheckpointIO()])

    A path that ends in ``.ckpt`` becomes one file, which `torch.load`, `load_from_checkpoint` and `holdfast.open` read.
    Any other path, and every path in a store, becomes a folder of holdfast, which `holdfast.open` reads.

    What is saved is the state at the call. While `fit` trains, `save_checkpoint` returns once the state is copied, and
    the end of `fit` waits until it is committed; a save that failed raises SaveFailed in the next one, or there. At any
    other time, and as a part of another plugin, `save_checkpoint` returns once the checkpoint is committed, and raises
    its failure.

    A checkpoint that `ModelCheckpoint` replaces is removed once the new one is committed. A link is removed or replaced
    itself: the checkpoint that it points to stays. Hyperparameters are kept as plain values; those that have none
    (functions, classes, modules) are left out, with a warning.

    Lightning gathers the state on rank 0 before it calls a plugin; `HoldfastCheckpoint` saves it as it lies.
    Takes the options of `WorkerOptions` as keywords. ``worker`` says who writes folders; a thread of this process
    writes files.
    """

    @takes(WorkerOptions)
    def __init__(self, options: WorkerOptions) -> None:
        self._options, self._deadline = options, options.deadline
        self._saver: Saver | None = None
        self._files: FileSaver | None = None
        self._last: Saving | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save ``checkpoint`` to ``path``, in the background if a trainer runs `fit` with this plugin.

        Called on one rank alone. Raises SaveFailed, in the background that of an earlier save; TypeError for
        ``storage_options``, of which there are none.
        """
        if storage_options is not None:
            raise TypeError("HoldfastCheckpointIO has no storage_options: give credentials as docs/stores.md says")
        state, place = with_plain_settings(checkpoint), location(path)
        step = checkpoint.get("global_step")
        step = step if type(step) is int else None
        beside = self._teardown_follows()
        if self._last is not None and self._last.path == place and not self._last.done and not _is_there(place):
            log.warning(
                "%s is saved again before its first save is committed, and replaces it: to keep both, put {step} into "
                "the filename",
                place,
            )
        if self._last is not None and not self._last.settled() and beside and not self._last.heard:
            self._last.wait()  # raises its failure
        if is_file_path(place):
            self._save_file(state, LocalPlace(place), step, beside=beside)
        else:
            self._save_folder(state, place, step, beside=beside)

    def _save_file(self, state: dict[str, Any], path: LocalPlace, step: int | None, *, beside: bool) -> None:
        if not beside:
            files = FileSaver(self._deadline)
            saving = files.save(state, path, step)
            files.join()
            saving.wait()
            return
        if self._files is None:
            self._files = FileSaver(self._deadline)
        self._last = self._files.save(state, path, step)

    def _save_folder(self, state: dict[str, Any], folder: Place, step: int | None, *, beside: bool) -> None:
        aside = _set_aside(folder)
        try:
            if beside:
                saving = self._save_beside(state, folder, step)
                saving.add_done_callback(lambda saving: _settle_link(folder, aside, saved=saving.failed is None))
            else:
                save(state, folder, overwrite=True, step=step, group=Ranks(0, 1), deadline=self._deadline)
                _settle_link(folder, aside, saved=True)
        except BaseException:
            _settle_link(folder, aside, saved=False)
            raise

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """A checkpoint as Lightning made it, on the CPU or where ``map_location`` says (of a folder: a device).

        What this plugin wrote is checked byte by byte. A file that others wrote is read as Lightning reads it. Of a
        step of `HoldfastCheckpoint` it is the model, and what hooks and callbacks restore from.
        """
        if self._last is not None:
            self._last.wait()
        place = location(path)
        if not place.is_remote and not place.exists():
            raise NotACheckpoint(f"Checkpoint file not found: {path}")
        if place.has_descriptors and place.is_file():
            plain = check_file(LocalPlace(place)) or weights_only  # ours needs no code of anybody's
            return with_settings_types(TorchCheckpointIO().load_checkpoint(LocalPlace(place), map_location, plain))
        checkpoint = open_checkpoint(path)
        loaded = as_lightning(checkpoint) if is_step(checkpoint) else with_settings_types(checkpoint.state_dict())
        if isinstance(map_location, (str, torch.device)):
            return dict(_moved(loaded, torch.device(map_location)))
        return loaded

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, or a link: at once, or if a save is under way once that is committed."""
        folder = location(path)
        link = _linked(folder)
        if self._last is None or self._last.done:
            _remove(folder, link)
        else:
            self._last.add_done_callback(partial(_remove_after, folder, link))

    def teardown(self) -> None:
        """Wait for the saves under way, and end the writer. Raises SaveFailed for one whose failure was not raised."""
        saver, files, last = self._saver, self._files, self._last
        self._saver = self._files = self._last = None
        if files is not None:
            files.join()
        if saver is not None:
            saver.close()
        if last is not None and last.failed is not None and not last.heard:
            last.wait()  # raises its failure

    def _save_beside(self, state: dict[str, Any], folder: Place, step: int | None) -> Saving:
        if self._saver is None:
            self._saver = Saver(**values_of(self._options, WorkerOptions), group=Ranks(0, 1))
        self._last = self._saver.save(state, folder, overwrite=True, step=step)
        return self._last

    def _teardown_follows(self) -> bool:
        """Whether this call comes out of a `fit` that will end with `teardown` of this plugin.

        Lightning does not tell a plugin which trainer it serves or what that does, so the calls under way are asked.
        """
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            trainer = frame.f_locals.get("self") if frame.f_code is _RUN_STAGE else None
            if isinstance(trainer, Trainer) and trainer.strategy.checkpoint_io is self:
                return trainer.state.fn == TrainerFn.FITTING
        return False


def _is_there(place: Place) -> bool:
    return not place.is_remote and place.exists()


def _linked(folder: Place) -> str | None:
    """Where a link at this name points to; None if there is something else, or nothing."""
    return os.readlink(folder) if folder.is_symlink() else None


def _set_aside(folder: Place) -> Place | None:
    """Rename a link at the place of a checkpoint that is to be saved; None if there is no link."""
    if not folder.is_symlink():
        return None
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.link")
    with naming(folder, "rename the link"):
        disk.replace(folder, aside)
    return aside


def _settle_link(folder: Place, aside: Place | None, *, saved: bool) -> None:
    """Delete a link that a checkpoint has replaced. If the save failed, give the link its name back."""
    if aside is None:
        return
    try:
        if saved:
            disk.delete(aside)
        else:
            disk.replace(aside, str(folder))
    except OSError as error:
        log.warning("the link that was at %s stays as %s: %s", folder, aside, error)


def _remove_after(folder: Place, link: str | None, saving: Saving) -> None:
    if saving.failed is None:
        _remove(folder, link)
    else:
        log.warning("%s is kept: what was to replace it, %s, has failed", folder, saving.path)


def _remove(folder: Place, link: str | None) -> None:
    """Remove a checkpoint, or the link that was at this name when it was to be removed."""
    if _linked(folder) != link:
        return  # another one has taken the name
    if link is not None:
        folder.delete()
        return
    if folder.has_folders and folder.is_file():
        folder.delete()
        return
    (folder / FILE_NAME).delete()  # first: half a checkpoint is none
    delete(*(folder / name for name in folder.files_below()))
    folder.delete_empty_folders()


def _moved(node: Any, device: torch.device) -> Any:
    return mapped(node, lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf)
