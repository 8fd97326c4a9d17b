"""From what a reader found to a Manifest: every tensor proved complete, every value plain, every byte placed.

`detect` calls `assemble` for each format. Never reads the bytes of a tensor.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.events import log
from holdfast.formats.ahead import Ahead
from holdfast.formats.machine import arrays
from holdfast.formats.machine.inert import expanded
from holdfast.formats.machine.pickles import Name, Record
from holdfast.formats.sources import File, Memory, Source, Stretch, opened
from holdfast.formats.stored import Opaque, Stored
from holdfast.ondisk import dtypes, manifest, names, values
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord, cells_for
from holdfast.ondisk.containers import Note
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.read.source import Descriptors, ReadStats
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

MAX_LEAVES = 4_000_000
"""More than any state has; what claims more refers to itself."""

MAX_DEPTH = 100


@dataclass(frozen=True)
class PerRank:
    """A leaf whose value differs by rank: one for each, in the order of the ranks."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Found:
    """What a reader makes of a path.

    ``format``: the format's name for people. ``state``: nested dicts, lists and tuples under our names (``model``,
    ``optimizer`` with ``state`` by FQN and ``param_groups``, and whatever else there is), with `Stored` tensors,
    `PerRank` and plain values as leaves. ``reading``: which reading of the path was taken, if several are possible.
    ``attachments``: files beside the state, by name. ``partial``: names of tensors that may be missing parts.
    """

    format: str
    state: Mapping[str, Any]
    step: int | None = None
    world_size: int = 1
    producer: Mapping[str, str] = field(default_factory=dict)
    reading: str = ""
    attachments: Mapping[str, Place] = field(default_factory=dict)


class ForeignFiles:
    """Where each piece of each tensor lies; the same three questions that our own data files answer."""

    def __init__(self, sources: list[Source], places: dict[tuple[str, Box], Stretch]) -> None:
        self.sources, self.places = sources, places
        self._ahead = Ahead(places.values())
        self._unpacked: dict[Source, int] = {}
        self._lock = threading.Lock()

    def path(self, index: int) -> Place:
        return self.sources[index].path

    def plain(self, index: int) -> Place | None:
        """The local file whose bytes the pieces of that number are; None for those in memory or to be unpacked."""
        source = self.sources[index]
        return source.path if isinstance(source, File) and source.path.has_descriptors else None

    def prove(self, indices: Iterable[int]) -> None:
        """Every stretch was found to lie within its file when it was made."""

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        """All is known that the reader asks for."""

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats | None = None
    ) -> tuple[int, Piece, tuple[str, ...]]:
        """Where the bytes of a cell lie; foreign files keep no sums of blocks."""
        stretch = self.located(self.places[name, cell])
        if stretch.source != self.sources[index]:  # it was found to need unpacking
            with self._lock:
                index = self._unpacked.setdefault(stretch.source, len(self.sources))
                if index == len(self.sources):
                    self.sources.append(stretch.source)
        return index, Piece(name, record.dtype, cell.lengths, stretch.nbytes, stretch.begin), ()

    def located(self, stretch: Stretch) -> Stretch:
        """One of the stretches at its true place."""
        return self._ahead.located(stretch)

    def opened(self, index: int) -> AbstractContextManager[Descriptors | StorePlace]:
        return opened(self.sources[index])


@dataclass(frozen=True)
class Foreign:
    """A foreign checkpoint, opened: what `Checkpoint` needs to know of it. ``left_out``: paths and why."""

    format: str
    reading: str
    manifest: Manifest
    files: ForeignFiles
    per_rank: Mapping[str, tuple[Any, ...]]
    attachments: Mapping[str, Place]
    left_out: Mapping[str, str]


def assemble(found: Found, path: Place) -> Foreign:
    """Join what a reader found. Raises Damaged if a tensor has holes, overlaps or bytes outside of its file."""
    if expanded(dict(found.state), MAX_LEAVES) is None:  # told at once, where walking so far would take minutes
        raise Damaged(f"{path}: it claims more than {MAX_LEAVES} leaves: it contains itself over and over")
    flat = _Flat(path)
    flat.container("", dict(found.state), 0)
    for name, reason in flat.left_out.items():
        log.warning("%s: %s is left out: %s", path, name, reason)
    sources: list[Source] = []
    index_of: dict[int, int] = {}
    merged = _merged_memory(flat.tensors, path)
    places: dict[tuple[str, Box], Stretch] = {}
    records: dict[str, TensorRecord] = {}
    by_equal: dict[Source, int] = {}
    for name, tensor in flat.tensors.items():
        fault = tensor.fault()
        if fault:
            raise Damaged(f"{path}: {name} ({tensor.dtype} of shape {list(tensor.shape)}) is not whole: {fault}")
        cells, order = cells_for(tensor.shape, [box for box, _ in tensor.pieces])
        files = []
        for i in order:
            box, stretch = tensor.pieces[i]
            stretch = merged.get(id(stretch.source), lambda s: s)(stretch)
            at = index_of.get(id(stretch.source))
            if at is None:
                at = by_equal.setdefault(stretch.source, len(sources))
                if at == len(sources):
                    sources.append(stretch.source)
                index_of[id(stretch.source)] = at
            places[name, box] = stretch
            files.append(at)
        records[name] = TensorRecord(tensor.dtype, tensor.shape, cells, manifest.ranges(files))
    record = Manifest(
        save="", run="", step=found.step, created="", producer=dict(found.producer), world_size=found.world_size,
        files=[[str(s.path), s.nbytes, 0, ""] for s in sources], tensors=records, values=flat.values,
        containers=flat.containers, aliases=flat.aliases, per_rank=dict.fromkeys(flat.per_rank, ""), attachments=[],
    )  # fmt: skip
    return Foreign(
        found.format, found.reading, record, ForeignFiles(sources, places), flat.per_rank, found.attachments,
        flat.left_out,
    )  # fmt: skip


def _merged_memory(tensors: Mapping[str, Stored], path: Place) -> dict[int, Any]:
    """Thousands of step counters are one source, not thousands: how a stretch of each moves into it."""
    data = bytearray()
    begins: dict[int, tuple[Memory, int]] = {}
    for tensor in tensors.values():
        for _, stretch in tensor.pieces:
            if isinstance(stretch.source, Memory) and id(stretch.source) not in begins:
                data += bytes(-len(data) % 16)
                begins[id(stretch.source)] = (stretch.source, len(data))
                data += stretch.source.data
    if not begins:
        return {}
    joint = Memory(path, bytes(data))

    def mover(begin: int) -> Any:
        return lambda stretch: Stretch(joint, begin + stretch.begin, stretch.nbytes)

    return {key: mover(begin) for key, (_, begin) in begins.items()}


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


def simplified(node: Any, path: Place) -> Any:
    """A leaf or container as our formats know them: what stands in a record, without the record.

    An enum is its value, a namespace its attributes, a set a list, a time its text, a duration its seconds.
    """
    if isinstance(node, Name):
        kind, _, name = node.text.rpartition(".")
        return dtypes.torch_dtype(name) if kind == "torch" and dtypes.known(name) else node.text
    if isinstance(node, (set, frozenset)):
        return sorted(node, key=str)
    if isinstance(node, bytearray):
        return bytes(node)
    if isinstance(node, Opaque):
        raise Unsupported(node.reason)
    if not isinstance(node, Record):
        return node
    if arrays.is_array(node):
        return arrays.array_of(node, path)
    if node.name.startswith("torch.") and node.name.rpartition(".")[2] in _TENSORS:
        raise Unsupported(f"a {node.name} is no tensor that can be told apart from here")
    if node.name == "_io.BytesIO" and isinstance(node.state, tuple) and node.state:
        return node.state[0]
    if node.name.startswith("datetime."):
        return _time(node)
    if node.items:
        return node.items
    if node.elements:
        return node.elements
    if isinstance(node.state, dict):
        return node.state
    if node.state is not None:
        return node.state
    return node.args[0] if len(node.args) == 1 else list(node.args)


_TENSORS = frozenset({
    "DTensor", "ShardedTensor", "_rebuild_sparse_tensor", "_rebuild_qtensor", "_rebuild_nested_tensor",
    "_rebuild_meta_tensor_no_storage", "_rebuild_sparse_csr_tensor",
})  # fmt: skip


_TIMES: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}


def _time(node: Record) -> Any:
    kind, args = node.name.rpartition(".")[2], node.args
    try:
        if kind == "timedelta":
            return datetime.timedelta(*args).total_seconds()
        if kind in _TIMES and args and isinstance(args[0], bytes):
            return _TIMES[kind](args[0]).isoformat()
    except (TypeError, ValueError, OverflowError):
        pass  # told as it stands
    return list(args)


def materialized(value: Any, path: Place) -> Any:
    """A value of one rank with its tensors read."""
    left = MAX_LEAVES

    def made(node: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise Damaged(f"{path}: a value of a rank is nested {MAX_DEPTH} deep or contains itself over and over")
        try:
            node = simplified(node, path)
        except Unsupported as error:
            log.warning("%s: None stands for a part of a value of one rank: %s", path, error)
            return None
        if isinstance(node, Stored):
            return node.read()
        if isinstance(node, dict):
            return {key: made(inner, depth + 1) for key, inner in node.items()}
        if isinstance(node, (list, tuple)) and not isinstance(node, torch.Size):
            return type(node)(made(inner, depth + 1) for inner in node)
        return node

    return made(value, 0)
