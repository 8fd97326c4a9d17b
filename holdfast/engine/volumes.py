"""Which data file of its section a tensor goes to, where one header could not name them all.

`make_plan` calls `volumes_of`, so every rank comes to the same. Looks at names and shapes alone: never at who writes
what, for a tensor is in the same volume on all ranks.
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
