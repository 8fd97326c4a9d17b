"""Who was the slowest in each phase: a table from the parts of a timeline.

`trace` makes it, the command shows it. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from holdfast.report.parts import Part
from holdfast.report.recording import Line


@dataclass(frozen=True)
class Phase:
    """One phase of all saves (or loads) of a timeline: ``of`` what, how many ``times``, and who took longest in it.

    ``median`` is over ranks and times, ``longest`` the longest time of one rank in one of them: that ``rank``, on that
    ``host``, for that ``path``; in seconds. ``often`` is the rank that was most often the slowest.
    """

    of: str
    name: str
    times: int
    median: float
    longest: float
    rank: int | None
    host: str
    path: str
    often: int | None


def slowest(parts: list[Part], clock: Callable[[Part, float], float]) -> list[Phase]:
    """A row for each phase, in the order in which they begin. Spans that have not ended are left out."""
    seconds: dict[tuple[str, str], dict[str, dict[int, float]]] = {}  # (of, phase) → which save → part → seconds
    first: dict[tuple[str, str], float] = {}
    begins: dict[str, float] = {}
    for index, part in enumerate(parts):
        wholes: dict[str, list[Line]] = {}
        for line in sorted(part.spans.values(), key=lambda line: line.began):
            if line.whole:
                wholes.setdefault(line.path, []).append(line)
        for line in part.spans.values():
            if line.whole or line.rank < 0 or not line.ended:
                continue
            same = wholes.get(line.path, [])
            whole = _whole_of(line, same)
            row = (whole.name if whole else "", line.name)
            times = seconds.setdefault(row, {}).setdefault(_occasion(line, whole, same), {})
            times[index] = times.get(index, 0.0) + line.ended - line.began
            began = clock(part, line.began)
            after = began - (clock(part, whole.began) if whole else 0.0)
            first[row] = min(first.get(row, after), after)
            begins[row[0]] = min(begins.get(row[0], began), began)
    phases = []
    for row in sorted(seconds, key=lambda row: (begins[row[0]], row[0], first[row])):
        occasions = seconds[row]
        longest, index, occasion = max((s, i, name) for name, by in occasions.items() for i, s in by.items())
        winners = [max(by, key=lambda i: by[i]) for by in occasions.values()]
        often = max(set(winners), key=lambda i: (winners.count(i), -i))
        phases.append(Phase(
            *row, len(occasions), median(s for by in occasions.values() for s in by.values()), longest,
            parts[index].rank, parts[index].header.host, occasion.partition("\n")[0], parts[often].rank,
        ))  # fmt: skip
    return phases


def _whole_of(line: Line, same: list[Line]) -> Line | None:
    """The save or load that a span is part of: the last one of its path that began before, or the next one."""
    before = [whole for whole in same if whole.began <= line.began]
    return before[-1] if before else same[0] if same else None


def _occasion(line: Line, whole: Line | None, same: list[Line]) -> str:
    """Names a save alike on every rank: its path, and which one of that path it is."""
    alike = [other for other in same if whole is not None and other.name == whole.name]
    return f"{line.path}\n{alike.index(whole) if whole in alike else 0}"
