"""A checkpoint by the keys that torch's programs know: ours as it is, torch's own folders by torch's own keys.

`load` and `Reader` open with it. Never unpickles what torch has pickled: the foreign room reads it.
"""

from __future__ import annotations

import os

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.stores.urls import location
from holdfast.errors import HoldfastError
from holdfast.foreign.assemble import Found, assemble
from holdfast.foreign.dcp import read_folder
from holdfast.ondisk import manifest


def as_torch_has_it(path: Location) -> str | os.PathLike[str]:
    """A path as torch's own objects hold it."""
    return str(path) if isinstance(path, Place) else path


def may_be_a_path(path: str | os.PathLike[str]) -> bool:
    """Whether torch may be told that this is a path of ours, on disk or in a store."""
    try:
        location(path)
    except (HoldfastError, ValueError):
        return False
    return True


def open_by_key(path: str | os.PathLike[str] | Place) -> Checkpoint:
    """`holdfast.open`, but a folder that torch's engine wrote keeps its keys: a program that changes one line goes on.

    `holdfast.open` gives the model and the optimizer in it holdfast's names, whatever that program called them.
    """
    folder = location(path)
    of_torch = any((folder / name).is_file() for name in (".metadata", "__0.metadata"))
    if not of_torch or (folder / manifest.FILE_NAME).exists():
        return open_checkpoint(path)
    state = read_folder(folder)
    found = Found("torch.distributed.checkpoint", state.tree, world_size=state.world_size)
    return Checkpoint(folder, foreign=assemble(found, folder))
