"""Signs of life and of progress: a rank that works for long writes its progress to the store, and others look.

`Call` in `ranks` and the uploader write signs (`at_work`); a rank that waits for others has a `Watch`. Never writes for
work that ends within an interval, and never decides how long a rank is waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.events import log

MOST, LEAST = 30.0, 0.02
"""Seconds between two signs of one rank, at the most and at the least; an eighth of the deadline in between."""

LOOK = 1.5
"""Seconds between two looks at the signs of others, at the most."""

_NOTHING = b"?"  # never a sign
_IDLE = 1.0  # seconds without work after which the thread that writes signs ends


class Sign(msgspec.Struct, array_like=True, frozen=True):
    """``beats`` counts signs, ``moves`` any progress, and ``done`` the bytes of it."""

    beats: int
    moves: int
    done: int


def interval(deadline: float) -> float:
    """Seconds between two signs of a rank at work."""
    return min(max(deadline / 8, LEAST), MOST)


def look_interval(deadline: float) -> float:
    """Seconds between two looks of a rank that waits."""
    return min(deadline / 8, LOOK)


def key_of(rank: int) -> str:
    return f"heartbeat/{rank}"


@dataclass
class Work:
    """Work of this process that others may come to wait for.

    ``done()`` counts bytes; `tick` counts progress that moves no byte, such as a wait that will end.
    """

    store: Any
    key: str
    pause: float
    done: Callable[[], int]
    ticks: int = 0
    due: float = field(init=False)
    _beats: int = 0
    _ended: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.due = time.monotonic() + self.pause

    def tick(self) -> None:
        """Count this call as progress."""
        self.ticks += 1

    def write_sign(self) -> None:
        """Write a sign, unless the work has ended."""
        with self._lock:
            if self._ended:
                return
            done = self.done()
            self._beats += 1
            self.store.set(self.key, msgspec.msgpack.encode(Sign(self._beats, self.ticks + done, done)))

    def stop(self) -> None:
        """The work has ended: no sign of it is written any more, and none stays in the store. Idempotent."""
        with self._lock:
            ended, self._ended = self._ended, True
            if self._beats and not ended:
                with suppress(RuntimeError):  # the store is gone: the next round says so
                    self.store.delete_key(self.key)
        _writer.forget(self)


class _Writer:
    """The one thread of a process that writes signs, so that a phase costs no thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._works: dict[int, Work] = {}
        self._wakes = float("inf")  # when the thread looks again by itself
        self._thread: threading.Thread | None = None

    def add(self, work: Work) -> None:
        with self._changed:
            self._works[id(work)] = work
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
                self._thread.start()
            elif work.due < self._wakes:  # seldom: it sleeps until a phase that has ended meanwhile would have had to
                self._changed.notify()

    def forget(self, work: Work) -> None:
        with self._changed:
            self._works.pop(id(work), None)

    def _run(self) -> None:
        while True:
            with self._changed:
                # A daemon, so an interpreter that ends does not wait; without work for a while it ends itself.
                idle = not self._works
                self._wakes = min((work.due for work in self._works.values()), default=time.monotonic() + _IDLE)
                left = self._wakes - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                    if idle and not self._works:
                        self._thread = None
                        return
                    continue
                due = [work for work in self._works.values() if work.due <= self._wakes]
            for work in due:
                work.due = time.monotonic() + work.pause
                try:
                    work.write_sign()
                except BaseException as error:  # noqa: BLE001 - the thread serves all work of this process. Others
                    # then see no sign of this rank, and this rank meets the same store when its work is done.
                    log.debug("no sign of life can be written: %s", error)


_writer = _Writer()


def _after_fork() -> None:
    global _writer
    _writer = _Writer()  # the thread of the parent is not here, and its lock may be held for ever


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def at_work(store: Any, rank: int, deadline: float, done: Callable[[], int]) -> Iterator[Work]:
    """While the block is at work, write signs under the rank's key; the first one after an interval."""
    work = Work(store, key_of(rank), interval(deadline), done)
    if store is None:
        yield work
        return
    _writer.add(work)
    try:
        yield work
    finally:
        work.stop()


@dataclass
class _Seen:
    since: float  # when it was last seen to make progress; at first, when somebody began to wait for it
    sign: Sign | None = None
    alive: float | None = None  # when its signs were last seen to change


@dataclass
class Watch:
    """What one rank has seen of the signs of others while it waits for them. ``store`` is None for a lone process."""

    store: Any
    deadline: float
    _seen: dict[int, _Seen] = field(default_factory=dict)

    def expect(self, ranks: Iterable[int], since: float) -> None:
        """Wait for these ranks since that moment. Nothing changes for ranks that are waited for already."""
        for rank in ranks:
            self._seen.setdefault(rank, _Seen(since))

    def moved(self, rank: int, now: float) -> None:
        """The rank has made progress that is seen elsewhere."""
        self._seen.setdefault(rank, _Seen(now)).since = now

    def forget(self, ranks: Iterable[int] | None = None) -> None:
        """They have come (all of them, if none is given) and are not waited for any more."""
        for rank in list(self._seen) if ranks is None else ranks:
            self._seen.pop(rank, None)

    def look(self, ranks: Iterable[int]) -> None:
        """Look at the signs of these ranks, which are expected."""
        for rank in ranks:
            data = bytes(self.store.compare_set(key_of(rank), _NOTHING, _NOTHING))
            if data == _NOTHING:
                continue
            try:
                sign = msgspec.msgpack.decode(data, type=Sign)
            except msgspec.MsgspecError:  # of another version of holdfast, which its message will show
                continue
            now, seen = time.monotonic(), self._seen[rank]
            # The age of the first sign is not known: it may be of this moment.
            if sign.moves != (seen.sign.moves if seen.sign else 0):
                seen.since = now
            if seen.sign is not None and sign != seen.sign:
                seen.alive = now
            seen.sign = sign

    def silent(self, rank: int, now: float) -> float:
        """Seconds since a rank that is expected was last seen to make progress."""
        return now - self._seen[rank].since if rank in self._seen else 0.0

    def known(self, rank: int) -> bool:
        return rank in self._seen

    def progress(self, rank: int) -> str:
        """How far a rank was when it was last seen, in words; empty if it never gave a sign."""
        seen = self._seen.get(rank)
        if seen is None or seen.sign is None:
            return ""
        return f"{amount(seen.sign.done)} done" if seen.sign.done else "nothing done yet"

    def described(self, rank: int) -> str:
        """`progress` for an error, and whether signs go on; empty if there never was one."""
        progress, seen = self.progress(rank), self._seen.get(rank)
        if not progress or seen is None:
            return ""
        alive = seen.alive is not None and time.monotonic() - seen.alive < self.deadline / 2
        return f" ({progress}, {'alive but stuck: its storage may hang' if alive else 'and no sign of life since'})"


@dataclass
class Vigil:
    """A wait for others inside of a phase, watched: `begin`, `look` again and again, `end` once they have come.

    If they do not come, what was seen stays for the next round. ``tick`` shows that this rank is not stuck: it waits
    for others, and not for ever.
    """

    watch: Watch
    others: list[int]
    tick: Callable[[], None]
    _began: float = 0.0
    _next: float = 0.0
    _looked: bool = False

    def begin(self) -> None:
        self._began = time.monotonic()
        self._next = self._began + look_interval(self.watch.deadline)

    def look(self) -> None:
        self.tick()
        if time.monotonic() > self._next:
            self.expect()
            with suppress(RuntimeError):  # the store is gone: the next round says so
                self.watch.look(self.others)
            self._next = time.monotonic() + look_interval(self.watch.deadline)

    def in_vain(self) -> bool:
        """Whether one of the others has made no progress for as long as the deadline says."""
        now = time.monotonic()
        self.expect()
        return any(self.watch.silent(rank, now) > self.watch.deadline for rank in self.others)

    def expect(self) -> None:
        """Count the silence of the others from the beginning of this wait."""
        if not self._looked:
            self._looked = True
            self.watch.expect(self.others, self._began)

    def end(self) -> None:
        if self._looked:
            self.watch.forget(self.others)
            self._looked = False


def amount(nbytes: int) -> str:
    """Bytes as people say them."""
    size, units = float(nbytes), ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{nbytes} bytes" if units[0] == "bytes" else f"{size:.1f} {units[0]}"
