"""Parts of tensors in the memory of ranks, and which bytes of the target's files they become: arithmetic on strides.

A conversion from a live state makes a `Patch` of each box that a rank writes. Copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from holdfast.export.draft import WINDOW
from holdfast.storage.local.disk import SECTOR

Run = tuple[int, int]
"""A stretch of a file: where it begins and ends."""

Cell = tuple[str, int]
"""A window of a file: its path, and its number. All ranks cut the files at the same places."""


class Footprint(NamedTuple):
    """The bytes of a file that an array of elements becomes.

    Element (i, j) stands at ``offset + i * steps[0] + j * steps[1]``. Once it is `folded`, the steps descend.
    """

    path: str
    offset: int
    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    itemsize: int

    @property
    def end(self) -> int:
        """Where its last element ends."""
        return self.offset + self.itemsize + sum((n - 1) * s for n, s in zip(self.lengths, self.steps, strict=True))

    @property
    def nbytes(self) -> int:
        return prod(self.lengths) * self.itemsize

    @property
    def is_run(self) -> bool:
        """Whether nothing else lies between its first and its last byte."""
        return self.end - self.offset == self.nbytes

    @property
    def cell(self) -> Cell:
        """The window in which it begins."""
        return self.path, self.offset // WINDOW

    @property
    def run_count(self) -> int:
        """How many runs it has."""
        return prod(self.lengths[: self._outer()[0]])

    def runs(self) -> Iterator[Run]:
        """The stretches of the file that it fills; neighbours may follow without a gap."""
        axis, length = self._outer()
        for at in product(*(range(0, n * s, s) for n, s in zip(self.lengths[:axis], self.steps[:axis], strict=True))):
            begin = self.offset + sum(at)
            yield begin, begin + length

    def _outer(self) -> tuple[int, int]:
        """How many axes lie outside of a run, and the bytes of a run."""
        length, axis = self.itemsize, len(self.steps)
        while axis and self.steps[axis - 1] == length:
            axis -= 1
            length *= self.lengths[axis]
        return axis, length


class Patch(NamedTuple):
    """Elements in memory, on any device, and the bytes that they become as elements of ``dtype``."""

    tensor: torch.Tensor
    dtype: torch.dtype
    place: Footprint


def patch_of(place: Footprint, memory: torch.Tensor, dtype: torch.dtype) -> Patch:
    """The patch for ``memory``, which has the lengths of its place."""
    place, strides = _folded(place, memory.stride())
    return Patch(memory.as_strided(place.lengths, strides, memory.storage_offset()), dtype, place)


def folded(place: Footprint) -> Footprint:
    """The same with its axes in the order of the file, and as few of them as possible."""
    return _folded(place, place.steps)[0]


def _folded(place: Footprint, strides: Sequence[int]) -> tuple[Footprint, list[int]]:
    """`folded`, as far as memory with these strides can follow, and its strides then."""
    axes: list[tuple[int, int, int]] = []  # length, step in the file, stride in memory
    for n, step, stride in sorted(zip(place.lengths, place.steps, strides, strict=True), key=lambda axis: -axis[1]):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * step and axes[-1][2] == n * stride:
            axes[-1] = axes[-1][0] * n, step, stride
        else:
            axes.append((n, step, stride))
    folded = place._replace(lengths=tuple(n for n, _, _ in axes), steps=tuple(step for _, step, _ in axes))
    return folded, [stride for _, _, stride in axes]


Index = tuple[int | slice, ...]


def cut(place: Footprint, index: Index = ()) -> Iterator[tuple[Footprint, Index]]:
    """Parts that each lie in one window of the file, and what of the array each of them is."""
    begin, room = place.offset, _room(place.offset)
    if not place.steps or place.end <= begin + room:
        yield place, index
        return
    count, step = place.lengths[0], place.steps[0]
    inner, row = place.end - begin - (count - 1) * step, 0  # bytes of one row
    while row < count:
        at = begin + row * step
        rows = min(max((_room(at) - inner) // step + 1, 0), count - row)
        if rows:
            part = place._replace(offset=at, lengths=(rows, *place.lengths[1:]))
            yield part, (*index, slice(row, row + rows))
            row += rows
        else:  # a row that goes on in the next window
            part = place._replace(offset=at, lengths=place.lengths[1:], steps=place.steps[1:])
            yield from cut(part, (*index, row))
            row += 1


def _room(at: int) -> int:
    """Bytes from ``at`` to the end of the window."""
    return WINDOW - at % WINDOW


def patches_by_cell(patches: Iterable[Patch]) -> dict[Cell, list[Patch]]:
    """The patches cut at the windows of the files, in the order of the files."""
    cells: dict[Cell, list[Patch]] = {}
    for patch in patches:
        for place, index in cut(patch.place):
            cells.setdefault(place.cell, []).append(Patch(patch.tensor[index], patch.dtype, place))
    return {cell: sorted(cells[cell], key=lambda patch: patch.place.offset) for cell in sorted(cells)}


def places_by_cell(places: Iterable[Footprint]) -> dict[Cell, list[Footprint]]:
    """The same of footprints alone."""
    cells: dict[Cell, list[Footprint]] = {}
    for place in places:
        for part, _ in cut(folded(place)):
            cells.setdefault(part.cell, []).append(part)
    return cells


def runs_of(places: Iterable[Footprint]) -> list[Run]:
    """The stretches of a file that these fill, in order, joined where they meet. No two of them share a byte."""
    places = list(places)
    begin, end = min((place.offset for place in places), default=0), max((place.end for place in places), default=0)
    if places and sum(place.nbytes for place in places) == end - begin:
        return [(begin, end)]  # thousands of runs of several ranks as a rule are one
    joined: list[Run] = []
    for low, high in sorted(run for place in places for run in place.runs()):
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return joined


def edges_of(runs: Iterable[Run]) -> list[Run]:
    """The ends of stretches that share a sector with bytes of others, in order."""
    edges: list[Run] = []
    for begin, end in runs:
        low, high = -(-begin // SECTOR) * SECTOR, end // SECTOR * SECTOR
        if low >= high:
            edges.append((begin, end))
        else:
            edges += [edge for edge in ((begin, low), (high, end)) if edge[0] < edge[1]]
    return edges


def parted(runs: Iterable[Run], edges: Sequence[Run]) -> tuple[list[Run], list[Run]]:
    """What of the runs lies outside of the edges, and what inside; both in order, as the arguments are."""
    outside: list[Run] = []
    inside: list[Run] = []
    first = 0
    for begin, end in runs:
        while first < len(edges) and edges[first][1] <= begin:
            first += 1
        number = first
        while number < len(edges) and edges[number][0] < end:
            low, high = max(begin, edges[number][0]), min(end, edges[number][1])
            if begin < low:
                outside.append((begin, low))
            inside.append((low, high))
            begin, number = high, number + 1
        if begin < end:
            outside.append((begin, end))
    return outside, inside
