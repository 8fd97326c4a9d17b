"""Which rank writes which piece: for one rank alone, or for all of them at once.

A plan makes an `OwnPieces` on every rank and an `AllPieces` on the first. Boxes that one rank holds are its own; boxes
that the same ranks hold are laid end to end and cut into equal shares. Pure.

We rejected greedy bin packing. Equal shares of one line give the same balance with far fewer cuts, each holder's file
is read sequentially, and there are no ties to break.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec

from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes
from holdfast.ondisk.cells import Cells
from holdfast.plan.holders import Holders, Lie, cut_of

HolderGroup = tuple[Holders, list[int]]
"""Ranks that hold the same boxes, and the numbers of these."""


class PlannedTensor(msgspec.Struct, frozen=True, eq=False):
    """What is planned alike for all tensors that share it: type, shape, and which ranks hold which box.

    ``first`` says that the first holder of a box writes all of it.
    """

    dtype: str
    shape: tuple[int, ...]
    lie: Lie
    first: bool = False


class Owned(msgspec.Struct, frozen=True, eq=False):
    """The pieces of a tensor as a manifest has them: its cells, and the rank that writes each. Shared between tensors.

    An empty tensor has no cells, and one owner.
    """

    cells: list[int] | Cells | None
    owners: Sequence[int]


Planned = Mapping[str, PlannedTensor]
_Line = list[tuple[int, tuple[int, ...]]]


class OwnPieces:
    """What ``rank`` writes."""

    def __init__(self, rank: int, tensors: Collection[PlannedTensor]) -> None:
        self.rank = rank
        self._whole: dict[PlannedTensor, list[Box]] = {}
        self._shared: dict[PlannedTensor, list[tuple[int, int, list[Box]]]] = {}
        numbers: dict[Holders, int] = {}
        for kind in dict.fromkeys(tensors):
            held: dict[Holders, list[Box]] = {}
            for box, holders in kind.lie.of(rank):
                held.setdefault(holders[:1] if kind.first else holders, []).append(box)
            self._whole[kind] = held.pop((rank,), [])
            self._shared[kind] = [
                (numbers.setdefault(holders, len(numbers)), holders.index(rank), boxes)
                for holders, boxes in held.items()
                if len(holders) > 1
            ]
        entries = {
            kind: [(number, _entries(kind, boxes)) for number, _, boxes in shared]
            for kind, shared in self._shared.items()
        }
        self._hands = _dealt(tensors, entries, [len(holders) for holders in numbers])

    def of(self, tensors: Planned) -> Iterator[tuple[str, PlannedTensor, Box]]:
        """The pieces with their names, in the order of ``tensors``, which are those that this was made of."""
        at = [0] * len(self._hands)
        for name, tensor in tensors.items():
            for box in self._whole[tensor]:
                yield name, tensor, box
            for number, own, boxes in self._shared[tensor]:
                hand, begin = self._hands[number], at[number]
                at[number] += len(boxes)
                for place, box in enumerate(boxes, begin):
                    holder = hand.holders[place]
                    if holder == own:
                        yield name, tensor, box
                    elif holder < 0:
                        yield from ((name, tensor, part.of(box)) for part in hand.cut[place] if part.holder == own)


class AllPieces:
    """What every rank writes."""

    def __init__(self, tensors: Collection[PlannedTensor]) -> None:
        kinds = list(dict.fromkeys(tensors))
        shared = {kind.lie: _shared(kind.lie) for kind in kinds if not kind.first}
        # Groups of holders that have the same boxes, but for where these lie, are dealt them alike.
        profiles: dict[Holders, list[tuple[Lie, list[tuple[int, ...]]]]] = {}
        for lie, groups in shared.items():
            for holders, numbers in groups.items():
                profiles.setdefault(holders, []).append((lie, [lie.boxes[number].lengths for number in numbers]))
        alike: dict[tuple[object, ...], int] = {}
        counts: list[int] = []
        self._lines: dict[Lie, dict[int, list[HolderGroup]]] = {lie: {} for lie in shared}
        for holders, profile in profiles.items():
            key = (len(holders), *((lie, *lengths) for lie, lengths in profile))
            number = alike.setdefault(key, len(counts))
            if number == len(counts):
                counts.append(len(holders))
            for lie, _ in profile:
                self._lines[lie].setdefault(number, []).append((holders, shared[lie][holders]))
        entries = {
            kind: [
                (number, _entries(kind, [kind.lie.boxes[n] for n in groups[0][1]]))
                for number, groups in self._lines_of(kind).items()
            ]
            for kind in kinds
        }
        self._steps = {kind: [(number, len(line)) for number, line in lines] for kind, lines in entries.items()}
        self._hands = _dealt(tensors, entries, counts)
        self._known: dict[tuple[object, ...], Owned] = {}

    def _lines_of(self, kind: PlannedTensor) -> dict[int, list[HolderGroup]]:
        return {} if kind.first else self._lines[kind.lie]

    def of(self, tensors: Planned) -> Iterator[tuple[str, PlannedTensor, Owned]]:
        """The pieces of each tensor, in the order of ``tensors``, which are those that this was made of."""
        at = [0] * len(self._hands)
        for name, tensor in tensors.items():
            given: list[Given] = []
            for number, count in self._steps[tensor]:
                begin = at[number]
                at[number] = end = begin + count
                hand = self._hands[number]
                given += hand.holders[begin:end] if not hand.cut else [hand.given(place) for place in range(begin, end)]
            key = (tensor.lie, tensor.first, *given)
            owned = self._known.get(key)
            if owned is None:
                owned = self._known[key] = self._owned(tensor, given)
            yield name, tensor, owned

    def _owned(self, tensor: PlannedTensor, given: Sequence[Given]) -> Owned:
        lie = tensor.lie
        dealt: dict[int, tuple[Holders, Given]] = {}
        begin = 0
        for groups in self._lines_of(tensor).values():
            for holders, numbers in groups:
                dealt.update((number, (holders, given[begin + i])) for i, number in enumerate(numbers))
            begin += len(groups[0][1])
        if all(isinstance(one, int) for one in given):
            owners = [holders[0] for holders in lie.holders]
            for number, (holders, one) in dealt.items():
                owners[number] = holders[one]  # type: ignore[index]
            return Owned(lie.cut.cells, [owners[number] for number in lie.cut.order])
        pieces: list[tuple[Box, int]] = []
        for number, (box, sole) in enumerate(zip(lie.boxes, lie.holders, strict=True)):
            holders, one = dealt.get(number, (sole, 0))
            pieces += ((part, holders[holder]) for part, holder in pieces_of(one, box))
        cut = cut_of(tensor.shape, [box for box, _ in pieces])
        return Owned(cut.cells, [pieces[number][1] for number in cut.order])


def _shared(lie: Lie) -> dict[Holders, list[int]]:
    """The boxes (by number) that several ranks hold, by their holders."""
    by_holders: dict[Holders, list[int]] = {}
    for number, holders in enumerate(() if lie.sole else lie.holders):
        if len(holders) > 1:
            by_holders.setdefault(holders, []).append(number)
    return by_holders


def _entries(kind: PlannedTensor, boxes: Sequence[Box]) -> _Line:
    """What a tensor adds to a line."""
    size = dtypes.itemsize(kind.dtype)
    return [(box.size * size, box.lengths) for box in boxes]


def _dealt(
    tensors: Collection[PlannedTensor], entries: Mapping[PlannedTensor, Sequence[tuple[int, _Line]]],
    counts: Sequence[int],
) -> list[Hand]:  # fmt: skip
    """Lay the lines out in the order of the tensors, and deal them."""
    lines: list[_Line] = [[] for _ in counts]
    if lines:
        for tensor in tensors:
            for number, line in entries[tensor]:
                lines[number] += line
    return [deal(line, count) for line, count in zip(lines, counts, strict=True)]


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
    return [(box, given)] if isinstance(given, int) else [(part.of(box), part.holder) for part in given]
