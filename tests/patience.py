"""Waiting in tests for what comes about by itself: no sleep that has to be long enough, no time that is asserted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

LONG = 240.0
"""Seconds that end a hang: what works takes less on the busiest machine."""


def wait_until(what: Callable[[], object]) -> None:
    """Until ``what()`` is true; an AssertionError if it does not come about."""
    pause = threading.Event()
    until = time.monotonic() + LONG
    while not what():
        if time.monotonic() > until:
            raise AssertionError("it did not come about")
        pause.wait(0.02)


def freeze(pid: int) -> None:
    """Stop a process (SIGSTOP), and wait until all its threads stand still: the signal reaches one of them first."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()))


def _is_stopped(thread: Path) -> bool:
    with suppress(FileNotFoundError):  # it has ended meanwhile
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    return True
