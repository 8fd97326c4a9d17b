"""A store as plain data, so that the writer process can make the same one for itself.

`write/process_worker.py` takes it apart, `write/courier.py` puts it together in the other process; so no torch here.
"""

from __future__ import annotations

from typing import Any

from holdfast.storage.store import Store
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.retrying import Retrying


def spec_of(store: Store) -> dict[str, Any] | None:
    """What makes the same store again, as JSON has it; None for one that lives in this process alone."""
    seconds: float | None = None
    at: Any = store
    while at is not None:
        if isinstance(at, Deadline):
            seconds = at.seconds
        spec = getattr(at, "spec", None)
        if spec is not None:
            return {"cloud": spec, "seconds": seconds}
        at = getattr(at, "store", None)
    return None


def store_from(spec: dict[str, Any]) -> Store:
    """The store that a spec tells of."""
    from holdfast.storage.cloud.cloud import Cloud  # obstore is an extra

    store: Store = Retrying(Cloud.from_spec(spec["cloud"]), attempts=2)
    return store if spec["seconds"] is None else Deadline(store, spec["seconds"])
