"""What came out of the stall bench: one row for each system, what its segments sum up to, and the bars.

Filled by the bench, shown by its report, written as JSON.
Never rounds, never drops a segment, and never passes a bar whose figure is missing.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from benchmarks.bar import Bar
from benchmarks.stall_job import Segment
from benchmarks.stall_systems import BARE, DCP, HOLDFAST, NOTHING, PURE


@dataclass(frozen=True)
class Joined:
    """One save of all ranks: the slowest rank's seconds; ``end_to_end`` from the first call to the last verdict."""

    call: float
    hook: float
    waited: float
    stall: float
    end_to_end: float
    first: bool


@dataclass
class Row:
    """One system. ``segments``: of each round, by rank; ``peaks``: bytes of each round, by rank."""

    system: str
    segments: list[list[Segment]] = field(default_factory=list)
    peaks: list[list[int]] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> list[float]:
        """Of training in each segment."""
        return [max(s.ended for s in ranks) - min(s.began for s in ranks) for ranks in self.segments]

    def intervals(self, every: int) -> list[float]:
        """Seconds from one save to the next, or of as many steps without."""
        found = []
        for ranks in self.segments:
            steps = [max(times) for times in zip(*(s.steps for s in ranks), strict=True)]
            found += [steps[at + every] - steps[at] for at in range(0, len(steps) - every, every)]
        return found

    @property
    def cpu(self) -> list[float]:
        return [sum(s.cpu for s in ranks) for ranks in self.segments]

    @property
    def saves(self) -> list[Joined]:
        """Every save of every segment."""
        found = []
        for ranks in self.segments:
            for number, seen in enumerate(zip(*(s.saves for s in ranks), strict=True)):
                found.append(
                    Joined(
                        max(s.call for s in seen),
                        max(s.hook for s in seen),
                        max(s.waited for s in seen),
                        max(s.waited + s.call + s.hook for s in seen),
                        max(s.durable for s in seen) - min(s.began for s in seen),
                        number == 0,
                    )
                )
        return found

    @property
    def over(self) -> float:
        """Seconds by which the worst last save outlasted its segment: what it cost after that is not counted."""
        return max((s.saves[-1].durable - s.ended for ranks in self.segments for s in ranks if s.saves), default=0.0)

    def middle(self, figure: str, *, first: bool | None = None) -> float | None:
        """The median of a figure over all saves, or the first ones of each segment, or the later ones."""
        values = [getattr(s, figure) for s in self.saves if first is None or s.first is first]
        return median(values) if values else None

    def worst(self, figure: str) -> float | None:
        return max((getattr(s, figure) for s in self.saves), default=None)


class Rows:
    """The rows of a run, by system."""

    def __init__(self, systems: list[str], every: int) -> None:
        self.all, self.every = {name: Row(name) for name in systems}, every

    def added(self, system: str, *, best: bool = False) -> float | None:
        """Seconds of training that one save adds: the median interval with a save, or the best, over one without.

        By intervals and not by segments, because a disturbance from outside then spoils one of many.
        """
        row, alone = (self.all[name].intervals(self.every) for name in (system, NOTHING))
        choose = min if best else median
        return choose(row) - choose(alone) if row and alone and system != NOTHING else None

    def cpu(self, system: str) -> float | None:
        """Processor seconds that one save adds, all ranks and their processes together."""
        row, alone = self.all[system], self.all[NOTHING]
        if not row.saves or not alone.cpu:
            return None
        return (median(row.cpu) - median(alone.cpu)) * len(row.segments) / len(row.saves)

    def memory(self, system: str) -> int | None:
        """Bytes above those of training alone, on the worst rank in the worst round."""
        row, alone = self.all[system], self.all[NOTHING]
        if not row.saves or not alone.peaks:
            return None
        base = [median(peaks) for peaks in zip(*alone.peaks, strict=True)]
        return max(round(peak - low) for peaks in row.peaks for peak, low in zip(peaks, base, strict=True))

    def plain(self) -> list[dict[str, Any]]:
        """For JSON: what was measured and what follows from it."""
        return [
            {
                **asdict(row), "seconds": row.seconds, "added": self.added(name), "cpu_per_save": self.cpu(name),
                "extra_memory": self.memory(name), "joined": [asdict(save) for save in row.saves],
            }
            for name, row in self.all.items()
        ]  # fmt: skip


def judge(rows: Rows) -> list[Bar]:
    """Every bar, for each of holdfast's workers."""
    objects = [bar for name in HOLDFAST if name in rows.all for bar in _judge(rows, name)]
    return objects + [bar for name in BARE if name in rows.all for bar in _judge_bare(rows, name)]


def _judge_bare(rows: Rows, name: str) -> list[Bar]:
    stall = rows.all[name].middle("stall")

    def dcp(system: str) -> float | None:
        return rows.all[system].middle("stall") if system in rows.all else None

    return [
        Bar(f"{name}: stall over that of DCP in a thread", _over(stall, dcp("DCP thread")), most=1 / 10),
        Bar(f"{name}: stall over that of DCP, overlapped", _over(stall, dcp("DCP thread, overlapped")), most=1 / 3),
    ]


def _judge(rows: Rows, name: str) -> list[Bar]:
    own = rows.all[name]
    call, stall, durable = (own.middle(figure) for figure in ("call", "stall", "end_to_end"))
    first, later = (own.middle("end_to_end", first=first) for first in (True, False))
    measured = {system: overlap for system, (_, overlap) in DCP.items() if system in rows.all}
    added, best = rows.added(name), rows.added(name, best=True)

    def dcp(figure: str, *, overlapped: bool = True) -> float | None:
        """Of its better variant."""
        return _least([rows.all[s].middle(figure) for s, overlap in measured.items() if overlapped or not overlap])

    dcp_added = _least([rows.added(system) for system in measured])
    dcp_best = _least([rows.added(system, best=True) for system in measured])
    blocking = dcp("stall", overlapped=False)
    # Training stands still meanwhile, so what this one adds can be seen directly, without the noise of a difference.
    pure = rows.all[PURE].middle("stall") if PURE in rows.all else None
    slow_start = None
    if PURE in rows.all:
        slow_start = _over(*(rows.all[PURE].middle("end_to_end", first=which) for which in (True, False)))
    return [
        Bar(f"{name}: the save call, slowest rank", None if call is None else call * 1e3, most=20, unit=" ms"),
        Bar(f"{name}: stall over that of DCP, staging as documented for CPUs", _over(stall, blocking), most=0.05),
        Bar(f"{name}: stall over that of DCP, overlapped staging too", _over(stall, dcp("stall")), most=0.05),
        Bar(f"{name}: added training time over DCP's", _over(added, dcp_added), _over(best, dcp_best), most=0.5),
        Bar(f"{name}: added training time over copy and write alone", _over(added, pure), _over(best, pure), most=1.3),
        Bar(f"{name}: durable, as many times as fast as DCP", _over(dcp("end_to_end"), durable), least=3.0),
        Bar(f"{name}: first save over a later one, until durable", _over(first, later), most=1.2),
        # A disk may take its first bytes more slowly, whoever writes them: then this tells what is left for holdfast.
        Bar(f"{name}: the same, over that of copy and write alone", _over(_over(first, later), slow_start), most=1.2),
    ]  # fmt: skip


def _least(values: list[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _over(above: float | None, below: float | None) -> float | None:
    """A ratio, if both are there and it says something."""
    return above / below if above is not None and below is not None and below > 0 else None
