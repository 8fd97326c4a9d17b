"""Which ranks hold which boxes of a tensor, worked out once for all tensors of one shape that lie alike.

The plan makes one for each class of tensors. A complete mesh is arithmetic on its coordinates, and nothing is listed
for each rank until it is needed; anything else is a list of boxes. Pure.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.ondisk.box import Box, Grid, tiling_fault
from holdfast.ondisk.cells import Cells, cells_for, cells_of_grid
from holdfast.plan.spread import Placed, axis_cells, coordinate, cutting_axes, placed_runs

Holders = tuple[int, ...]
"""Ranks that hold the same box, ascending."""


class Cut(NamedTuple):
    """A tiling as a manifest writes it: its cells, and the number of the box that each of them is."""

    cells: list[int] | Cells | None
    order: Sequence[int]


def cut_of(shape: tuple[int, ...], boxes: Sequence[Box]) -> Cut:
    """Raises HoldfastError if the boxes do not tile ``shape``, which would be a fault of the plan."""
    fault = tiling_fault(shape, boxes)
    if fault:
        raise HoldfastError(f"the pieces of a tensor of shape {list(shape)} do not tile it: {fault}")
    return Cut(*cells_for(shape, boxes))


class Listed:
    """A tensor as a list of boxes with their holders, in any order."""

    def __init__(self, shape: tuple[int, ...], boxes: Sequence[tuple[Box, Holders]]) -> None:
        self.shape = shape
        self.boxes = [box for box, _ in boxes]
        self.holders = [holders for _, holders in boxes]
        self._of: dict[int, list[int]] | None = None

    def of(self, rank: int) -> list[tuple[Box, Holders]]:
        """The boxes that ``rank`` holds, each with all its holders."""
        if self._of is None:
            self._of = {}
            for number, holders in enumerate(self.holders):
                for holder in holders:
                    self._of.setdefault(holder, []).append(number)
        return [(self.boxes[number], self.holders[number]) for number in self._of.get(rank, ())]

    @property
    def sole(self) -> bool:
        """Whether every box has one holder."""
        return all(len(holders) == 1 for holders in self.holders)

    @cached_property
    def cut(self) -> Cut:
        """How a manifest writes the boxes. Raises HoldfastError if they do not tile the tensor."""
        return Cut(None, range(len(self.boxes))) if 0 in self.shape else cut_of(self.shape, self.boxes)


class OnMesh:
    """A tensor on one complete mesh, or on several that cut it alike and share no rank; see `cut_alike`."""

    def __init__(self, shape: tuple[int, ...], meshes: Sequence[Placed]) -> None:
        self.shape = shape
        self._layers = [_layer(mesh, len(shape)) for mesh in meshes]

    def of(self, rank: int) -> list[tuple[Box, Holders]]:
        """The boxes that ``rank`` holds, each with all its holders, in row-major order."""
        for layer in self._layers:
            position = _position(layer.mesh, rank)
            if position is not None:
                runs = placed_runs(self.shape, layer.mesh, position)
                boxes = [Box(tuple(r.start for r in c), tuple(r.length for r in c)) for c in product(*runs)]
                if len(self._layers) > 1:
                    return [(box, self._holders(self._places_of(box))) for box in boxes]
                where = coordinate(layer.mesh.shape, position)
                holders = self._holders([position - sum(where[axis] * n for axis, n in layer.replicating)])
                return [(box, holders) for box in boxes]
        return []

    @cached_property
    def boxes(self) -> list[Box]:
        """All boxes, in row-major order."""
        return list(self._grid.boxes())

    @property
    def sole(self) -> bool:
        """Whether every box has one holder."""
        return len(self._layers) == 1 and len(self._layers[0].replicas) == 1

    @property
    def holders(self) -> list[Holders]:
        """The holders of each box, in row-major order."""
        if self.sole:  # as many as ranks, and needed once: not kept
            ranks = self._layers[0].mesh.ranks
            return [(ranks[sum(at)],) for at in product(*self._places(self._layers[0]))]
        return self._shared

    @cached_property
    def _shared(self) -> list[Holders]:
        by_layer = [list(map(sum, product(*places))) for places in map(self._places, self._layers)]
        known: dict[tuple[int, ...], Holders] = {}  # boxes of one rank share the tuple
        return [known.get(p) or known.setdefault(p, self._holders(p)) for p in zip(*by_layer, strict=True)]

    @cached_property
    def cut(self) -> Cut:
        """How a manifest writes the boxes."""
        return Cut(cells_of_grid(self.shape, self._grid), range(prod(self._grid.counts)))

    @property
    def _grid(self) -> Grid:
        return Grid(_cuts(self.shape, self._layers[0].cutting))

    def _places(self, layer: _Layer) -> list[list[int]]:
        """For each axis, what each of its runs adds to the place of a box in the mesh."""
        return [[place for _, place in axis_cells(n, c)] for n, c in zip(self.shape, layer.cutting, strict=True)]

    def _places_of(self, box: Box) -> list[int]:
        """The place of a box in each mesh."""
        cuts = self._grid.cuts
        runs = [bisect_right(axis, start) - 1 for axis, start in zip(cuts, box.offsets, strict=True)]
        return [
            sum(axis_cells(n, c)[run][1] for n, c, run in zip(self.shape, layer.cutting, runs, strict=True))
            for layer in self._layers
        ]

    def _holders(self, places: Sequence[int]) -> Holders:
        return tuple(
            sorted(
                layer.mesh.ranks[place + replica]
                for layer, place in zip(self._layers, places, strict=True)
                for replica in layer.replicas
            )
        )


Lie = OnMesh | Listed


def cut_alike(shape: tuple[int, ...], meshes: Sequence[Placed]) -> bool:
    """Whether all cut a tensor of ``shape`` at the same places."""
    ways = {(mesh.shape, mesh.splits): mesh for mesh in meshes}
    return len(ways) == 1 or len({_cuts(shape, _layer(mesh, len(shape)).cutting) for mesh in ways.values()}) == 1


_Cutting = tuple[tuple[tuple[int, int, int], ...], ...]


class _Layer(NamedTuple):
    """A mesh, looked at from a tensor's axes.

    ``cutting`` has for each of them (size, weight, strides) of the mesh axes that cut it, ``replicating`` the other
    mesh axes with their weights, ``replicas`` how far in ``mesh.ranks`` replicas lie from the first of them.
    """

    mesh: Placed
    cutting: _Cutting
    replicating: tuple[tuple[int, int], ...]
    replicas: tuple[int, ...]


def _layer(mesh: Placed, dims: int) -> _Layer:
    weights = [prod(mesh.shape[axis + 1 :]) for axis in range(len(mesh.shape))]
    by_dim = [cutting_axes(mesh.shape, mesh.splits, dim) for dim in range(dims)]
    used = {axis for axes in by_dim for axis, _ in axes}
    replicating = tuple((axis, weights[axis]) for axis in range(len(mesh.shape)) if axis not in used)
    steps = [range(0, mesh.shape[axis] * weight, weight) for axis, weight in replicating]
    return _Layer(
        mesh,
        tuple(tuple((mesh.shape[axis], weights[axis], strides) for axis, strides in axes) for axes in by_dim),
        replicating,
        tuple(map(sum, product(*steps))),
    )


@lru_cache(maxsize=32)
def _cuts(shape: tuple[int, ...], cutting: _Cutting) -> tuple[tuple[int, ...], ...]:
    return tuple((*(start for start, _ in axis_cells(n, c)), n) for n, c in zip(shape, cutting, strict=True))


@lru_cache(maxsize=4096)
def _position(mesh: Placed, rank: int) -> int | None:
    return mesh.ranks.index(rank) if rank in mesh.ranks else None
