"""Plain tensors that every rank brings: are they really the same? Sums of the small ones, compared before a save.

`save` calls `sums_of` on every rank and `join_sums` on the first. Never looks at large tensors: that costs a pass over
them. Parameters and optimizer state are left out too, training keeps those equal; buffers are taken from one rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.engine.spread import Whole
from holdfast.engine.stage import contiguous_parts, copy_bytes
from holdfast.engine.state import Collected
from holdfast.errors import Mismatch

LARGEST = 1 << 20
"""Bytes of a tensor from which on it is not compared."""

ALTOGETHER = 32 << 20
"""Bytes compared in one save at the most, in the order of the state."""


def sums_of(state: Collected) -> dict[str, str]:
    """Name to shape and sum of each small tensor that is neither sharded nor a module's nor an optimizer's."""
    sums, left = {}, ALTOGETHER
    for name in state.plain:
        entry = state.entries[name]
        size = sum(view.tensor.nbytes for view in entry.views)
        if isinstance(entry.spread, Whole) and 0 < size <= min(LARGEST, left):
            left -= size
            sums[name] = f"{entry.dtype} {list(entry.shape)}:{_sum(entry.views[0].tensor)}"
    return sums


def _sum(tensor: torch.Tensor) -> str:
    state = xxhash.xxh3_64()
    for part in contiguous_parts(tensor):
        data = bytearray(part.nbytes)
        copy_bytes(part, 0, part.nbytes, torch.frombuffer(data, dtype=torch.uint8).data_ptr())
        state.update(data)
    return state.hexdigest()


def join_sums(told: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Raise Mismatch for the first tensor whose bytes differ between two ranks. ``told`` = (rank, its sums)."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, sums in told:
        for name, found in sums.items():
            first, known = seen.setdefault(name, (rank, found))
            # Another shape or type is the plan's to tell; it says which.
            if known != found and known.partition(":")[0] == found.partition(":")[0]:
                raise Mismatch(
                    f"{name} differs between ranks {first} and {rank}, but has one name, and only one of them could be "
                    "kept. Wrap it as holdfast.PerRank(…) if every rank has its own, else make the ranks agree"
                )
