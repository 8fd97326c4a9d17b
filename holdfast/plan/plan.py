"""Which rank writes which box: a pure function of names, boxes and holders, the same on every rank.

`save` calls `make_plan` with all distinct layouts. Touches no tensor, no file and no rank. A mesh of any size can be
planned in one process: tensors that lie alike are worked out once, and a rank's pieces without those of the others.

We rejected a coordinator that gathers and scatters plans, because its time grows with ranks times tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol

from holdfast.errors import Mismatch
from holdfast.ondisk import datafile, names
from holdfast.ondisk.box import Box, tiling_fault, whole
from holdfast.ondisk.containers import Note, shown
from holdfast.plan.holders import Lie, Listed, OnMesh, cut_alike
from holdfast.plan.layout import Layout, TensorLayout
from holdfast.plan.owners import AllPieces, Owned, OwnPieces, PlannedTensor
from holdfast.plan.spread import Boxes, Placed, Spread, Whole, held_by

Views = tuple[tuple[int, int], ...]
"""The layouts that name a tensor, each with the number of its spread there."""


@dataclass(frozen=True)
class Plan:
    """What all ranks together write. ``volumes``: which tensors are not in the first data file of their section.

    ``version``: the version of the format that the PerRank values of the ranks need.
    """

    tensors: dict[str, PlannedTensor]
    aliases: dict[str, str]
    containers: dict[str, Note]
    per_rank: list[str]
    volumes: dict[str, int] = field(default_factory=dict)
    version: int = 1
    _own: dict[int, OwnPieces] = field(default_factory=dict, init=False, repr=False, compare=False)

    def written_by(self, rank: int) -> Iterator[tuple[str, PlannedTensor, Box]]:
        """The pieces that ``rank`` writes, in name order of the state."""
        own = self._own.get(rank)
        if own is None:  # one rank is remembered: a save asks for its own, again and again
            self._own.clear()
            own = self._own[rank] = OwnPieces(rank, self.tensors.values())
        return own.of(self.tensors)

    def owned(self) -> Iterator[tuple[str, PlannedTensor, Owned]]:
        """The pieces of all ranks, in name order of the state: for the first rank, which writes the manifest."""
        return self._all.of(self.tensors)

    @cached_property
    def _all(self) -> AllPieces:
        return AllPieces(self.tensors.values())


@dataclass(frozen=True)
class PiecedTensor:
    """A tensor whose pieces are known: which rank writes which box."""

    dtype: str
    shape: tuple[int, ...]
    pieces: list[tuple[Box, int]]


def plan_of(tensors: Mapping[str, PiecedTensor], containers: dict[str, Note]) -> Plan:
    """A plan for pieces that are known already."""
    listed = {
        name: PlannedTensor(t.dtype, t.shape, Listed(t.shape, [(box, (rank,)) for box, rank in t.pieces]))
        for name, t in tensors.items()
    }
    return Plan(listed, {}, containers, [])


def make_plan(layouts: Sequence[Layout], layout_of: Sequence[int]) -> Plan:
    """Join the layouts of all ranks; that of rank r is ``layouts[layout_of[r]]``.

    Raises Mismatch, naming tensor and ranks, where ranks disagree or their boxes do not tile a tensor.
    """
    members: list[list[int]] = [[] for _ in layouts]
    for rank, index in enumerate(layout_of):
        members[index].append(rank)
    layouts_of: dict[str, list[tuple[int, TensorLayout]]] = {}
    for index, layout in enumerate(layouts):
        for tensor in layout.tensors:
            layouts_of.setdefault(tensor.name, []).append((index, tensor))
    _check_names(layouts_of, members)
    aliases = _join_aliases(layouts, layouts_of)
    tensors: dict[str, PlannedTensor] = {}
    kinds: dict[tuple[object, ...], PlannedTensor] = {}
    lies = _Lies(layouts, members)
    for name, versions in layouts_of.items():
        first = versions[0][1]
        if len(versions) > 1:  # as a rule all ranks share a layout, which may have a million tensors
            _check_alike(name, versions, members)
        if name in aliases:
            continue
        views = tuple([(index, tensor.spread) for index, tensor in versions if not lies.is_idle(index, tensor)])
        key = (first.dtype, first.shape, first.first, views)
        kind = kinds.get(key)
        if kind is None:
            lie = lies.of(first.shape, views)
            fault = tiling_fault(lie.shape, lie.boxes) if isinstance(lie, Listed) and 0 not in lie.shape else None
            if fault:
                ranks = sorted(r for index, _ in versions for r in members[index])
                raise Mismatch(
                    f"{name} of shape {list(first.shape)} is not whole: {fault}. Ranks {_some(ranks)} hold it; either "
                    "a rank did not bring its shard, or this group is not the one that the tensor is sharded over"
                )
            kind = kinds[key] = PlannedTensor(first.dtype, first.shape, lie, first.first)
        tensors[name] = kind
    containers, per_rank = _join_containers(layouts, members), _join_per_rank(layouts, members)
    version = max(layout.version for layout in layouts)
    return Plan(tensors, aliases, containers, per_rank, volumes_of(tensors), version)


class _Lies:
    """How tensors lie over the ranks: thousands share a handful of (shape, spreads), each worked out once."""

    def __init__(self, layouts: Sequence[Layout], members: Sequence[Sequence[int]]) -> None:
        self._members = members
        same: dict[Spread, Spread] = {}
        self._spreads = [[same.setdefault(spread, spread) for spread in layout.spreads] for layout in layouts]
        self._lies: dict[tuple[tuple[int, ...], Views], Lie] = {}
        self._named: dict[tuple[int, ...], frozenset[int]] = {}
        self._meshes: dict[tuple[Spread, tuple[int, ...]], Placed | None] = {}

    def is_idle(self, layout: int, tensor: TensorLayout) -> bool:
        """Whether the ranks of the layout have no element, and list boxes of their own alone."""
        return tensor.empty and isinstance(self._spreads[layout][tensor.spread], Boxes)

    def of(self, shape: tuple[int, ...], views: Views) -> Lie:
        """Whether the boxes tile the shape is only known of complete meshes."""
        if (shape, views) not in self._lies:
            self._lies[shape, views] = self._made(shape, views)
        return self._lies[shape, views]

    def _made(self, shape: tuple[int, ...], views: Views) -> Lie:
        if 0 in shape:
            return Listed(shape, [(whole(shape), (self._members[views[0][0]][0],))])
        layouts_with: dict[Spread, list[int]] = {}
        for layout, spread in views:
            layouts_with.setdefault(self._spreads[layout][spread], []).append(layout)
        meshes = [self._mesh(spread, tuple(by)) for spread, by in layouts_with.items()]
        complete = [mesh for mesh in meshes if mesh is not None]
        if meshes and len(complete) == len(meshes) and cut_alike(shape, complete):
            return OnMesh(shape, complete)
        holders: dict[Box, set[int]] = {}
        for layout, number in views:
            for rank, box in held_by(shape, self._spreads[layout][number], self._members[layout]):
                holders.setdefault(box, set()).add(rank)
        return Listed(shape, [(box, tuple(sorted(ranks))) for box, ranks in holders.items()])

    def _mesh(self, spread: Spread, layouts: tuple[int, ...]) -> Placed | None:
        """The mesh of a spread of these layouts, if every rank of it is there."""
        key = (spread, layouts)
        if key not in self._meshes:
            self._meshes[key] = self._complete(spread, layouts)
        return self._meshes[key]

    def _complete(self, spread: Spread, layouts: tuple[int, ...]) -> Placed | None:
        if isinstance(spread, Boxes):
            return None
        named = self._named.get(layouts)
        if named is None:
            named = self._named[layouts] = frozenset(rank for layout in layouts for rank in self._members[layout])
        if isinstance(spread, Whole):
            return Placed(tuple(sorted(named)), (len(named),), (None,))
        is_mesh = len(set(spread.ranks)) == len(spread.ranks) == prod(spread.shape)
        return spread if is_mesh and named.issuperset(spread.ranks) else None


def _check_alike(name: str, versions: Sequence[tuple[int, TensorLayout]], members: Sequence[Sequence[int]]) -> None:
    first = versions[0][1]
    for index, other in versions[1:]:
        if (other.dtype, other.shape) != (first.dtype, first.shape):
            raise Mismatch(
                f"{name} is {first.dtype} {list(first.shape)} on rank {members[versions[0][0]][0]} and {other.dtype} "
                f"{list(other.shape)} on rank {members[index][0]}: one name, one tensor. If every rank has its "
                "own, wrap it as holdfast.PerRank(…); if these are shards, as DTensor or holdfast.Shard"
            )


def _check_names(layouts_of: dict[str, list[tuple[int, TensorLayout]]], members: Sequence[Sequence[int]]) -> None:
    """A name that is a tensor on one rank cannot lie above a tensor of another: no nested state has both."""
    fine = {""}
    for name, views in layouts_of.items():
        above = name.rpartition("/")[0]
        while above not in fine:  # neighbours lie below the same names
            if above in layouts_of:
                one, other = members[layouts_of[above][0][0]][0], members[views[0][0]][0]
                raise Mismatch(
                    f"{above} is a tensor on rank {one}, and on rank {other} it holds {name}: make the ranks agree, "
                    "or rename one"
                )
            fine.add(above)
            above = above.rpartition("/")[0]


def _join_aliases(layouts: Sequence[Layout], layouts_of: dict[str, list[tuple[int, TensorLayout]]]) -> dict[str, str]:
    """Names that are stored under another one: only if every rank that can know agrees."""
    aliases = {}
    for name, views in layouts_of.items():
        target = next((t.alias for _, t in views if not t.empty), None)
        if target is None or target not in layouts_of or target == name:
            continue
        if all(t.alias == target or t.empty for _, t in views):
            aliases[name] = target
    for layout in layouts:
        for name, target in layout.aliases.items():
            if name not in layouts_of and target in layouts_of and aliases.setdefault(name, target) != target:
                raise Mismatch(f"{name} is tied to {aliases[name]} on one rank and to {target} on another")
    # An alias of an alias (a name un-aliased elsewhere) points at what is stored.
    for name, target in list(aliases.items()):
        while target in aliases:
            target = aliases[target]
        aliases[name] = target
    return aliases


def _join_containers(layouts: Sequence[Layout], members: Sequence[Sequence[int]]) -> dict[str, Note]:
    """The notes of all ranks. A rank may have an empty dict where others have more."""
    joined: dict[str, Note] = {}
    source: dict[str, int] = {}
    for layout, ranks in zip(layouts, members, strict=True):
        for path, kind in layout.containers.items():
            source.setdefault(path, ranks[0])
            if joined.setdefault(path, kind) != kind:
                raise Mismatch(
                    f"{path} is {shown(joined[path])} on rank {source[path]} and {shown(kind)} on rank {ranks[0]}: "
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


ROOM = datafile.MAX_HEADER // 3
"""Bytes of header for whole pieces. A piece that is a part of its tensor takes up to twice as much, for its box and the
tensor's shape, and a rank may write more than one of a tensor."""

_ENTRY, _AXIS = 112, 12
"""Bytes that a piece takes in a header beside its name: dtype, offsets, a sum; and for each axis of its shape."""


class Shaped(Protocol):
    """A tensor of the plan, as far as it matters here."""

    @property
    def shape(self) -> tuple[int, ...]: ...


def volumes_of(tensors: Mapping[str, Shaped]) -> dict[str, int]:
    """The number, from 1 on, of each tensor's volume that is not in the first one of its section. As a rule none is."""
    volumes: dict[str, int] = {}
    last: dict[str, int] = {}
    used: dict[str, int] = {}
    for name, tensor in tensors.items():
        section = names.section_of(name)
        nbytes = (len(name) if name.isascii() else len(name.encode())) + _ENTRY + _AXIS * len(tensor.shape)
        taken = used.get(section, 0) + nbytes
        if taken > ROOM:
            last[section] = last.get(section, 0) + 1
            taken = nbytes
        used[section] = taken
        if section in last:
            volumes[name] = last[section]
    return volumes


def file_of(section: str, writer: int, world_size: int, save: str, volume: int, volumes: Mapping[str, int]) -> str:
    """The path of a data file, by who writes it; ``volumes`` are those of all tensors.

    A writer from ``world_size`` on is a rank that takes over from lost ones (`degraded.writer_of`): its files are
    further volumes, after all that were planned.
    """
    attempt, rank = divmod(writer, world_size)
    if attempt:
        planned = 1 + max((n for name, n in volumes.items() if names.section_of(name) == section), default=0)
        volume += attempt * planned
    return datafile.file_name(section, rank, world_size, save, volume)
