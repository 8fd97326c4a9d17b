"""Spreads: how a tensor lies over ranks, as plain numbers, and which boxes of it a rank holds.

The state makes one for each tensor, ranks send each other theirs, and the plan turns them into owners. Pure, and the
same on every rank; it can be asked about any rank of any mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import permutations, product
from math import prod

import msgspec

from holdfast.ondisk.box import Box, whole


class Split(msgspec.Struct, array_like=True, frozen=True):
    """One mesh axis cuts tensor axis ``dim``.

    ``strides`` > 1 is torch's ``_StridedShard``: the axis is first cut into that many parts, then each part over
    the mesh axis. Where that number says that mesh axes on the right have cut before (FSDP over tensor parallel),
    it stands for that order of cutting; see `cutting_axes`.
    """

    dim: int
    strides: int = 1


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """Each rank that names the tensor holds all of it."""


class Placed(msgspec.Struct, frozen=True, tag="placed", cache_hash=True):
    """A DTensor: ``ranks`` of the mesh in row-major order, the mesh ``shape``, and what each mesh axis does.

    ``splits[axis]`` is None where the mesh axis replicates.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    splits: tuple[Split | None, ...]


class Boxes(msgspec.Struct, frozen=True, tag="boxes", cache_hash=True):
    """Explicit boxes ``(offsets, lengths)`` of each rank named: flat shards, ShardedTensor, `holdfast.Shard`."""

    of: tuple[tuple[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]], ...]


Spread = Whole | Placed | Boxes
WHOLE = Whole()


class Run(msgspec.Struct, array_like=True, frozen=True):
    """Elements ``start:start + length`` of a tensor axis, which lie at ``local`` in the rank's own tensor."""

    start: int
    length: int
    local: int


def _chunk(length: int, parts: int, index: int) -> tuple[int, int]:
    """``torch.chunk``: ceiling-sized parts, the last ones shorter or empty."""
    size = -(-length // parts)
    start = min(size * index, length)
    return start, min(start + size, length)


def _cut(runs: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Elements ``start:stop`` of the concatenation of ``runs`` (start, length)."""
    kept, at = [], 0
    for begin, length in runs:
        low, high = max(start - at, 0), min(stop - at, length)
        if low < high:
            kept.append((begin + low, high - low))
        at += length
    return kept


@lru_cache(maxsize=65536)
def axis_runs(length: int, splits: tuple[tuple[int, int, int], ...]) -> tuple[Run, ...]:
    """What is left of an axis after ``splits`` = (mesh axis size, coordinate, strides), applied left to right."""
    runs = [(0, length)] if length else []
    for parts, index, strides in splits:
        runs = _kept(runs, parts, index, strides)
    placed, local = [], 0
    for start, n in _merged(runs):
        placed.append(Run(start, n, local))
        local += n
    return tuple(placed)


def _kept(runs: list[tuple[int, int]], parts: int, index: int, strides: int) -> list[tuple[int, int]]:
    """What coordinate ``index`` of a mesh axis of ``parts`` keeps of ``runs``."""
    size = sum(n for _, n in runs)
    kept: list[tuple[int, int]] = []
    for k in range(strides):
        outer_start, outer_stop = _chunk(size, strides, k)
        start, stop = _chunk(outer_stop - outer_start, parts, index)
        kept += _cut(runs, outer_start + start, outer_start + stop)
    return kept


def _merged(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours joined; runs stay in the order in which they lie in the rank's own tensor."""
    merged: list[tuple[int, int]] = []
    for start, n in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + n)
        else:
            merged.append((start, n))
    return merged


def coordinate(sizes: tuple[int, ...], position: int) -> tuple[int, ...]:
    """The coordinate of the ``position``-th rank of a mesh of these ``sizes``."""
    index = []
    for size in reversed(sizes):
        position, i = divmod(position, size)
        index.append(i)
    return tuple(reversed(index))


def placed_runs(shape: tuple[int, ...], spread: Placed, position: int) -> tuple[tuple[Run, ...], ...]:
    """For each tensor axis the runs that the ``position``-th rank of the mesh holds."""
    return _placed_runs(shape, spread.shape, spread.splits, position)  # which ranks they are makes no difference


@lru_cache(maxsize=65536)
def _placed_runs(
    shape: tuple[int, ...], sizes: tuple[int, ...], splits: tuple[Split | None, ...], position: int
) -> tuple[tuple[Run, ...], ...]:
    where = coordinate(sizes, position)
    return tuple(
        axis_runs(
            length, tuple((sizes[axis], where[axis], strides) for axis, strides in cutting_axes(sizes, splits, dim))
        )
        for dim, length in enumerate(shape)
    )


@lru_cache(maxsize=4096)
def cutting_axes(sizes: tuple[int, ...], splits: tuple[Split | None, ...], dim: int) -> tuple[tuple[int, int], ...]:
    """The mesh axes that cut tensor axis ``dim``, in the order in which they cut it, each with its strides.

    torch writes another order than left to right as strides: those of a mesh axis are the product of the sizes of
    the axes to its right that cut before it. If an order explains all strides, it is what was meant, which for
    uneven cuts is not the same as taking the strides by their word (torch: `DTensorSpec.shard_order`).
    """
    cutting = tuple((axis, s.strides) for axis, s in enumerate(splits) if s is not None and s.dim == dim)
    if all(strides == 1 for _, strides in cutting):
        return cutting
    for order in permutations(cutting):
        if all(
            strides == prod(sizes[before] for before, _ in order[:place] if before > axis)
            for place, (axis, strides) in enumerate(order)
        ):
            return tuple((axis, 1) for axis, _ in order)
    return cutting


@lru_cache(maxsize=32)
def axis_cells(length: int, splits: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int], ...]:
    """All runs of a tensor axis that ``splits`` = (mesh axis size, weight, strides) cut, ascending: (start, place).

    A run ends where the next one begins. ``place`` is the sum of coordinate x weight over the mesh axes: with the
    strides of a row-major mesh as weights it says where in the mesh the holders are.
    """
    held: list[tuple[list[tuple[int, int]], int]] = [([(0, length)], 0)]
    for parts, weight, strides in splits:
        held = [
            (kept, place + index * weight)
            for runs, place in held
            for index, kept in enumerate(_parted(runs, parts, strides))
            if kept
        ]
    cells = sorted((start, place) for runs, place in held for start, _ in _merged(runs))
    return tuple(cells)


def _parted(runs: list[tuple[int, int]], parts: int, strides: int) -> Iterator[list[tuple[int, int]]]:
    """What each coordinate of a mesh axis keeps of ``runs``."""
    if len(runs) == 1 and strides == 1:
        ((begin, length),) = runs
        size = -(-length // parts)
        yield from ([(begin + at, min(size, length - at))] for at in range(0, length, size))
        return
    for index in range(parts):
        yield _kept(runs, parts, index, strides)


def boxes_held(shape: Sequence[int], spread: Spread, rank: int) -> list[Box]:
    """The non-empty boxes of a tensor of ``shape`` that ``rank`` holds, given that it names the tensor."""
    return [box for _, box in held_by(tuple(shape), spread, (rank,))]


def held_by(shape: tuple[int, ...], spread: Spread, members: Collection[int]) -> Iterator[tuple[int, Box]]:
    """(rank, box) for each non-empty box that one of ``members`` holds, by rank; all of them name the tensor."""
    if 0 in shape:
        return
    named = set(members)
    if isinstance(spread, Whole):
        yield from ((rank, whole(shape)) for rank in sorted(named))
    elif isinstance(spread, Boxes):
        for who, boxes in sorted(spread.of, key=lambda pair: pair[0]) if len(spread.of) > 1 else spread.of:
            if who in named:
                yield from ((who, Box(o, n)) for o, n in boxes if 0 not in n)
    else:
        for who, position in sorted((who, at) for at, who in enumerate(spread.ranks) if who in named):
            axes = placed_runs(shape, spread, position)
            yield from ((who, Box(tuple(r.start for r in c), tuple(r.length for r in c))) for c in product(*axes))
