"""What is asked of a place as a store, and what is done to many places at once.

Called by what deletes, copies and uploads. Never opens a file.
"""

from __future__ import annotations

from holdfast.errors import StorageError
from holdfast.storage.local.local import Local
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

JOURNAL = ".journal"
"""The folder in a run's root that tells of the run. It is never a checkpoint, nor looked into for one."""


def as_store(place: Place) -> StorePlace:
    """The place in a store: of a local folder, in a store of all that lies below it."""
    return place if isinstance(place, StorePlace) else StorePlace(Local(str(place)), "")


def delete(*paths: Place) -> None:
    """Delete files, those that are there. Raises StorageError for the first that cannot be, once all were tried."""
    by_store: dict[int, list[StorePlace]] = {}
    failed: StorageError | None = None
    for path in paths:
        if isinstance(path, StorePlace):
            by_store.setdefault(id(path.store), []).append(path)
            continue
        try:
            path.delete()
        except StorageError as error:
            failed = failed or error
    for places in by_store.values():
        try:
            with naming(places[0], "delete"):
                places[0].store.delete([place.key for place in places])
        except StorageError as error:
            failed = failed or error
    if failed is not None:
        raise failed
