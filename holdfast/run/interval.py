"""How often to save: what is lost to saving against what is lost to failures.

The manager calls `advise` with what it has measured. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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
