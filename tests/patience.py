"""Waiting in tests for what comes about by itself: no sleep that has to be long enough, no time that is asserted."""

from __future__ import annotations

import threading
from collections.abc import Callable


def wait_until(what: Callable[[], object]) -> None:
    """Until ``what()`` is true; an AssertionError if it does not come about."""
    pause = threading.Event()
    for _ in range(600):
        if what():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come about")
