"""Data files before they are written: which pieces this rank writes, under which keys, from which memory.

`lay_out` makes them of a plan, and `write` brings them to disk. Moves no byte and opens no file.
"""

from __future__ import annotations

import errno
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import torch

from holdfast.errors import HoldfastError, StorageError, Unsupported
from holdfast.ondisk import datafile, dtypes, names
from holdfast.ondisk.box import Box, relative
from holdfast.ondisk.datafile import Piece
from holdfast.plan.plan import Plan, file_of
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected
from holdfast.storage.place import Place
from holdfast.write.jobs import Worker


@dataclass(frozen=True)
class DataFile:
    """A data file before it is written: where it goes, its pieces in file order, and each piece's tensor."""

    path: str
    section: str
    pieces: list[Piece]
    sources: list[torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    volume: int = 0

    @cached_property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.pieces)

    @cached_property
    def is_on_device(self) -> bool:
        """Whether any of its bytes arrive later than they are asked for."""
        return any(device.type != "cpu" for device in {source.device for source in self.sources})


@dataclass(frozen=True)
class Written:
    """A durable data file: path relative to the checkpoint, size, its header's size, digest, and SHA-256 if signed."""

    path: str
    bytes: int
    header_bytes: int
    header_digest: str
    header_sha256: str = ""

    @property
    def record(self) -> tuple[str, int, int, str]:
        """What manifests and parts say of it."""
        return self.path, self.bytes, self.header_bytes, self.header_digest


KEPT = 8
"""Files of a save on one rank that stay open, and so locked, until its outcome is known. A lock on any file tells that
the save lives, so the rest of them are opened as they are needed: there may be more of them than descriptors."""


@dataclass
class OpenFiles:
    """The files of a save, and descriptors of the first of them, kept open until its outcome is known."""

    paths: list[Place] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def open(self, path: Place, nbytes: int, worker: Worker) -> int | None:
        """Create a file of this size and lock it; the worker's number of it. None in a store, where it begins later."""
        if not path.has_descriptors:
            self.paths.append(path)
            return None
        try:
            fd, direct = path.open_to_write(nbytes)
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            path.parent.make_folder()  # another rank, or a sweep, has deleted the folder while it was empty
            fd, direct = path.open_to_write(nbytes)
        self.paths.append(path)
        if len(self.descriptors) < KEPT:
            self.descriptors.append(fd)
            return worker.open(path, fd, direct=direct)
        os.close(fd)
        return worker.open(path, None, direct=direct)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


Lengths = tuple[int, ...]

Source = Callable[[Collected, str, Box], torch.Tensor]
"""Where a piece lies in the memory of this rank."""


def datafiles_of(
    state: Collected, plan: Plan, ranks: Ranks, save: str, *, writer: int | None = None, source: Source | None = None
) -> list[DataFile]:
    """This rank's data files: the pieces it owns and its own PerRank values, by section and volume.

    As another ``writer`` than its own (`degraded.writer_of`) a rank has pieces alone. ``source`` tells where they lie,
    if not in the state.
    """
    number, find = ranks.rank if writer is None else writer, source or memory_of
    parts: defaultdict[tuple[str, int], list[tuple[Piece, torch.Tensor, tuple[int, ...]]]] = defaultdict(list)

    def add(name: str, key: str, dtype: str, tensor: torch.Tensor, shape: tuple[int, ...], lengths: Lengths) -> None:
        part = (names.section_of(name), plan.volumes.get(name, 0))
        parts[part].append((Piece(key, dtype, lengths, tensor.nbytes), tensor, shape))

    for name, tensor, box in plan.written_by(number):
        key = datafile.key_of(names.in_section(name), box, tensor.shape)
        if 0 not in box.lengths:
            memory = find(state, name, box)
        else:  # an empty tensor, of which a sharded one has no view
            memory = torch.empty(box.lengths, dtype=dtypes.torch_dtype(tensor.dtype), device="cpu")
        add(name, key, tensor.dtype, memory, tensor.shape, box.lengths)
    for path, leaf in state.per_rank.items() if writer is None else ():
        own = f"{names.in_section(path)}@{ranks.rank}"
        text = bytearray(msgspec.json.encode(leaf.encoded))
        add(path, own, "uint8", torch.frombuffer(text, dtype=torch.uint8), (len(text),), (len(text),))
        for reference, inner in leaf.tensors.items():
            add(path, f"{own}/{reference}", dtypes.name_of(inner.dtype), inner, tuple(inner.shape), tuple(inner.shape))
    files = []
    for (section, volume), rows in parts.items():
        by_key = {piece.key: (source, shape) for piece, source, shape in rows}
        if len(by_key) < len(rows):
            raise Unsupported(f"two tensors of section {section!r} have the same key: rename the one at the top")
        pieces = datafile.arrange(piece for piece, _, _ in rows)
        shapes = {
            datafile.base_of(p.key): by_key[p.key][1]
            for p in pieces
            # A single number of a type kept as bytes is stored as one row of bytes, as a vector of one would be.
            if "[" in p.key or (not p.lengths and datafile.stored_as_bytes(p.dtype))
        }
        path = file_of(section, number, ranks.size, save, volume, plan.volumes)
        files.append(DataFile(path, section, pieces, [by_key[p.key][0] for p in pieces], shapes, volume))
    return files


def memory_of(state: Collected, name: str, box: Box) -> torch.Tensor:
    """This rank's memory of one planned piece: a view, or a part of one."""
    for view in state.entries[name].views:
        if view.box is box or view.box == box:
            return view.tensor
        if all(a >= b for a, b in zip(box.offsets, view.box.offsets, strict=True)) and all(
            a <= b for a, b in zip(box.ends, view.box.ends, strict=True)
        ):
            part = view.tensor
            for dim, (start, length) in enumerate(zip(*relative(box, view.box), strict=True)):
                part = part.narrow(dim, start, length)
            return part
    raise HoldfastError(f"this rank was to write {name}{box} and does not hold it; this is a fault of holdfast")
