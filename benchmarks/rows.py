"""What came out: one row for each work and system, all its repetitions, and what they sum up to.

Filled by the bench, shown by the report, written as JSON.
Never rounds and never drops a repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.jobs import LoadCost
from benchmarks.repeated import Repeated, times

RAW, RAW_HUGE = "raw device", "raw, huge pages"


@dataclass
class Row(Repeated):
    """One system at one work. ``nbytes``: of the whole state, or of all that the ranks together want.

    Bytes read over bytes needed, one element a repetition: ``read_ratio`` by read calls and ``told_ratio`` as the
    system itself reports them, both on the worst rank; ``device_ratio`` from the disk, of all ranks together.
    """

    work: str
    system: str
    nbytes: int
    mapped: bool = False
    read_ratio: list[float] = field(default_factory=list)
    told_ratio: list[float] = field(default_factory=list)
    device_ratio: list[float] = field(default_factory=list)
    disk: int | None = None
    error: str | None = None

    def add_load(self, ranks: Sequence[LoadCost]) -> None:
        """One repetition of a load, with the bytes that it read."""
        self.add_spent([cost.spent for cost in ranks])
        if ranks and not self.mapped:
            self.read_ratio.append(max(cost.spent.read / cost.needed for cost in ranks))
        if ranks:
            self.device_ratio.append(sum(cost.spent.device for cost in ranks) / sum(cost.needed for cost in ranks))
        told = [cost.told for cost in ranks if cost.told is not None]
        if told:
            self.told_ratio.append(max(t.read / t.needed for t in told))

    @property
    def rate(self) -> float | None:
        """GB/s by the median."""
        return self.nbytes / self.median / 1e9 if self.median else None

    @property
    def cpu_per_gb(self) -> float | None:
        return median(self.cpu) / self.nbytes * 1e9 if self.cpu else None


class Rows:
    """All rows of a run, by work and system."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def of(self, work: str, system: str, nbytes: int, *, mapped: bool = False) -> Row:
        """The row of this work and system, made if it is new."""
        return self._rows.setdefault((work, system), Row(work, system, nbytes, mapped))

    def find(self, work: str, system: str) -> Row | None:
        return self._rows.get((work, system))

    def works(self) -> dict[str, list[Row]]:
        """Rows by work, in the order of measuring."""
        found: dict[str, list[Row]] = {}
        for row in self._rows.values():
            found.setdefault(row.work, []).append(row)
        return found

    def ratio(self, work: str, over: str, under: str, *, best: bool = False) -> float | None:
        """Seconds of ``over`` by seconds of ``under``: medians, or the best repetition of each."""
        return times(self.find(work, over), self.find(work, under), best=best)

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: what was measured and what follows from it."""
        found = []
        for row in self._rows.values():
            ratio = self.ratio(row.work, row.system, "holdfast")
            found.append(
                {
                    **vars(row), "median": row.median, "best": row.best, "gb_per_s": row.rate,
                    "cpu_s_per_gb": row.cpu_per_gb, "times_holdfast": ratio,
                }
            )  # fmt: skip
        return found
