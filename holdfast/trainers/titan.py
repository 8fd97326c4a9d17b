"""torchtitan: a checkpoint manager with torchtitan's configuration and calls.

It derives from torchtitan's `BaseCheckpointManager` where a current torchtitan is installed, but does not need it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from holdfast import dcp
from holdfast.checkpoint import open_checkpoint as holdfast_open
from holdfast.dcp.opening import is_of_torch
from holdfast.errors import Mismatch, Unsupported
from holdfast.load import load
from holdfast.manager import CheckpointManager as Manager
from holdfast.ondisk.patterns import Patterns
from holdfast.ranks.ranks import DEADLINE
from holdfast.run.keep import Keep
from holdfast.save import save
from holdfast.state import RNG, PerRank
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.trainers import titan_hugging_face
from holdfast.trainers.titan_steps import NAME, Staging, find_step, upload_of

if TYPE_CHECKING:
    from holdfast.trainers.titan_contract import BaseCheckpointManager
else:
    try:
        from torchtitan.components.checkpointer import BaseCheckpointManager
    except ImportError:  # an older torchtitan, or none
        from holdfast.trainers.titan_contract import BaseCheckpointManager

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"

logger = logging.getLogger("holdfast.titan")


class CheckpointManager(BaseCheckpointManager):
    """A torchtitan checkpoint manager that saves and loads with holdfast.

        from holdfast.trainers.titan import CheckpointManager

        checkpoint=CheckpointManager.Config(enable=True, interval=500)

    ``Config`` has the fields of torchtitan's own manager. A ``config`` of another class is read by the same names, and
    a field that it lacks has torchtitan's default, but for ``enable``, which is then True.

    The modules of ``model_parts`` and the optimizers inside of ``optimizers`` are saved as they are, under the names of
    the parameters. So parts of a pipeline may be cut another way later. ``lr_schedulers`` and the other ``states`` are
    saved by their ``state_dict``; the random generators of each rank are saved as well. Steps lie in ``step-<n>`` below
    the folder. A step that is saved again replaces the one that is there.

    `load` also reads the steps that torchtitan's own manager has saved, in the same folder or as
    ``initial_load_path``.

    ``deadline`` is what each phase of a save or load may take, in seconds. ``ft_manager`` is for torchtitan's
    signature: an enabled one is refused.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        """torchtitan's checkpoint configuration."""

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
        """``"disabled"``: training waits for each save. The others save beside training."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            self.async_mode = _known_mode(self.async_mode)

    def __init__(
        self, config: Any, *, dataloader: Any, model_parts: list[nn.Module], optimizers: Any, lr_schedulers: Any,
        states: dict[str, Any], sd_adapter: Any = None, base_folder: str = "", ft_manager: Any = None,
        deadline: float = DEADLINE,
    ) -> None:  # fmt: skip
        self.save_future: Future[Any] | None = None
        self.staging_future: Staging | None = None
        self.enable = bool(getattr(config, "enable", True))
        if not self.enable:
            return
        if getattr(ft_manager, "enabled", ft_manager is not None):
            raise Unsupported(
                "ft_manager: torchft's fault tolerance is not supported here; use torchtitan's TorchFTCheckpointManager"
            )
        taken = sorted({"rng", "step"} & states.keys())
        if taken:
            raise ValueError(f"states has {taken[0]!r}, a name under which this manager saves something of its own")
        self._config, self._adapter = config, sd_adapter
        self._in_background = _known_mode(self._setting("async_mode", "disabled")) != "disabled"
        self.folder = os.path.join(base_folder, self._setting("folder", "checkpoint"))  # may be a URL
        self.interval: int = self._setting("interval", 500)
        self.keep_latest_k: int = self._setting("keep_latest_k", 10)
        if self._setting("last_save_in_hf", False) and sd_adapter is None:
            raise ValueError("checkpoint.last_save_in_hf is True, but sd_adapter is not provided.")
        self.states = states
        self._parts = list(model_parts)
        states.update({MODEL: self._parts, OPTIMIZER: optimizers, DATALOADER: dataloader, LR_SCHEDULER: lr_schedulers})
        self._manager = Manager(
            self.folder, every=self.interval, name=NAME, deadline=deadline, signals=(), journal=False,
            keep=Keep(last=self.keep_latest_k) if self.keep_latest_k else Keep(every=1),
            worker="process" if self._in_background else "none",
        )  # fmt: skip
        logger.info("Checkpointing active. Checkpoints will be loaded from and saved to %s", self.folder)

    def _setting(self, name: str, default: Any) -> Any:
        return getattr(self._config, name, default)

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if it is time: every ``interval`` steps, after the first if asked for, and after the last one."""
        if not self._should_save(curr_step, last_step):
            return False
        self.maybe_wait_for_saving()
        begin, phase = time.monotonic(), "staging" if self._in_background else "saving"
        logger.info("%s the checkpoint.", phase.capitalize())
        if last_step:
            self._save_last_step(curr_step)
            logger.info("Last step checkpoint completed in %.2fs", time.monotonic() - begin)
            return True
        if self._in_background:
            self.staging_future, self.save_future = self._begin(curr_step)
        else:
            self._write(curr_step)
        logger.info("Finished %s the checkpoint in %.2f seconds.", phase, time.monotonic() - begin)
        return True

    def _should_save(self, curr_step: int, last_step: bool) -> bool:
        if self._setting("load_only", False):
            return False
        first = curr_step == 1 and self._setting("enable_first_step_checkpoint", False)
        return first or last_step or curr_step % self.interval == 0

    def _save_last_step(self, curr_step: int) -> None:
        if not self._setting("last_save_model_only", True):
            logger.info("Saving a full checkpoint at last step, step %d.", curr_step)
            self._write(curr_step)
            return
        dtype = getattr(torch, self._setting("export_dtype", "float32"))
        logger.info("Saving a model only checkpoint in %s at last step, step %d.", dtype, curr_step)
        with torch.no_grad():
            weights = self._weights()
            if self._setting("last_save_in_hf", False):
                target = self._manager.root / NAME.format(step=curr_step)
                titan_hugging_face.write(self._adapter, weights, target, dtype)
                return
            cast = {
                name: tensor.to(dtype) if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() else tensor
                for name, tensor in weights.items()
            }
            self._write_model(curr_step, cast)

    def _begin(self, step: int) -> tuple[Staging, Future[Any]]:
        """Begin a save beside training."""
        saving = self._manager.step(step, self._state(step), due=True, overwrite=True)
        assert saving is not None  # it was due, whatever was saved before
        return Staging(saving), upload_of(saving)

    def _write(self, step: int) -> None:
        """Save everything, and wait for it."""
        self._manager.save(step, self._state(step), overwrite=True)

    def _write_model(self, step: int, weights: dict[str, Any]) -> None:
        """Save the model alone, and wait for it."""
        save({MODEL: weights}, self._manager.root / NAME.format(step=step), step=step, overwrite=True)

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

    def _weights(self) -> dict[str, Any]:
        """The model's state by name, of all parts together."""
        return {name: value for part in self._parts for name, value in part.state_dict().items()}

    def _maybe_wait_for_staging(self) -> None:
        staging, self.staging_future = self.staging_future, None
        if staging is not None:
            staging.result()

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            future.result()

    def _close(self) -> None:
        if not hasattr(self, "_manager"):  # its making failed, and torchtitan's class closes what is forgotten
            return
        try:
            self.maybe_wait_for_saving()
        finally:
            self._manager.close()

    def _load(self, step: int = -1) -> bool:
        """Load ``step``, or the newest one; what ``initial_load_path`` names if there is none yet."""
        chosen = find_step(self._manager.root, step)
        if chosen == -1:
            return self._load_initially()
        path = self._manager.root / NAME.format(step=chosen)
        self._load_from(path, model_only=chosen == 0, newest=step == -1)
        return True

    def _load_initially(self) -> bool:
        """Load what the configuration names for a run without a step."""
        path, from_hf = self._setting("initial_load_path", None), self._setting("initial_load_in_hf", False)
        if from_hf and not path:
            path = getattr(self._adapter, "hf_assets_path", None)
        if not path and from_hf:
            raise ValueError("initial_load_in_hf needs initial_load_path, or an sd_adapter with hf_assets_path")
        if not path:
            logger.info("No checkpoint was provided, this is a fresh start.")
            return False
        if not from_hf:
            self._load_from(location(path), model_only=self._setting("initial_load_model_only", True))
            return True
        if self._adapter is None:
            raise ValueError("checkpoint.initial_load_in_hf is True, but sd_adapter is not provided.")
        logger.info("Loading the checkpoint from %s, in the form of Hugging Face.", path)
        quantized = self._setting("initial_load_in_hf_quantized", False)
        with torch.no_grad():
            self._take_weights(titan_hugging_face.read(self._adapter, self._weights(), path, quantized=quantized))
        return True

    def _load_from(self, path: Place, *, model_only: bool, newest: bool = False) -> None:
        """Load one checkpoint. ``newest``: it is the newest step of this run, and damage leads to the one before."""
        begin = time.monotonic()
        logger.info("Loading the checkpoint from %s.", path)
        self._read(path, model_only=model_only, newest=newest)
        logger.info("Finished loading the checkpoint in %.2f seconds.", time.monotonic() - begin)

    def _read(self, path: Place, *, model_only: bool, newest: bool) -> None:
        if is_of_torch(path) or not any(name.startswith(f"{MODEL}/") for name in holdfast_open(path).tensors):
            states = self._as_torchtitan(model_only=model_only)
            dcp.load(states, checkpoint_id=path)
            self._take_weights(states)
            self._take(states)
            return
        if model_only:
            load(path, {MODEL: self._parts}, only=MODEL)
            return
        out = self._excluded()
        state = {name: value for name, value in self._state(0).items() if name not in out}
        only: Patterns = [*state] if out else "*"
        if newest:
            self._restore(state, only)
        else:
            load(path, state, only=only)
        self._take(state)

    def _restore(self, state: dict[str, Any], only: Patterns) -> None:
        try:
            self._manager.restore(state, only=only)
        except Mismatch as error:
            if "run=" not in str(error):
                raise
            raise Mismatch(f"{error}. Here you say it by the step to go on from: load(step=…), load_step") from error

    def _as_torchtitan(self, *, model_only: bool) -> dict[str, Any]:
        """The state as torchtitan lays it out: the model's parameters at the top, all else beside them."""
        if model_only:
            return self._weights()
        out = {MODEL, *self._excluded()}
        others = {name: value for name, value in self.states.items() if name not in out and value is not None}
        return {**self._weights(), **others}

    def _excluded(self) -> list[str]:
        excluded: list[str] = self._setting("exclude_from_loading", [])
        for name in excluded:
            if name not in self.states:
                raise ValueError(f"{name} not found in state_dict.")
        return excluded

    def _take_weights(self, weights: dict[str, Any]) -> None:
        """Give the model what was loaded by name, as tensors of its state dict may be copies of its parameters."""
        for part in self._parts:
            part.load_state_dict({name: weights[name] for name in part.state_dict() if name in weights}, strict=False)

    def _take(self, loaded: dict[str, Any]) -> None:
        """Hand back what is no object that was loaded in place: plain values of ``states``."""
        ours = {MODEL, OPTIMIZER, DATALOADER, LR_SCHEDULER}
        self.states.update({name: loaded[name] for name in self.states.keys() & loaded.keys() - ours})


def _known_mode(mode: str) -> Any:
    known = mode.lower()
    if known not in ("disabled", "async", "async_with_pinned_mem"):
        raise ValueError(f"Invalid async_mode: {known}")
    return known


def _merged(values: Sequence[Any], rank: int, world_size: int) -> Any:
    """On other ranks a loader gets the states of all ranks in one, by its own keys, as DCP would give it."""
    return {key: value for state in values for key, value in state.items()}
