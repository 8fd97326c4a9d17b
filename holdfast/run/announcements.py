"""What the ranks of a training loop tell each other from step to step: that a signal has come, that a save has failed.

The manager owns one. Never waits for another rank: what one knows is acted on at the first step by which all know.
"""

from __future__ import annotations

from holdfast.ranks.notices import Notice, Notices
from holdfast.ranks.ranks import Ranks
from holdfast.run.recent import Recent
from holdfast.run.signals import Signals


class Announcements:
    """One on every rank, with the same ``key``; ranks look every ``poll`` steps."""

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
            self._notices.put(Notice("stop", step, now, bool(self._recent.flying), self._signals.hurries))
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
