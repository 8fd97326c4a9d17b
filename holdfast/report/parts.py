"""The parts of a timeline read back, and their clocks brought together. Broken lines are counted and passed over."""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from holdfast.errors import HoldfastError
from holdfast.report.clocks import Measured
from holdfast.report.recording import SUFFIX, Header, Line, Who
from holdfast.storage.local import disk

_DECODER = msgspec.json.Decoder(Header | Who | Line | Measured)
_POOR = 4.0  # a measurement counts if it is at most so many times as inexact as the best one


@dataclass
class Part:
    """What one process wrote down. ``spans`` by number: as they ended, or, if they did not, as they began."""

    header: Header
    rank: int | None
    spans: dict[int, Line] = field(default_factory=dict)
    measured: list[Measured] = field(default_factory=list)
    last: float = 0.0
    """The last moment of any of its lines."""
    unread: int = 0
    """Lines that make no sense."""


def parts_in(folder: Path) -> list[Part]:
    """The parts in a folder and the folders in it. Raises HoldfastError if there is none, OSError."""
    parts = [part for path in sorted(_files_in(folder)) if (part := _read(path)) is not None]
    if not parts:
        raise HoldfastError(
            f"no timeline in {folder}: run the training script with HOLDFAST_TIMELINE={folder}, or inside of "
            f"`with holdfast.report.timeline.timeline({str(folder)!r})`, and let it save or load"
        )
    return parts


def _files_in(folder: Path) -> Iterator[Path]:
    for entry in disk.listed(folder):
        if entry.is_dir(follow_symlinks=False):  # one for each node, perhaps
            yield from (Path(one.path) for one in disk.listed(entry.path) if one.name.endswith(SUFFIX))
        elif entry.name.endswith(SUFFIX):
            yield Path(entry.path)


def _read(path: Path) -> Part | None:
    part: Part | None = None
    for text in disk.read_file(path).splitlines():
        try:
            line = _DECODER.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):  # it broke off, or is not of ours
            if part is not None:
                part.unread += 1
            continue
        if isinstance(line, Header):
            part = part or Part(line, line.rank)
        elif part is None:
            continue
        elif isinstance(line, Who):
            part.rank = line.rank
        elif isinstance(line, Measured):
            part.measured.append(line)
        else:
            part.spans[line.number] = line
            part.last = max(part.last, line.began, line.ended)
    return part


def common_clock(parts: list[Part]) -> Callable[[Part, float], float]:
    """What brings a moment of a part's clock to one clock for all: ``clock(part, moment)``, in seconds.

    Clocks of hosts are brought together by what was measured over the process group's store, directly or by way of
    others; where nothing was, by the time of day.
    """
    kind_of = {part.header.part: part.header.clock for part in parts}
    measured: dict[tuple[str, str], list[tuple[float, float, float]]] = {}
    for part in parts:
        for one in part.measured:
            there, here = kind_of.get(one.to), part.header.clock
            if there is not None and there != here:
                measured.setdefault((here, there), []).append((one.at, one.offset, one.error))
    shifts: dict[tuple[str, str], Callable[[float], float]] = {}
    for (here, there), rows in measured.items():
        shift = _interpolated(rows)
        mean = median(offset for _, offset, _ in rows)
        shifts[here, there] = shift
        shifts.setdefault((there, here), partial(_back, shift, mean))
    ordered = sorted(parts, key=lambda part: (part.rank is None, part.rank or 0, part.header.wall))
    base = ordered[0].header
    ways: dict[str, list[Callable[[float], float]]] = {}
    for part in ordered:
        if part.header.clock not in ways:  # not to be reached from any clock before: by the time of day
            apart = (part.header.wall - part.header.monotonic) - (base.wall - base.monotonic)
            ways |= _ways_to(part.header.clock, shifts, partial(_always, apart), ways)

    def clock(part: Part, moment: float) -> float:
        for shift in ways[part.header.clock]:
            moment += shift(moment)
        return moment

    return clock


def _always(apart: float, moment: float) -> float:
    return apart


def _back(shift: Callable[[float], float], mean: float, moment: float) -> float:
    return -shift(moment - mean)


def _ways_to(
    root: str, shifts: dict[tuple[str, str], Callable[[float], float]], last: Callable[[float], float],
    known: Iterable[str],
) -> dict[str, list[Callable[[float], float]]]:  # fmt: skip
    """The shifts from each clock that can be compared with ``root``, and at last from there."""
    ways, queue = {root: [last]}, deque([root])
    while queue:
        there = queue.popleft()
        for here, to in shifts:
            if to == there and here not in ways and here not in known:
                ways[here] = [shifts[here, to], *ways[there]]
                queue.append(here)
    return ways


def _interpolated(rows: list[tuple[float, float, float]]) -> Callable[[float], float]:
    """The offset at a moment, from those measured before and after: clocks drift apart evenly."""
    best = min(error for _, _, error in rows)
    good = sorted((at, offset) for at, offset, error in rows if error <= _POOR * best)
    times = [at for at, _ in good]

    def offset(at: float) -> float:
        right = bisect(times, at)
        if right == 0 or right == len(good):
            return good[min(right, len(good) - 1)][1]
        (before, low), (after, high) = good[right - 1], good[right]
        return low + (high - low) * (at - before) / (after - before)

    return offset
