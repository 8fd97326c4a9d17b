"""Which steps to keep: a rule that the manager asks after each commit.

Pure: sees step numbers and metrics, never a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Keep:
    """Which committed steps to keep; a step is kept if any rule keeps it.

    ``last``: the newest so many (at least 1). ``every``: every step that is a multiple of it, for good. ``best``:
    so many with the best ``metric`` given to `CheckpointManager.step`; ``mode`` says whether less or more is better.
    """

    last: int = 2
    every: int | None = None
    best: int = 0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): at least the newest checkpoint is always kept")
        if self.every is not None and self.every < 1:
            raise ValueError(f"Keep(every={self.every}) must be at least 1, or None")
        if self.best < 0 or self.mode not in ("min", "max"):
            raise ValueError(f"Keep(best={self.best}, mode={self.mode!r}): best is 0 or more, mode is 'min' or 'max'")

    def kept(self, steps: Mapping[int, float | None]) -> set[int]:
        """Of committed ``steps`` with their metrics, those to keep."""
        newest = sorted(steps)
        kept = set(newest[-self.last :])
        if self.every is not None:
            kept |= {s for s in newest if s % self.every == 0}
        if self.best:
            rated = [(m if self.mode == "min" else -m, -s) for s, m in steps.items() if m is not None and m == m]
            kept |= {-s for _, s in sorted(rated)[: self.best]}
        return kept
