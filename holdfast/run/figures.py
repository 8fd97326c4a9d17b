"""What a rank measures of its run: how long its steps and its saves take, and what follows for how often to save.

The manager owns one. Never measures by itself: it is told when steps end and what became of saves.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean, median

from holdfast.run.interval import Advice, advise, check_mtbf
from holdfast.saving import Timing

MEASURED = 50
"""Steps and saves whose times count."""


class Figures:
    """The latest steps and saves of one rank."""

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=MEASURED)
        self._left: tuple[int, float] | None = None
        self._saves: deque[tuple[float, float]] = deque(maxlen=MEASURED)

    def arrived(self, step: int) -> None:
        """Training has done ``step``; what is between `left` and here is training's own time."""
        if self._left is not None and step > self._left[0]:
            self._steps.append((time.monotonic() - self._left[1]) / (step - self._left[0]))

    def left(self, step: int) -> None:
        """Training goes on from ``step``."""
        self._left = (step, time.monotonic())

    def saved(self, timing: Timing) -> None:
        """A save has committed."""
        self._saves.append((timing.stall, timing.total))

    @property
    def step_seconds(self) -> float | None:
        """The median of the latest steps; None before the second one."""
        found = [*self._steps]  # other threads ask, too
        return median(found) if found else None

    def advice(self, mtbf: float) -> Advice | None:
        """See `CheckpointManager.advice`."""
        check_mtbf(mtbf)
        step = self.step_seconds
        if not self._saves or step is None:
            return None
        stall, total = (fmean(values) for values in zip(*[*self._saves], strict=True))
        return advise(mtbf, stall=stall, save=total, step=step)
