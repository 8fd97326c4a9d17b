"""Progress bars, for anything that takes longer than two seconds: at a terminal and in a notebook, else silence.

The first rank of a node shows its own share. A save in the background has no bar.
"""

from __future__ import annotations

import os
import threading

from holdfast import events
from holdfast.report import display

PATIENCE = 2.0
"""Seconds before a bar appears."""

VARIABLE = "HOLDFAST_PROGRESS"
"""The environment variable that says 0: never, or 1: also where there is no terminal, as lines of text."""

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


class Bars:
    """The bars of this process: one for each task under way, shown from `PATIENCE` seconds on."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._display: display.Display | None = None
        self._shown: set[str] = set()

    def __call__(self, event: events.Event) -> None:
        """Show, move or take away the bar of an event's task."""
        if event.kind == "phase" or event.task == events.BACKGROUND:
            return  # training does not wait for the latter, and a bar would disturb its own
        name = f"{event.task} {event.path}"
        with self._lock:
            if event.kind == "end":
                if name in self._shown:
                    self._move(name, event)  # threads may have reported out of order: this is how far it came
                self._end(name)
            elif event.kind == "advance" and event.seconds >= PATIENCE and event.total:
                self._move(name, event)

    def _move(self, name: str, event: events.Event) -> None:
        if os.environ.get(VARIABLE) == "0" or local_rank(event.rank):
            return
        self._display = self._display or display.display_here(forced=os.environ.get(VARIABLE) == "1")
        if self._display is not None:
            self._shown.add(name)
            others = os.environ.get("LOCAL_WORLD_SIZE", "1") != "1"
            self._display.show(name, event.done, event.total, "this rank's share" if others else "")

    def _end(self, name: str) -> None:
        if name in self._shown and self._display is not None:
            self._shown.remove(name)
            self._display.drop(name)
            if not self._shown:
                self._display = None


def local_rank(rank: int) -> int:
    """Which rank of its node this process is, as its launcher says; without one its ``rank`` among those at work."""
    given = next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "")
    return int(given) if given.isdecimal() else rank
