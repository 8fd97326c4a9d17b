"""Which rank writes which piece: for one rank alone, or for all of them at once.

A plan makes one `OwnPieces` on every rank and one `AllPieces` on the first. Neither lists the other ranks' boxes of a
tensor unless it has to: boxes held by one rank are its own, and lines of replicated boxes that are alike are dealt out
once. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import msgspec

from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import Cells
from holdfast.plan.dealing import Given, Hand, deal, pieces_of
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
