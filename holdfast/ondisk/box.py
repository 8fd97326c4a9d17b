"""Boxes: half-open hyper-rectangles of a tensor's index space, and the arithmetic on them.

Called by planning, reading and the manifest. Pure integers: no tensors, no bytes.
A box of a 0-dimensional tensor has no axes and one element.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

MAX_COMPARED = 2_000_000
"""Boxes and pairs of boxes that are looked at before a tiling is given up: some seconds."""

_TEXT = re.compile(r"\[((?:[0-9]+:[0-9]+(?:,[0-9]+:[0-9]+)*)?)\]")


class Box(NamedTuple):
    """``offsets[d] <= index[d] < offsets[d] + lengths[d]`` on every axis d."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.lengths)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(o + n for o, n in zip(self.offsets, self.lengths, strict=True))

    def __str__(self) -> str:
        return "[" + ",".join(f"{o}:{o + n}" for o, n in zip(self.offsets, self.lengths, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box that covers ``shape``."""
    return _whole(tuple(shape))


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    # Many tensors share a shape: that they share the box as well makes comparing it free.
    return Box((0,) * len(shape), shape)


def covers(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` is all of ``shape``."""
    return box.lengths is shape or box.lengths == tuple(shape)


def inside(box: Box, shape: Sequence[int]) -> bool:
    """Whether ``box`` has the axes of ``shape`` and stays within them."""
    return len(box.offsets) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= s for o, n, s in zip(box.offsets, box.lengths, shape, strict=True)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None if that is empty."""
    starts = tuple(map(max, a.offsets, b.offsets))
    lengths = tuple(min(x, y) - s for x, y, s in zip(a.ends, b.ends, starts, strict=True))
    return Box(starts, lengths) if all(n > 0 for n in lengths) else None


def relative(box: Box, origin: Box) -> Box:
    """``box`` counted from the corner of ``origin``."""
    return Box(tuple(map(int.__sub__, box.offsets, origin.offsets)), box.lengths)


def parse(text: str) -> Box:
    """The inverse of ``str(box)``. Raises ValueError on anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"not a box: {text!r}")
    spans = [span.split(":") for span in match[1].split(",")] if match[1] else []
    box = Box(tuple(int(a) for a, _ in spans), tuple(int(b) - int(a) for a, b in spans))
    if str(box) != text or any(n < 0 for n in box.lengths):
        raise ValueError(f"not a box: {text!r}")
    return box


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The boxes that make up elements ``start:stop`` of the flattened tensor, in row-major order.

    At most ``2 * ndim - 1`` boxes; each is contiguous in the flattened tensor.
    """
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # rows first:last are whole
    if first > last or (first == last and start // row == (stop - 1) // row):
        index = start // row
        inner = flat_boxes(shape[1:], start - index * row, stop - index * row)
        return [Box((index, *b.offsets), (1, *b.lengths)) for b in inner]
    boxes = []
    if start < first * row:
        boxes += flat_boxes(shape, start, first * row)
    if first < last:
        boxes.append(Box((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last * row < stop:
        boxes += flat_boxes(shape, last * row, stop)
    return boxes


def runs(outer: Box, inner: Box) -> tuple[int, list[int]]:
    """Where ``inner`` lies in the row-major elements of ``outer``: (length of one run, start of each run).

    Runs are maximal: axes that ``inner`` takes whole are folded into the run.
    """
    lengths, axis = outer.lengths, len(outer.lengths)
    run = 1
    while axis > 0:
        axis -= 1
        run *= inner.lengths[axis]
        if inner.lengths[axis] != lengths[axis]:
            break
    strides = [prod(lengths[d + 1 :]) for d in range(len(lengths))]
    origin = sum((i - o) * s for i, o, s in zip(inner.offsets, outer.offsets, strides, strict=True))
    if not inner.lengths or prod(inner.lengths[:axis]) == 1:
        return run, [origin]
    starts = [origin]
    for d in range(axis):
        starts = [s + k * strides[d] for s in starts for k in range(inner.lengths[d])]
    return run, starts


class Grid(NamedTuple):
    """Cut points on every axis, ends included; cells are counted row-major."""

    cuts: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(len(c) - 1 for c in self.cuts)

    def boxes(self) -> Iterator[Box]:
        """Every cell, in order."""
        axes = [list(pairwise(c)) for c in self.cuts]
        for spans in product(*axes):
            yield Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The cells (number, box) that share at least one element with ``box``."""
        if 0 in box.lengths:
            return
        axes = []
        for cuts, start, length in zip(self.cuts, box.offsets, box.lengths, strict=True):
            first = bisect_right(cuts, start) - 1
            last = bisect_right(cuts, start + length - 1)
            axes.append(range(first, min(last, len(cuts) - 1)))
        counts = self.counts
        for index in product(*axes):
            number = 0
            for i, n in zip(index, counts, strict=True):
                number = number * n + i
            starts = tuple(c[i] for c, i in zip(self.cuts, index, strict=True))
            yield number, Box(starts, tuple(c[i + 1] - s for c, i, s in zip(self.cuts, index, starts, strict=True)))


def regular_cuts(length: int, cell: int) -> tuple[int, ...]:
    """Cut points of cells of ``cell`` along ``length``, the last one clipped."""
    return (*range(0, length, cell), length) if length else (0,)


def grid_of(shape: Sequence[int], boxes: Sequence[Box]) -> Grid | None:
    """The grid whose cells are exactly ``boxes`` (in any order), or None if they form no grid.

    Boxes must be non-empty, distinct and lie inside ``shape``.
    """
    axes = tuple(
        tuple(sorted({b.offsets[d] for b in boxes} | {b.offsets[d] + b.lengths[d] for b in boxes} | {0, shape[d]}))
        for d in range(len(shape))
    )
    grid = Grid(axes)
    if prod(grid.counts) != len(boxes):
        return None
    steps = [dict(pairwise(c)) for c in axes]
    for b in boxes:
        if any(step.get(o) != o + n for step, o, n in zip(steps, b.offsets, b.lengths, strict=True)):
            return None
    return grid


def tiling_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why ``boxes`` do not tile ``shape`` exactly (a hole, an overlap, outside), or None if they do."""
    for b in boxes:
        if not inside(b, shape):
            return f"box {b} lies outside of shape {list(shape)}"
    boxes = [b for b in boxes if b.size]
    if len(set(boxes)) == len(boxes) and grid_of(shape, boxes) is not None:
        return None
    # Equal volume and no overlap means no hole.
    fault = _overlap(boxes, len(shape))
    if fault is not None:
        return fault
    missing = prod(shape) - sum(b.size for b in boxes)
    return f"{missing} of {prod(shape)} elements are in no box" if missing else None


def _overlap(boxes: list[Box], ndim: int) -> str | None:
    """Which two of ``boxes`` overlap, or None if none do.

    What is cut from edge to edge is taken apart there, along one axis after the other: what lies on two sides of a cut
    cannot overlap. Most tilings come apart wholly, shares of a flat tensor among thousands of ranks too; only
    what is left in one tangle is compared, up to a bound, as boxes may come from a hostile file.
    """
    left, looked = [boxes], 0
    while left:
        group = left.pop()
        looked += len(group)
        parts = next((parts for axis in range(ndim) if len(parts := _cut_apart(group, axis)) > 1), None)
        if parts is not None:
            left += (part for part in parts if len(part) > 1)
        else:
            # A sweep along the axis on which most begin elsewhere, so that far boxes are never compared.
            axis = max(range(ndim), key=lambda d: len({b.offsets[d] for b in group}), default=0)
            active: list[Box] = []
            for b in sorted(group, key=lambda box: (box.offsets[axis:], box)):
                looked += len(active)
                if looked > MAX_COMPARED:
                    break
                active = [a for a in active if not a.offsets or a.offsets[axis] + a.lengths[axis] > b.offsets[axis]]
                for a in active:
                    if intersect(a, b) or not b.offsets:
                        return f"boxes {a} and {b} overlap"
                active.append(b)
        if looked > MAX_COMPARED:
            return f"{len(boxes)} boxes lie in such a tangle that they cannot be told apart"
    return None


def _cut_apart(boxes: list[Box], axis: int) -> list[list[Box]]:
    """``boxes`` in groups between which a cut across ``axis`` goes through none of them."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box.offsets[axis]):
        if box.offsets[axis] >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, box.offsets[axis] + box.lengths[axis])
    return parts
