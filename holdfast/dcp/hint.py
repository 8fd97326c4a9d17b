"""`.metadata`, for programs that look for it: what torch's reader would find there of a checkpoint of holdfast.

`save`, `async_save` and `Writer` leave it after the commit. Never stands for the checkpoint: the manifest does.
"""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from holdfast.checkpoint import Checkpoint
from holdfast.commit.folder import HINT, HINT_BEGINS
from holdfast.dcp.flattened import describe, storage_meta
from holdfast.events import log
from holdfast.export.dcp import Table
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.ondisk.manifest import Manifest
from holdfast.storage.place import Place

_WHERE = "no file of torch.distributed.checkpoint: load this checkpoint with holdfast.dcp.load or holdfast.load"
"""The file that torch's reader would open for anything: its error says what is to be done."""


def leave_hint(folder: Place, record: Manifest) -> None:
    """Write the hint beside a committed checkpoint. What goes wrong is logged: the checkpoint is there without it."""
    try:
        data = HINT_BEGINS + _metadata(folder, record)
        (folder / HINT).replace_small(data, f".manifest.{HINT}.{record.save}.tmp")
    except Exception as error:  # noqa: BLE001 - the save is committed, and must not fail
        log.warning("%s is committed, but programs that look for %s do not see it: %s", folder, HINT, error)


def _metadata(folder: Place, record: Manifest) -> bytes:
    checkpoint = Checkpoint(folder)
    vars(checkpoint)["manifest"] = record
    described = describe(checkpoint).metadata
    table = Table(_WHERE)
    for key, known in described.state_dict_metadata.items():
        path, boxes = described.planner_data[key], []
        if isinstance(known, TensorStorageMetadata):
            boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in known.chunks]
            table.tensor(path, dtypes.name_of(known.properties.dtype), known.size, boxes)
        else:
            table.value(path)
        table.nowhere(path, boxes, _WHERE)
    known_by = storage_meta(checkpoint)
    return table.metadata({"checkpoint_id": str(known_by.checkpoint_id), "save_id": known_by.save_id})
