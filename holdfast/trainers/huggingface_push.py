"""Pushes to the Hub at the saves of a Trainer, as Trainer pushes its own checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
from transformers.trainer_utils import HubStrategy
from transformers.utils import hub

from holdfast.copy import copy
from holdfast.events import log
from holdfast.saving import Saving
from holdfast.storage.hub.address import Address
from holdfast.storage.hub.push import push
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import at

_FOLDER = "_holdfast-push"
"""In the output folder: what begins so is not pushed with it."""


def refuse_to_push_steps(args: Any, roots: Sequence[Place]) -> None:
    """Raise ValueError if Trainer would push the steps of a run with its output folder."""
    output = LocalPlace(args.output_dir).absolute()
    for root in roots if args.push_to_hub else ():
        if not root.is_remote and (root == output or output in root.parents):
            inside = root.relative_to(output).as_posix()
            if not fnmatch(inside, "_*") and not fnmatch(inside, "checkpoint-*"):
                raise ValueError(
                    f"push_to_hub pushes all of {args.output_dir}, and {root} lies there: give HoldfastCallback "
                    f"another folder, or one whose name begins with an underscore, as {output / '_steps'}"
                )


class Pushes:
    """What a Trainer pushes while it trains. ``saved`` and ``end`` are called by all ranks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._folder = trainer, Path(trainer.args.output_dir, _FOLDER)

    def saved(self, saving: Saving) -> None:
        """A save has begun: push the model as it is now, and the step too if ``hub_strategy`` asks for it."""
        trainer, args = self._trainer, self._trainer.args
        if not args.push_to_hub or args.hub_strategy == "end":
            return
        first, model = trainer.is_world_process_zero(), self._folder / "model"
        busy = first and trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()
        if first and not busy:
            self._clear()
        trainer.save_model(str(model), _internal_call=True)  # by all ranks: shards are gathered
        if first and (not busy or args.hub_always_push):
            self._push(model, saving)

    def _push(self, model: Path, saving: Saving) -> None:
        """The model as Trainer does it, and then the step in a commit of its own, in the place of what was there."""
        trainer, args = self._trainer, self._trainer.args
        strategy, args.hub_strategy = args.hub_strategy, HubStrategy.EVERY_SAVE
        try:
            trainer._push_from_checkpoint(str(model))
        finally:
            args.hub_strategy = strategy
        if strategy == HubStrategy.EVERY_SAVE:
            return
        if not saving.settled():
            log.warning("%s is not pushed, as it was not saved", saving.path)
            return
        step = self._folder / saving.path.name
        copy(saving.path, step)  # the step itself may be deleted while it is pushed
        repository = Address("models", trainer.hub_model_id, args.hub_revision or "").url
        name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else step.name
        target = partial(at, f"{repository}/{name}", {"token": args.hub_token})
        message = f"Training in progress, step {saving.step}, checkpoint"
        # In the queue of Trainer's own pushes, so that no two are under way at once. Releases 4 have huggingface_hub's.
        queue = hub.hf_api() if hasattr(hub, "hf_api") else huggingface_hub
        trainer.push_in_progress.jobs.append(queue.run_as_future(_push_step, step, target, message))

    def end(self) -> None:
        """Take away what was pushed. Trainer has waited for it, unless its training failed."""
        if self._trainer.args.push_to_hub and self._trainer.is_world_process_zero():
            self._clear()

    def _clear(self) -> None:
        under_way = self._trainer.push_in_progress
        if under_way is None or under_way.is_done():
            with suppress(OSError):
                disk.delete_all(self._folder)


def _push_step(step: Path, target: Callable[[], StorePlace], message: str) -> None:
    """Push a step in one commit, in the place of what was there. Nobody asks for its outcome: a failure is logged."""
    files = {path: step / path for path in LocalPlace(step).files_below()}
    try:
        place = target()  # not before: it sees the commits so far
        push(files, place, stale={*place.files_below()} - {*files}, message=message)
    except Exception as error:
        log.error("%s is not pushed to the Hub: %s", step.name, error)
        raise
