"""Replicated boxes dealt out to their holders by bytes: which holder writes which, and where a box is cut.

The plan calls `deal` for a line of boxes that the same ranks hold. Pure, and knows no ranks: holders have numbers.

We rejected greedy bin packing. Equal shares of one line give the same balance with far fewer cuts, each holder's file
is read sequentially, and there are no ties to break.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

from holdfast.ondisk.box import Box, flat_boxes

SMALLEST_CUT = 4096
"""A replicated piece of fewer bytes is never cut, and no share is smaller: a thousand scalars are then read from a file
or two, and not from a thousand."""

CUT_SHARE = 0.02
"""Nor one that is smaller than this part of what its holder writes: giving it away whole keeps the balance."""


EVEN_ROWS = 20
"""Rows of a share from which on cutting between rows is even enough; fewer are cut inside of a row."""


class Slice(NamedTuple):
    """A part of a box, counted from its corner, and the holder that writes it."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    holder: int

    def of(self, box: Box) -> Box:
        """The part as a box of the tensor."""
        return Box(tuple(map(int.__add__, self.offsets, box.offsets)), self.lengths)


Given = int | tuple[Slice, ...]
"""The writers of a box: one holder, or several with a part each."""


class Hand(NamedTuple):
    """A line dealt out: the holder of each box, -1 for one that is cut, and the parts of those."""

    holders: array[int]
    cut: dict[int, tuple[Slice, ...]]

    def given(self, at: int) -> Given:
        """The writers of the box at this place of the line."""
        holder = self.holders[at]
        return self.cut[at] if holder < 0 else holder


def deal(line: Sequence[tuple[int, tuple[int, ...]]], count: int) -> Hand:
    """Deal boxes (bytes, lengths) out to ``count`` holders.

    They are laid end to end and cut into equal shares, one for each holder in turn until all is dealt. So every holder
    writes one run of neighbours, at most ``count - 1`` boxes are cut, and shares differ by less than a row: of the
    first axis whose rows are fine enough, else of the longest one, and where these are coarse as well, by an element.
    """
    share = max(sum(nbytes for nbytes, _ in line) / count, SMALLEST_CUT)
    bounds = [share * (k + 1) for k in range(count - 1)]
    smallest = max(SMALLEST_CUT, CUT_SHARE * share)
    holders, cut = array("i", bytes(4 * len(line))), {}
    at = 0
    for number, (nbytes, lengths) in enumerate(line):
        if nbytes < smallest:
            holders[number] = bisect_right(bounds, at + nbytes / 2)
        else:
            parts = _cut_at(lengths, bounds, at, nbytes, share)
            holders[number] = parts[0].holder if len(parts) == 1 else -1
            if len(parts) > 1:
                cut[number] = parts
        at += nbytes
    return Hand(holders, cut)


def _cut_at(lengths: tuple[int, ...], bounds: Sequence[float], at: int, nbytes: int, share: float) -> tuple[Slice, ...]:
    """Cut a box of ``nbytes``, which begins ``at`` in the line, where ``bounds`` fall."""
    # Rows of the first axis keep parts contiguous. If its rows are too coarse for the share, a longer axis serves.
    axis = next((d for d, n in enumerate(lengths) if n * (share / nbytes) * CUT_SHARE * 2 >= 1), None)
    if axis is None:
        axis = max(range(len(lengths)), key=lambda d: lengths[d])
    if lengths[axis] * (share / nbytes) < EVEN_ROWS and share >= 2 * SMALLEST_CUT:
        return tuple(
            Slice(*part, holder)
            for start, stop, holder in _runs(prod(lengths), bounds, at, nbytes)
            for part in flat_boxes(lengths, start, stop)
        )
    parts = []
    for start, stop, holder in _runs(lengths[axis], bounds, at, nbytes):
        offsets, sizes = [0] * len(lengths), list(lengths)
        offsets[axis], sizes[axis] = start, stop - start
        parts.append(Slice(tuple(offsets), tuple(sizes), holder))
    return tuple(parts)


def _runs(length: int, bounds: Sequence[float], at: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
    """``length`` rows or elements cut where ``bounds`` fall: (start, stop, holder)."""
    start, index = 0, bisect_right(bounds, at)
    while start < length:
        bound = (bounds[index] - at) / nbytes if index < len(bounds) else 1.0
        stop = min(max(round(bound * length), start), length)
        if stop > start:
            yield start, stop, index
        start, index = stop, index + 1


def pieces_of(given: Given, box: Box) -> Iterable[tuple[Box, int]]:
    """The pieces of a box, each with its holder."""
    return [(box, given)] if isinstance(given, int) else [(part.of(box), part.holder) for part in given]
