"""What the stories put around a store: a limit to every wait, a second try of slow reads, a cache on local disk.

`save`, `load` and `open` call these with the path that they were given. Never touches a local path.
"""

from __future__ import annotations

import os

from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.cached import Cached
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.hedged import Hedged


def patiently(path: Place, seconds: float) -> Place:
    """The same place, where nothing is waited for longer than ``seconds`` at a time, whatever limit it had before."""
    if not isinstance(path, StorePlace):
        return path
    store = path.store.store if isinstance(path.store, Deadline) else path.store
    return StorePlace(Deadline(store, seconds), path.key)


def bounded(path: Place, seconds: float) -> Place:
    """The same place, where nothing is waited for without end: ``seconds`` at a time, unless it has a limit already."""
    if isinstance(path, StorePlace) and not isinstance(path.store, (Deadline, Cached)):
        return patiently(path, seconds)
    return path


def hedged(path: Place) -> Place:
    """The same place, where what is unusually slow to come is asked for again."""
    return StorePlace(Hedged(path.store), path.key) if isinstance(path, StorePlace) else path


def cached(path: Place, folder: str | os.PathLike[str]) -> Place:
    """The same place, with what is fetched from it kept in a ``folder`` on local disk. A local path needs none."""
    return StorePlace(Cached(path.store, folder), path.key) if isinstance(path, StorePlace) else path
