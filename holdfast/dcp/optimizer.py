"""torch's load of a sharded optimizer for FSDP1, from a folder that holdfast saved as well.

Programs call it. Never reads anything itself: a `Reader` does, under torch's engine.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict as _with_their_reader
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from holdfast.dcp.arguments import origin, stores_itself
from holdfast.dcp.reader import Reader


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any], optimizer_key: str, storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:  # fmt: skip
    """As torch's function of this name. Of torch's own readers the path is taken, and read by a `Reader`."""
    if not stores_itself(storage_reader):
        path, verify = origin(None, storage_reader)
        storage_reader = Reader(path, verify=verify)
    loaded: dict[str, Any] = _with_their_reader(model_state_dict, optimizer_key, storage_reader, planner)
    return loaded
