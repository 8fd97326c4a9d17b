"""Weighted sums of stretches that several checkpoints have, in bounded memory, and the products that SLERP needs.

`copying` calls it for each window of a merge. It reads nothing itself, and each source is read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import fsum
from typing import NamedTuple

import torch

from holdfast.buffers.stage import host_tensor
from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.export.draft import Stretch, Unit
from holdfast.export.selection import Leaf
from holdfast.ondisk import dtypes

CHUNK = 1 << 15
"""Elements that are summed while they stay in the processor's cache, by one thread, so that results do not vary."""

SOURCES = 32 << 20
"""Bytes of sources that are in memory at once, for each thread; at least one source."""

MEMORY, READING = 192 << 20, 20 << 20
"""Bytes of all threads together, and what the reader takes of them for each."""

ALIGN = 64
"""What goes through a window of its own begins there at multiples of this."""

Room = Callable[[str, int], int]
"""The address of memory of a name, of at least so many bytes."""

Fetch = Callable[[Checkpoint, Sequence[Stretch]], None]
"""Reads stretches of one checkpoint as they were saved."""


class _Read(NamedTuple):
    """The elements of one source, and its weight."""

    elements: torch.Tensor
    weight: float
    path: object


def room_for(dtype: str, count: int) -> int:
    """The bytes of so many elements, filled up so that the next tensor is aligned."""
    return -(-count * dtypes.itemsize(dtype) // ALIGN) * ALIGN


def workers_for(units: Iterable[Unit]) -> int:
    """How many threads may sum these units at a time."""
    most = 0
    for unit in units:
        sums = [atom for atom in unit.atoms if atom.leaf.terms]
        if sums:
            of_one = sum(room_for("uint8", (atom.stop - atom.start) * atom.leaf.width) for atom in sums)
            total = sum((atom.stop - atom.start) * dtypes.itemsize(atom.leaf.total or "uint8") for atom in sums)
            total *= of_one * len(sums[0].leaf.terms) > SOURCES
            most = max(most, unit.atoms[-1].end - unit.atoms[0].offset + max(SOURCES, of_one) + total + READING)
    return max(MEMORY // max(most, 1), 1)


def fill(stretches: Sequence[Stretch], room: Room, fetch: Fetch) -> None:
    """Fill stretches with the sums of their terms. Raises Mismatch if what cannot be summed is not equal."""
    groups = _groups(stretches)
    totals = _totals(stretches, room) if len(groups) > 1 else [None] * len(stretches)
    for group in groups:
        terms = _fetched(stretches, group, room, fetch)
        for stretch, read, total in zip(stretches, terms, totals, strict=True):
            if stretch.leaf.total:
                _add(stretch, read, total, first=group is groups[0], last=group is groups[-1])
            else:
                _check_equal(stretch, read, first=group is groups[0])


def products(stretches: Sequence[Stretch], room: Room, fetch: Fetch) -> Iterator[tuple[Leaf, list[float]]]:
    """Of stretches with two terms a, b: the parts of a·a, b·b and a·b, in float64."""
    a, b = torch.empty(2, 2 * CHUNK, dtype=torch.float64)
    terms = _fetched(stretches, [0, 1], room, fetch)
    for stretch, (one, other) in zip(stretches, terms, strict=True):
        parts: list[list[float]] = [[], [], []]
        for low in range(0, stretch.size, CHUNK):
            x, y = (_real(read.elements[low : low + CHUNK]) for read in (one, other))
            x, y = a[: len(x)].copy_(x), b[: len(y)].copy_(y)
            for part, (p, q) in zip(parts, ((x, x), (y, y), (x, y)), strict=True):
                part.append(float(torch.dot(p, q)))
        yield stretch.leaf, [fsum(part) for part in parts]


def _groups(stretches: Sequence[Stretch]) -> list[list[int]]:
    """The numbers of the sources that are read, those together that fit into memory at once."""
    groups: list[list[int]] = [[]]
    left = SOURCES
    for k in range(len(stretches[0].leaf.terms)):
        nbytes = _bytes_of(stretches, [k])
        if nbytes and nbytes > left and groups[-1]:
            groups.append([])
            left = SOURCES
        if nbytes:
            groups[-1].append(k)
            left -= nbytes
    return groups


def _bytes_of(stretches: Sequence[Stretch], group: Sequence[int]) -> int:
    terms = ((s.leaf.terms[k], s.size) for s in stretches for k in group)
    return sum(room_for(term.leaf.record.dtype, count) for term, count in terms if term.weight)


def _totals(stretches: Sequence[Stretch], room: Room) -> list[torch.Tensor | None]:
    sizes = [room_for(s.leaf.total, s.size) if s.leaf.total else 0 for s in stretches]
    at, totals = room("total", sum(sizes)), list[torch.Tensor | None]()
    for stretch, size in zip(stretches, sizes, strict=True):
        totals.append(_elements(at, stretch.size, stretch.leaf.total) if size else None)
        at += size
    return totals


def _fetched(stretches: Sequence[Stretch], group: Sequence[int], room: Room, fetch: Fetch) -> list[list[_Read]]:
    """For each stretch, its elements in the sources of a group; those with weight 0 are left out."""
    at = room("raw", _bytes_of(stretches, group))
    reads: list[list[_Read]] = [[] for _ in stretches]
    for k in group:
        parts = []
        for stretch, read in zip(stretches, reads, strict=True):
            source, leaf, weight, update = stretch.leaf.terms[k]
            if weight:
                elements = _elements(at, stretch.size, leaf.record.dtype)
                if update is None:
                    parts.append(Stretch(leaf, stretch.start, stretch.stop, at))
                else:
                    update.fill(stretch.start, stretch.stop, elements)
                read.append(_Read(elements, weight, source.path))
                at += room_for(leaf.record.dtype, stretch.size)
        if parts:
            fetch(stretches[0].leaf.terms[k].checkpoint, parts)
    return reads


def _add(stretch: Stretch, reads: Sequence[_Read], total: torch.Tensor | None, *, first: bool, last: bool) -> None:
    """Add a group of sources to the total, which is in ``total`` between groups; the last one fills the stretch."""
    dtype = dtypes.torch_dtype(stretch.leaf.total)
    target = _elements(stretch.address, stretch.size, stretch.leaf.dtype)
    fresh, product = torch.empty(2, min(CHUNK, stretch.size), dtype=dtype)
    for low in range(0, stretch.size, CHUNK):
        part = slice(low, min(low + CHUNK, stretch.size))
        sum_, term = fresh[: part.stop - low] if total is None else total[part], product[: part.stop - low]
        if first and not reads:
            sum_.zero_()
        for number, read in enumerate(reads):
            # A product and then a sum, each rounded: a fused operation would make the result depend on the processor.
            if first and not number:
                sum_.copy_(read.elements[part]).mul_(read.weight)
            else:
                sum_.add_(term.copy_(read.elements[part]).mul_(read.weight))
        if last:
            target[part].copy_(sum_)


def _check_equal(stretch: Stretch, reads: Sequence[_Read], *, first: bool) -> None:
    leaf = stretch.leaf
    target = host_tensor(stretch.address, stretch.size * leaf.itemsize)
    for number, read in enumerate(reads):
        elements = read.elements.view(torch.uint8)
        if first and not number:
            target.copy_(elements)
        elif not torch.equal(target, elements):
            raise Mismatch(
                f"{leaf.name} is {leaf.dtype}, which cannot be summed, and has other numbers in {read.path} than in "
                f"{leaf.terms[0].checkpoint.path}: leave it out by only="
            )


def _elements(address: int, count: int, dtype: str) -> torch.Tensor:
    return host_tensor(address, count * dtypes.itemsize(dtype)).view(dtypes.torch_dtype(dtype))


def _real(elements: torch.Tensor) -> torch.Tensor:
    """Complex numbers as twice as many real ones."""
    return torch.view_as_real(elements).reshape(-1) if elements.is_complex() else elements
