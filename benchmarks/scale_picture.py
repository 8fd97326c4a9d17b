"""Draws docs/scale.svg: what planning costs against the number of ranks, both axes logarithmic.

Called by the simulator with the cells of its run. Plain SVG, readable on light and dark pages; every point was counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor, log10
from typing import NamedTuple

from benchmarks.scale_report import Cell

ACROSS, HIGH = 960, 400
LEFT, MIDDLE, TOP, WIDE, BOTTOM = 62, 548, 44, 330, 300  # of the two plots, in pixels
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.small { font-size: 11px; fill: #57606a }
.grid { stroke: #8c959f; stroke-opacity: 0.25 }
.axis { stroke: #8c959f }
path { fill: none; stroke-width: 2 }
.rank { stroke: #d9822b } .rank-dot { fill: #d9822b }
.first { stroke: #3f8f5f } .first-dot { fill: #3f8f5f }
.size { stroke: #4c78a8 } .size-dot { fill: #4c78a8 }
.dcp { stroke: #c44e52; stroke-dasharray: 6 4 } .dcp-dot { fill: #c44e52 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .small { fill: #9da7b1 } }
"""

Points = list[tuple[float, float]]


class Line(NamedTuple):
    """One line of a plot; ``style`` names its colour."""

    label: str
    style: str
    points: Points


def lines_of(cells: Sequence[Cell]) -> tuple[list[Line], list[Line]]:
    """CPU seconds, and bytes, of the worst sharding at each number of ranks; torch's planner where it ran."""
    names = {cell.name for cell in cells}
    ranks = [n for n in sorted({c.ranks for c in cells}) if {c.name for c in cells if c.ranks == n} == names]

    def worst(figure: str) -> Points:
        return [(n, max(getattr(cell.save, figure) for cell in cells if cell.ranks == n)) for n in ranks]

    def torchs(figure: str) -> Points:
        return [(cell.ranks, getattr(cell.dcp, figure)) for cell in cells if cell.dcp is not None]

    seconds = [
        Line("holdfast, any rank: first plan", "rank", worst("first_save_s")),
        Line("holdfast, first rank: all the rest", "first", worst("first_rank_s")),
        Line("torch DCP, coordinator: global plan", "dcp", torchs("global_s")),
    ]
    nbytes = [
        Line("holdfast: manifest", "size", worst("manifest_bytes")),
        Line("holdfast: memory of a plan", "rank", worst("plan_bytes")),
        Line("torch DCP: metadata", "dcp", torchs("metadata_bytes")),
    ]
    return [line for line in seconds if line.points], [line for line in nbytes if line.points]


def draw(cells: Sequence[Cell]) -> str:
    """The picture."""
    seconds, nbytes = lines_of(cells)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {ACROSS} {HIGH}" role="img">',
            "<title>Cost of planning a save against the number of ranks</title>",
            f"<style>{STYLE}</style>",
            *_plot(LEFT, "CPU seconds, the worst of all shardings", seconds, _seconds),
            *_plot(MIDDLE, "bytes, the worst of all shardings", nbytes, _bytes),
            "</svg>",
            "",
        ]
    )


def _plot(left: int, title: str, lines: Sequence[Line], unit: Callable[[float], str]) -> list[str]:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low_x, high_x = log10(min(xs)) - 0.1, log10(max(xs)) + 0.1
    low_y, high_y = floor(log10(min(ys)) * 2) / 2, max(ceil(log10(max(ys)) * 2) / 2, floor(log10(min(ys)) * 2) / 2 + 1)

    def x(value: float) -> float:
        return left + (log10(value) - low_x) / (high_x - low_x) * WIDE

    def y(value: float) -> float:
        return BOTTOM - (log10(value) - low_y) / (high_y - low_y) * (BOTTOM - TOP)

    out = [f'<text class="title" x="{left}" y="{TOP - 20}">{title}</text>']
    for power in range(ceil(low_y), floor(high_y) + 1):
        at = y(10.0**power)
        out.append(f'<line class="grid" x1="{left}" y1="{at:.1f}" x2="{left + WIDE}" y2="{at:.1f}"/>')
        out.append(f'<text class="small" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{unit(10.0**power)}</text>')
    for value in sorted(set(xs)):
        at = x(value)
        out.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{BOTTOM}"/>')
        out.append(f'<text class="small" x="{at:.1f}" y="{BOTTOM + 18}" text-anchor="middle">{value:,.0f}</text>')
    out.append(f'<line class="axis" x1="{left}" y1="{BOTTOM}" x2="{left + WIDE}" y2="{BOTTOM}"/>')
    out.append(f'<text class="small" x="{left + WIDE}" y="{BOTTOM + 34}" text-anchor="end">ranks</text>')
    for number, line in enumerate(lines):
        path = " L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in line.points)
        out.append(f'<path class="{line.style}" d="M{path}"/>')
        for a, b in line.points:
            out.append(f'<circle class="{line.style}-dot" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>')
        last = line.points[-1]
        out.append(f'<text x="{x(last[0]) + 8:.1f}" y="{y(last[1]) + 4:.1f}">{unit(last[1])}</text>')
        at = BOTTOM + 48 + 18 * number
        out.append(
            f'<path class="{line.style}" d="M{left} {at} h22"/><text x="{left + 30}" y="{at + 4}">{line.label}</text>'
        )
    return out


def _seconds(value: float) -> str:
    return (
        f"{value:g} s"
        if value >= 1 and log10(value) % 1 == 0
        else _two(value, "s")
        if value >= 1
        else _two(value * 1e3, "ms")
    )


def _bytes(value: float) -> str:
    for scale, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= scale:
            return _two(value / scale, name)
    return _two(value, "B")


def _two(value: float, unit: str) -> str:
    """Two digits that count."""
    return f"{value:.1f} {unit}" if value < 9.95 and value != round(value) else f"{value:.0f} {unit}"
