"""The leaves of a torchsnapshot manifest: what each kind of entry stands for, and which files its bytes are in."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import product
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.machine.untrusted import damaged_as, named_in_errors
from holdfast.formats.members import member
from holdfast.formats.shares import MAX_RANKS, Share, sizes_of
from holdfast.formats.sources import File, Stretch, file
from holdfast.formats.stored import Opaque, Stored, joined, plain, reshaped
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, inside
from holdfast.storage.place import Place

Entry = dict[str, Any]

_QUANTIZED = ("torch.qint", "torch.quint")
_NO_QUANTIZED = "it is quantized; save it dequantized, or its int_repr(), scale and zero point as tensors"


def is_sharded(entry: Entry) -> bool:
    """Whether an entry has no more than one rank's part."""
    return entry["type"] in ("ShardedTensor", "DTensor")


def is_everywhere(entry: Entry) -> bool:
    """Whether an entry stands for ranks that do not list it too."""
    # Only one of the ranks that hold a DTensor's shard lists it.
    return bool(entry.get("replicated")) or entry["type"] == "DTensor"


def without_owner(by_rank: Mapping[int, Entry]) -> int | None:
    """A rank of a DTensor's mesh whose shard no rank lists, or None. Of a ShardedTensor every rank lists its own."""
    for entry in by_rank.values():
        if entry["type"] == "DTensor":
            break
    else:
        return None
    with damaged_as("a mesh of a DTensor cannot be read"):
        cut = {axis for axes in entry["dim_map"] for axis in axes if axis >= 0}
        at = dict(_coordinates(entry["mesh"]))
        indices = {tuple(at[rank][axis] for axis in cut) for rank in by_rank if rank in at}
        return next((rank for rank, index in at.items() if tuple(index[axis] for axis in cut) not in indices), None)


def _coordinates(mesh: Any) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The ranks of nested lists, each with its coordinate."""
    sizes: list[int] = []
    inner = mesh
    while isinstance(inner, list):
        sizes.append(len(inner))
        inner = inner[0]
    if prod(sizes) > MAX_RANKS:
        raise ValueError(f"it has {sizes} ranks")
    for index in product(*map(range, sizes)):
        rank = mesh
        for i in index:
            rank = rank[i]
        yield rank, index


class Leaves:
    """What entries stand for, and the files of the snapshot that were asked for."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.files: dict[str, File] = {}

    def value(self, path: str, entry: Entry) -> Any:
        """The value, or the unread tensor, of an entry that is no container and not sharded."""
        with self.naming(path):
            kind = entry["type"]
            if kind in _PRIMITIVES and "serialized_value" in entry:
                return _PRIMITIVES[kind](entry["serialized_value"])
            if kind == "ChunkedTensor":
                return self.chunked(entry)
            if kind == "Tensor":
                quantized = entry["serializer"].endswith("qtensor") or entry["dtype"].startswith(_QUANTIZED)
                return Opaque(_NO_QUANTIZED) if quantized else self.tensor(entry)
            if kind == "object":
                return self.object(entry)
            raise Unsupported(f"it is an entry of type {kind!r}, which is not known; update holdfast")

    def sharded(self, path: str, entries: Iterable[Entry]) -> Share:
        """All shards of all ranks as one. No entry has the shape of the whole: it ends where the last shard does."""
        with self.naming(path):
            shards = [shard for entry in entries for shard in self.shards(entry["shards"])]
            if not shards:
                raise Damaged("it is sharded, but no rank has a shard of it")
            dtype, ndim = shards[0][1].dtype, len(shards[0][0])
            if any(len(offsets) != ndim for offsets, _ in shards):
                raise Damaged("it has shards with different numbers of axes")
            shape = tuple(max(offsets[d] + part.shape[d] for offsets, part in shards) for d in range(ndim))
            return Share(dtype, shape, tuple(shards))

    def naming(self, path: str) -> AbstractContextManager[None]:
        return named_in_errors(f"{self.folder}: {path}", "its entry is not whole")

    def object(self, entry: Entry) -> Any:
        try:
            return load_file(self.stretch(entry))
        except Unsupported as error:  # a class of the user's own: no reason to refuse all the rest
            return Opaque(str(error))

    def tensor(self, entry: Entry) -> Stored:
        shape, dtype, serializer = sizes_of(entry["shape"]), entry["dtype"].removeprefix("torch."), entry["serializer"]
        if serializer not in ("torch_save", "buffer_protocol") or not dtypes.known(dtype):
            raise Unsupported(f"it is {dtype}, written by {serializer!r}, which is not known; update holdfast")
        if serializer == "buffer_protocol" and 0 in shape:
            return Stored(dtype, shape, ())
        stretch = self.stretch(entry)
        if serializer == "torch_save":
            tensor = load_file(stretch)
            if not isinstance(tensor, Stored) or (tensor.dtype, tensor.shape) != (dtype, shape):
                raise Damaged(f"it should be {dtype} of shape {shape}, but {stretch.source.path} holds something else")
            return tensor
        if stretch.nbytes != prod(shape) * dtypes.itemsize(dtype):
            raise Damaged(
                f"it has {stretch.nbytes} bytes in {stretch.source.path}: that is no {dtype} of shape {shape}"
            )
        return plain(dtype, shape, stretch)

    def chunked(self, entry: Entry) -> Stored:
        shape, dtype = sizes_of(entry["shape"]), entry["dtype"].removeprefix("torch.")
        chunks = self.shards(entry["chunks"])
        if not shape:  # cut as if it had one axis
            ((_, only),) = chunks
            return reshaped(only, ())
        if any(not inside(Box(offsets, part.shape), shape) for offsets, part in chunks):
            raise Damaged(f"it has chunks outside of its shape {shape}")
        return joined(dtype, shape, chunks)

    def shards(self, entries: Iterable[Entry]) -> list[tuple[tuple[int, ...], Stored]]:
        shards = []
        for shard in entries:
            offsets, sizes = sizes_of(shard["offsets"]), sizes_of(shard["sizes"])
            tensor = self.tensor(shard["tensor"])
            if tensor.shape != sizes or len(offsets) != len(sizes):
                raise Damaged(f"it has a shard of sizes {sizes} at {offsets} that is of shape {tensor.shape}")
            shards.append((offsets, tensor))
        return shards

    def stretch(self, entry: Entry) -> Stretch:
        location, byte_range = entry["location"], entry.get("byte_range")
        if location not in self.files:
            self.files[location] = file(member(self.folder, location, "the manifest"))
        source = self.files[location]
        begin, end = sizes_of(byte_range) if byte_range is not None else (0, source.nbytes)
        return Stretch(source, begin, end - begin)


_PRIMITIVES: dict[str, Any] = {
    "int": int,
    "str": str,
    "bool": lambda text: {"True": True, "False": False}[text],
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "float": lambda text: struct.unpack("<d", base64.b64decode(text, validate=True))[0],
}
