"""Observation from outside: tasks, phases and spans of time, reported to listeners.

Saves and loads call `task`, `reached` and `span`; progress bars and tests call `listen`, timelines and telemetry
`observe`. Never raises into a save, never prints, and costs one list check without listeners.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import count
from typing import TypeVar

log = logging.getLogger("holdfast")

BACKGROUND = "background save"
"""The task of a save in the background."""

SAVING = ("gather", "plan", "layout", "stage", "write", "durable", "commit", "committed", "saved")
"""The phases of a save, in order; each is reported when it begins.

``gather``: collect the state. ``plan``: send the ranks what there is. ``layout``: send what they do not know yet.
``stage``: open the files and copy. ``write``: all is copied, the files are being written. ``durable``: this rank's
files are, and it reports. On the first rank alone ``commit``: all have reported, the manifest comes next, and
``committed``: it stands, and no other rank knows. ``saved``: this rank knows.
"""

LOADING = ("open", "match", "read", "filled", "loaded")
"""The phases of a load, in order.

``open``: the manifest. ``match``: send the ranks what is wanted. ``read``: the bytes. ``filled``: this rank has all and
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


What = TypeVar("What")
Listener = Callable[[Event], None]
_listeners: list[Listener] = []
_REPORTS = "holdfast.report.installed"
"""What is imported with the first event of this process: it installs the listeners that every program has."""
_started = False


def _start() -> None:
    """Install the progress bars, and the timeline that the environment asks for, before the first event."""
    global _started
    if not _started:
        _started = True
        import_module(_REPORTS)


def install(listener: Listener) -> None:
    """Call ``listener(event)`` for every event of this process from now on, from any thread."""
    _listeners.append(listener)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Report every event of this process to ``listener`` inside of the ``with`` block.

    Args:
        listener: Called with each `Event`, from any thread. What it raises is logged, and fails no save.

    Example:
        >>> seen = []
        >>> with holdfast.events.listen(lambda event: seen.append(event.task)):
        ...     _ = holdfast.save({"model": model}, "/ckpt/listened")
        >>> "save" in seen
        True
    """
    install(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@dataclass(frozen=True)
class Span:
    """A stretch of time of this process: a whole save or load, a part of one, or a wait.

    ``number`` counts the spans of the process. ``path``: what is saved or loaded, or the file of it that is written.
    ``rank`` as of an `Event`, -1 of a process that only writes files. ``whole``: a save or load from end to end, of
    which the others with its path, or one below it, are parts. ``lane`` names the thread (``thread`` its number in the
    system), or what else the span belongs to. ``began`` and ``ended`` by `time.monotonic`; ``ended`` is 0 until it has.
    ``nbytes`` is known at the end; ``error`` is what ended it, if it failed.
    """

    number: int
    name: str
    path: str
    rank: int
    began: float
    lane: str
    thread: int
    whole: bool = False
    step: int | None = None
    ended: float = 0.0
    nbytes: int = 0
    error: str = ""

    @property
    def seconds(self) -> float:
        """How long it took; 0 until it has ended."""
        return max(self.ended - self.began, 0.0) if self.ended else 0.0


Observer = Callable[[Span], None]
_observers: list[Observer] = []
_numbers = count(1)


def observe(observer: Observer) -> None:
    """Call ``observer(span)`` when a span of this process begins and again when it has ended, from any thread."""
    _observers.append(observer)


def ignore(observer: Observer) -> None:
    """Take `observe` back. Idempotent."""
    if observer in _observers:
        _observers.remove(observer)


def observed() -> bool:
    """Whether there are observers of spans."""
    return bool(_observers)


class Opened:
    """A span that has begun; `end` it once. ``nbytes`` may be set before."""

    def __init__(self, span: Span | None = None) -> None:
        self._span, self.nbytes = span, 0

    def end(self, error: BaseException | None = None) -> None:
        """It ends now; ``error`` is what ended it. Only the first call counts."""
        span, self._span = self._span, None
        if span is not None:
            failed = "" if error is None else f"{type(error).__name__}: {error}"
            _show(replace(span, ended=time.monotonic(), nbytes=self.nbytes, error=failed))


def begin(
    name: str, path: object, rank: int, *, whole: bool = False, step: int | None = None, lane: str = ""
) -> Opened:  # fmt: skip
    """A span of this thread, or of another ``lane``, begins now."""
    _start()
    if not _observers:
        return Opened()
    at = lane or threading.current_thread().name
    number = next(_numbers)
    thread = -number if lane else threading.get_native_id()  # those of a lane may overlap, those of a thread nest
    span = Span(number, name, str(path), rank, time.monotonic(), at, thread, whole, step)
    _show(span)
    return Opened(span)


@contextmanager
def span(
    name: str, path: object, rank: int, *, whole: bool = False, step: int | None = None
) -> Iterator[Opened]:  # fmt: skip
    """The enclosed work is a span of this thread."""
    opened = begin(name, path, rank, whole=whole, step=step)
    try:
        yield opened
    except BaseException as error:
        opened.end(error)
        raise
    opened.end()


def record(name: str, path: str, lane: str, thread: int, began: float, ended: float, nbytes: int) -> None:
    """A span that is over, of a thread that writes files, in this process or in its writer process."""
    if _observers:
        begun = Span(next(_numbers), name, path, -1, began, lane, thread)
        _show(begun)
        _show(replace(begun, ended=ended, nbytes=nbytes))


def _show(span: Span) -> None:
    _call(_observers, span)


def _call(functions: list[Callable[[What], None]], what: What) -> None:
    for function in list(functions):
        try:
            function(what)
        except Exception:  # it must never fail the save that it observes
            log.exception("an observer of holdfast failed")


_last: list[Callable[[], object]] = []


def at_exit(then: Callable[[], object]) -> None:
    """Call ``then()`` when the interpreter ends, after the saves that are under way then."""
    _last.append(then)


@atexit.register  # handlers run from the last to the first, and this module is imported before those that save
def _end() -> None:
    for then in _last:
        then()


class Moved:
    """Bytes that the tasks of one thread have reported so far."""

    done = 0


_mine = threading.local()


def moved() -> Moved:
    """What the tasks that this thread begins report, from any thread: so it is seen to make progress."""
    if not hasattr(_mine, "moved"):
        _mine.moved = Moved()
    return _mine.moved  # type: ignore[no-any-return]


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
        seconds = time.monotonic() - self._began
        _call(_listeners, Event(kind, self.name, self.path, self.rank, self.done, self.total, seconds))


def reached(phase: str, path: object, rank: int) -> None:
    """Report that this rank begins a phase of saving or loading ``path``."""
    _start()
    if _listeners:
        _call(_listeners, Event("phase", phase, str(path), rank, 0, 0, 0.0))


@contextmanager
def task(name: str, path: str, rank: int = 0, total: int = 0, *, part: bool = False) -> Iterator[Task]:
    """Report the enclosed work as one task of ``total`` bytes; also as a span, unless it is ``part`` of one already."""
    _start()
    running = Task(name, path, rank, total)
    opened = Opened() if part else begin(name, path, rank, whole=True)
    running._tell("start")
    try:
        yield running
    except BaseException as error:
        opened.nbytes = running.done
        opened.end(error)
        raise
    finally:
        running._tell("end")
        opened.nbytes = running.done
        opened.end()
