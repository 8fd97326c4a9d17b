"""Where bars are shown: a terminal, the cell of a notebook, or lines of text."""

from __future__ import annotations

import html
import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 0.2
"""Seconds between two changes of a cell."""

LINES = 5.0
"""Seconds between two lines of text."""


class Display(Protocol):
    """A place for bars, each by its name."""

    def show(self, name: str, done: int, total: int, whose: str) -> None:
        """Show a bar, or move it; ``whose`` share it is, if not all."""

    def drop(self, name: str) -> None:
        """Take a bar away."""


def display_here(*, forced: bool) -> Display | None:
    """Where this process can show bars; None in a pipe, but lines of text if they are ``forced``."""
    if _in_kernel():
        return Cell()
    try:
        at_terminal = sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is no standard error, or it is closed
        return None
    return Terminal() if at_terminal else Lines() if forced else None


def _in_kernel() -> bool:
    """Whether cells of a notebook run here, in whichever program; IPython at a terminal is a terminal."""
    ipython = sys.modules.get("IPython")
    shell = getattr(ipython, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class Terminal:
    """Bars of rich, on standard error."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def show(self, name: str, done: int, total: int, whose: str) -> None:
        if self._progress is None:
            self._progress = _started()
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, whose=whose)
        self._progress.update(self._tasks[name], completed=done, total=total, whose=whose)

    def drop(self, name: str) -> None:
        task = self._tasks.pop(name, None)
        if self._progress is not None and task is not None:
            if not self._tasks:
                self._progress.stop()  # shows it as it is now, once more, and wipes it out
                self._progress = None
            else:
                self._progress.remove_task(task)


def _started() -> Progress:
    from rich import progress
    from rich.console import Console

    bars = progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=False),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[whose]}", markup=False),
        console=Console(stderr=True),
        transient=True,
    )
    bars.start()
    return bars


class _Pace:
    """When a bar began, and when it was last changed."""

    def __init__(self, done: int) -> None:
        self.began, self.before, self.changed = time.monotonic(), done, float("-inf")

    def text(self, name: str, done: int, total: int, whose: str) -> str:
        rate = (done - self.before) / max(time.monotonic() - self.began, 1e-9)
        left = f"{_clock((total - done) / rate)} left" if rate > 0 else ""
        parts = [f"{_size(done)} of {_size(total)}", f"{_size(rate)}/s" if rate > 0 else "", left, whose]
        return f"{name}: {min(done * 100 // max(total, 1), 100)} %, " + ", ".join(part for part in parts if part)


class Cell:
    """Bars in the output of a notebook's cell, as HTML that needs no extension; text where there is no HTML."""

    def __init__(self) -> None:
        self._bars: dict[str, tuple[Any, _Pace]] = {}

    def show(self, name: str, done: int, total: int, whose: str) -> None:
        if name not in self._bars:
            display: Any = import_module("IPython.display").display  # it runs us, or we were not here
            pace = _Pace(done)
            handle = display(_cell(pace.text(name, done, total, whose), done, total), raw=True, display_id=True)
            self._bars[name] = handle, pace
        handle, pace = self._bars[name]
        if time.monotonic() - pace.changed >= EVERY:
            pace.changed = time.monotonic()
            handle.update(_cell(pace.text(name, done, total, whose), done, total), raw=True)

    def drop(self, name: str) -> None:
        handle, _ = self._bars.pop(name, (None, None))
        if handle is not None:
            handle.update({"text/plain": "", "text/html": ""}, raw=True)


def _cell(text: str, done: int, total: int) -> dict[str, str]:
    bar = f'<progress max="{max(total, 1)}" value="{done}"></progress>'
    return {"text/plain": text, "text/html": f"<div>{bar} <code>{html.escape(text)}</code></div>"}


class Lines:
    """Lines of text on standard error, for logs of those who ask for them."""

    def __init__(self) -> None:
        self._bars: dict[str, _Pace] = {}

    def show(self, name: str, done: int, total: int, whose: str) -> None:
        pace = self._bars.setdefault(name, _Pace(done))
        if time.monotonic() - pace.changed >= LINES:
            pace.changed = time.monotonic()
            sys.stderr.write(pace.text(name, done, total, whose) + "\n")
            sys.stderr.flush()

    def drop(self, name: str) -> None:
        self._bars.pop(name, None)


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
