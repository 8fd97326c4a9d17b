"""What one rank holds of a tensor that is cut over many: its boxes of the whole, and the bytes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.stored import Stored, strided
from holdfast.ondisk.box import Box
from holdfast.plan.spread import Placed, Split, placed_runs

MAX_RANKS = 1 << 20
"""More than any mesh has."""

MAX_STRIDES = 1 << 16
"""More parts than an axis is cut into before a mesh axis cuts those."""


@dataclass(frozen=True)
class Share:
    """What one rank holds of a tensor of global ``shape``: ``parts``, each with its offsets. May be nothing."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], Stored], ...]


class Mesh(NamedTuple):
    """The sizes of a device mesh and where the rank stands in it; None if it is outside."""

    sizes: tuple[int, ...]
    coordinate: tuple[int, ...] | None


def sizes_of(values: Any) -> tuple[int, ...]:
    """Sizes or offsets from a file. Raises ValueError for anything else, TypeError for no sequence."""
    sizes = tuple(values)
    if not all(type(n) is int and n >= 0 for n in sizes):
        raise ValueError(f"{str(values)[:60]} are no sizes")
    return sizes


def placed_share(
    shape: Sequence[int], mesh: Mesh, splits: Sequence[Split | None], local: Stored, where: str = ""
) -> Share:
    """The share of a rank that holds ``local`` of a tensor cut by ``splits``, one for each axis of the mesh.

    A local tensor that is strided over the whole becomes several parts. Raises Damaged if its shape is not what
    the mesh says.
    """
    shape = tuple(shape)
    if mesh.coordinate is None:
        return Share(local.dtype, shape, ())
    if len(mesh.sizes) != len(splits) or len(mesh.coordinate) != len(mesh.sizes):
        raise Damaged(f"{where} has {len(splits)} placements on a mesh of {len(mesh.sizes)} axes")
    for split in splits:
        if split is not None and not (0 <= split.dim < max(len(shape), 1) and 0 < split.strides <= MAX_STRIDES):
            raise Damaged(f"{where} of shape {list(shape)} is said to be cut as it cannot be: {split}")
    axes = placed_runs(shape, _placed(mesh.sizes, tuple(splits)), _position(mesh))
    expected = tuple(sum(run.length for run in axis) for axis in axes)
    if 0 in expected and 0 in local.shape:
        return Share(local.dtype, shape, ())
    if local.shape != expected:
        raise Damaged(
            f"{where} is a local tensor of shape {list(local.shape)}, but a tensor of shape {list(shape)} that is cut "
            f"so has {list(expected)} there"
        )
    parts = []
    for runs in product(*axes):
        within = Box(tuple(run.local for run in runs), tuple(run.length for run in runs))
        parts.append((tuple(run.start for run in runs), part_of(local, within)))
    return Share(local.dtype, shape, tuple(parts))


def _position(mesh: Mesh) -> int:
    position = 0
    for size, index in zip(mesh.sizes, mesh.coordinate or (), strict=True):
        if not 0 <= index < size:
            raise Damaged(f"a mesh of sizes {list(mesh.sizes)} has no coordinate {list(mesh.coordinate or ())}")
        position = position * size + index
    return position


@lru_cache(maxsize=4096)
def _placed(sizes: tuple[int, ...], splits: tuple[Split | None, ...]) -> Placed:
    # Which ranks the mesh is made of plays no part in what a coordinate holds.
    if prod(sizes) > MAX_RANKS or any(size < 1 for size in sizes):
        raise Damaged(f"a mesh of sizes {list(sizes)} is none")
    return Placed((), sizes, splits)


def part_of(local: Stored, box: Box) -> Stored:
    """A box of a rank's own tensor; what is no run of its bytes is gathered when it is read."""
    if box.lengths == local.shape:
        return local
    if len(local.pieces) != 1:
        raise Unsupported("is strided, and its local tensor is itself in several pieces")
    strides = tuple(prod(local.shape[d + 1 :]) for d in range(len(local.shape)))
    offset = sum(o * s for o, s in zip(box.offsets, strides, strict=True))
    return strided(local.dtype, box.lengths, strides, local.pieces[0][1], offset)
