"""Flat parts of all ranks cut into parameters: one vector cut evenly (ZeRO 1 and 2), or a share of each (ZeRO 3).

`zero` cuts masters and optimizer state with these, `slice` frozen weights. Never reads a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from holdfast.errors import Damaged
from holdfast.formats.sources import Memory, Stretch
from holdfast.formats.stored import Stored
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import flat_boxes
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place

Shapes = Mapping[str, Sequence[int]]
"""Parameters of a group with their shapes, in the order in which they lie in the flat group."""


def proper(shapes: Shapes, where: Place) -> dict[str, tuple[int, ...]]:
    """The shapes as tuples. Raises Damaged for one that is no shape."""
    checked = {name: tuple(shape) for name, shape in shapes.items()}
    for name, shape in checked.items():
        if not isinstance(name, str) or not all(type(n) is int and n >= 0 for n in shape):
            raise Damaged(f"{where}: {str(name)[:200]} is said to have shape {str(shape)[:100]}")
    return checked


def cut_vector(shapes: Shapes, gaps: Sequence[int], what: str, parts: Sequence[Stored]) -> dict[str, Stored]:
    """Parameters out of the parts that follow each other in one vector, ``gaps`` between and padding at the end."""
    starts = [0, *accumulate(part.shape[0] for part in parts)]
    needed, align = sum(map(prod, shapes.values())) + sum(gaps), 2 * len(parts)
    # The padding up to a multiple of twice the ranks is kept or not, and older versions strip too little of it.
    if starts[-1] < needed or ceil(starts[-1] / align) != ceil(needed / align):
        raise Damaged(
            f"{what}: its parameters have {needed} elements, the partitions of {len(parts)} ranks {starts[-1]}: files "
            "of different saves lie there, or one was altered"
        )
    dtype, stretches = _stretches(parts, what)
    tensors, begin, rank = {}, 0, 0
    for (name, shape), gap in zip(shapes.items(), gaps, strict=True):
        end = begin + prod(shape)
        while rank + 1 < len(parts) and starts[rank + 1] <= begin:
            rank += 1
        runs, at = [], rank
        while at < len(parts) and starts[at] < end:
            low, high = max(begin, starts[at]), min(end, starts[at + 1])
            runs.append(Run(low - begin, high - low, stretches[at], low - starts[at]))
            at += 1
        tensors[name] = _of_runs(dtype, shape, runs)
        begin = end + gap
    return tensors


def cut_shares(shapes: Shapes, what: str, parts: Sequence[Stored]) -> dict[str, Stored]:
    """Parameters out of the parts in which each rank has its equal share of every one, padded at its end."""
    lengths = [ceil(prod(shape) / len(parts)) for shape in shapes.values()]
    for rank, part in enumerate(parts):
        if part.shape[0] != sum(lengths):
            raise Damaged(
                f"{what}: rank {rank} should have {sum(lengths)} elements and has {part.shape[0]}: files of different "
                "saves or numbers of ranks lie there, or one was altered"
            )
    dtype, stretches = _stretches(parts, what)
    tensors, at = {}, 0
    for (name, shape), length in zip(shapes.items(), lengths, strict=True):
        numel = prod(shape)
        firsts = range(0, numel, length or 1)  # a small parameter is not on all ranks
        runs = [Run(first, min(length, numel - first), stretches[rank], at) for rank, first in enumerate(firsts)]
        tensors[name] = _of_runs(dtype, shape, runs)
        at += length
    return tensors


class Run(NamedTuple):
    """Elements ``first:first + numel`` of a flattened parameter: where in a rank's part they begin."""

    first: int
    numel: int
    part: Stretch
    begin: int


def _of_runs(dtype: str, shape: Sequence[int], runs: Sequence[Run]) -> Stored:
    # As `stored.from_flat`, without a tensor for each run: there are as many as ranks times parameters.
    shape, size = tuple(shape), dtypes.itemsize(dtype)
    pieces = []
    for first, numel, part, begin in runs:
        at = begin * size
        for box in flat_boxes(shape, first, first + numel):
            nbytes = box.size * size
            pieces.append((box, part.part(at, nbytes)))
            at += nbytes
    return Stored(dtype, shape, tuple(pieces))


def _stretches(parts: Sequence[Stored], what: str) -> tuple[str, list[Stretch]]:
    """The type of all parts, and the bytes of each."""
    if len({part.dtype for part in parts}) > 1 or any(len(part.pieces) > 1 for part in parts):
        raise Damaged(f"{what}: the ranks' parts are of several types: files of different saves lie there")
    nothing = Stretch(Memory(LocalPlace(what), b""), 0, 0)
    return parts[0].dtype, [part.pieces[0][1] if part.pieces else nothing for part in parts]
