"""`Accelerator.save_state` and `load_state` through holdfast: one checkpoint in the place of a folder of pickles.

Users call `holdfast.trainers.accelerate.attach`. Never reads one of accelerate's own checkpoints: accelerate does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from accelerate import Accelerator

from holdfast.commit.folder import is_leaving
from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.load import load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import ranks_of
from holdfast.save import save
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming

_THEIRS = "random_states_0.pkl"
"""The file that each of accelerate's own checkpoints has."""

_BESIDE = "holdfast"
"""Where in a folder the checkpoint lies if others have files there: hooks of users, or the script."""


class States:
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
            alone = all(is_leaving(path) for path in folder.files_below())
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
