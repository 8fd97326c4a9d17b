"""Entries of DCP's data files: each an archive of torch.save, with one tensor or one object, behind transforms or not.

`dcp` asks for them once the metadata says where they are. Never reads a tensor's bytes to place them: what is read is
the two ends of its archive, and only when somebody wants the tensor.
"""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.sources import File, Memory, Stretch, Unpacked, all_of
from holdfast.formats.stored import Stored
from holdfast.ondisk import dtypes
from holdfast.read.source import Descriptors
from holdfast.storage.local import disk
from holdfast.storage.place import Place, StorePlace

MAX_VALUE = 1 << 30
"""More than any compressed object unpacks to."""

_PACKED = 1 << 16
"""How many bytes may have been packed into one; Zstandard's blocks of equal bytes reach half of it."""

_SMALL = 1 << 20
"""Objects of more bytes are read where they lie: most of them are tensors."""

_RUN = 8 << 20
"""Objects that follow each other in a file are read together up to this many bytes."""

_ENDS = 1024
"""How much of an archive's beginning and end is read to find the tensor in it."""


class Spot(NamedTuple):
    """Where an entry lies, and the transforms it was written through, last first."""

    source: File
    begin: int
    nbytes: int
    transforms: tuple[str, ...]


# Tensors


@dataclass(eq=False)
class _Entry:
    """An entry that should hold a tensor of this type and shape."""

    place: Spot
    key: str
    dtype: str
    shape: tuple[int, ...]
    _found: Stretch | None = None

    def found(self) -> Stretch:
        """Where the tensor's bytes are, row-major. Raises Damaged if the archive holds anything else."""
        if self._found is None:  # two threads that look for it find the same
            source, begin, nbytes, _ = self.place
            ends = _ends(source, begin, nbytes)
            stretch = self.tensor_in(Stretch(ends, begin, nbytes))
            # What was saved with strides is gathered when it is read: a source of its own.
            plain = stretch.source is ends
            self._found = Stretch(source, stretch.begin, stretch.nbytes, stretch.member) if plain else stretch
        return self._found

    def unpack(self, target: BinaryIO) -> None:
        """Write the tensor's bytes, out of the transforms and the archive around it."""
        nbytes = prod(self.shape) * dtypes.itemsize(self.dtype)
        with tempfile.TemporaryFile(prefix="holdfast-") as scratch:
            # Around its tensor an archive has a few hundred bytes.
            total = _unpacked(self.place, self.key, nbytes + (1 << 20), scratch)
            scratch.flush()
            stretch = self.tensor_in(all_of(_Nameless(self.place.source.path, total, scratch)))
            for begin in range(0, nbytes, _RUN):
                target.write(stretch.read(begin, min(_RUN, nbytes - begin)))

    def tensor_in(self, archive: Stretch) -> Stretch:
        found = load_file(archive)
        if not isinstance(found, Stored) or (found.dtype, found.shape) != (self.dtype, self.shape):
            there = f"{found.dtype} {list(found.shape)}" if isinstance(found, Stored) else "no tensor"
            raise Damaged(
                f"{archive.source.path}: the entry of {self.key} at byte {self.place.begin} should hold {self.dtype} "
                f"{list(self.shape)}, but there is {there}: the file is not the one that the metadata describes"
            )
        ((_, stretch),) = found.pieces
        return stretch


@dataclass(frozen=True)
class _Chunk(Stretch):
    """Bytes of an entry's tensor, from ``skip`` on; ``begin`` tells only where the entry begins."""

    entry: _Entry = field(kw_only=True)
    skip: int = field(kw_only=True)

    def part(self, begin: int, nbytes: int) -> Stretch:
        super().part(begin, nbytes)  # its checks
        return _Chunk(self.source, self.begin, nbytes, entry=self.entry, skip=self.skip + begin)

    def located(self) -> Stretch:
        return self.entry.found().part(self.skip, self.nbytes)


def chunk(place: Spot, key: str, dtype: str, shape: tuple[int, ...]) -> Stretch:
    """The bytes of the tensor that an entry holds, unread."""
    nbytes = prod(shape) * dtypes.itemsize(dtype)
    entry = _Entry(place, key, dtype, shape)
    if nbytes > (_PACKED if place.transforms else 1) * place.nbytes:
        raise Damaged(f"{place.source.path}: {key} is said to have {nbytes} bytes in an entry of {place.nbytes}")
    if place.transforms:
        return all_of(Unpacked(place.source.path, nbytes, entry.unpack))
    return _Chunk(place.source, place.begin, nbytes, entry=entry, skip=0)


@dataclass(frozen=True, eq=False)
class _Ends:
    """A file of which a stretch, an archive, has both its ends in memory."""

    file: File
    begin: int
    end: int
    head: bytes = field(repr=False)
    tail: bytes = field(repr=False)

    @property
    def path(self) -> Place:
        return self.file.path

    @property
    def nbytes(self) -> int:
        return self.file.nbytes

    def open(self) -> Descriptors | StorePlace:
        return self.file.open()

    def read(self, begin: int, nbytes: int) -> bytes:
        for data, first in ((self.head, self.begin), (self.tail, self.end - len(self.tail))):
            if first <= begin and begin + nbytes <= first + len(data):
                return data[begin - first : begin - first + nbytes]
        return self.file.read(begin, nbytes)


def _ends(source: File, begin: int, nbytes: int) -> _Ends:
    if nbytes <= 2 * _ENDS:
        head = tail = source.read(begin, nbytes)
    else:
        head, tail = source.read(begin, _ENDS), source.read(begin + nbytes - _ENDS, _ENDS)
    return _Ends(source, begin, begin + nbytes, head, tail)


@dataclass(frozen=True, eq=False)
class _Nameless:
    """A file without a name."""

    path: Place
    nbytes: int
    file: BinaryIO

    def open(self) -> tuple[int, int | None]:
        return os.dup(self.file.fileno()), None

    def read(self, begin: int, nbytes: int) -> bytes:
        return disk.read_bytes(self.file.fileno(), nbytes, begin, self.path)


# Objects


def blobs(entries: Sequence[tuple[Spot, str]]) -> dict[Spot, bytes]:
    """The bytes of entries with small objects, by place; neighbours are read together. With each place, its key."""
    found: dict[Spot, bytes] = {}
    plain = []
    for place, key in entries:
        if place.transforms:
            target = io.BytesIO()
            _unpacked(place, key, MAX_VALUE, target)
            found[place] = target.getvalue()
        elif place.nbytes <= _SMALL:
            plain.append(place)
    plain.sort(key=lambda place: (str(place.source.path), place.begin))
    at = 0
    while at < len(plain):
        first, end, stop = plain[at], plain[at].begin + plain[at].nbytes, at + 1
        while stop < len(plain) and plain[stop].source is first.source and plain[stop].begin == end:
            if end + plain[stop].nbytes - first.begin > _RUN:
                break
            end, stop = end + plain[stop].nbytes, stop + 1
        data = all_of(first.source).read(first.begin, end - first.begin)
        for place in plain[at:stop]:
            found[place] = data[place.begin - first.begin :][: place.nbytes]
        at = stop
    return found


def value(place: Spot, key: str, data: bytes | None, alike: dict[bytes, Any]) -> Any:
    """The object in an entry; tensors in a large one stay unread. ``data``: its bytes, if `blobs` has read them.

    Thousands of hyperparameters are the same few archives: ``alike`` keeps what the plain ones hold.
    """
    if data is not None and data in alike:
        return alike[data]
    archive = Stretch(place.source, place.begin, place.nbytes) if data is None else Memory(place.source.path, data)
    try:
        found = load_file(archive if isinstance(archive, Stretch) else all_of(archive))
    except Damaged as error:
        raise Damaged(f"{key}, at byte {place.begin}: {error}") from None
    if data is not None and isinstance(found, (bool, int, float, str, type(None))):
        alike[data] = found
    return found


# Transforms


def _unpacked(place: Spot, key: str, limit: int, target: BinaryIO) -> int:
    """Undo the transforms of an entry; how many bytes came. Raises Damaged if they are more than ``limit``."""
    pieces: Iterator[bytes] = _packed(place)
    for descriptor in place.transforms:
        name, _, version = str(descriptor).partition("/")
        if name != "stream.zstd" or version.partition(".")[0] != "1":
            raise Unsupported(
                f"{place.source.path}: {key} was written through {descriptor!r}, an extension that holdfast does not "
                "know; load it with what wrote it and save it again without extensions"
            )
        pieces = _zstd(pieces, place.source.path, key)
    written = 0
    for piece in pieces:
        written += len(piece)
        if written > limit:
            raise Damaged(f"{place.source.path}: {key} unpacks to more than the {limit} bytes that it can have")
        target.write(piece)
    return written


def _packed(place: Spot) -> Iterator[bytes]:
    for at in range(0, place.nbytes, 1 << 20):
        yield place.source.read(place.begin + at, min(1 << 20, place.nbytes - at))


def _zstd(packed: Iterable[bytes], path: Place, key: str) -> Iterator[bytes]:
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        raise Unsupported(
            f"{path} is compressed with Zstandard, which takes a package to read: pip install 'holdfast[zstd]'"
        ) from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(_Reader(packed)) as stream:
            while piece := stream.read(1 << 20):
                yield piece
    except zstandard.ZstdError as error:
        raise Damaged(f"{path}: {key} is no valid Zstandard stream: {error}") from None


class _Reader:
    """An iterator of bytes as something to read from."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces, self.rest = iter(pieces), b""

    def read(self, nbytes: int) -> bytes:
        while not self.rest:
            piece = next(self.pieces, None)
            if piece is None:
                return b""
            self.rest = piece
        found, self.rest = self.rest[:nbytes], self.rest[nbytes:]
        return found
