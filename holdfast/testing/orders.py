"""Which calls on a disk fail or lie or are slow, and how: hooks of `storage/local/disk.py`, also in the writer process.

They count in memory that both processes share. An environment variable would not reach a writer that runs already.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

CHANGING = (
    "create", "write", "sync", "cut", "reserve", "link", "replace", "rename", "exchange", "delete", "make folder",
    "remove folder", "sync folder",
)  # fmt: skip
LOOKING = ("open", "read", "list", "stat")
VERBS = (*CHANGING, *LOOKING)
GROUPS = {
    "any": VERBS,
    "change": CHANGING,
    "look": LOOKING,
    "durable": ("sync", "sync folder"),
    "data": ("create", "reserve", "write", "cut", "sync"),
    "names": ("link", "replace", "rename", "exchange", "delete", "make folder", "remove folder", "sync folder"),
}
"""Names of several verbs."""

SECTOR = 4096

JOURNAL = ".journal"
"""The folder of a run's journal (`storage.JOURNAL`), which a thread of its own writes whenever it comes to it."""

_HEAD = 8  # bytes of a tally before its lines: how many calls there were


class Asked(Protocol):
    """A call on the disk, as `storage/local/disk.py` describes it."""

    @property
    def verb(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def target(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def data(self) -> Any: ...


class Hit(NamedTuple):
    """A call that an order was about: the ``number``-th of those that fit it (the first is 1), in process ``pid``."""

    verb: str
    path: str
    offset: int
    number: int
    pid: int


@dataclass(frozen=True)
class Order:
    """What becomes of the calls from the ``nth`` on, ``times`` of them (0: of all), among those that fit.

    ``what``: "count" nothing; "fail" with ``error``, and with ``done`` after the call was carried out all the same;
    "tear" a write in its middle, and fail; "shorten" it, and say so; "flip" a bit of what is written or was read;
    "slow" down. A call fits by its verb, by lying ``under`` a path, and by the rank that makes it. Calls on a run's
    journal fit only if ``under`` lies in one: they come between the others at any moment, and which is the nth would
    be chance.
    """

    what: str
    verbs: tuple[str, ...]
    nth: int = 1
    times: int = 1
    under: str = ""
    rank: int | None = None
    error: int = errno.EIO
    done: bool = False
    seconds: float = 0.0
    rate: float = 0.0
    seed: int = 0

    def fits(self, call: Asked) -> bool:
        """Whether a call is one of those that are counted, by any rank."""
        if call.verb not in self.verbs or (_is_of_journal(call.path) and not _is_of_journal(self.under)):
            return False
        return any(_is_under(path, self.under) for path in (call.path, call.target) if path)

    def hits(self, number: int) -> bool:
        return number >= self.nth and (self.times == 0 or number < self.nth + self.times)


def verbs_of(asked: str | Collection[str]) -> tuple[str, ...]:
    """The verbs that a word, or several, stand for. Raises ValueError for one that there is not."""
    words = [asked] if isinstance(asked, str) else list(asked)
    for word in words:
        if word not in VERBS and word not in GROUPS:
            raise ValueError(f"{word!r} is no call on a disk: take of {', '.join(VERBS)}, or {', '.join(GROUPS)}")
    return tuple(dict.fromkeys(verb for word in words for verb in GROUPS.get(word, (word,))))


class Tally:
    """How many calls fitted an order, and which it hit: in memory that the writer process, and forks, count in too."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("holdfast-tally") if fd is None else fd
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1

    def take(self, call: Asked, hits: Callable[[int], bool]) -> int | None:
        """Count one call more, and note it if it is hit: its number then. None for all others, and once closed."""
        with self._alone():
            if self.fd < 0:  # a call of another thread, which was on its way when the order ended
                return None
            number = self._count() + 1
            os.pwrite(self.fd, number.to_bytes(_HEAD, "little"), 0)
            if not hits(number):
                return None
            line = json.dumps([call.verb, call.path, call.offset, number, os.getpid()]).encode() + b"\n"
            os.pwrite(self.fd, line, max(os.fstat(self.fd).st_size, _HEAD))
            return number

    @property
    def count(self) -> int:
        with self._alone():
            return self._count()

    @property
    def hits(self) -> list[Hit]:
        with self._alone():
            text = os.pread(self.fd, os.fstat(self.fd).st_size, _HEAD)
        return [Hit(*json.loads(line)) for line in text.splitlines()]

    def _count(self) -> int:
        return int.from_bytes(os.pread(self.fd, _HEAD, 0), "little")

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with self._lock:  # among threads; among processes the lock of the file
            if self.fd < 0:
                yield
                return
            fcntl.lockf(self.fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)


class Ordered:
    """An order as a hook of the disk, in this process."""

    def __init__(self, order: Order, tally: Tally, rank: Callable[[], int]) -> None:
        self.order, self.tally, self._rank = order, tally, rank

    def __call__(self, call: Asked, do: Callable[[], Any]) -> Any:
        order = self.order
        if not order.fits(call) or (order.rank is not None and order.rank != self._rank()):
            return do()
        if self.tally.take(call, order.hits) is None:
            return do()
        return _ACTS[order.what](order, call, do)

    def travel(self) -> tuple[str, dict[str, Any], list[int]]:
        """What makes the same hook in another process: the module whose `arrive` does, its argument, descriptors."""
        return __name__, {**asdict(self.order), "here": self._rank()}, [self.tally.fd]

    def close(self) -> None:
        self.tally.close()


def arrive(order: dict[str, Any], fds: list[int]) -> Ordered:
    """The hook that `Ordered.travel` describes, in the process that it was sent to."""
    here = order.pop("here")
    return Ordered(Order(**{**order, "verbs": tuple(order["verbs"])}), Tally(fds[0]), lambda: here)


def _is_under(path: str, under: str) -> bool:
    path = os.path.abspath(path)
    return not under or path == under or path.startswith(f"{under.rstrip('/')}/")


def _is_of_journal(path: str) -> bool:
    return JOURNAL in path.split(os.sep)


def _failure(order: Order, call: Asked) -> OSError:
    return OSError(order.error, os.strerror(order.error), call.path)


def _fail(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    if order.done:
        do()
    raise _failure(order, call)


def _half(call: Asked) -> int:
    """Write the first half of what is to be written; how many bytes that is."""
    part = memoryview(call.data).cast("B")
    # Of whole sectors, whole ones: a disk that is written to directly stops between two of them, if at all.
    part = part[: len(part) // 2 // SECTOR * SECTOR if len(part) % SECTOR == 0 else len(part) // 2]
    # By a descriptor of its own: halves are no whole sectors.
    fd = os.open(call.path, os.O_WRONLY | (os.O_APPEND if call.offset < 0 else 0))
    try:
        return (os.write(fd, part) if call.offset < 0 else os.pwrite(fd, part, call.offset)) if part else 0
    finally:
        os.close(fd)


def _tear(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    _half(call)
    raise _failure(order, call)


def _shorten(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    return _half(call) or do()


def _flip(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    # Files get their length first. Direct writes go on to the end of a sector, and what is too much is cut off again: a
    # bit there would be none of the file.
    length = os.stat(call.path).st_size if call.verb == "write" else 0
    done: int | bytes = do()
    nbytes = done if isinstance(done, int) else len(done)
    if not nbytes:
        return done
    if 0 <= call.offset < length:
        nbytes = min(nbytes, length - call.offset)
    chance = random.Random(order.seed)
    at, bit = chance.randrange(nbytes), 1 << chance.randrange(8)
    if isinstance(done, bytes):
        return done[:at] + bytes([done[at] ^ bit]) + done[at + 1 :]
    if call.verb == "read":
        memoryview(call.data).cast("B")[at] ^= bit
        return done
    fd = os.open(call.path, os.O_RDWR)
    try:
        at += call.offset if call.offset >= 0 else os.fstat(fd).st_size - done
        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ bit]), at)
    finally:
        os.close(fd)
    return done


def _slow(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    nbytes = len(memoryview(call.data).cast("B")) if call.data is not None else 0
    time.sleep(order.seconds + (nbytes / order.rate if order.rate else 0.0))
    return do()


def _count(order: Order, call: Asked, do: Callable[[], Any]) -> Any:
    return do()


_ACTS: dict[str, Callable[[Order, Asked, Callable[[], Any]], Any]] = {
    "count": _count, "fail": _fail, "tear": _tear, "shorten": _shorten, "flip": _flip, "slow": _slow,
}  # fmt: skip
