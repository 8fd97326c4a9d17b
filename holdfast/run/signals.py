"""What asks a run to stop or to raise: signals of this process, and what other ranks report from step to step.

The manager owns one of each. Never saves, and never waits for another rank: what one rank knows is acted on at the
first step by which all ranks know it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from types import FrameType
from typing import Any

from holdfast.ranks.notices import Notice, Notices
from holdfast.ranks.ranks import Ranks
from holdfast.run.recent import Recent


class Signals:
    """Notes the signals ``numbers``; after a SIGTERM no wait of ``ranks`` lasts longer than ``grace`` seconds."""

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
        """Restore the earlier signal handlers. Idempotent."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        self._handlers = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.set()
        if number == signal.SIGTERM:  # SIGUSR1 comes early, as a warning
            self.hurry()


class Announcements:
    """What the ranks of a training loop tell each other: that a signal has come, that a save has failed.

    One on every rank, with the same ``key``; ranks look every ``poll`` steps.
    """

    def __init__(self, ranks: Ranks, key: str, poll: int, *, signals: Signals, recent: Recent) -> None:
        self._notices = Notices(ranks.store, key, poll, rank=ranks.rank, size=ranks.size)
        self._signals, self._recent = signals, recent
        self._to_raise: list[int] = []
        self.heard = 0
        """Calls of `hear`: ranks make them alike, whatever the steps are called."""
        self.stop: Notice | None = None
        """The notice that ends the run, once all ranks have seen it."""

    def hear(self, step: int) -> bool:
        """Tell the other ranks what this one knows, and act on what all know. True if this step is the last one.

        Raises the failure of an earlier save, the same on every rank.
        """
        self.heard += 1
        now = self.heard
        if self._signals.arrived and self.stop is None:
            self._notices.put(Notice("stop", step, now, bool(self._recent.under_way), self._signals.hurries))
        for number in self._recent.unheard:
            self._notices.put(Notice("failed", number, now))
        due = self._notices.due(now)
        for notice in [*self._notices.pending, *due]:
            if notice.kind == "stop" and notice.hurry and not self._signals.hurries:
                self._signals.hurry()
        self.stop = next((notice for notice in due if notice.kind == "stop"), self.stop)
        self._to_raise += [notice.of for notice in due if notice.kind == "failed"]
        while self._to_raise and self.stop is None:
            self._recent.raise_failure(self._to_raise.pop(0))
        return self.stop is not None
