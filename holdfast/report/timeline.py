"""Timelines: what every rank did when, written down while it happens and joined into one trace afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast import events

if TYPE_CHECKING:
    from holdfast.report.trace import Trace

VARIABLE = "HOLDFAST_TIMELINE"
"""The environment variable that names a folder for the timeline of the whole process."""


@contextmanager
def timeline(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Inside the block each save and load of this process is written down below ``folder``.

    Called by every rank that is to be seen, best around all of training; every process adds a file of its own to the
    folder, so it may be on shared storage, or one on each node, brought together later. A folder that cannot be written
    is a warning in the log. `merge` makes a trace of it.
    """
    from holdfast.report.recording import Recorder

    recorder = Recorder(Path(os.path.abspath(folder)))
    try:
        yield
    finally:
        recorder.close()


def merge(folder: str | os.PathLike[str]) -> Trace:
    """All that was written down below ``folder``, as one trace on one clock.

    ``merge(folder).write("trace.json")`` is for chrome://tracing or https://ui.perfetto.dev; ``phases`` says who was
    the slowest in each phase. Files that break off, as their process was killed, count as far as they go. Raises
    HoldfastError if there is nothing, OSError if it cannot be read.
    """
    from holdfast.report.trace import joined, parts_in

    return joined(parts_in(Path(folder)))


def from_environment() -> None:
    """Record all of this process, if the environment asks for it. Called once, by the package."""
    folder = os.environ.get(VARIABLE)
    if folder:
        block = timeline(folder)
        block.__enter__()
        events.at_exit(lambda: block.__exit__(None, None, None))
