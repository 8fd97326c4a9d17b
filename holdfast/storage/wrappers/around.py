"""What the stories put around a store: a limit to every wait, a second try of slow reads, a cache on local disk.

`save`, `load` and `open` call these with the path that they were given. Never touches a local path.
"""

from __future__ import annotations

import os

from holdfast.storage.place import Location, Place
from holdfast.storage.wrappers.cached import Cached
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.hedged import Hedged


def patiently(path: Location, seconds: float) -> Location:
    """The same place, where nothing is waited for longer than ``seconds`` at a time, whatever limit it had before."""
    if not isinstance(path, Place):
        return path
    store = path.store.store if isinstance(path.store, Deadline) else path.store
    return Place(Deadline(store, seconds), path.key)


def bounded(path: Location, seconds: float) -> Location:
    """The same place, where nothing is waited for without end: ``seconds`` at a time, unless it has a limit already."""
    if isinstance(path, Place) and not isinstance(path.store, (Deadline, Cached)):
        return patiently(path, seconds)
    return path


def hedged(path: Location) -> Location:
    """The same place, where what is unusually slow to come is asked for again."""
    return Place(Hedged(path.store), path.key) if isinstance(path, Place) else path


def cached(path: Location, folder: str | os.PathLike[str]) -> Location:
    """The same place, with what is fetched from it kept in a ``folder`` on local disk. A local path needs none."""
    return Place(Cached(path.store, folder), path.key) if isinstance(path, Place) else path
