"""Who wants the same bytes of a checkpoint, and which of them reads what: a pure function of the targets' layouts.

`share` and `pass_on` ask here. Touches no tensor, no file and no rank; every rank works out the same for its own part.

We rejected lists of boxes from each rank. The axes of a mesh that replicate say which ranks hold a box, so a rank works
out its own boxes and nothing for thousands of others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import msgspec

from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, flat_boxes, intersect
from holdfast.ondisk.cells import TensorRecord
from holdfast.plan.spread import Boxes, Placed, Spread, Whole

SHORTEST = 1 << 20
"""Ranks that have fewer bytes than this in common read them each: connecting costs more."""

ALIGN = 64
"""Atoms lie in memory at multiples of this, so that a slice of a window never cuts an element."""

Holders = tuple[int, ...]


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Explicit boxes ``(offsets, lengths)``, without the rank that has them: replicas tell the same."""

    boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


class Wants(msgspec.Struct, array_like=True, frozen=True):
    """What a rank wants of a checkpoint: (number of a tensor, index of its spread). Ranks of one mesh tell equal ones.

    ``checkpoint`` stands for the tensors, their cells and their files: ranks that differ in it share nothing.
    """

    checkpoint: str
    tensors: list[tuple[int, int]]
    spreads: list[Whole | Placed | Held]


class Item(NamedTuple):
    """A box of the tensor of that number."""

    tensor: int
    box: Box


class Atom(NamedTuple):
    """What is read by one rank alone: elements ``first:first + elements`` of ``share``, in row-major order.

    ``share`` is what an item takes of a ``cell`` that lies in ``file``. If it is one run there, an atom is a part of
    one block, from element ``at`` of the cell; else ``at`` is -1, and the atom is all of its share.
    """

    item: int
    share: Box
    first: int
    elements: int
    nbytes: int
    file: int
    cell: Box
    at: int


def as_told(spread: Spread, rank: int) -> Whole | Placed | Held:
    """A spread as other ranks get it, which may hold the same."""
    if isinstance(spread, Boxes):
        return Held(tuple(sorted(box for who, boxes in spread.of if who == rank for box in boxes)))
    return spread


def may_be_shared(spread: Whole | Placed | Held, size: int) -> bool:
    """Whether others of ``size`` ranks could hold the same boxes, as far as this rank can tell by itself."""
    if isinstance(spread, Placed):
        return len(spread.ranks) < size or any(
            n > 1 and split is None for n, split in zip(spread.shape, spread.splits, strict=True)
        )
    return size > 1


def shared_items(
    wants: Sequence[Wants], wants_of: Sequence[int], rank: int, own: Mapping[Item, Whole | Placed | Held]
) -> dict[Holders, list[Item]]:
    """The items of ``rank`` by the ranks that all want them, itself among them; items of its own are left out.

    Rank r wants ``wants[wants_of[r]]``; ``own`` are the items of ``rank``, each with its spread.
    """
    finder = _Finder(wants, wants_of, rank)
    by_holders: dict[Holders, list[Item]] = defaultdict(list)
    for item, spread in own.items():
        holders = finder.holders(item, spread)
        if len(holders) > 1:
            by_holders[holders].append(item)
    return {holders: sorted(items) for holders, items in sorted(by_holders.items())}


class _Finder:
    """Thousands of tensors share a handful of spreads: who holds what is worked out once for each of them."""

    def __init__(self, wants: Sequence[Wants], wants_of: Sequence[int], rank: int) -> None:
        self.wants, self.rank = wants, rank
        self.members: list[list[int]] = [[] for _ in wants]
        for r, index in enumerate(wants_of):
            self.members[index].append(r)
        self.named: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for index, wanted in enumerate(wants):
            if wanted.checkpoint == wants[wants_of[rank]].checkpoint:
                for tensor, spread in wanted.tensors:
                    self.named[tensor].append((index, spread))
        self._known: dict[tuple[object, ...], Holders] = {}

    def holders(self, item: Item, spread: Whole | Placed | Held) -> Holders:
        """Every rank that wants the item."""
        named = tuple(self.named[item.tensor])
        # Of a placed tensor a rank has boxes that nobody has who is elsewhere on the mesh: which box is no matter.
        key = (named, spread if isinstance(spread, Placed) else item.box if isinstance(spread, Held) else None)
        if key not in self._known:
            ranks: set[int] = set()
            for index, at in named:
                ranks.update(self._of(item.box, spread, self.wants[index].spreads[at], self.members[index]))
            self._known[key] = tuple(sorted(ranks))
        return self._known[key]

    def _of(
        self, box: Box, own: Whole | Placed | Held, other: Whole | Placed | Held, members: Sequence[int]
    ) -> Sequence[int]:
        if isinstance(own, Whole):
            return members if isinstance(other, Whole) else ()
        if isinstance(own, Held):
            return members if isinstance(other, Held) and box in other.boxes else ()
        # Meshes of other ranks that cut in the same way hold the same boxes at the same places.
        if not isinstance(other, Placed) or (other.shape, other.splits) != (own.shape, own.splits):
            return ()
        there = set(members)
        return [r for r in (other.ranks[p] for p in _alike(own, own.ranks.index(self.rank))) if r in there]


@lru_cache(maxsize=1024)
def _alike(spread: Placed, position: int) -> tuple[int, ...]:
    """The positions of a mesh that hold what ``position`` holds: they differ along axes that replicate alone."""
    axes, stride, base = [], 1, 0
    for n, split in zip(reversed(spread.shape), reversed(spread.splits), strict=True):
        if split is None:
            axes.append([i * stride for i in range(n)])
        else:
            base += position // stride % n * stride
        stride *= n
    return tuple(sorted(base + sum(steps) for steps in product(*axes)))


def atoms_of(items: Sequence[Item], records: Sequence[TensorRecord]) -> list[Atom]:
    """All bytes of the items in parts that are read whole, in the order in which they lie in files.

    A block of a file is never parted among ranks, so that its reader can check its sum.
    """
    atoms: list[Atom] = []
    for number, (tensor, box) in enumerate(items):
        record = records[tensor]
        size = dtypes.itemsize(record.dtype)
        for cell, file in record.touching(box):
            share = box if cell == box else intersect(cell, box)
            if share is not None:
                atoms += _cut(number, share, cell, file, size)
    atoms.sort(key=lambda atom: (atom.file, atom.item, atom.cell, atom.at, atom.share, atom.first))
    return atoms


def _cut(item: int, share: Box, cell: Box, file: int, size: int) -> list[Atom]:
    start, most = run_at(share, cell), BLOCK // size
    if start is None:
        parts = [
            Box(tuple(map(int.__add__, part.offsets, share.offsets)), part.lengths)
            for first in range(0, share.size, most)
            for part in flat_boxes(share.lengths, first, min(first + most, share.size))
        ]
        return [Atom(item, part, 0, part.size, part.size * size, file, cell, -1) for part in parts]
    atoms, at, stop = [], start, start + share.size
    while at < stop:
        count = min(stop, (at // most + 1) * most) - at
        atoms.append(Atom(item, share, at - start, count, count * size, file, cell, at))
        at += count
    return atoms


def run_at(inner: Box, outer: Box) -> int | None:
    """The element of ``outer``, row-major, at which ``inner`` begins, if it is one run there."""
    if inner == outer:
        return 0
    at, whole_below = 0, True
    for length, size in zip(reversed(inner.lengths), reversed(outer.lengths), strict=True):
        if length > 1 and not whole_below:
            return None
        whole_below = whole_below and length == size
    stride = 1
    for start, low, size in zip(reversed(inner.offsets), reversed(outer.offsets), reversed(outer.lengths), strict=True):
        at += (start - low) * stride
        stride *= size
    return at


def runs_of(atoms: Sequence[Atom], readers: int) -> list[range]:
    """Which atoms each reader reads: neighbours, as many bytes as every other reader, give or take an atom."""
    ends = list(accumulate(atom.nbytes for atom in atoms))
    total = ends[-1] if ends else 0
    cuts = [0]
    for reader in range(1, readers):
        goal = total * reader / readers
        cut = bisect_left(ends, goal)  # atom `cut` is the one that reaches the goal: it goes where most of it lies
        if cut < len(ends) and ends[cut] - goal < goal - (ends[cut] - atoms[cut].nbytes):
            cut += 1
        cuts.append(max(cut, cuts[-1]))
    return [range(a, b) for a, b in zip(cuts, [*cuts[1:], len(atoms)], strict=True)]


class Placing(NamedTuple):
    """An atom, by its number, and where in a window it lies."""

    atom: int
    offset: int


def windows_of(atoms: Sequence[Atom], run: range, most: int) -> list[list[Placing]]:
    """A reader's atoms in windows of at most ``most`` bytes (of one atom, if that has more)."""
    windows: list[list[Placing]] = []
    end = most
    for number in run:
        at = -(-end // ALIGN) * ALIGN
        if at + atoms[number].nbytes > most:
            windows.append([])
            at = 0
        windows[-1].append(Placing(number, at))
        end = at + atoms[number].nbytes
    return windows
