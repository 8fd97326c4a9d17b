"""`.metadata`, for programs that look for it: what torch's reader would find there of a checkpoint of holdfast.

`save`, `async_save` and `Writer` leave it after the commit. Never stands for the checkpoint: the manifest does.
"""

from __future__ import annotations

import pickle

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from holdfast.checkpoint import Checkpoint
from holdfast.dcp.flattened import describe, storage_meta
from holdfast.engine import storage
from holdfast.engine.folder import HINT, HINT_BEGINS
from holdfast.engine.stores.place import Location
from holdfast.errors import HoldfastError
from holdfast.events import log
from holdfast.ondisk.manifest import Manifest

_WHERE = "no file of torch.distributed.checkpoint: load this checkpoint with holdfast.dcp.load or holdfast.load"
"""The path that torch's reader would open for any tensor: its error says what is to be done."""


def leave_hint(folder: Location, record: Manifest) -> None:
    """Write the hint beside a committed checkpoint. What goes wrong is logged: the checkpoint is there without it."""
    try:
        checkpoint = Checkpoint(folder)
        vars(checkpoint)["manifest"] = record
        metadata = describe(checkpoint).metadata
        metadata.storage_data = dict.fromkeys(_indices(metadata), _StorageInfo(_WHERE, 0, 0))
        metadata.storage_meta = storage_meta(checkpoint)
        data = HINT_BEGINS + pickle.dumps(metadata, protocol=4)
        storage.replace_small(folder / HINT, data, f".manifest.{HINT}.{record.save}.tmp")
    except (HoldfastError, OSError) as error:
        log.warning("%s is committed, but programs that look for %s do not see it: %s", folder, HINT, error)


def _indices(metadata: Metadata) -> list[MetadataIndex]:
    found = []
    for key, known in metadata.state_dict_metadata.items():
        if isinstance(known, TensorStorageMetadata):
            found += [MetadataIndex(key, chunk.offsets, index) for index, chunk in enumerate(known.chunks)]
        else:
            found.append(MetadataIndex(key))
    return found
