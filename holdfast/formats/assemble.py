"""Turns what a reader of a format returns into a Manifest: every tensor complete, every value plain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.events import log
from holdfast.formats.foreign import Foreign, ForeignFiles
from holdfast.formats.machine.inert import expanded
from holdfast.formats.simplified import MAX_DEPTH, MAX_LEAVES, PerRank, simplified
from holdfast.formats.sources import Memory, Source, Stretch
from holdfast.formats.stored import Stored
from holdfast.ondisk import dtypes, manifest, names, values
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord, cells_for
from holdfast.ondisk.containers import Note
from holdfast.ondisk.manifest import Manifest
from holdfast.storage.place import Place


@dataclass(frozen=True)
class ForeignState:
    """What a reader makes of a path.

    ``format``: the format's name for people. ``state``: nested dicts, lists and tuples under our names (``model``,
    ``optimizer`` with ``state`` by FQN and ``param_groups``, and whatever else there is), with `Stored` tensors,
    `PerRank` and plain values as leaves. ``reading``: which reading of the path was taken, if several are possible.
    ``attachments``: files beside the state, by name.
    """

    format: str
    state: Mapping[str, Any]
    step: int | None = None
    world_size: int = 1
    producer: Mapping[str, str] = field(default_factory=dict)
    reading: str = ""
    attachments: Mapping[str, Place] = field(default_factory=dict)


def assemble(content: ForeignState, path: Place) -> Foreign:
    """Make a checkpoint of what a reader returned. Raises Damaged for a tensor with holes or overlaps."""
    if expanded(dict(content.state), MAX_LEAVES) is None:  # walking so far would take minutes
        raise Damaged(f"{path}: it claims more than {MAX_LEAVES} leaves: it contains itself over and over")
    flat = _Flat(path)
    flat.container("", dict(content.state), 0)
    for name, reason in flat.left_out.items():
        log.warning("%s: %s is left out: %s", path, name, reason)
    sources: list[Source] = []
    index_of: dict[Source, int] = {}
    merged = _merged_memory(flat.tensors, path)
    places: dict[tuple[str, Box], Stretch] = {}
    records: dict[str, TensorRecord] = {}
    for name, tensor in flat.tensors.items():
        fault = tensor.fault()
        if fault:
            raise Damaged(f"{path}: {name} ({tensor.dtype} of shape {list(tensor.shape)}) is not whole: {fault}")
        cells, order = cells_for(tensor.shape, [box for box, _ in tensor.pieces])
        files = []
        for i in order:
            box, stretch = tensor.pieces[i]
            if id(stretch.source) in merged:
                joint, begin = merged[id(stretch.source)]
                stretch = Stretch(joint, begin + stretch.begin, stretch.nbytes)
            at = index_of.setdefault(stretch.source, len(sources))
            if at == len(sources):
                sources.append(stretch.source)
            places[name, box] = stretch
            files.append(at)
        records[name] = TensorRecord(tensor.dtype, tensor.shape, cells, manifest.ranges(files))
    record = Manifest(
        save="", run="", step=content.step, created="", producer=dict(content.producer), world_size=content.world_size,
        files=[[str(s.path), s.nbytes, 0, ""] for s in sources], tensors=records, values=flat.values,
        containers=flat.containers, aliases=flat.aliases, per_rank=dict.fromkeys(flat.per_rank, ""), attachments=[],
    )  # fmt: skip
    return Foreign(
        path, content.format, content.reading, record, ForeignFiles(sources, places), flat.per_rank,
        content.attachments, flat.left_out,
    )  # fmt: skip


def _merged_memory(tensors: Mapping[str, Stored], path: Place) -> dict[int, tuple[Memory, int]]:
    """Thousands of step counters as one source: by the id of each, that source and where the counter begins in it."""
    data = bytearray()
    begins: dict[int, int] = {}
    for tensor in tensors.values():
        for _, stretch in tensor.pieces:
            if isinstance(stretch.source, Memory) and id(stretch.source) not in begins:
                data += bytes(-len(data) % 16)
                begins[id(stretch.source)] = len(data)
                data += stretch.source.data
    joint = Memory(path, bytes(data))
    return {key: (joint, begin) for key, begin in begins.items()}


class _Flat:
    """Leaves by name, as a manifest lists them."""

    def __init__(self, path: Place) -> None:
        self.path = path
        self.tensors: dict[str, Stored] = {}
        self.aliases: dict[str, str] = {}
        self.values: dict[str, Any] = {}
        self.containers: dict[str, Note] = {}
        self.per_rank: dict[str, tuple[Any, ...]] = {}
        self.left_out: dict[str, str] = {}
        self._first: dict[Stored, str] = {}
        self._leaves = 0

    def node(self, at: str, node: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise Damaged(f"{self.path}: {at[:200]} is nested {MAX_DEPTH} deep, or contains itself")
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise Damaged(f"{self.path}: it claims more than {MAX_LEAVES} leaves: it contains itself over and over")
        try:
            node = simplified(node, self.path)
        except Unsupported as error:
            self.left_out[at] = str(error)
            return
        if isinstance(node, Stored):
            self.tensor(at, node)
        elif isinstance(node, PerRank):
            self.per_rank[at] = node.values
        elif isinstance(node, (dict, list, tuple)) and not isinstance(node, torch.Size):
            self.container(at, node, depth)
        else:
            try:
                self.values[at] = values.encode(node)
            except values.Refused as error:
                self.left_out[at] = error.reason

    def container(self, at: str, node: Any, depth: int) -> None:
        if isinstance(node, (list, tuple)):
            self.containers[at] = "list" if isinstance(node, list) else "tuple"
            for i, value in enumerate(node):
                self.node(names.child(at, str(i)), value, depth + 1)
            return
        whole_numbers = at and any(type(k) is int for k in node)
        if at and (not node or whole_numbers):
            self.containers[at] = "dict"
        taken: set[str] = set()
        for key, value in node.items():
            text = key if isinstance(key, str) else str(key)
            child = names.child(at, text)
            if text in taken:
                self.left_out[child] = "another key of the same dict reads the same"
                continue
            taken.add(text)
            self.node(child, value, depth + 1)

    def tensor(self, at: str, tensor: Stored) -> None:
        if not dtypes.known(tensor.dtype):
            self.left_out[at] = f"it is of dtype {tensor.dtype}, which this torch does not have"
            return
        first = self._first.setdefault(tensor, at) if prod(tensor.shape) else at
        if first == at:
            self.tensors[at] = tensor
        else:
            self.aliases[at] = first
