"""How far this process's clock is from the first rank's: questions and answers over the store, in a thread of its own.

Of the ranks of a host, which have one clock, one asks. Nothing of this happens without a timeline.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from holdfast.events import log
from holdfast.ranks.ranks import Ranks
from holdfast.storage.local import disk

TIMES = 8
"""Questions of a rank, of which the quickest answer counts."""

PATIENCE = 30.0
"""Seconds that a rank asks, or waits for questions: others may come late, or record no timeline."""

ALONE = 0.25
"""Seconds that the first rank waits for the next question of the rank that it answers."""

GRACE = 1.0
"""Seconds that a measurement under way gets to end."""

_NOTHING = b"?"  # never a question or an answer
_BETWEEN = 0.002  # seconds between two looks for a rank that has not begun, twice as long after each,
_SELDOM, _OFTEN = 0.1, 0.02  # but no longer than this on the first rank, and on the others: all look at one store


class Measured(msgspec.Struct, tag="clock", frozen=True):
    """The clock of the part ``to`` shows ``offset`` more than this one, give or take ``error``, at the time ``at``."""

    to: str
    offset: float
    error: float
    at: float


class _Answer(msgspec.Struct, array_like=True):
    part: str
    kind: str
    now: float


class Clocks:
    """Measures this process's clock against the first rank's, and answers the others if it is that itself.

    ``part`` is what it is called in the timeline, ``tell`` takes what was measured, ``kind`` is equal
    for processes that have one clock.
    """

    def __init__(self, part: str, tell: Callable[[Measured], None]) -> None:
        self._part, self._tell, self.kind = part, tell, clock_kind()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def measure(self, ranks: Ranks) -> None:
        """Begin to, for a call of these ranks; not if another measurement is under way."""
        if ranks.store is None or (self._thread is not None and self._thread.is_alive()):
            return
        prefix = f"clock/{ranks.calls}"
        self._thread = threading.Thread(target=self._run, args=(ranks, prefix), name="holdfast-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave the store; a measurement under way may end first."""
        if self._thread is not None:
            self._thread.join(GRACE)
        self._stop.set()
        if self._thread is not None:
            self._thread.join()  # it ends: its waits are short, and the store's own have a deadline

    def _run(self, ranks: Ranks, prefix: str) -> None:
        try:
            store = _own(ranks.store)
            if ranks.first:
                self._answer(store, prefix, ranks.size - 1)
            else:
                self._come(store, prefix)
        except RuntimeError as error:  # the store is gone, and the run with it; the wall clock has to do
            log.debug("no clock could be measured: %s", error)

    def _answer(self, store: Any, prefix: str, others: int) -> None:
        until, pause, asked, kinds = time.monotonic() + PATIENCE, _BETWEEN, 0, {self.kind}
        store.add(f"{prefix}/of/{self.kind}", 1)  # ranks of this clock need not ask
        while time.monotonic() < until and not self._stop.is_set():
            if store.check([f"{prefix}/{asked + 1}/0"]):
                asked += 1
                kinds |= self._answer_one(store, f"{prefix}/{asked}")
                until, pause = time.monotonic() + PATIENCE, _BETWEEN
            elif store.add(f"{prefix}/here", 0) >= others and store.add(f"{prefix}/askers", 0) <= asked:
                break
            else:
                self._stop.wait(pause)
                pause = min(2 * pause, _SELDOM)
        _forget(store, [f"{prefix}/here", f"{prefix}/askers", *(f"{prefix}/of/{kind}" for kind in kinds)])

    def _answer_one(self, store: Any, prefix: str) -> set[str]:
        """The kind of the one that asked, if it was heard."""
        kinds: set[str] = set()
        for number in range(TIMES):
            question, until = f"{prefix}/{number}", time.monotonic() + ALONE
            while (kind := _look(store, question)) is None:
                if time.monotonic() > until or self._stop.is_set():
                    return kinds
            kinds.add(kind.decode())
            now = time.monotonic()
            store.set(f"{question}/answer", msgspec.msgpack.encode(_Answer(self._part, self.kind, now)))
            if kind == self.kind.encode():
                break
        return kinds

    def _come(self, store: Any, prefix: str) -> None:
        """Of the ranks of one clock the first to come asks; askers are numbered, so that none has to be looked for."""
        asks = store.add(f"{prefix}/of/{self.kind}", 1) == 1
        number = store.add(f"{prefix}/askers", 1) if asks else 0
        store.add(f"{prefix}/here", 1)
        if asks and not self._ask(store, f"{prefix}/{number}"):
            _forget(store, [f"{prefix}/here", f"{prefix}/askers", f"{prefix}/of/{self.kind}"])  # no other rank will

    def _ask(self, store: Any, prefix: str) -> bool:
        """Whether there was an answer."""
        best: Measured | None = None
        keys: list[str] = []
        try:
            for number in range(TIMES):
                question = f"{prefix}/{number}"
                keys += [question, f"{question}/answer"]
                began = time.monotonic()
                store.set(question, self.kind.encode())
                answer = self._await(
                    store, f"{question}/answer", began + (ALONE if number else PATIENCE), now=number > 0
                )
                ended = time.monotonic()
                if answer is None:
                    break
                reply = msgspec.msgpack.decode(answer, type=_Answer)
                if reply.kind == self.kind:
                    best = Measured(reply.part, 0.0, 0.0, began)
                    break
                half = (ended - began) / 2
                if best is None or half < best.error:
                    best = Measured(reply.part, reply.now - (began + half), half, began)
        finally:
            _forget(store, keys)
        if best is not None:
            self._tell(best)
        return best is not None

    def _await(self, store: Any, key: str, until: float, *, now: bool) -> bytes | None:
        """An answer; ``now`` if this is the rank whose turn it is, and the first one is at it."""
        pause = _BETWEEN
        while (data := _look(store, key)) is None:
            if time.monotonic() > until or self._stop.is_set():
                return None
            if not now:
                self._stop.wait(pause)
                pause = min(2 * pause, _OFTEN)
        return data


def _look(store: Any, key: str) -> bytes | None:
    """What stands there now. Never waits for it, as `get` would if the key were deleted after a `check`."""
    data = bytes(store.compare_set(key, _NOTHING, _NOTHING))
    return None if data == _NOTHING else data


def _forget(store: Any, keys: list[str]) -> None:
    for key in keys:
        with suppress(RuntimeError):  # the store is gone, or cannot delete
            store.delete_key(key)


def _own(store: Any) -> Any:
    """A connection of one's own to a store, so that what one asks never waits for the calls of the ranks."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError):  # a store in memory, or of files: nothing there waits
        return store


def clock_kind() -> str:
    """Names the clock that `time.monotonic` reads: that of a boot of a host, within a time namespace."""
    try:
        return disk.read_file("/proc/sys/kernel/random/boot_id").decode().strip() + "/" + _namespace()
    except OSError:  # no /proc: then no other process counts as having the same clock
        return f"{os.getpid()}/{time.time_ns()}"


def _namespace() -> str:
    try:
        return str(disk.stat("/proc/self/ns/time").st_ino)
    except OSError:  # a kernel without time namespaces
        return ""
