"""Which data file of its section a tensor goes to, where one header could not name them all.

`make_plan` calls `volumes_of`, so every rank comes to the same; `images` and `commit` ask `file_of`. A tensor's volume
follows from names and shapes alone: never from who writes what, for it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from holdfast.ondisk import datafile, names

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
