"""A timeline as a trace that Chrome and Perfetto draw, and who was the slowest in each phase.

A process for each rank, a lane for each thread, in the Trace Event Format: microseconds from the first event.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from statistics import median
from typing import Any

import msgspec

from holdfast.report.parts import Part, common_clock, parts_in
from holdfast.report.recording import Line
from holdfast.storage.local import disk

__all__ = ["Trace", "joined", "parts_in"]

LANES = {"saves": "saves", "MainThread": "training", "holdfast-save": "save", "holdfast-write": "writer"}
"""What threads are called in a trace, the first one first; those of a writer process and others follow."""


@dataclass(frozen=True)
class Trace:
    """A timeline, joined. ``events`` are the trace's; ``phases`` say who was the slowest; ``began`` is in UTC.

    ``processes`` and ``spans`` are counted, ``unfinished`` spans without an end (they are drawn
    up to the last moment that is known of their process), and ``unread`` lines that make no sense.
    """

    events: list[dict[str, Any]]
    phases: list[Phase]
    began: str
    processes: int
    spans: int
    unfinished: int
    unread: int

    def write(self, path: str | os.PathLike[str]) -> None:
        """The trace as a file of JSON, in the place of what was there. Raises OSError."""
        about = {"began": self.began, "made by": "holdfast"}
        data = msgspec.json.encode({"traceEvents": self.events, "displayTimeUnit": "ms", "otherData": about})
        fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            disk.write_all(fd, data, 0, path)
        finally:
            os.close(fd)


def joined(parts: list[Part]) -> Trace:
    """All parts on one clock."""
    clock = common_clock(parts)
    ends = {id(part): {n: line.ended or part.last for n, line in part.spans.items()} for part in parts}
    first = min((clock(part, line.began) for part in parts for line in part.spans.values()), default=0.0)
    ordered = sorted(parts, key=lambda part: (part.rank is None, part.rank or 0, part.header.wall))
    base = ordered[0]
    began = base.header.wall + first - clock(base, base.header.monotonic)
    of_rank = Counter(part.rank for part in parts)
    events: list[dict[str, Any]] = []
    for number, part in enumerate(ordered, start=1):
        name = f"{part.header.host} · pid {part.header.pid}" if part.rank is None else f"rank {part.rank}"
        if part.rank is not None:
            name += f" · {part.header.host}" + (f" · pid {part.header.pid}" if of_rank[part.rank] > 1 else "")
        events += [_named("process_name", number, 0, name=name), _named("process_sort_index", number, 0, index=number)]
        events += _spans_of(part, number, ends[id(part)], partial(_since, clock, part, first))
    lines = [line for part in parts for line in part.spans.values()]
    return Trace(
        events, slowest(ordered, clock), datetime.fromtimestamp(began, timezone.utc).isoformat(timespec="milliseconds"),
        len(parts), len(lines), sum(not line.ended for line in lines), sum(part.unread for part in parts),
    )  # fmt: skip


def _since(clock: Callable[[Part, float], float], part: Part, first: float, moment: float) -> float:
    return clock(part, moment) - first


def _named(what: str, pid: int, tid: int, *, name: str = "", index: int = 0) -> dict[str, Any]:
    args: dict[str, Any] = {"name": name} if name else {"sort_index": index}
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _spans_of(
    part: Part, pid: int, ends: dict[int, float], since: Callable[[float], float]
) -> list[dict[str, Any]]:  # fmt: skip
    events: list[dict[str, Any]] = []
    for tid, (name, lines) in enumerate(_lanes(part.spans.values(), ends), start=1):
        events += [_named("thread_name", pid, tid, name=name), _named("thread_sort_index", pid, tid, index=tid)]
        for line in sorted(lines, key=lambda line: (line.began, -ends[line.number])):
            # Both ends are rounded, not the length: so what ends together does in the trace, and lies in each other.
            begin, end = round(since(line.began) * 1e6, 3), round(since(ends[line.number]) * 1e6, 3)
            events.append({
                "ph": "X", "name": line.name, "cat": _kind(line), "pid": pid, "tid": tid,
                "ts": begin, "dur": max(round(end - begin, 3), 0.0), "args": _details(line),
            })  # fmt: skip
    return events


def _kind(line: Line) -> str:
    if line.whole:
        return "whole"
    return "wait" if line.name.endswith(" wait") else "file" if line.rank < 0 else "phase"


def _details(line: Line) -> dict[str, Any]:
    details: dict[str, Any] = {"path": line.path}
    if line.step is not None:
        details["step"] = line.step
    if line.nbytes:
        details["bytes"] = line.nbytes
        if line.ended > line.began:
            details["GB/s"] = round(line.nbytes / (line.ended - line.began) / 1e9, 3)
    if line.error:
        details["error"] = line.error
    if not line.ended:
        details["unfinished"] = True
    return details


def _lanes(lines: Iterable[Line], ends: dict[int, float]) -> list[tuple[str, list[Line]]]:
    """Spans by lane. Threads of one name share as many lanes as of them lived at once."""
    threads: dict[tuple[str, int], list[Line]] = {}
    for line in lines:
        threads.setdefault((_called(line.lane), line.thread), []).append(line)
    lanes: dict[str, list[_Lane]] = {}
    for (name, _), mine in sorted(threads.items(), key=lambda item: min(line.began for line in item[1])):
        begin, there = min(line.began for line in mine), lanes.setdefault(name, [])
        lane = next((lane for lane in there if lane.until <= begin), None)
        if lane is None:
            there.append(lane := _Lane())
        lane.lines += mine
        lane.until = max(ends[line.number] for line in mine)
    order = list(LANES.values())
    names = sorted(lanes, key=lambda name: (order.index(name) if name in order else len(order), name))
    return [
        (name if number == 0 else f"{name} {number + 1}", lane.lines)
        for name in names
        for number, lane in enumerate(lanes[name])
    ]


@dataclass
class _Lane:
    lines: list[Line] = field(default_factory=list)
    until: float = 0.0


def _called(lane: str) -> str:
    before, colon, _ = lane.rpartition(": ")
    return before if colon else LANES.get(lane, lane.removeprefix("holdfast-"))


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
