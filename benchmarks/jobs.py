"""What a rank is asked to do: build a state, save it, load it and prove it, write and read raw bytes.

Called by name in the rank processes of a pool. Only the system's own call is measured.
Never returns a figure for a load that brought wrong bytes.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks import device
from benchmarks.gauge import Spent, spend
from benchmarks.states import Spec, State, digest, local_bytes, poison
from benchmarks.systems import SYSTEMS, Told


@dataclass
class _Held:
    spec: Spec
    state: State
    digest: str
    needed: int


_held: list[_Held] = []  # at most one state at a time


@dataclass(frozen=True)
class LoadCost:
    """``needed``: bytes of this rank's own tensors. ``told``: what the system says of itself."""

    spent: Spent
    needed: int
    told: Told | None


class WrongBytes(Exception):
    """A load that left other bytes than were saved."""


def build(spec: Spec) -> int:
    """Hold this state from now on; this rank's bytes."""
    if not _held or _held[0].spec != spec:
        drop()
        state = spec.build(dist.get_rank(), dist.get_world_size())
        _held.append(_Held(spec, state, digest(state), local_bytes(state)))
    return _held[0].needed


def held() -> tuple[State, str]:
    """The state, and the digest that it had when it was built."""
    return _held[0].state, _held[0].digest


def drop() -> None:
    """Let go of the state."""
    _held.clear()
    gc.collect()


def save(system: str, folder: Path) -> Spent:
    """Save the state held."""
    state, rank = _held[0].state, dist.get_rank()
    return spend(lambda: SYSTEMS[system].save(state, folder, rank))[0]


def load(system: str, folder: Path) -> LoadCost:
    """Load into the state held, overwritten before; then prove every byte."""
    held, rank = _held[0], dist.get_rank()
    poison(held.state)
    spent, told = spend(lambda: SYSTEMS[system].load(held.state, folder, rank))
    if digest(held.state) != held.digest:
        spec = held.spec
        drop()
        build(spec)
        raise WrongBytes(f"{system} loaded other bytes than were saved (rank {rank})")
    return LoadCost(spent, held.needed, told)


def raw_write(folder: Path, huge: bool) -> Spent:
    """As many bytes as this rank's tensors, straight to the disk."""
    folder.mkdir(parents=True, exist_ok=True)
    path, nbytes, memory = folder / f"{dist.get_rank()}.raw", _held[0].needed, device.buffers(huge=huge)
    return spend(lambda: device.raw_write(path, nbytes, memory))[0]


def raw_read(folder: Path, huge: bool) -> Spent:
    """The same bytes back."""
    path, memory = folder / f"{dist.get_rank()}.raw", device.buffers(huge=huge)
    return spend(lambda: device.raw_read(path, memory))[0]
