"""A store as plain data, so that the writer process can make the same one for itself.

`write/worker.py` sends it, `write/writer_process.py` makes the store of it. Never imports torch.
"""

from __future__ import annotations

from typing import Any

from holdfast.storage.store import Store
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.retrying import Retrying
from holdfast.storage.wrappers.wrapper import nested


def spec_of(store: Store) -> dict[str, Any] | None:
    """What makes the same store again, as JSON has it; None for one that lives in this process alone."""
    *layers, innermost = nested(store)
    if not hasattr(innermost, "spec"):
        return None
    seconds = [layer.seconds for layer in layers if isinstance(layer, Deadline)]
    return {"cloud": innermost.spec, "seconds": seconds[-1] if seconds else None}


def store_from(spec: dict[str, Any]) -> Store:
    from holdfast.storage.cloud.cloud import Cloud  # obstore is an extra

    store: Store = Retrying(Cloud.from_spec(spec["cloud"]), attempts=2)
    return store if spec["seconds"] is None else Deadline(store, spec["seconds"])
