"""Hugging Face Accelerate: everything that an Accelerator knows, as one state.

Pass what `state_of` returns to a `CheckpointManager`, to `save` or to `load`; or call `attach` and keep your own calls
of `save_state` and `load_state`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.commit.folder import is_orphan
from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.load import load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import DEADLINE, ranks_of
from holdfast.save import save
from holdfast.state import RNG, PerRank
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.trainers.batches import Position

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError("holdfast.trainers.accelerate needs accelerate: pip install accelerate") from error

_ENGINES = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def state_of(
    accelerator: Accelerator, *, also: Mapping[str, Any] | None = None, loaders: bool = True
) -> dict[str, Any]:
    """The state of a loop: all that was prepared by ``accelerator`` or registered with it for checkpointing.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        state = state_of(accelerator, also={"step": 0})
        manager = holdfast.CheckpointManager("/ckpt/run1", every=500)
        manager.restore(state)  # in place: go on with epoch_of(loader) and state["step"]

    Call it once, after `prepare`. The first of each kind is called ``model``, ``optimizer``, ``scheduler``, ``loader``
    and ``custom``, others ``model_1`` and so on; then there are ``scaler``, ``rng`` and ``accelerator`` (its count of
    micro-batches). ``also`` adds objects and values of your own.

    With ``loaders`` a loader goes on after the batches that it had given out, see `Position`.

    Raises Unsupported if the Accelerator leaves the state to an engine (DeepSpeed, Megatron-LM, XLA), or a loader
    cannot be resumed.
    """
    kind = accelerator.distributed_type
    if kind in [getattr(DistributedType, name, None) for name in _ENGINES]:
        raise Unsupported(
            f"an Accelerator with {kind.value} keeps its state in an engine: hand that to holdfast instead"
        )
    state: dict[str, Any] = {}
    _number(state, "model", accelerator._models)
    _number(state, "optimizer", [getattr(wrapper, "optimizer", wrapper) for wrapper in accelerator._optimizers])
    _number(state, "scheduler", [getattr(wrapper, "scheduler", wrapper) for wrapper in accelerator._schedulers])
    if loaders:
        _number(state, "loader", [_position_of(loader) for loader in accelerator._dataloaders])
    _number(state, "custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        state["scaler"] = accelerator.scaler
    state["accelerator"] = _MicroBatches(accelerator)
    state["rng"] = RNG()
    taken = sorted(state.keys() & (also or {}).keys())
    if taken:
        raise ValueError(f"also={{{taken[0]!r}: …}} has a name that the state of an Accelerator has already")
    return {**state, **(also or {})}


def attach(accelerator: Accelerator, *, loaders: bool = False, deadline: float = DEADLINE) -> Accelerator:
    """Let ``accelerator.save_state`` and ``accelerator.load_state`` go through holdfast; returns the Accelerator.

        model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
        attach(accelerator)
        accelerator.load_state()  # the newest automatic checkpoint, whether holdfast or accelerate saved it
        accelerator.save_state()

    Call it once, after `prepare`. What is saved is what `state_of` gives; folders, automatic naming, ``total_limit``
    and hooks are accelerate's. `save_state` returns once the checkpoint is committed. It may be called between two
    steps of the optimizer, and not between two micro-batches of one.

    As with accelerate alone, a loader starts its epoch over after a load, and scripts call ``skip_first_batches``; a
    ``StatefulDataLoader`` goes on by itself. With ``loaders`` every loader goes on by itself, see `Position`.

    Raises Unsupported for what `state_of` refuses.
    """

    def watched() -> list[Any]:
        prepared = accelerator._dataloaders
        return [one for one in prepared if loaders or getattr(one, "use_stateful_dataloader", False)]

    positions = {id(loader): _position_of(loader) for loader in watched()}

    def state() -> dict[str, Any]:
        if any(id(loader) not in positions for loader in watched()):
            raise Unsupported("a loader was prepared after attach(accelerator): call attach after accelerator.prepare")
        values = state_of(accelerator, loaders=False)
        _number(values, "loader", [positions[id(loader)] for loader in watched()])
        return values

    state_of(accelerator, loaders=False)
    states = _States(accelerator, state, deadline)
    accelerator.save_state, accelerator.load_state = states.save_state, states.load_state
    return accelerator


def epoch_of(loader: Any) -> int:
    """The epoch, from 0, that the next iteration over a prepared ``loader`` is of: after a load, where it goes on."""
    position = loader.__dict__.get("_holdfast_position")
    return position.epoch if position is not None else int(loader.iteration)


def _number(into: dict[str, Any], name: str, objects: list[Any]) -> None:
    into.update({name if not number else f"{name}_{number}": one for number, one in enumerate(objects)})


def _position_of(loader: Any) -> PerRank:
    position = Position.of(loader)
    return PerRank(position, elsewhere=position.elsewhere)


class _MicroBatches:
    """How far gradient accumulation is. Gradients are in no checkpoint, so between two steps nothing can be saved."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        if not self._accelerator.sync_gradients:
            raise Unsupported(
                "a state was to be saved or loaded between two micro-batches of one optimizer step, and gradients are "
                "in no state: call the manager where accelerator.sync_gradients is true. To go back to a saved step "
                "from here, drop what was accumulated: accelerator.sync_gradients = True, then optimizer.zero_grad()"
            )
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = state["step"]


_THEIRS = "random_states_0.pkl"
"""The file that each of accelerate's own checkpoints has."""

_BESIDE = "holdfast"
"""Where in a folder the checkpoint lies if others have files there: hooks of users, or the script."""


class _States:
    """The two methods that `attach` puts in the place of the Accelerator's own. ``state`` gives what they save."""

    def __init__(self, accelerator: Accelerator, state: Callable[[], dict[str, Any]], deadline: float) -> None:
        self._accelerator, self._state, self._deadline = accelerator, state, deadline
        self._load_theirs = accelerator.load_state

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **options: Any
    ) -> LocalPlace:
        """Save to ``output_dir``, or to the next automatic folder, and return it once it is committed."""
        if options:
            raise Unsupported(f"save_state({', '.join(options)}=…): holdfast saves models without such options")
        accelerator = self._accelerator
        automatic = accelerator.project_configuration.automatic_checkpoint_naming
        folder = self._next_folder() if automatic else _given(output_dir)
        accelerator.wait_for_everyone()  # all have looked
        folder.make_folder()
        state = self._saved_models(folder)
        save(state, folder / self._place_in(folder), overwrite=not automatic, deadline=self._deadline)
        if automatic and accelerator.is_main_process:
            _delete_oldest(folder.parent, accelerator.project_configuration.total_limit)
        accelerator.project_configuration.iteration += 1
        return folder

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Load from ``input_dir``, or from the newest automatic folder, whether holdfast or accelerate saved it."""
        accelerator = self._accelerator
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            folder = _newest(LocalPlace(accelerator.project_dir, "checkpoints"))
        else:
            folder = _given(input_dir).expanduser()
        ours = _ours(folder)
        if ours is None:
            self._load_theirs(str(folder), load_kwargs, **options)
            return
        place = options.pop("map_location", None)
        if place not in (None, "cpu", "on_device"):
            raise TypeError(f"map_location={place!r} is none of None, 'cpu' and 'on_device'")
        if options or load_kwargs:
            names = [*options, *(load_kwargs or {})]
            raise Unsupported(
                f"load_state({', '.join(names)}=…): {folder} is read by holdfast, which has no such option"
            )
        models = list(accelerator._models)
        for hook in accelerator._load_model_state_pre_hook.values():
            hook(models, str(folder))
        load(ours, self._without(models), deadline=self._deadline)

    def _saved_models(self, folder: LocalPlace) -> dict[str, Any]:
        """The state to save, after the hooks of users: a model whose weights they take out of the list is not in it."""
        accelerator = self._accelerator
        if not accelerator._save_model_state_pre_hook:
            return self._state()
        models, weights = accelerator._models, [model.state_dict() for model in accelerator._models]
        before = [(given, dict(given)) for given in weights]
        for hook in accelerator._save_model_state_pre_hook.values():
            hook(models, weights, str(folder))
        kept = []
        for given in weights:
            number = next((number for number, (made, _) in enumerate(before) if made is given), None)
            if number is None or not _same(given, before[number][1]):
                raise Unsupported(
                    "a hook of register_save_state_pre_hook has changed the weights that are to be saved: holdfast "
                    "saves the models themselves. Let the hook take a model's weights out of the list, and save them "
                    "itself"
                )
            kept.append(models[number])
        return self._without(kept)

    def _without(self, kept: list[Any]) -> dict[str, Any]:
        """The state without the models that are not in ``kept``."""
        state = self._state()
        gone = [model for model in self._accelerator._models if not any(model is one for one in kept)]
        return {name: value for name, value in state.items() if not any(value is model for model in gone)}

    def _place_in(self, folder: LocalPlace) -> str:
        """Where in a folder the checkpoint goes, as the first rank sees it."""

        def place(_: list[None]) -> str:
            alone = all(is_orphan(path) for path in folder.files_below())
            return "" if alone or (folder / FILE_NAME).is_file() else _BESIDE

        with ranks_of(None).call(f"save_state {folder}", deadline=self._deadline) as call:
            return call.exchange("choose", lambda: None, place, str)

    def _next_folder(self) -> LocalPlace:
        accelerator = self._accelerator
        folder = LocalPlace(accelerator.project_dir, "checkpoints", f"checkpoint_{accelerator.save_iteration}")
        if _is_whole(folder):
            raise ValueError(
                f"{folder} holds a checkpoint already: set accelerator.project_configuration.iteration to the number "
                "that comes next"
            )
        return folder


def _given(folder: str | os.PathLike[str] | None) -> LocalPlace:
    if folder is None:
        raise ValueError("give a folder, or ProjectConfiguration(automatic_checkpoint_naming=True)")
    if "://" in os.fspath(folder):
        raise Unsupported(f"{os.fspath(folder)!r}: save_state and load_state take folders; use a CheckpointManager")
    return LocalPlace(folder)


def _same(given: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return given.keys() == before.keys() and all(value is before[name] for name, value in given.items())


def _ours(folder: LocalPlace) -> LocalPlace | None:
    """The checkpoint that holdfast has committed in a folder; None if there is none."""
    return next((place for place in (folder, folder / _BESIDE) if (place / FILE_NAME).is_file()), None)


def _is_whole(folder: LocalPlace) -> bool:
    """Whether holdfast has committed a checkpoint there, or it is one of accelerate's own."""
    return _ours(folder) is not None or (folder / _THEIRS).is_file()


def _automatic(folder: LocalPlace) -> list[LocalPlace]:
    """The folders that automatic naming has made, oldest first."""
    named = [(re.fullmatch(r"checkpoint_(\d+)", path.name), path) for path in folder.iterdir()]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def _newest(folder: LocalPlace) -> LocalPlace:
    """The newest automatic checkpoint. One that a save has left unfinished is passed over."""
    folders = _automatic(folder) if folder.is_dir() else []
    for path in reversed(folders):
        if _is_whole(path):
            return path
        log.warning("%s is no whole checkpoint, trying the one before", path)
    raise FileNotFoundError(f"there is no checkpoint in {folder}: nothing can be loaded")


def _delete_oldest(folder: LocalPlace, limit: int | None) -> None:
    """Leave ``limit`` checkpoints. The manifest goes first: without it a folder is no checkpoint."""
    folders = [path for path in _automatic(folder) if _is_whole(path)]
    for path in folders[: max(0, len(folders) - limit)] if limit is not None else ():
        ours = _ours(path)
        if ours is not None:
            (ours / FILE_NAME).delete()
        with naming(path, "delete"):
            disk.delete_all(path)
