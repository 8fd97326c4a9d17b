"""Progress bars at a terminal, for anything that takes longer than two seconds; silence in a pipe.

Installed once by the package as a listener of its events. Shows the first rank of each node, never raises.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from holdfast import events

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE = 2.0
"""Seconds before a bar appears."""


class Bars:
    """The bars of this process: one for each task under way, shown from `PATIENCE` seconds on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._progress: Progress | None = None
        self._shown: dict[tuple[str, str], TaskID] = {}

    def __call__(self, event: events.Event) -> None:
        """Show, move or take away the bar of an event's task."""
        key = (event.task, event.path)
        with self._lock:
            if event.kind == "end":
                self._drop(key)
            elif event.task == events.BACKGROUND:
                pass  # nobody waits for it, and a bar would stand in the way of the training loop's own
            elif event.kind == "advance" and event.seconds >= PATIENCE and event.total and _wanted():
                if key not in self._shown:
                    self._shown[key] = self._bars().add_task(f"{event.task} {event.path}", total=event.total)
                self._bars().update(self._shown[key], completed=event.done, total=event.total)

    def _bars(self) -> Progress:
        if self._progress is None:
            from rich import progress
            from rich.console import Console

            self._progress = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(binary_units=False),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        return self._progress

    def _drop(self, key: tuple[str, str]) -> None:
        shown = self._shown.pop(key, None)
        if shown is not None:
            self._bars().remove_task(shown)
        if self._progress is not None and not self._shown:
            self._progress.stop()
            self._progress = None


def _wanted() -> bool:
    return sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
