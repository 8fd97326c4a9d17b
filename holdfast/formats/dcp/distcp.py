"""Entries of DCP's data files: each is an archive of torch.save with one tensor or one object, compressed or not.

To find a tensor only the two ends of its archive are read, and only when the tensor is wanted.
"""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any, BinaryIO, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.dcp.outlines import Ends, located
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.sources import File, Memory, Stretch, Unpacked, all_of
from holdfast.formats.stored import Stored
from holdfast.ondisk import dtypes
from holdfast.storage.local import disk
from holdfast.storage.place import Place

MAX_VALUE = 1 << 30
"""More than any compressed object unpacks to."""

_MAX_RATIO = 1 << 16
"""How many bytes one packed byte may stand for; Zstandard's blocks of equal bytes reach half of it."""

_SMALL = 1 << 20
"""Larger objects are read where they lie: most of them are tensors."""

_RUN = 8 << 20
"""Objects that follow each other in a file are read together up to this many bytes."""

_READ = 1 << 20


class Entry(NamedTuple):
    """Where an entry lies, and the transforms it was written through. ``key`` names it in errors."""

    key: str
    source: File
    begin: int
    nbytes: int
    transforms: tuple[str, ...]


def chunk(entry: Entry, dtype: str, shape: tuple[int, ...]) -> Stretch:
    """The bytes of the tensor that an entry holds, unread."""
    tensor = _Tensor(entry, dtype, shape)
    if tensor.nbytes > (_MAX_RATIO if entry.transforms else 1) * entry.nbytes:
        raise Damaged(
            f"{entry.source.path}: {entry.key} is said to have {tensor.nbytes} bytes in an entry of {entry.nbytes}"
        )
    if entry.transforms:
        return all_of(Unpacked(entry.source.path, tensor.nbytes, tensor.unpack))
    return _Chunk(entry.source, entry.begin, tensor.nbytes, tensor=tensor, skip=0)


@dataclass(eq=False)
class _Tensor:
    """An entry that should hold a tensor of this type and shape."""

    entry: Entry
    dtype: str
    shape: tuple[int, ...]
    _stretch: Stretch | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    def stretch(self) -> Stretch:
        """Where the tensor's bytes are, row-major. Raises Damaged if the archive holds anything else."""
        if self._stretch is None:  # two threads that look for it get the same
            _, source, begin, nbytes, _ = self.entry
            ends = Ends(source, begin, nbytes)
            kind = (self.dtype, self.shape, nbytes)
            self._stretch = located(kind, ends, lambda: self.tensor_in(Stretch(ends, begin, nbytes)))
        return self._stretch

    def unpack(self, target: BinaryIO) -> None:
        """Write the tensor's bytes, out of the transform and the archive around it."""
        with tempfile.TemporaryFile(prefix="holdfast-") as scratch:
            # Around its tensor an archive has a few hundred bytes.
            total = _unpack(self.entry, self.nbytes + (1 << 20), scratch)
            scratch.flush()
            stretch = self.tensor_in(all_of(_Nameless(self.entry.source.path, total, scratch)))
            for begin in range(0, self.nbytes, _RUN):
                target.write(stretch.read(begin, min(_RUN, self.nbytes - begin)))

    def tensor_in(self, archive: Stretch) -> Stretch:
        tensor = load_file(archive)
        if not isinstance(tensor, Stored) or (tensor.dtype, tensor.shape) != (self.dtype, self.shape):
            there = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, Stored) else "no tensor"
            raise Damaged(
                f"{archive.source.path}: the entry of {self.entry.key} at byte {self.entry.begin} should hold "
                f"{self.dtype} {list(self.shape)}, but there is {there}: the file is not the one that the metadata "
                "describes"
            )
        ((_, stretch),) = tensor.pieces
        return stretch


@dataclass(frozen=True)
class _Chunk(Stretch):
    """Bytes of an entry's tensor, from ``skip`` on; ``begin`` is only where the entry begins."""

    tensor: _Tensor = field(kw_only=True)
    skip: int = field(kw_only=True)

    def part(self, begin: int, nbytes: int) -> Stretch:
        super().part(begin, nbytes)  # its checks
        return _Chunk(self.source, self.begin, nbytes, tensor=self.tensor, skip=self.skip + begin)

    def located(self) -> Stretch:
        return self.tensor.stretch().part(self.skip, self.nbytes)


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


def blobs(entries: Iterable[Entry]) -> dict[Entry, bytes]:
    """The bytes of entries with small objects; neighbours are read together."""
    data: dict[Entry, bytes] = {}
    plain = []
    for entry in entries:
        if entry.transforms:
            target = io.BytesIO()
            _unpack(entry, MAX_VALUE, target)
            data[entry] = target.getvalue()
        elif entry.nbytes <= _SMALL:
            plain.append(entry)
    plain.sort(key=lambda entry: (str(entry.source.path), entry.begin))
    at = 0
    while at < len(plain):
        first, end, stop = plain[at], plain[at].begin + plain[at].nbytes, at + 1
        while stop < len(plain) and plain[stop].source is first.source and plain[stop].begin == end:
            if end + plain[stop].nbytes - first.begin > _RUN:
                break
            end, stop = end + plain[stop].nbytes, stop + 1
        run = all_of(first.source).read(first.begin, end - first.begin)
        for entry in plain[at:stop]:
            data[entry] = run[entry.begin - first.begin :][: entry.nbytes]
        at = stop
    return data


def value(entry: Entry, data: bytes | None, known: dict[bytes, Any]) -> Any:
    """The object in an entry; tensors in a large one stay unread. ``data``: its bytes, if `blobs` has read them.

    Thousands of hyperparameters are the same few archives: ``known`` keeps what the plain ones hold.
    """
    if data is not None and data in known:
        return known[data]
    source = entry.source.path
    archive = Stretch(entry.source, entry.begin, entry.nbytes) if data is None else all_of(Memory(source, data))
    try:
        content = load_file(archive)
    except Damaged as error:
        raise Damaged(f"{entry.key}, at byte {entry.begin}: {error}") from None
    if data is not None and isinstance(content, (bool, int, float, str, type(None))):
        known[data] = content
    return content


def _unpack(entry: Entry, limit: int, target: BinaryIO) -> int:
    """Undo the transform of an entry; how many bytes came out. Raises Damaged if they are more than ``limit``."""
    path, key = entry.source.path, entry.key
    name, _, version = entry.transforms[0].partition("/")
    if len(entry.transforms) > 1 or name != "stream.zstd" or version.partition(".")[0] != "1":
        raise Unsupported(
            f"{path}: {key} was written through {', '.join(entry.transforms)}, extensions that holdfast does not know; "
            "load it with what wrote it and save it again without extensions"
        )
    try:
        zstandard, written = importlib.import_module("zstandard"), 0
    except ImportError:
        raise Unsupported(f"{path} is packed by Zstandard: pip install 'holdfast-torch[zstd]', or unpack it") from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(_Packed(entry), read_size=_READ) as stream:
            while piece := stream.read(_READ):
                written += len(piece)
                if written > limit:
                    raise Damaged(f"{path}: {key} unpacks to more than the {limit} bytes that it can have")
                target.write(piece)
    except zstandard.ZstdError as error:
        raise Damaged(f"{path}: {key} is no valid Zstandard stream: {error}") from None
    return written


class _Packed:
    """The bytes of an entry as a file to read from."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.at = entry, 0

    def read(self, nbytes: int) -> bytes:
        data = self.entry.source.read(self.entry.begin + self.at, min(nbytes, self.entry.nbytes - self.at))
        self.at += len(data)
        return data
