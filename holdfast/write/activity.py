"""What the threads of a writer have done and when, reported to observers once it is done.

A file writer has one. Imports the standard library alone, as the writer process reports too. Reports nothing unless
asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

Report = Callable[[str, str, str, int, float, float, int], None]
"""Called with what was done: name, path, name and number of the thread, begin and end (monotonic), bytes."""

GAP, LONGEST = 0.05, 1.0
"""Seconds between writes of a thread to one file that are reported as one, and how long the whole may last."""


class _Stroke(NamedTuple):
    """Writes of one thread to one file in a row."""

    path: str
    lane: str
    began: float
    ended: float
    nbytes: int


class Activity:
    """Reports to ``report``, if it is not None. Chunks in a row count as one: there are thousands of them."""

    def __init__(self) -> None:
        self.report: Report | None = None
        self._strokes: dict[int, _Stroke] = {}  # by thread: its last writes, not reported yet
        self._lock = threading.Lock()

    def wrote(self, path: str, began: float, nbytes: int) -> None:
        """This thread has written to a file."""
        if self.report is None:
            return
        me, now = threading.get_native_id(), time.monotonic()
        with self._lock:
            last = self._strokes.get(me)
            if last is not None and last.path == path and began - last.ended < GAP and now - last.began < LONGEST:
                self._strokes[me] = last._replace(ended=now, nbytes=last.nbytes + nbytes)
                return
            self._strokes[me] = _Stroke(path, threading.current_thread().name, began, now, nbytes)
        self._report_strokes({} if last is None else {me: last})

    def synced(self, path: str, began: float, nbytes: int) -> None:
        """A file has its header and is durable: its writes are over."""
        if self.report is None:
            return
        with self._lock:
            strokes = {thread: stroke for thread, stroke in self._strokes.items() if stroke.path == path}
            for thread in strokes:
                del self._strokes[thread]
        self._report_strokes(strokes)
        self.did("sync file", path, began, nbytes)

    def uploaded(self, key: str, thread: int, began: float, ended: float, nbytes: int) -> None:
        """A file has gone to a store, by a thread of its own."""
        report = self.report  # once: it may change meanwhile
        if report is not None:
            report("upload", key, "holdfast-upload", thread, began, ended, nbytes)

    def did(self, name: str, path: str, began: float, nbytes: int) -> None:
        """This thread has just done something else."""
        report = self.report
        if report is not None:
            thread = threading.current_thread().name
            report(name, path, thread, threading.get_native_id(), began, time.monotonic(), nbytes)

    def _report_strokes(self, strokes: Mapping[int, _Stroke]) -> None:
        report = self.report
        if report is not None:
            for thread, stroke in strokes.items():
                report("write file", stroke.path, stroke.lane, thread, stroke.began, stroke.ended, stroke.nbytes)
