"""Repetitions of one piece of work, and how the times of two compare.

The rows of each benchmark are such. Never rounds and never drops a repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.gauge import Spent


@dataclass(kw_only=True)
class Repeated:
    """One element a repetition: ``seconds`` from the first rank's start to the last one's end; ``cpu`` seconds of all
    ranks; ``memory`` bytes above the state on the worst rank.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    def add_spent(self, ranks: Sequence[Spent]) -> None:
        """One repetition, as its ranks measured it; nothing if there are none."""
        if ranks:
            self.seconds.append(max(s.ended for s in ranks) - min(s.began for s in ranks))
            self.cpu.append(sum(s.cpu for s in ranks))
            self.memory.append(max(s.memory for s in ranks))

    @property
    def median(self) -> float | None:
        return median(self.seconds) if self.seconds else None

    @property
    def best(self) -> float | None:
        return min(self.seconds, default=None)


def times(over: Repeated | None, under: Repeated | None, *, best: bool = False) -> float | None:
    """Seconds of ``over`` by seconds of ``under``: medians, or the best repetition of each; None if one is missing."""
    a, b = (None if row is None else row.best if best else row.median for row in (over, under))
    return a / b if a is not None and b else None
