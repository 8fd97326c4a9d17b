"""The plan as a list of every piece of every tensor: plain, slow, and what the real one has to be equal to.

Called by the tests of the plan alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, tiling_fault, whole
from holdfast.plan.layout import Layout, TensorLayout
from holdfast.plan.owners import deal, pieces_of
from holdfast.plan.plan import _join_aliases, _some
from holdfast.plan.spread import Spread, boxes_held


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor and its pieces: which rank writes which box. An empty tensor is one whole piece."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, int]]


Holders = tuple[int, ...]


def reference(layouts: Sequence[Layout], layout_of: Sequence[int]) -> dict[str, PlannedTensor]:
    """What every rank writes of each tensor."""
    members: list[list[int]] = [[] for _ in layouts]
    for rank, index in enumerate(layout_of):
        members[index].append(rank)
    told: dict[str, list[tuple[int, TensorLayout]]] = {}
    for index, layout in enumerate(layouts):
        for tensor in layout.tensors:
            told.setdefault(tensor.name, []).append((index, tensor))
    aliases = _join_aliases(layouts, told)
    tensors: dict[str, PlannedTensor] = {}
    shared: dict[Holders, list[tuple[str, Box, int]]] = defaultdict(list)
    held = _Held(layouts, [tuple(m) for m in members])
    for name, views in told.items():
        first = views[0][1]
        for index, other in views[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                raise Mismatch(
                    f"{name} is {first.dtype} {list(first.shape)} on rank {members[views[0][0]][0]} and {other.dtype} "
                    f"{list(other.shape)} on rank {members[index][0]}: one name, one tensor. If every rank has its "
                    "own, wrap it as holdfast.PerRank(…); if these are shards, as DTensor or holdfast.Shard"
                )
        if name in aliases:
            continue
        pieces: list[tuple[Box, int]] = []
        tensors[name] = PlannedTensor(first.dtype, first.shape, pieces)
        if 0 in first.shape:
            pieces.append((whole(first.shape), members[views[0][0]][0]))
            continue
        boxes = held.boxes(first.shape, [(index, t.spread) for index, t in views])
        fault = _fault(first.shape, tuple(boxes))
        if fault:
            ranks = sorted(r for index, _ in views for r in members[index])
            raise Mismatch(
                f"{name} of shape {list(first.shape)} is not whole: {fault}. Ranks {_some(ranks)} hold it; either a "
                "rank did not bring its shard, or this group is not the one that the tensor is sharded over"
            )
        size = dtypes.itemsize(first.dtype)
        for box, holders in boxes.items():
            if len(holders) == 1 or first.first:
                pieces.append((box, holders[0]))
            else:
                shared[holders].append((name, box, size))
    for holders, candidates in shared.items():
        for name, box, owner in share_out(candidates, holders):
            tensors[name].pieces.append((box, owner))
    return tensors


class _Held:
    """Which ranks hold which box; thousands of tensors share a handful of (shape, spreads), each worked out once."""

    def __init__(self, layouts: Sequence[Layout], members: Sequence[Holders]) -> None:
        self.layouts, self.members = layouts, members
        self._known: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], dict[Box, Holders]] = {}

    def boxes(self, shape: tuple[int, ...], views: list[tuple[int, int]]) -> dict[Box, Holders]:
        """``views`` = (layout, spread of the tensor in it) for each layout that names the tensor."""
        key = (shape, tuple(views))
        if key not in self._known:
            found: dict[Box, list[int]] = defaultdict(list)
            for index, spread in views:
                for rank in self.members[index]:
                    for box in boxes_held(shape, self._spread(index, spread), rank):
                        found[box].append(rank)
            self._known[key] = {box: tuple(sorted(set(ranks))) for box, ranks in found.items()}
        return self._known[key]

    def _spread(self, layout: int, spread: int) -> Spread:
        return self.layouts[layout].spreads[spread]


@lru_cache(maxsize=4096)
def _fault(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> str | None:
    return tiling_fault(shape, boxes)


def share_out(candidates: Sequence[tuple[str, Box, int]], holders: Holders) -> list[tuple[str, Box, int]]:
    """Spread replicated pieces (name, box, item size) over their holders by bytes: (name, box, owner)."""
    hand = deal([(box.size * size, box.lengths) for _, box, size in candidates], len(holders))
    return [
        (name, part, holders[holder])
        for at, (name, box, _) in enumerate(candidates)
        for part, holder in pieces_of(hand.given(at), box)
    ]
