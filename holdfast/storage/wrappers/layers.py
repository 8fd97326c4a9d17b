"""A place with another layer around its store: a deadline for every request, hedged reads, a cache on local disk.

`save`, `load` and `open` call these with the path that they are given. A local path comes back as it is.
"""

from __future__ import annotations

import os

from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.cached import Cached
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.hedged import Hedged


def with_deadline(place: Place, seconds: float) -> Place:
    """A request to the store fails after ``seconds`` without progress; an earlier deadline is replaced."""
    if not isinstance(place, StorePlace):
        return place
    store = place.store.store if isinstance(place.store, Deadline) else place.store
    return StorePlace(Deadline(store, seconds), place.key)


def with_default_deadline(place: Place, seconds: float) -> Place:
    """The same, unless the place has a deadline already."""
    if isinstance(place, StorePlace) and isinstance(place.store, (Deadline, Cached)):
        return place
    return with_deadline(place, seconds)


def with_hedging(place: Place) -> Place:
    """What is unusually slow to read is requested a second time."""
    return StorePlace(Hedged(place.store), place.key) if isinstance(place, StorePlace) else place


def with_cache(place: Place, folder: str | os.PathLike[str]) -> Place:
    """What is read is kept in ``folder`` on local disk."""
    return StorePlace(Cached(place.store, folder), place.key) if isinstance(place, StorePlace) else place
