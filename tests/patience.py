"""Waiting in tests for what comes about by itself: no sleep that has to be long enough, no time that is asserted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
