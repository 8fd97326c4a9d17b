"""How often to save: what a rank measures of its steps and saves, and the interval that follows from it.

The manager owns one `Figures` and reports to it when steps end and saves commit.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass
from statistics import fmean, median

from holdfast.saving import Timing

MEASURED = 50
"""Steps and saves whose times count."""


@dataclass(frozen=True)
class Advice:
    """The interval at which the least time is lost: ``seconds`` of training between two saves, in ``steps``.

    ``stall``: seconds that training waits for one save; ``save``: seconds from its call until it is committed;
    ``lost``: the share of all time lost at that interval, to stalls and to work done again after failures.
    """

    seconds: float
    steps: int
    stall: float
    save: float
    lost: float


def advise(mtbf: float, *, stall: float, save: float, step: float) -> Advice:
    """The best interval for a mean time between failures of ``mtbf`` seconds.

    Young's first-order optimum, the square root of twice ``stall`` times ``mtbf`` (CACM 17(9), 1974), in Daly's
    higher-order form (Future Generation Computer Systems 22(3), 2006). Never shorter than a save takes.
    """
    check_mtbf(mtbf)
    half = stall / (2 * mtbf)
    best = math.sqrt(2 * stall * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - stall if half < 1 else mtbf
    seconds = max(best, save, step)
    steps = max(round(seconds / step), math.ceil(save / step), 1) if step > 0 else 1
    # A failure costs half an interval, and the save that was under way.
    lost = stall / (seconds + stall) + (seconds / 2 + save) / mtbf
    return Advice(seconds, steps, stall, save, min(lost, 1.0))


def check_mtbf(mtbf: float) -> None:
    """Raise ValueError unless ``mtbf`` is a positive number."""
    if not mtbf > 0 or not math.isfinite(mtbf):
        raise ValueError(f"mtbf={mtbf} must be a positive number of seconds")


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
        seconds = [*self._steps]  # other threads ask, too
        return median(seconds) if seconds else None

    def advice(self, mtbf: float) -> Advice | None:
        """See `CheckpointManager.advice`."""
        check_mtbf(mtbf)
        step = self.step_seconds
        if not self._saves or step is None:
            return None
        stall, total = (fmean(values) for values in zip(*[*self._saves], strict=True))
        return advise(mtbf, stall=stall, save=total, step=step)
