"""torchtitan: a checkpoint manager with the calls of torchtitan's, on this engine.

A trainer like torchtitan's makes one in the place of `torchtitan.components.checkpoint.CheckpointManager`. Never
imports torchtitan, and needs nothing of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from holdfast.checkpoint import open_checkpoint as holdfast_open
from holdfast.engine.ranks import DEADLINE
from holdfast.engine.state import RNG, PerRank
from holdfast.errors import Mismatch, Unsupported
from holdfast.keep import Keep
from holdfast.load import load
from holdfast.manager import CheckpointManager as Manager
from holdfast.patterns import Patterns
from holdfast.save import save
from holdfast.saving import Saving

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"


class CheckpointManager:
    """In the place of torchtitan's, made with the same arguments and called in the same way.

        from holdfast.trainers.titan import CheckpointManager

    ``config`` needs the fields of torchtitan's that are named here, and takes defaults for those it lacks: ``enable``,
    ``folder``, ``interval``, ``keep_latest_k``, ``async_mode`` (``"disabled"`` waits, all others save beside training),
    ``load_only``, ``exclude_from_loading``, ``enable_first_step_checkpoint``, ``last_save_model_only``,
    ``export_dtype``, ``initial_load_path``, ``initial_load_model_only``. Hugging Face's form (``last_save_in_hf``,
    ``initial_load_in_hf``) is refused: `holdfast.convert` makes it.

    The modules of ``model_parts`` and the optimizers inside of ``optimizers`` are saved as they lie, under the names of
    the parameters; so chunks of a pipeline may be cut another way later. ``lr_schedulers`` and the other ``states`` go
    by their ``state_dict``; the generators are saved as well. Steps lie in ``step-<n>`` below the folder. What
    torchtitan itself has saved, in the form of torch.distributed.checkpoint, can be named as ``initial_load_path``.
    """

    def __init__(
        self, config: Any, *, dataloader: Any, model_parts: list[nn.Module], optimizers: Any, lr_schedulers: Any,
        states: dict[str, Any], sd_adapter: Any = None, base_folder: str = "", deadline: float = DEADLINE,
    ) -> None:  # fmt: skip
        self.enable = bool(getattr(config, "enable", True))
        if not self.enable:
            return
        self._config = config
        self.folder = os.path.join(base_folder, self._setting("folder", "checkpoint"))  # may be a URL
        self.interval: int = self._setting("interval", 500)
        for name in ("last_save_in_hf", "initial_load_in_hf"):
            if self._setting(name, False):
                raise Unsupported(f"{name}=True: save as ever, and holdfast.convert(path, target, to='huggingface')")
        taken = sorted({"rng", "step"} & states.keys())
        if taken:
            raise ValueError(f"states has {taken[0]!r}, a name under which this manager saves something of its own")
        self.states = states
        self._parts = list(model_parts)
        states.update({MODEL: self._parts, OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers})
        every_one = self._setting("keep_latest_k", 10) == 0
        self._manager = Manager(
            self.folder, every=self.interval, name="step-{step}", deadline=deadline, signals=(),
            keep=Keep(every=1) if every_one else Keep(last=self._setting("keep_latest_k", 10)),
            worker="none" if self._setting("async_mode", "disabled") == "disabled" else "process",
        )  # fmt: skip
        self._saving: Saving | None = None
        self._later: set[int] = set()  # steps that were there already when an earlier one was loaded by its number

    def _setting(self, name: str, default: Any) -> Any:
        return getattr(self._config, name, default)

    def _state(self, step: int) -> dict[str, Any]:
        """What is saved: live modules and optimizers, whatever has a state, a loader of each rank, the generators."""
        state = dict(self.states)
        optimizers = list(getattr(state[OPTIMIZER], "optimizers", [state[OPTIMIZER]]))
        state[OPTIMIZER] = optimizers[0] if len(optimizers) == 1 else optimizers
        if state[DATALOADER] is None:
            del state[DATALOADER]
        else:
            state[DATALOADER] = PerRank(state[DATALOADER], _merged)
        return {**state, "rng": RNG(), "step": step}

    def _take(self, loaded: dict[str, Any]) -> None:
        """Hand back what is no object that was loaded in place: plain values of ``states``."""
        ours = {MODEL, OPTIMIZER, DATALOADER, LR_SCHEDULER}
        self.states.update({name: loaded[name] for name in self.states.keys() & loaded.keys() - ours})

    def load(self, step: int = -1) -> bool:
        """Go on from ``step``, or from the newest whole one; from ``initial_load_path`` if there is none yet.

        False if there is nothing to load. Raises NotACheckpoint if a ``step`` that is named is not there. Steps after
        one that was named are written anew, each when its turn comes; training waits for those saves.
        """
        if not self.enable:
            return False
        out = self._setting("exclude_from_loading", [])
        state = {name: value for name, value in self._state(0).items() if name not in out}
        only: Patterns = [*state] if out else "*"
        if step != -1:
            load(self._manager.root / f"step-{step}", state, only=only)
            self._later = {other for other in self._manager.steps() if other > step}
        elif not self._restore(state, only) and not self._load_initially(state, only):
            return False
        self._take(state)
        return True

    def _restore(self, state: dict[str, Any], only: Patterns) -> bool:
        try:
            return self._manager.restore(state, only=only) is not None
        except Mismatch as error:
            if "run=" not in str(error):
                raise
            raise Mismatch(f"{error}. Here that is said by the step to go on from: load(step=…), load_step") from error

    def _load_initially(self, state: dict[str, Any], only: Patterns) -> bool:
        path = self._setting("initial_load_path", None)
        if not path:
            return False
        if not self._setting("initial_load_model_only", True):
            load(path, state, only=only)
            return True
        bare = not any(name.startswith(f"{MODEL}/") for name in holdfast_open(path).tensors)
        # torchtitan's own checkpoints hold the model's parameters at the top.
        only, rename = ("*", lambda name: f"{MODEL}/{name}") if bare else (MODEL, None)
        load(path, {MODEL: self._parts}, only=only, rename=rename)
        return True

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is time: every ``interval`` steps, after the first if asked for, and after the last one.

        True if it was. Raises SaveFailed for an earlier save beside training that has failed.
        """
        if not self.enable or self._setting("load_only", False):
            return False
        if last_step:
            self._save_last(curr_step)
            return True
        first = curr_step == 1 and self._setting("enable_first_step_checkpoint", False)
        if first or (curr_step in self._later and curr_step % self.interval == 0):
            self._save_and_wait(curr_step)
            return True
        self._saving = self._manager.step(curr_step, self._state(curr_step))
        return self._saving is not None

    def _save_and_wait(self, step: int) -> None:
        self._manager.save(step, self._state(step), overwrite=step in self._later)
        self._later.discard(step)

    def _save_last(self, step: int) -> None:
        if not self._setting("last_save_model_only", True):
            self._save_and_wait(step)
            return
        self._manager.wait()
        dtype = getattr(torch, self._setting("export_dtype", "float32"))
        weights = {
            name: tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
            for part in self._parts
            for name, tensor in part.state_dict().items()
        }
        save({MODEL: weights}, self._manager.root / f"step-{step}", step=step, overwrite=True)

    def maybe_wait_for_staging(self) -> None:
        """Wait until the last save has copied everything. The optimizers' own steps wait for it anyway."""
        if self.enable and self._saving is not None:
            self._saving.wait_staged()

    def maybe_wait_for_saving(self) -> None:
        """Wait until the last save is committed. Raises SaveFailed."""
        if self.enable:
            self._manager.wait()

    def close(self) -> None:
        """Wait for the saves under way, and let go of everything. Raises SaveFailed for one that failed."""
        if self.enable:
            self._manager.close()


def _merged(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """On other ranks a loader gets the states of all ranks in one, by its own keys, as DCP would give it."""
    return {key: value for state in values for key, value in state.items()}
