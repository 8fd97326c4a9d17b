"""A bar: a figure that has to clear a limit.

Made by every benchmark that judges. Never passed by a figure that is missing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """``measured`` by the medians, ``best`` by the best repetitions; ``least`` or ``most`` is the limit.

    ``floor``: what ``measured`` would be if only the indispensable work were done, such as to read the bytes; measured
    in the same run. It explains a miss, and excuses none.
    """

    what: str
    measured: float | None
    best: float | None = None
    least: float | None = None
    most: float | None = None
    unit: str = "×"
    floor: float | None = None

    @property
    def met(self) -> bool:
        if self.measured is None:
            return False
        return (self.least is None or self.measured >= self.least) and (self.most is None or self.measured <= self.most)
