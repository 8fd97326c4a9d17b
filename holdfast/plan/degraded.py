"""The writers of what lost ranks were to write: from a plan and the lost ranks, a plan for the ranks that are left.

The failover of a save calls `taken_over` once ranks are lost, and `kept_by` before that, where copies have to be made
in time. Pure, and the same on every rank. Never gives a piece to a rank that does not hold it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import ranges
from holdfast.plan.holders import Holders, Lie, Listed
from holdfast.plan.owners import Owned, OwnPieces, PlannedTensor
from holdfast.plan.plan import Plan

_NAMED = 8  # pieces that an error names at the most

Key = tuple[str, Box]
"""A piece: the tensor's name and the box."""

NamedPiece = tuple[str, PlannedTensor, Box]
"""A piece as a plan lists it."""


@dataclass(frozen=True)
class TakenOver:
    """What is left to do without the lost ranks, or why it cannot be done.

    ``plan`` is that of `writer_of`: its owners are writers. It is empty if anything is ``missing``, each text a thing
    that only lost ranks had.
    """

    plan: Plan = field(default_factory=lambda: Plan({}, {}, {}, []))
    missing: list[str] = field(default_factory=list)


def writer_of(rank: int, world_size: int, attempt: int) -> int:
    """The number that a rank has as the writer of what it takes over; of its own share it is the rank itself.

    Each ``attempt``, counted from 1, has writers of its own, so that they have files of their own.
    """
    return world_size * attempt + rank


def spare_of(holders: Holders, owner: int) -> int | None:
    """The rank that keeps a copy of what ``owner`` writes of a box with these holders; None if no other has it.

    It is the one half the way around: neighbours are often on the same host, and are lost together.
    """
    count = len(holders)
    return holders[(holders.index(owner) + count // 2) % count] if count > 1 else None


def kept_by(plan: Plan, rank: int) -> Iterator[NamedPiece]:
    """The pieces that ``rank`` keeps for others, as their spare."""
    kinds = dict.fromkeys(plan.tensors.values())
    owners = {
        owner
        for kind in kinds
        for _, holders in kind.lie.of(rank)
        for owner in (holders[:1] if kind.first else holders)
        if owner != rank and spare_of(holders, owner) == rank
    }
    for owner in sorted(owners):
        held = _Held(owner)
        for name, tensor, box in OwnPieces(owner, plan.tensors.values()).of(plan.tensors):
            if box.size and spare_of(held.holders(tensor.lie, box), owner) == rank:
                yield name, tensor, box


def taken_over(
    plan: Plan, lost: Collection[int], world_size: int, *, attempt: int = 1, spares: bool = False
) -> TakenOver:
    """The plan with every piece of a ``lost`` rank given to one that is left and holds it.

    Pieces that the same ranks hold are laid end to end, and each of these ranks takes an equal run, by bytes. Of
    tensors that each rank has for itself (buffers), the first rank left takes all. With ``spares`` a piece counts as
    held by the spare of its owner alone.
    """
    left = [rank for rank in range(world_size) if rank not in lost]
    missing = [f"{path} of rank {rank}" for rank in sorted(lost) for path in plan.per_rank]
    lines: dict[Holders, list[NamedPiece]] = {}
    heirs: dict[Key, int] = {}
    for owner in sorted(lost):
        held = _Held(owner)
        for name, tensor, box in OwnPieces(owner, plan.tensors.values()).of(plan.tensors):
            if not box.size:
                heirs[name, box] = left[0] if left else -1
                continue
            holders = held.holders(tensor.lie, box)
            able = (spare_of(holders, owner),) if spares else holders
            heirs_left = tuple(rank for rank in able if rank is not None and rank not in lost)
            if not heirs_left:
                missing.append(f"{name}{box} of rank {owner}")
            elif tensor.first:
                heirs[name, box] = heirs_left[0]
            else:
                lines.setdefault(heirs_left, []).append((name, tensor, box))
    if missing or not left:
        return TakenOver(missing=missing or ["every rank"])
    for holders, line in lines.items():
        heirs.update(_dealt(line, holders))
    return TakenOver(_plan_without(plan, lost, heirs, lambda heir: writer_of(heir, world_size, attempt)))


def listed(missing: Sequence[str]) -> str:
    return ", ".join(missing[:_NAMED]) + (f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else "")


class _Held:
    """The boxes of one rank, looked up once for each kind of tensor."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._known: dict[Lie, list[tuple[Box, Holders]]] = {}

    def holders(self, lie: Lie, piece: Box) -> Holders:
        """The ranks that hold the box that ``piece`` is a part of."""
        if lie not in self._known:
            self._known[lie] = lie.of(self._rank)
        return next((holders for box, holders in self._known[lie] if _contains(box, piece)), (self._rank,))


def _contains(outer: Box, inner: Box) -> bool:
    return all(a <= b for a, b in zip(outer.offsets, inner.offsets, strict=True)) and all(
        a >= b for a, b in zip(outer.ends, inner.ends, strict=True)
    )


def _dealt(line: Sequence[NamedPiece], holders: Holders) -> dict[Key, int]:
    """Whole pieces in runs of about equal bytes: the rank whose run has the middle of a piece takes it."""
    sizes = [box.size * dtypes.itemsize(tensor.dtype) for _, tensor, box in line]
    share = sum(sizes) / len(holders)
    bounds = [share * (k + 1) for k in range(len(holders) - 1)]
    middles = [end - nbytes / 2 for end, nbytes in zip(accumulate(sizes), sizes, strict=True)]
    return {
        (name, box): holders[bisect_right(bounds, middle)] for (name, _, box), middle in zip(line, middles, strict=True)
    }


def _plan_without(plan: Plan, lost: Collection[int], heirs: Mapping[Key, int], writer: Callable[[int], int]) -> Plan:
    """The plan with its owners listed, because dealing it out again would change all of it."""
    kinds: dict[tuple[object, ...], PlannedTensor] = {}
    tensors = {}
    for name, tensor, owned in plan.owned():
        owners = [owner for _, owner in _pieces(tensor, owned)]
        if any(owner in lost for owner in owners):
            owners = [writer(heirs[name, box]) if owner in lost else owner for box, owner in _pieces(tensor, owned)]
        key = (tensor.dtype, tensor.shape, id(owned), *owners)
        if key not in kinds:
            boxes = [box for box, _ in _pieces(tensor, owned)]
            lie = Listed(tensor.shape, [(box, (owner,)) for box, owner in zip(boxes, owners, strict=True)])
            kinds[key] = PlannedTensor(tensor.dtype, tensor.shape, lie)
        tensors[name] = kinds[key]
    return Plan(tensors, plan.aliases, plan.containers, plan.per_rank, plan.volumes, plan.version)


def _pieces(tensor: PlannedTensor, owned: Owned) -> list[tuple[Box, int]]:
    if 0 in tensor.shape:
        return [(whole(tensor.shape), owned.owners[0])]
    return TensorRecord(tensor.dtype, tensor.shape, owned.cells, ranges(owned.owners)).boxes()
