"""What a rank is asked to do by `benchmarks.cloud`: hold a state, save it to a store, load all or a part, and prove it.

Called by name in the rank processes of a pool. Only the system's own call is measured.
Never returns a figure for a load that brought wrong bytes, or touched what was not asked for.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist

from benchmarks.cloud_systems import RAW_PART, SYSTEMS, Where
from benchmarks.gauge import Spent, spend
from benchmarks.jobs import LoadCost, WrongBytes
from benchmarks.states import Sharded, State, digest, local_bytes, local_tensors

T = TypeVar("T")


@dataclass
class _Held:
    """A state, the same bytes as one buffer (which is what raw obstore moves), and the digest of each part."""

    spec: Sharded
    raw: bool
    state: State
    digests: dict[str, str]


_held: list[_Held] = []  # at most one at a time
POISON = 0xA5  # of bytes; numbers become -1.0


def build(spec: Sharded, raw: bool) -> int:
    """Hold this state from now on, and with ``raw`` its bytes as one buffer; this rank's bytes."""
    if not _held or (_held[0].spec, _held[0].raw) != (spec, raw):
        drop()
        state = spec.build(dist.get_rank(), dist.get_world_size())
        if raw:
            one = torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in local_tensors(state)])
            state[RAW_PART] = {"bytes": one}
        _held.append(_Held(spec, raw, state, {part: digest({part: state[part]}) for part in state}))
    return local_bytes(_held[0].state) // (2 if raw else 1)


def drop() -> None:
    """Let go of the state."""
    _held.clear()
    gc.collect()


def _parts_of(system: str) -> list[str]:
    return [part for part in _held[0].state if (part == RAW_PART) == SYSTEMS[system].raw]


def save(system: str, where: Where) -> Spent:
    """Save the state held."""
    state, rank = {part: _held[0].state[part] for part in _parts_of(system)}, dist.get_rank()
    return _spend(lambda: SYSTEMS[system].save(state, where, rank))[0]


def load(system: str, where: Where, only: str | None) -> LoadCost:
    """Load all parts, or ``only`` one, into the state held, overwritten before; then prove every byte of it."""
    held, rank = _held[0], dist.get_rank()
    present = {part: held.state[part] for part in _parts_of(system)}
    wanted = {part: tensors for part, tensors in present.items() if only in (None, part)}
    left = {part: tensors for part, tensors in present.items() if part not in wanted}
    for tensors in present.values():
        _poison(tensors)
    spent, told = _spend(lambda: SYSTEMS[system].load(wanted, where, rank))
    wrong = [part for part in wanted if digest({part: wanted[part]}) != held.digests[part]]
    touched = [name for name, tensor in local_tensors(left) if not bool((tensor == -1.0).all())]
    needed = local_bytes(wanted)
    if wrong or left:
        spec, raw = held.spec, held.raw
        del held, present, wanted, left
        drop()
        build(spec, raw)
    if wrong or touched:
        what = f"other bytes of {wrong} than were saved" if wrong else f"{touched[0]}, which was not asked for"
        raise WrongBytes(f"{system} loaded {what} (rank {rank})")
    return LoadCost(spent, needed, told)


def _poison(tensors: dict[str, torch.Tensor]) -> None:
    for _, tensor in local_tensors({"": tensors}):
        tensor.fill_(-1.0 if tensor.is_floating_point() else POISON)


def _spend(action: Callable[[], T]) -> tuple[Spent, T]:
    before = _children()
    spent, result = spend(action)
    return replace(spent, cpu=spent.cpu + _children() - before), result


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
