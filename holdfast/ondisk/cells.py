"""How a tensor is cut into cells, and which data file holds each of them, as a manifest has it.

The manifest holds a `TensorRecord` for each tensor; plans of saves and reads ask it. Never looks at a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import prod

import msgspec

from holdfast.ondisk import dtypes, spans
from holdfast.ondisk.box import Box, Grid, grid_of, intersect, regular_cuts, tiling_fault, whole

MAX_CELLS = 1 << 20
"""Cells of one tensor at most: a few characters of a hostile file can claim any number."""

MAX_AXES = 64
"""As many as torch can work with."""


class Cells(msgspec.Struct, frozen=True, omit_defaults=True, cache_hash=True):
    """Cells that are no regular grid: cut points on each axis, or plain boxes."""

    cuts: tuple[tuple[int, ...], ...] | None = None
    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] | None = None


class TensorRecord(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor: torch's dtype name, global shape, how it is cut into cells, and the file of each non-empty cell."""

    dtype: str
    shape: tuple[int, ...]
    cells: list[int] | Cells | None
    files: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    def touching(self, box: Box) -> list[tuple[Box, int]]:
        """The cells that meet ``box``, each with the index of its file."""
        files = spans.read(self.files)
        if self.cells is None and files.count and 0 not in box.lengths:  # by far the most common: saved whole
            return [(whole(self.shape), files.first)]
        return [(cell, files.at(number)) for number, cell in _geometry(self.shape, frozen(self.cells)).touching(box)]

    def boxes(self) -> list[tuple[Box, int]]:
        """Every non-empty cell with the index of its file."""
        cells = _geometry(self.shape, frozen(self.cells))
        return list(zip(cells.boxes(), spans.read(self.files), strict=True))


class _Scattered:
    """Boxes that are no grid, found by where they lie on the first axis."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self._boxes = boxes
        self._order = sorted(range(len(boxes)), key=lambda n: boxes[n].offsets[:1])
        self._starts = [boxes[n].offsets[0] for n in self._order]
        self._reach = list(accumulate((boxes[n].ends[0] for n in self._order), max))

    def boxes(self) -> Iterator[Box]:
        """Every box, in order."""
        return iter(self._boxes)

    def touching(self, box: Box) -> Iterator[tuple[int, Box]]:
        """The boxes (number, box) that share at least one element with ``box``."""
        if 0 in box.lengths:
            return
        first, last = bisect_right(self._reach, box.offsets[0]), bisect_left(self._starts, box.ends[0])
        for number in sorted(self._order[first:last]):
            if intersect(self._boxes[number], box) is not None:
                yield number, self._boxes[number]


def frozen(cells: list[int] | Cells | None) -> tuple[int, ...] | Cells | None:
    """The cells of a record as a value that can be a key."""
    return tuple(cells) if isinstance(cells, list) else cells


@lru_cache(maxsize=1024)
def _geometry(shape: tuple[int, ...], cells: tuple[int, ...] | Cells | None) -> Grid | _Scattered:
    # Thousands of tensors share a handful of shapes and cuts: one Grid serves them all.
    if 0 in shape:
        return _Scattered(())
    if cells is None or not shape:
        return Grid(tuple((0, n) for n in shape))
    if isinstance(cells, tuple):
        return Grid(tuple(regular_cuts(n, c) for n, c in zip(shape, cells, strict=True)))
    if cells.cuts is not None:
        return Grid(cells.cuts)
    return _Scattered([Box(o, n) for o, n in cells.boxes or ()])


def record_fault(record: TensorRecord, files: int) -> str | None:
    """What is wrong with a record of a manifest that has so many files; None if nothing is."""
    shape, cells = record.shape, record.cells
    if any(n < 0 for n in shape):
        return f"shape {list(shape)} is negative"
    if len(shape) > MAX_AXES or prod(n or 1 for n in shape) >= 1 << 60:
        return f"shape {str(list(shape))[:80]} is none that a tensor can have"
    if 0 in shape:
        return None if not record.files else "an empty tensor has files"
    if cells is None:
        count = 1
    elif isinstance(cells, list):
        if len(cells) != len(shape) or any(c < 1 for c in cells):
            return f"cells {cells} do not fit shape {list(shape)}"
        count = prod(-(-n // c) for n, c in zip(shape, cells, strict=True))
    elif cells.cuts is not None:
        if len(cells.cuts) != len(shape) or any(
            len(c) < 2 or c[0] != 0 or c[-1] != n or any(a >= b for a, b in pairwise(c))
            for c, n in zip(cells.cuts, shape, strict=True)
        ):
            return f"cuts do not fit shape {list(shape)}"
        count = prod(len(c) - 1 for c in cells.cuts)
    elif cells.boxes is not None:
        boxes = tuple(Box(o, n) for o, n in cells.boxes)
        if any(len(b.offsets) != len(b.lengths) or 0 in b.lengths for b in boxes):
            return f"boxes do not fit shape {list(shape)}"
        fault = _known_tiling_fault(shape, boxes)
        if fault:
            return fault
        count = len(boxes)
    else:
        return "cells are neither cuts nor boxes"
    if count > MAX_CELLS:
        return f"{count} cells are more than {MAX_CELLS}"
    numbers = spans.read(record.files)
    if numbers.count != count:
        return f"{count} cells, files {record.files!r}"
    return None if numbers.largest < files else f"files {record.files!r}, but there are only {files}"


_known_tiling_fault = lru_cache(maxsize=4096)(tiling_fault)


def cells_for(shape: Sequence[int], boxes: Sequence[Box]) -> tuple[list[int] | Cells | None, list[int]]:
    """How to write ``boxes`` (which tile ``shape``) shortest: (cells, order of the boxes as cells count them)."""
    if len(boxes) == 1 or 0 in shape:
        return None, list(range(len(boxes)))
    grid = grid_of(shape, boxes)
    if grid is None:
        order = sorted(range(len(boxes)), key=lambda i: boxes[i])
        return Cells(boxes=tuple((boxes[i].offsets, boxes[i].lengths) for i in order)), order
    return cells_of_grid(shape, grid), sorted(range(len(boxes)), key=lambda i: boxes[i].offsets)


def cells_of_grid(shape: Sequence[int], grid: Grid) -> list[int] | Cells | None:
    """How to write the cells of a grid shortest."""
    if prod(grid.counts) == 1:
        return None
    cell = [c[1] for c in grid.cuts]
    if all(cuts == regular_cuts(n, c) for cuts, n, c in zip(grid.cuts, shape, cell, strict=True)):
        return cell
    return Cells(cuts=grid.cuts)
