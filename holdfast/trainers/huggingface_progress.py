"""What a Trainer itself counts and logs, and the states of its callbacks, as a part of the state that is saved.

`HoldfastCallback` puts a `Progress` into each save. Never saves tensors of the model.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from transformers.trainer_callback import ExportableState

from holdfast.trainers.batches import Draws

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
