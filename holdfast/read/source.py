"""Where the reader takes bytes from: an open file of a local disk, or an object of a store.

`read` makes one for each file that it reads. Never knows which bytes are wanted, nor whether they are right.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from holdfast.buffers.memory import address_of, move, thread_buffer
from holdfast.errors import Damaged
from holdfast.read.ranges import GAP, SPAN
from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.local.large import is_cached
from holdfast.storage.naming import naming, naming_unless_missing
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.cached import Cached

Descriptors = tuple[int, int | None]
"""Of one open local file: through the page cache, and directly (None where that cannot be had)."""

See = Callable[[memoryview], object]
"""What is called with bytes while they are in the processor's cache: the ``update`` of a sum."""

MOST_GAP = 512 << 10
"""However slow a store answers, ranges further apart than this are asked for one by one."""

STRIDE = 512 << 10
"""Bytes that a load copies and sums at a time: they and their copy stay in a core's own cache.

Measured with 2 MiB of cache per core: 1 MiB took 1.03 to 1.08 times as long, 2 MiB 1.14 to 1.23 times. On another
machine, 512 KiB and 2 MiB took the same."""

PART = 2 * STRIDE
"""Bytes that verifying reads and sums at a time, always into the same memory.

On the first machine half of it took 1.03 times as long, twice as much 1.05 times. On the other one half took 1.2 times
as long, and 1 to 3 MiB took the same."""


@dataclass
class ReadStats:
    """Bytes: ``needed`` by the boxes, ``read`` from storage, ``unverified`` of those needed; and ``requests``."""

    needed: int = 0
    read: int = 0
    unverified: int = 0
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int) -> None:
        """Count one request that brought so many bytes."""
        with self._lock:
            self.read += read
            self.requests += 1


class Fetched(NamedTuple):
    """Bytes that were read, and their address; ``owner`` keeps them alive."""

    view: memoryview
    address: int
    owner: object


class Source(Protocol):
    """One file to read from, by several threads at once."""

    @property
    def path(self) -> Place: ...

    @property
    def gap(self) -> int:
        """Ranges no further apart than this are read together."""

    @property
    def tries(self) -> int:
        """How often a block whose sum is wrong is read before it counts as damaged."""

    @property
    def straight(self) -> bool:
        """Whether `read` saves a copy."""

    def is_cached(self, begin: int, nbytes: int) -> bool:
        """Whether memory has this stretch already, so that many short reads cost no more than a long one."""

    def fetch(self, begin: int, nbytes: int, *, cached: bool | None = None) -> Fetched:
        """A stretch of the file, in memory that this thread may use until it fetches again.

        ``cached``: what `is_cached` said of it; it is asked by default.
        """

    def parts(self, begin: int, nbytes: int) -> Iterator[memoryview]:
        """A stretch that is cached, a part at a time, each until the next one comes."""

    def forget(self, begin: int, nbytes: int) -> None:
        """A stretch had a wrong sum: let it come from the store itself when it is fetched again."""

    def read(self, begin: int, memory: memoryview, address: int, see: See | None = None) -> None:
        """Fill ``memory`` (at ``address``) from the file. Raises Damaged if it ends before, StorageError.

        ``see`` is called with each part in turn, as soon as it is there; together the parts are all of ``memory``.
        """


def source_of(path: Place, opened: Descriptors | StorePlace, stats: ReadStats) -> Source:
    """What reads an opened file; ``path`` names it in errors."""
    if not isinstance(opened, tuple):
        return _Object(path, opened, stats, _paces.setdefault(opened.store.url, _Pace()))
    return _OpenFile(path, *opened, stats)


def damaged(path: Place, what: str, repairs: Place | None = None) -> Damaged:
    """The error of a file that is not what was written. ``repairs``: the folder, if it is a checkpoint of ours."""
    how = "" if repairs is None else f" (`holdfast repair {repairs} --from COPY`)"
    error = Damaged(f"{path} {what}; restore another step, or bring this file back from a copy{how}")
    error.file = str(path)
    return error


def forget(place: StorePlace, begin: int, nbytes: int) -> None:
    """Bytes had a wrong sum: let them come from the store itself when they are asked for again."""
    if isinstance(place.store, Cached):
        place.store.forget(place.key, begin, begin + nbytes)


@dataclass(frozen=True)
class _OpenFile:
    """A local file: pages that are cached from there, cold ones directly."""

    path: Place
    cached: int
    direct: int | None
    stats: ReadStats
    gap: int = GAP
    tries: int = 1
    straight: bool = True

    def is_cached(self, begin: int, nbytes: int) -> bool:
        return self.direct is None or is_cached(self.cached, begin, nbytes)

    def fetch(self, begin: int, nbytes: int, *, cached: bool | None = None) -> Fetched:
        skip = begin % SECTOR
        room = -(-(skip + nbytes) // SECTOR) * SECTOR
        gathered, at = thread_buffer("gather", room), 0
        view, address = gathered.view[skip : skip + nbytes], gathered.address + skip
        if self.direct is not None and not (self.is_cached(begin, nbytes) if cached is None else cached):
            with naming(self.path, "read"):  # whole sectors, so that the disk fills this memory and no other
                got = disk.read(self.direct, gathered.view[:room], begin - skip, self.path)
            self.stats.add(got)
            at = max(min(got - skip, nbytes), 0)
            if at < nbytes:
                self.read(begin + at, view[at:], address + at)
        else:
            with naming(self.path, "read"):
                self._through_cache(begin, view)
        return Fetched(view, address, gathered)

    def parts(self, begin: int, nbytes: int) -> Iterator[memoryview]:
        memory = thread_buffer("gather", PART).view[:PART]
        with naming(self.path, "read"):
            for at in range(0, nbytes, PART):
                part = memory if nbytes - at >= PART else memory[: nbytes - at]
                self._through_cache(begin + at, part)
                yield part

    def _through_cache(self, begin: int, memory: memoryview, see: See | None = None) -> None:
        # We rejected mapping the file: it gained nothing (measured), and if the file is cut meanwhile the process dies.
        at, total, most = 0, len(memory), len(memory) if see is None else STRIDE
        while at < total:
            part = memory[at : at + most]
            got = disk.read(self.cached, part, begin + at, self.path)
            if not got:
                raise damaged(self.path, f"ends at byte {begin + at}")
            self.stats.add(got)
            if see is not None:
                see(part[:got])
            at += got

    def forget(self, begin: int, nbytes: int) -> None:
        """A disk has nothing else to give."""

    def read(self, begin: int, memory: memoryview, address: int, see: See | None = None) -> None:
        total, at = len(memory), 0
        direct = None if self.is_cached(begin, total) else self.direct
        with naming(self.path, "read"):
            while at < total and direct is not None:
                low = (begin + at) // SECTOR * SECTOR
                high = -(-min(begin + total, low + SPAN) // SECTOR) * SECTOR
                bounce = thread_buffer("bounce", high - low)
                got = disk.read(direct, bounce.view[: high - low], low, self.path)
                skip = begin + at - low
                useful = min(got - skip, total - at)
                if useful <= 0:
                    break
                for done in range(0, useful, STRIDE):
                    n = min(STRIDE, useful - done)
                    move(address + at + done, bounce.address + skip + done, n)
                    if see is not None:
                        see(memory[at + done : at + done + n])
                self.stats.add(got)
                at += useful
            self._through_cache(begin + at, memory[at:], see)


class _Pace:
    """How a store answers: seconds until the first byte, and bytes a second after it, of one request."""

    def __init__(self) -> None:
        self._latency, self._rate = 0.0, 0.0

    def saw(self, nbytes: int, seconds: float) -> None:
        """Learn from one request; the newest count most."""
        if nbytes <= MOST_GAP:
            self._latency = seconds if not self._latency else 0.8 * self._latency + 0.2 * seconds
        elif seconds > self._latency:
            rate = nbytes / (seconds - self._latency)
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate

    @property
    def gap(self) -> int:
        """Bytes that come in the time of another request."""
        return int(min(max(self._latency * self._rate, 16 * GAP), MOST_GAP))


_paces: dict[str, _Pace] = {}


@dataclass(frozen=True)
class _Object:
    """An object of a store: each range is a request."""

    path: Place
    place: StorePlace
    stats: ReadStats
    pace: _Pace
    tries: int = 2  # a bit may flip on the way, and only our own sums find it
    straight: bool = False

    @property
    def gap(self) -> int:
        return self.pace.gap

    def is_cached(self, begin: int, nbytes: int) -> bool:
        """A store's answer is in memory as a whole."""
        return False

    def fetch(self, begin: int, nbytes: int, *, cached: bool | None = None) -> Fetched:
        began = time.monotonic()
        try:
            with naming_unless_missing(self.path, "read"):
                got = self.place.store.get(self.place.key, begin, begin + nbytes)
        except FileNotFoundError:
            raise damaged(self.path, "is missing") from None
        self.pace.saw(nbytes, time.monotonic() - began)
        view = memoryview(got.data)
        self.stats.add(len(view))
        if len(view) != nbytes:
            raise damaged(self.path, f"ends at byte {begin + len(view)}")
        return Fetched(view, address_of(got.data), got.data)

    def parts(self, begin: int, nbytes: int) -> Iterator[memoryview]:
        yield self.fetch(begin, nbytes).view

    def forget(self, begin: int, nbytes: int) -> None:
        forget(self.place, begin, nbytes)

    def read(self, begin: int, memory: memoryview, address: int, see: See | None = None) -> None:
        fetched = self.fetch(begin, len(memory))
        move(address, fetched.address, len(memory))
        if see is not None:
            see(memory)
