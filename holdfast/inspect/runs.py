"""Runs: which folders are those of a run, and a line about each run below a folder.

`holdfast ls`, `verify` and `view` call it. Reads manifests and lists files; never changes anything.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from holdfast.errors import HoldfastError, NotACheckpoint, StorageError
from holdfast.inspect.survey import Step, survey
from holdfast.ondisk import manifest
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage import storage
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline


@dataclass(frozen=True)
class Run:
    """One run below a folder: its checkpoints in numbers, and the newest that counts.

    ``nbytes``: what all its steps wrote. ``newest``: None for a run that has not saved yet, or that cannot be read
    (``fault`` says why).
    """

    name: str
    path: str
    steps: int = 0
    nbytes: int = 0
    newest: Step | None = None
    fault: str = ""


def is_run(root: Place) -> bool:
    """Whether this is a folder of steps, and not a checkpoint itself. Raises StorageError."""
    if (root / manifest.FILE_NAME).is_file():
        return False
    names = root.folder_names()
    return storage.JOURNAL in names or any((root / name / manifest.FILE_NAME).is_file() for name in names)


def run_at(path: str) -> Place | None:
    """The folder of a run that ``path`` names; None for a checkpoint, and on a server that cannot list folders."""
    place = with_default_deadline(location(path), DEADLINE)
    try:
        return place if is_run(place) else None
    except StorageError:  # opening it as a checkpoint says what is wrong
        return None


def runs_in(root: str | os.PathLike[str] | Place) -> list[Run]:
    """The runs right below ``root``, by name. Raises StorageError if it cannot be listed."""
    home = with_default_deadline(location(root), DEADLINE)
    if home.has_folders and not home.is_dir():
        return []
    names = sorted(name for name in home.folder_names() if not name.startswith("."))
    return [_run(home / name, name) for name in names if is_run(home / name)]


def _run(path: Place, name: str) -> Run:
    try:
        steps = survey(path)
    except NotACheckpoint:
        return Run(name, str(path), fault="no step was saved here yet")
    except HoldfastError as error:
        return Run(name, str(path), fault=str(error))
    counting = [step for step in steps if step.health != "left behind"]
    return Run(name, str(path), len(steps), sum(step.own for step in steps), (counting or steps)[-1])
