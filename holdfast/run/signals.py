"""Signals that ask a run to end, and how much time is left then.

The manager owns one. Does nothing in a handler but take note: saves and other ranks are the manager's.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from holdfast.ranks.ranks import Ranks


class Signals:
    """Takes note of ``numbers``; after a SIGTERM no wait of ``ranks`` lasts longer than ``grace`` seconds."""

    def __init__(self, numbers: tuple[signal.Signals, ...], ranks: Ranks, grace: float) -> None:
        self._ranks, self._grace = ranks, grace
        self._arrived = threading.Event()
        self.hurries = False
        self._handlers: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python delivers signals to it alone
            self._handlers = {number: signal.signal(number, self._note) for number in numbers}

    @property
    def arrived(self) -> bool:
        """Whether one of them has come to this process."""
        return self._arrived.is_set()

    def hurry(self) -> None:
        """The grace begins: here or on another rank there was a SIGTERM, and after that comes SIGKILL."""
        self.hurries = True
        self._ranks.hurry(self._grace)

    @property
    def left(self) -> float | None:
        """Seconds until the grace ends; None without a signal that set it."""
        left = self._ranks.limit - time.monotonic()
        return max(left, 0.0) if math.isfinite(left) else None

    def give_back(self) -> None:
        """Give the signals back to whoever handled them before. Idempotent."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._handlers = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.set()
        if number == signal.SIGTERM:  # SIGUSR1 comes early, as a warning
            self.hurry()
