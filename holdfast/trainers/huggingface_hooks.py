"""The methods of a Trainer that `HoldfastCallback` replaces, and what Trainer itself counts, as a part of the state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers.trainer_callback import ExportableState

from holdfast.errors import Unsupported
from holdfast.trainers.batches import Draws

HOOKED = (
    "_maybe_log_save_evaluate", "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler",
    "_load_best_model",
)  # fmt: skip
"""Without these a Trainer cannot be resumed. Those of the others that it lacks are left alone."""


@dataclass(frozen=True)
class Hooks:
    """What is done in the place of a Trainer. ``is_ours`` tells of the folder that Trainer is given to resume from."""

    train: Callable[[Callable[..., Any], Any], Any]
    finished: Callable[[], None]
    asked_to_save: Callable[[], None]
    is_ours: Callable[[Any], bool]
    restore: Callable[[], None]
    restore_rng: Callable[[], None]
    began: Callable[[], None]
    load_best: Callable[[Callable[[], None]], None]
    watch: Callable[[Any], Any]


def hook(trainer: Any, hooks: Hooks) -> None:
    """Replace the methods, on this object alone."""
    train, finish_step, loader = trainer.train, trainer._maybe_log_save_evaluate, trainer.get_train_dataloader
    load_best = trainer._load_best_model

    def resuming_train(
        resume_from_checkpoint: Any = None, trial: Any = None, ignore_keys_for_eval: list[str] | None = None
    ) -> Any:  # fmt: skip
        if trial is not None:
            raise Unsupported("HoldfastCallback does not take part in a hyperparameter search: attach it after")
        return hooks.train(partial(train, ignore_keys_for_eval=ignore_keys_for_eval), resume_from_checkpoint)

    def finish_step_and_save(*args: Any, **kwargs: Any) -> None:
        finish_step(*args, **kwargs)
        hooks.finished()

    def unless_ours(name: str, instead: Callable[[], None]) -> None:
        load = getattr(trainer, name, None)

        def loading(checkpoint: Any, *args: Any, **kwargs: Any) -> Any:
            return instead() if hooks.is_ours(checkpoint) else load(checkpoint, *args, **kwargs)  # type: ignore[misc]

        if load is not None:
            setattr(trainer, name, loading)

    def beginning(begin: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
        def first_epoch_and_batch(*args: Any, **kwargs: Any) -> tuple[int, int]:
            first, state = begin(*args, **kwargs), trainer.state
            hooks.began()
            # Else Trainer makes one more step before it asks whether it has made all.
            return (state.num_train_epochs, 0) if state.global_step >= state.max_steps else first

        return first_epoch_and_batch

    trainer.train, trainer._maybe_log_save_evaluate = resuming_train, finish_step_and_save
    trainer._save_checkpoint = lambda *_, **__: hooks.asked_to_save()
    trainer._load_best_model = lambda: hooks.load_best(load_best)
    trainer.get_train_dataloader = lambda: hooks.watch(loader())
    unless_ours("_load_from_checkpoint", lambda: None)
    unless_ours("_load_optimizer_and_scheduler", hooks.restore)
    unless_ours("_load_scaler", lambda: None)
    unless_ours("_load_rng_state", hooks.restore_rng)
    if hasattr(trainer, "_init_training_state"):
        trainer._init_training_state = beginning(trainer._init_training_state)


_OF_ITS_RANK = ("is_local_process_zero", "is_world_process_zero")


class Progress:
    """In plain values. The long log of `TrainerState` comes from the first rank alone."""

    def __init__(self, draws: Draws) -> None:
        self.trainer: Any = None
        self.taken: dict[str, Any] = {}
        self._draws = draws

    def state_dict(self) -> dict[str, Any]:
        trainer = self.trainer
        state: dict[str, Any] = {"state": "", "draws": self._draws.state_dict(), "flos": float(trainer.current_flos)}
        if trainer.is_world_process_zero():
            fields = {**dataclasses.asdict(trainer.state), "stateful_callbacks": states_of_callbacks(trainer)}
            state["state"] = json.dumps({key: value for key, value in fields.items() if key not in _OF_ITS_RANK})
        if hasattr(trainer, "_tr_loss"):
            state["loss"] = trainer._tr_loss.detach()
            state["logged"] = trainer._globalstep_last_logged
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state

    def hand_back(self) -> None:
        """What was summed up since the last line of the log, so that the next line is what it would be."""
        trainer = self.trainer
        trainer.current_flos = self.taken["flos"]
        if "loss" in self.taken and hasattr(trainer, "_tr_loss"):
            trainer._tr_loss.copy_(self.taken["loss"])
            trainer._globalstep_last_logged = self.taken["logged"]
            # The mean loss that train() returns is of its own steps.
            trainer._total_loss_scalar = -trainer.accelerator.gather(trainer._tr_loss).mean().item()


def states_of_callbacks(trainer: Any) -> dict[str, Any]:
    """The states of callbacks by class, as Trainer reads them; a list where a class has several."""
    by_class: dict[str, list[Any]] = {}
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            by_class.setdefault(type(callback).__name__, []).append(callback.state())
    return {name: states[0] if len(states) == 1 else states for name, states in by_class.items()}
