"""Observation from outside: phases and their progress, told to whoever listens.

The engine calls `task` and `reached`; progress bars, traces and tests call `listen`.
Never raises into the engine, never prints, costs one list check when nobody listens.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

log = logging.getLogger("holdfast")

BACKGROUND = "background save"
"""The task of a save that nobody waits for."""

SAVING = ("gather", "plan", "layout", "stage", "write", "durable", "commit", "committed", "saved")
"""The phases of a save, in order; each is told when it begins.

``gather``: collect the state. ``plan``: tell the ranks what there is. ``layout``: tell what they do not know yet.
``stage``: open the files and copy. ``write``: all is copied, the files are being written. ``durable``: this rank's
files are, and it reports. On the first rank alone ``commit``: all have reported, the manifest comes next, and
``committed``: it stands, and nobody has been told. ``saved``: this rank knows.
"""

LOADING = ("open", "match", "read", "filled", "loaded")
"""The phases of a load, in order.

``open``: the manifest. ``match``: tell the ranks what is wanted. ``read``: the bytes. ``filled``: this rank has all and
reports. ``loaded``: it knows that all have.
"""


@dataclass(frozen=True)
class Event:
    """One change of one task, or a phase that a rank has come to.

    ``kind`` is ``"start"``, ``"advance"`` or ``"end"``; ``done`` and ``total`` count bytes (``total`` 0 if unknown);
    ``seconds`` since the task began; ``rank`` of the process that reports. Of the kind ``"phase"``, ``task`` is the
    phase (one of `SAVING` or `LOADING`), which begins now, and the numbers are 0.
    """

    kind: str
    task: str
    path: str
    rank: int
    done: int
    total: int
    seconds: float


Listener = Callable[[Event], None]
_listeners: list[Listener] = []


def install(listener: Listener) -> None:
    """Call ``listener(event)`` for every event of this process from now on, from any thread."""
    _listeners.append(listener)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call ``listener(event)`` for every event of this process inside the ``with`` block, from any thread."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Moved:
    """Bytes that the tasks of one thread have told of so far."""

    done = 0


class _Mine(threading.local):
    def __init__(self) -> None:
        self.moved = Moved()


_mine = _Mine()


def moved() -> Moved:
    """What the tasks that this thread begins tell of, from whichever threads: how it is seen to make progress."""
    return _mine.moved


class Task:
    """A running phase; `advance` may be called from several threads."""

    def __init__(self, name: str, path: str, rank: int, total: int) -> None:
        self.name, self.path, self.rank, self.total = name, path, rank, total
        self.done = 0
        self._moved = moved()
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes as done."""
        with self._lock:
            self.done += count
            self._moved.done += count  # of two tasks at once some may get lost: that it changes is what counts
        if _listeners:
            self._tell("advance")

    def _tell(self, kind: str) -> None:
        _tell(Event(kind, self.name, self.path, self.rank, self.done, self.total, time.monotonic() - self._began))


def reached(phase: str, path: object, rank: int) -> None:
    """Tell that this rank begins a phase of saving or loading ``path``."""
    if _listeners:
        _tell(Event("phase", phase, str(path), rank, 0, 0, 0.0))


def _tell(event: Event) -> None:
    for listener in list(_listeners):
        try:
            listener(event)
        except Exception:  # an observer must never fail the save it observes
            log.exception("a listener of holdfast events failed")


@contextmanager
def task(name: str, path: str, rank: int = 0, total: int = 0) -> Iterator[Task]:
    """Report the enclosed work as one task of ``total`` bytes."""
    running = Task(name, path, rank, total)
    running._tell("start")
    try:
        yield running
    finally:
        running._tell("end")
