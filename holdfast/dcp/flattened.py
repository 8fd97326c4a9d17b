"""A checkpoint in torch's words: flattened keys, the Metadata that planners understand, and the `.metadata` hint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from uuid import NAMESPACE_URL, uuid5

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from holdfast.checkpoint import Checkpoint
from holdfast.commit.folder import HINT, HINT_BEGINS
from holdfast.dcp.opening import as_torch_has_it, taken_apart
from holdfast.errors import Mismatch, Unsupported
from holdfast.events import log
from holdfast.export.dcp import Table
from holdfast.ondisk import dtypes, names
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.containers import mapped
from holdfast.ondisk.manifest import Manifest
from holdfast.read.nested import nest
from holdfast.storage.place import Place

VERSION = "1.0.0"
"""Of torch's metadata, as torch writes it since 2.9."""


@dataclass(frozen=True)
class Tensor:
    """A saved tensor, not read yet."""

    name: str


@dataclass(frozen=True)
class Value:
    """A saved value, not decoded yet."""

    name: str


@dataclass(frozen=True)
class Described:
    """A checkpoint in torch's words. ``leaves`` has what each key stands for: a `Tensor`, or a nest of values."""

    metadata: Metadata
    leaves: Mapping[str, Any]


class Description(Metadata):
    """torch's Metadata of a checkpoint, made from the manifest when it is first looked at: few programs do."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    @cached_property
    def storage_meta(self) -> StorageMeta:  # type: ignore[override]
        """The path, and the save's id."""
        return storage_meta(self._checkpoint)

    @cached_property
    def _described(self) -> Metadata:
        return describe(self._checkpoint).metadata

    @property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """What is known of each flattened key."""
        return self._described.state_dict_metadata

    @property
    def version(self) -> str | None:  # type: ignore[override]
        """Of torch's metadata."""
        return self._described.version

    @property
    def planner_data(self) -> Any:
        """The path of keys behind each flattened key."""
        return self._described.planner_data


def name_of(path: tuple[str | int, ...]) -> str:
    """The name of what lies at a path of keys. Raises Unsupported for a key that cannot name a section."""
    keys = [str(key) for key in path]
    if keys[0] in ("", "manifest.json"):
        raise Unsupported(f"the state has the key {keys[0]!r} at the top, which cannot name a section; rename it")
    return names.join(keys)


def describe(checkpoint: Checkpoint) -> Described:
    """A checkpoint as torch would have flattened it. Raises Mismatch if two names become one key.

    Values that differ by rank are left out: torch's engine knows none.
    """
    checkpoint = taken_apart(checkpoint)
    leaves: dict[str, Any] = {name: Tensor(name) for name in checkpoint.records}
    leaves.update((path, Value(path)) for path in checkpoint.manifest.values)
    known: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    nodes: dict[str, Any] = {}

    def visit(path: tuple[str | int, ...], node: object) -> None:
        key = ".".join(map(str, path))
        if key in paths:
            raise Mismatch(
                f"{checkpoint.path} holds {names.join(list(map(str, paths[key])))} and "
                f"{names.join(list(map(str, path)))}, which torch both calls {key!r}: load it with holdfast.load"
            )
        paths[key], nodes[key] = path, node
        known[key] = (
            _tensor_metadata(checkpoint.records[node.name]) if isinstance(node, Tensor) else BytesStorageMetadata()
        )

    tree = nest(leaves, checkpoint.manifest.containers)
    traverse_state_dict(tree, visit, lambda node: isinstance(node, Tensor))
    return Described(Metadata(known, planner_data=paths, version=VERSION), nodes)


def storage_meta(checkpoint: Checkpoint) -> StorageMeta:
    """The path and the save's id, which torch has as a UUID; the same on every rank."""
    save = checkpoint.manifest.save
    return StorageMeta(checkpoint_id=as_torch_has_it(checkpoint.path), save_id=torch_id(save) if save else None)


def torch_id(save: str) -> str:
    """The id of a save, as torch has it."""
    return str(uuid5(NAMESPACE_URL, f"holdfast:{save}"))


def value_at(checkpoint: Checkpoint, node: Any) -> Any:
    """What a leaf stands for, read and decoded."""

    def read(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return checkpoint.value(leaf.name)
        return checkpoint.read(leaf.name) if isinstance(leaf, Tensor) else leaf

    return mapped(node, read)


def _tensor_metadata(record: TensorRecord) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box, _ in record.boxes()]
    properties = TensorProperties(dtype=dtypes.torch_dtype(record.dtype))
    return TensorStorageMetadata(properties, torch.Size(record.shape), chunks)


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
