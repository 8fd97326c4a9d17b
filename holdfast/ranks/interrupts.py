"""Ctrl-C in the middle of a few lines of bookkeeping that have to finish: it is handled after them.

The Saver and the manager use it in the calling thread. Never keeps an interrupt for longer than the block lasts.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """A SIGINT that comes in the block is handled at its end. For bookkeeping alone: nothing in it may wait."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[0])
