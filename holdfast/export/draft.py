"""A draft: the files of a target before a byte is copied, cut into units of work in the same way on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from holdfast.export import zip_file
from holdfast.export.selection import Leaf
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box

WINDOW = 16 << 20
"""A unit is at most this many bytes of a file: large enough for a disk's full rate."""

Sums = Literal["blocks", "crc32", "none"]
"""What a format wants to know of a tensor's bytes: XXH3-64 of its blocks, CRC-32 of all of it, or nothing."""


class Span(NamedTuple):
    """A box of a tensor that is a run of its elements, and where in which file of the target its bytes begin."""

    leaf: Leaf
    box: Box
    path: str
    offset: int

    @property
    def start(self) -> int:
        """The number of its first element in the flattened tensor."""
        shape = self.leaf.shape
        return sum(o * prod(shape[d + 1 :]) for d, o in enumerate(self.box.offsets))

    @property
    def nbytes(self) -> int:
        return self.box.size * self.leaf.itemsize


class Fixed(NamedTuple):
    """Bytes at a place in a file of the target that are no tensor's: a header, an index, a small file."""

    path: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Draft:
    """The files of a target.

    ``files``: paths with the bytes to reserve; what `finish` writes may come on top. ``spans`` lie in order in each
    file. ``finish(sums)`` makes all the rest once every tensor is there, with one text for each span: its blocks' sums
    in hexadecimal one after the other, or its CRC-32 in decimal.
    """

    files: Mapping[str, int]
    spans: Sequence[Span]
    sums: Sums
    finish: Callable[[Sequence[str]], Iterator[Fixed]]


class Atom(NamedTuple):
    """Elements ``start:stop`` of a span's tensor: what is read, summed and written in one go."""

    span: int
    leaf: Leaf
    start: int
    stop: int
    path: str
    offset: int

    @property
    def nbytes(self) -> int:
        return (self.stop - self.start) * self.leaf.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    @property
    def weight(self) -> int:
        """Bytes that it takes in memory, before or after a cast."""
        return (self.stop - self.start) * _weight(self.leaf)


def _weight(leaf: Leaf) -> int:
    # Several sources of a sum are in memory at once: a block of each at a time.
    return max(leaf.itemsize, (2 if leaf.terms else 1) * leaf.width)


class Stretch(NamedTuple):
    """Elements ``start:stop`` of a tensor, and the address of the memory that takes them."""

    leaf: Leaf
    start: int
    stop: int
    address: int

    @property
    def size(self) -> int:
        """How many elements."""
        return self.stop - self.start


class Unit(NamedTuple):
    """Atoms that follow each other in one file and fit into a window."""

    number: int
    atoms: tuple[Atom, ...]

    @property
    def path(self) -> str:
        return self.atoms[0].path

    @property
    def nbytes(self) -> int:
        """Of its tensors; what lies between them is not counted."""
        return sum(atom.nbytes for atom in self.atoms)


def units_of(draft: Draft) -> list[Unit]:
    """The draft cut into units, in the order of its files."""
    units: list[Unit] = []
    held: list[Atom] = []
    weight = 0
    for number, span in enumerate(draft.spans):
        # A large sum begins a window, so that windows end where the blocks of its sources do.
        begins = bool(span.leaf.terms) and weight + span.box.size * _weight(span.leaf) > WINDOW
        for atom in _atoms(number, span, draft.sums):
            weight += atom.weight
            if held and (begins or atom.path != held[0].path or atom.end - held[0].offset > WINDOW or weight > WINDOW):
                units.append(Unit(len(units), tuple(held)))
                held, weight = [], atom.weight
            held.append(atom)
            begins = False
    return [*units, Unit(len(units), tuple(held))] if held else units


def _atoms(number: int, span: Span, sums: Sums) -> Iterator[Atom]:
    leaf, first = span.leaf, span.start
    at = first
    for stop in _cuts(span, first, sums):
        yield Atom(number, leaf, at, stop, span.path, span.offset + (at - first) * leaf.itemsize)
        at = stop


def _cuts(span: Span, start: int, sums: Sums) -> Iterator[int]:
    """Where the atoms of a span end."""
    leaf, end, layout = span.leaf, start + span.box.size, span.leaf.layout
    if start == end:
        return
    if span.box.size * max(leaf.itemsize, leaf.width) <= BLOCK and layout.record.cells is None:
        yield end  # by far the most common
        return
    saved = dtypes.itemsize(layout.record.dtype)
    ratio = max(max(leaf.itemsize, leaf.width) // saved, 1)
    if sums == "blocks":  # whole blocks of the target, whatever that means for the source
        yield from range(start + BLOCK // leaf.itemsize, end, BLOCK // leaf.itemsize)
    elif layout.runs is not None:  # whole blocks of the source, so that each is read once and proved
        step = BLOCK // saved // max(ratio // 2, 1)
        for run in layout.runs:
            if run.stop <= start or run.start >= end:
                continue
            cuts = [*range(run.start + step, run.stop, step), run.stop]
            yield from (cut for cut in cuts if start < cut < end)
    else:  # whole rows, so that each is one box
        at = start
        for box in slabs(span.box.lengths, BLOCK // (ratio * saved)):
            at += box.size
            if at < end:
                yield at
    yield end


def slabs(shape: Sequence[int], limit: int) -> Iterator[Box]:
    """A tensor cut along its first axes, in order, into boxes of at most ``limit`` elements, each a run of them."""
    if prod(shape) <= limit or not shape:
        yield Box((0,) * len(shape), tuple(shape))
        return
    rest = tuple(shape[1:])
    rows = limit // prod(rest)
    if rows:
        for first in range(0, shape[0], rows):
            yield Box((first, *(0,) * len(rest)), (min(rows, shape[0] - first), *rest))
        return
    for index in range(shape[0]):
        for box in slabs(rest, limit):
            yield Box((index, *box.offsets), (1, *box.lengths))


def packed(leaves: Iterable[Leaf], limit: int) -> list[list[Leaf]]:
    """Tensors in their order by files of at most ``limit`` bytes; one that is larger has a file of its own."""
    files: list[list[Leaf]] = []
    room = 0
    for leaf in leaves:
        if not files or leaf.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(leaf)
        room -= leaf.nbytes
    return files


def share_of(units: Sequence[Unit], rank: int, size: int) -> list[Unit]:
    """What one of ``size`` ranks copies: neighbours, of about as many bytes for each."""
    total, at, mine = sum(unit.nbytes for unit in units), 0, []
    for unit in units:
        if at * size // max(total, 1) == rank:
            mine.append(unit)
        at += unit.nbytes
    return mine


def joined(parts: Iterable[str], atoms: Sequence[Atom], sums: Sums) -> str:
    """The sum of a span from those of its atoms."""
    if sums == "crc32":
        return str(zip_file.joined((int(part), atom.nbytes) for part, atom in zip(parts, atoms, strict=True)))
    return "".join(parts)
