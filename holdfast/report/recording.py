"""What one process writes down for a timeline: its spans, as lines of JSON, in a file of its own.

A thread writes, so that no save waits for the folder. A folder that cannot be written ends the recording.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import msgspec

from holdfast.events import Span, ignore, log, observe
from holdfast.ranks import ranks
from holdfast.report.clocks import Clocks
from holdfast.storage.local import disk

SUFFIX = ".spans.jsonl"
"""How the names of parts end."""

LEAVE = 5.0
"""Seconds that the last lines get to reach the folder."""


class Header(msgspec.Struct, tag="process", frozen=True):
    """The first line of a part: whose it is, and its two clocks at one moment."""

    part: str
    host: str
    pid: int
    clock: str
    wall: float
    monotonic: float
    rank: int | None = None


class Who(msgspec.Struct, tag="rank", frozen=True):
    """Which rank of the default process group the process is, once that is known."""

    rank: int
    world: int


class Line(msgspec.Struct, tag="span", frozen=True, omit_defaults=True):
    """A span that has begun (``ended`` 0) or that is over; see `events.Span`."""

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


class Recorder:
    """Records the spans of this process into a part below ``folder`` until it is closed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begin()
        observe(self._see)
        ranks.meetings.append(self._meet)
        _recorders.add(self)

    def _begin(self) -> None:
        host, pid = socket.gethostname(), os.getpid()
        self.part = f"{host.replace(os.sep, '-')}-{pid}-{secrets.token_hex(4)}"
        self.path = self._folder / f"{self.part}{SUFFIX}"
        self._rank = _rank_by_launcher()
        self._lines: queue.SimpleQueue[msgspec.Struct | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._clocks = Clocks(self.part, self._write)
        self._lines.put(Header(self.part, host, pid, self._clocks.kind, time.time(), time.monotonic(), self._rank))

    def close(self) -> None:
        """Write what is left, and stop. Idempotent."""
        self._leave()
        self._clocks.close()
        self._lines.put(None)
        if self._thread is not None:
            self._thread.join(LEAVE)

    def _leave(self) -> None:
        """Stop listening."""
        ignore(self._see)
        with suppress(ValueError):  # it is closed already
            ranks.meetings.remove(self._meet)
        _recorders.discard(self)

    def _see(self, span: Span) -> None:
        self._write(
            Line(
                span.number, span.name, span.path, span.rank, span.began, span.lane, span.thread, span.whole, span.step,
                span.ended, span.nbytes, span.error,
            )
        )  # fmt: skip

    def _meet(self, meeting: ranks.Ranks) -> None:
        known = meeting.global_ranks
        if known and self._rank != known[meeting.rank]:
            self._rank = known[meeting.rank]
            self._write(Who(self._rank, max(known) + 1))
        try:
            self._clocks.measure(meeting)
        except RuntimeError as error:  # no thread can be started: the time of day has to do
            log.debug("no clock can be measured: %s", error)

    def _write(self, line: msgspec.Struct) -> None:
        self._lines.put(line)
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="holdfast-timeline", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        fd = -1
        try:
            disk.make_folders(self._folder)
            fd = disk.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)
            ends = False
            while not ends:
                lines = [self._lines.get()]  # for ever, if nothing happens: `close` ends it
                while not self._lines.empty():
                    lines.append(self._lines.get())
                ends = None in lines
                data = b"".join(msgspec.json.encode(line) + b"\n" for line in lines if line is not None)
                while data:
                    data = data[disk.append(fd, data, self.path) :]
        except (OSError, UnicodeError) as error:  # the latter of a path that is no text
            self._leave()
            log.warning("the timeline of this process ends: %s cannot be written: %s", self.path, error)
        finally:
            if fd >= 0:
                os.close(fd)


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()


def _after_fork() -> None:
    for recorder in list(_recorders):
        recorder._begin()  # the thread of the parent is not here, and the part is its own


os.register_at_fork(after_in_child=_after_fork)


def _rank_by_launcher() -> int | None:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else None
