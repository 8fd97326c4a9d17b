"""Who writes which box: a pure function of names, boxes and holders, the same on every rank.

`save` calls `make_plan` with all distinct layouts. Touches no tensor, no file and no rank; runs in one process for
meshes of any size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.engine.layout import Layout, TensorLayout
from holdfast.engine.spread import Spread, boxes_held
from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, tiling_fault, whole

SMALLEST_CUT = 4096
"""A replicated piece of fewer bytes is never cut."""

CUT_SHARE = 0.02
"""Nor one that is smaller than this part of what its holder writes: giving it away whole keeps the balance."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor and its pieces: which rank writes which box. An empty tensor is one whole piece."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, int]]


@dataclass(frozen=True)
class Plan:
    """What all ranks together write."""

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    containers: dict[str, str]
    per_rank: list[str]

    def written_by(self, rank: int) -> Iterable[tuple[str, PlannedTensor, Box]]:
        """The pieces that ``rank`` writes, in name order of the state."""
        for name, tensor in self.tensors.items():
            for box, owner in tensor.pieces:
                if owner == rank:
                    yield name, tensor, box


Holders = tuple[int, ...]


def make_plan(layouts: Sequence[Layout], layout_of: Sequence[int]) -> Plan:
    """Join the layouts of all ranks; rank r told ``layouts[layout_of[r]]``.

    Raises Mismatch, naming tensor and ranks, where ranks disagree or their boxes do not tile a tensor.
    """
    members: list[list[int]] = [[] for _ in layouts]
    for rank, index in enumerate(layout_of):
        members[index].append(rank)
    told: dict[str, list[tuple[int, TensorLayout]]] = {}
    for index, layout in enumerate(layouts):
        for tensor in layout.tensors:
            told.setdefault(tensor.name, []).append((index, tensor))
    _check_names(told, members)
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
    return Plan(tensors, aliases, _join_containers(layouts, members), _join_per_rank(layouts, members))


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
    """Spread replicated pieces (name, box, item size) over their holders by bytes: (name, box, owner).

    The pieces are laid end to end and cut into equal shares, one for each holder in turn. So every holder writes
    one run of neighbours, at most ``len(holders) - 1`` pieces are cut, and shares differ by less than a row.
    """
    total = sum(box.size * size for _, box, size in candidates)
    share = total / len(holders)
    bounds = [share * (k + 1) for k in range(len(holders) - 1)]
    owned, at = [], 0
    for name, box, size in candidates:
        nbytes = box.size * size
        if nbytes < SMALLEST_CUT or nbytes < CUT_SHARE * share:
            owned.append((name, box, holders[bisect_right(bounds, at + nbytes / 2)]))
        else:
            for part, index in _cut_at(box, [(b - at) / nbytes for b in bounds], share / nbytes):
                owned.append((name, part, holders[index]))
        at += nbytes
    return owned


def _cut_at(box: Box, bounds: Sequence[float], share: float) -> list[tuple[Box, int]]:
    """Cut a box where ``bounds`` (fractions of it) fall: (part, number of bounds before it)."""
    # Rows of the first axis keep parts contiguous. If its rows are too coarse for the share, a longer axis serves.
    axis = next((d for d, n in enumerate(box.lengths) if n * share * CUT_SHARE * 2 >= 1), None)
    if axis is None:
        axis = max(range(len(box.lengths)), key=lambda d: box.lengths[d])
    length = box.lengths[axis]
    parts, start = [], 0
    for index, bound in enumerate([*bounds, 1.0]):
        stop = min(max(round(bound * length), start), length) if index < len(bounds) else length
        if stop > start:
            offsets, lengths = list(box.offsets), list(box.lengths)
            offsets[axis], lengths[axis] = box.offsets[axis] + start, stop - start
            parts.append((Box(tuple(offsets), tuple(lengths)), index))
        start = stop
    return parts


def _check_names(told: dict[str, list[tuple[int, TensorLayout]]], members: Sequence[Sequence[int]]) -> None:
    """A name that is a tensor on one rank cannot lie above a tensor of another: no nested state has both."""
    for name, views in told.items():
        above = name.rpartition("/")[0]
        while above:
            if above in told:
                one, other = members[told[above][0][0]][0], members[views[0][0]][0]
                raise Mismatch(
                    f"{above} is a tensor on rank {one}, and on rank {other} it holds {name}: make the ranks agree, "
                    "or rename one"
                )
            above = above.rpartition("/")[0]


def _join_aliases(layouts: Sequence[Layout], told: dict[str, list[tuple[int, TensorLayout]]]) -> dict[str, str]:
    """Names that are stored under another one: only if every rank that can know agrees."""
    aliases = {}
    for name, views in told.items():
        said = {t.alias for _, t in views if not t.empty}
        target = next(iter(said)) if len(said) == 1 else None
        if target is not None and target in told and target != name:
            aliases[name] = target
    for layout in layouts:
        for name, target in layout.aliases.items():
            if name not in told and target in told and aliases.setdefault(name, target) != target:
                raise Mismatch(f"{name} is tied to {aliases[name]} on one rank and to {target} on another")
    # An alias of an alias (a name un-aliased elsewhere) points at what is stored.
    for name, target in list(aliases.items()):
        while target in aliases:
            target = aliases[target]
        aliases[name] = target
    return aliases


def _join_containers(layouts: Sequence[Layout], members: Sequence[Sequence[int]]) -> dict[str, str]:
    joined: dict[str, str] = {}
    source: dict[str, int] = {}
    for layout, ranks in zip(layouts, members, strict=True):
        for path, kind in layout.containers.items():
            source.setdefault(path, ranks[0])
            if joined.setdefault(path, kind) != kind:
                raise Mismatch(
                    f"{path} is a {joined[path]} on rank {source[path]} and a {kind} on rank {ranks[0]}: "
                    "make the ranks agree"
                )
    return joined


def _join_per_rank(layouts: Sequence[Layout], members: Sequence[Sequence[int]]) -> list[str]:
    first = layouts[0].per_rank
    for layout, ranks in zip(layouts[1:], members[1:], strict=True):
        if set(layout.per_rank) != set(first):
            odd = sorted(set(layout.per_rank) ^ set(first))
            raise Mismatch(f"{', '.join(odd)} is a PerRank value on some ranks but not on all (see rank {ranks[0]})")
    return first


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" … ({len(ranks)} in all)" if len(ranks) > 8 else "")
