"""Where foreign bytes lie: a file, memory, or what must be unpacked first; and stretches of them."""

from __future__ import annotations

import io
import os
import stat
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from holdfast.errors import Damaged, HoldfastError, StorageError
from holdfast.read.source import Descriptors
from holdfast.storage.local import disk
from holdfast.storage.naming import naming, naming_unless_missing
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace

KEPT_FILES, KEPT_BYTES = 64, 8 << 30
"""How much stays unpacked; what was read longer ago is unpacked again when it is asked for."""


class Source(Protocol):
    """Bytes that can be opened; ``path`` names them in errors, ``nbytes`` is their length."""

    @property
    def path(self) -> Place: ...

    @property
    def nbytes(self) -> int: ...

    def open(self) -> Descriptors | StorePlace:
        """Descriptors, cached and (where it can be had) direct, that the caller closes; or the place in a store."""

    def read(self, begin: int, nbytes: int) -> bytes:
        """Bytes of it; fewer only where it ends before."""


@dataclass(frozen=True)
class File:
    """A file as it lies on disk or in a store. Equal to any other of the same path."""

    path: Place
    nbytes: int = field(compare=False)

    @property
    def place(self) -> StorePlace | None:
        """Where it lies in a store, if it does."""
        return as_store(self.path) if self.path.is_remote else None

    def open(self) -> Descriptors | StorePlace:
        if self.path.is_remote:
            return as_store(self.path)
        try:
            return self.path.open_to_read()
        except FileNotFoundError:
            raise self._gone() from None

    def read(self, begin: int, nbytes: int) -> bytes:
        try:
            with naming_unless_missing(self.path, "read"):
                if self.path.is_remote:
                    place = as_store(self.path)
                    return bytes(place.store.get(place.key, begin, begin + nbytes).data)
                fd = disk.open_regular(self.path)
                try:
                    return _read(fd, self.path, begin, nbytes)
                finally:
                    os.close(fd)
        except FileNotFoundError:
            raise self._gone() from None

    def _gone(self) -> Damaged:
        error = Damaged(f"{self.path} is missing; bring it back from a copy")
        error.file = str(self.path)
        return error


@contextmanager
def opened(source: Source) -> Iterator[Descriptors | StorePlace]:
    """What to read a source from; descriptors are closed at the end."""
    handle = source.open()
    try:
        yield handle
    finally:
        for descriptor in handle if isinstance(handle, tuple) else ():
            if descriptor is not None:
                os.close(descriptor)


def file(path: Place) -> File:
    """The file at ``path``. Raises FileNotFoundError, StorageError (for what is no regular file, too)."""
    with naming_unless_missing(path, "open"):
        status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
        raise StorageError(f"cannot open {path}: it is no regular file")
    return File(path, status.st_size)


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes that the format keeps inside of its metadata, or that follow from it (a step counter, say)."""

    path: Place
    data: bytes = field(repr=False)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def open(self) -> Descriptors:
        with naming(self.path, "hold in memory"), _Scratch(os.memfd_create("holdfast"), self.nbytes, self.path) as made:
            made.write(self.data)
            return os.dup(made.fileno()), None

    def read(self, begin: int, nbytes: int) -> bytes:
        return self.data[begin : begin + nbytes]


class _Scratch(io.FileIO):
    """A file without a name that takes ``limit`` bytes at most."""

    def __init__(self, fd: int, limit: int, path: Place) -> None:
        super().__init__(fd, "r+b")
        self.limit, self.path = limit, path

    def write(self, data: Any) -> int:
        """Write all of it, unlike a plain unbuffered file. Raises Damaged for more than it may take."""
        view = memoryview(data).cast("B")
        if self.tell() + len(view) > self.limit:
            raise Damaged(f"{self.path} unpacks to more than the {self.limit} bytes that it is said to hold")
        at = 0
        while at < len(view):
            at += super().write(view[at:])
        return at

    def __del__(self) -> None:
        self.close()


@dataclass(eq=False)
class Unpacked:
    """Bytes that are compressed or scattered where they lie: unpacked into a nameless file when they are read.

    ``unpack`` writes all ``nbytes`` to the file that it is given, each time the same.
    """

    path: Place
    nbytes: int
    unpack: Callable[[BinaryIO], None]
    _file: _Scratch | None = field(default=None, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def open(self) -> Descriptors:
        with self._lock:
            if self._file is None:
                self._file = self._unpacked()
            cached = os.dup(self._file.fileno())
        _keep(self)
        return cached, None

    def _unpacked(self) -> _Scratch:
        try:
            # Without a name it cannot outlive this process, whatever becomes of it.
            with tempfile.TemporaryFile(prefix="holdfast-", buffering=0) as nameless:
                made = _Scratch(os.dup(nameless.fileno()), self.nbytes, self.path)
            try:
                self.unpack(cast(BinaryIO, made))
                written = os.fstat(made.fileno()).st_size
                if written != self.nbytes:
                    raise Damaged(f"{self.path}: unpacked to {written} bytes instead of {self.nbytes}")
            except BaseException:
                made.close()
                raise
        except HoldfastError:
            raise
        except OSError as error:
            failed = StorageError(
                f"cannot unpack {self.path} into {tempfile.gettempdir()}: {error.strerror or error}. It takes "
                f"{self.nbytes} bytes there: free some, or set TMPDIR to a folder that has them"
            )
            failed.errno, failed.file = error.errno, str(self.path)
            raise failed from error
        return made

    def close(self) -> None:
        """Give the unpacked bytes up, unless they are being unpacked; they come again when they are asked for."""
        if self._lock.acquire(blocking=False):
            try:
                if self._file is not None:
                    self._file.close()
                    self._file = None
            finally:
                self._lock.release()

    def read(self, begin: int, nbytes: int) -> bytes:
        cached, _ = self.open()
        try:
            return _read(cached, self.path, begin, nbytes)
        finally:
            os.close(cached)


_recent: list[weakref.ref[Unpacked]] = []
_recent_lock = threading.Lock()


def _keep(latest: Unpacked) -> None:
    """Note what was read last, and close what was read longest ago: thousands would use up descriptors and disk."""
    with _recent_lock:
        alive = [other for ref in _recent if (other := ref()) is not None and other is not latest]
        alive.append(latest)
        total, surplus = sum(one.nbytes for one in alive), 0
        while surplus < len(alive) - 1 and (len(alive) - surplus > KEPT_FILES or total > KEPT_BYTES):
            total -= alive[surplus].nbytes
            surplus += 1
        _recent[:] = map(weakref.ref, alive[surplus:])
    for old in alive[:surplus]:
        old.close()


def _read(fd: int, path: Place, begin: int, nbytes: int) -> bytes:
    parts = []
    while nbytes and (got := disk.read_bytes(fd, min(nbytes, 1 << 30), begin, path)):
        parts.append(got)
        begin, nbytes = begin + len(got), nbytes - len(got)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Member(NamedTuple):
    """A member of an archive with the sum that the archive keeps of it."""

    begin: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Stretch:
    """Bytes ``begin:begin + nbytes`` of a source. ``member``: the archive member around them, if its sum is known."""

    source: Source
    begin: int
    nbytes: int
    member: Member | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.begin < 0 or self.nbytes < 0 or self.begin + self.nbytes > self.source.nbytes:
            raise Damaged(
                f"{self.source.path} has {self.source.nbytes} bytes, but is said to hold something at "
                f"{self.begin}:{self.begin + self.nbytes}: it is truncated or was altered"
            )

    def part(self, begin: int, nbytes: int) -> Stretch:
        """A part of it, ``begin`` counted from its start. Raises Damaged if that lies outside."""
        if begin < 0 or nbytes < 0 or begin + nbytes > self.nbytes:
            raise Damaged(
                f"{self.source.path}: bytes {begin}:{begin + nbytes} of a stretch of {self.nbytes} were asked for: "
                "the file is truncated or contradicts itself"
            )
        return Stretch(self.source, self.begin + begin, nbytes, self.member)

    def located(self) -> Stretch:
        """Itself; a subclass that knows its place only roughly looks for it here, once its bytes are wanted."""
        return self

    def read(self, begin: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes of it, all by default. Raises Damaged if the source ends before."""
        part = self.part(begin, self.nbytes - begin if nbytes is None else nbytes).located()
        data = part.source.read(part.begin, part.nbytes)
        if len(data) < part.nbytes:
            raise Damaged(f"{self.source.path} ends at byte {part.begin + len(data)}")
        return data


def all_of(source: Source) -> Stretch:
    """The whole of a source."""
    return Stretch(source, 0, source.nbytes)
