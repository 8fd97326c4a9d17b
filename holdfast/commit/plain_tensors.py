"""Plain tensors that every rank brings: are they really the same? Their sums are compared before a save.

`save` calls `sums_of` on every rank and `join_sums` on the first. Never reads all of a large tensor: blocks of it are
summed, spread evenly. Parameters and optimizer state are left out, training keeps those equal; buffers are taken from
one rank. `check_replicas` compares every byte.

A plain tensor with one name on several ranks is taken for a replica and cut among them. If each rank had its own, such
as the state of a generator, the checkpoint would mix them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.buffers.device import Copier
from holdfast.buffers.stage import contiguous_parts, copy_bytes
from holdfast.errors import Mismatch
from holdfast.plan.spread import Whole
from holdfast.state import Collected

LARGEST = 1 << 20
"""Bytes of a tensor up to which it is compared whole."""

ALTOGETHER = 32 << 20
"""Bytes of tensors that are compared whole in one save, in the order of the state."""

BLOCKS, BLOCK = 64, 1024
"""Of others: how many blocks are compared, and of how many elements. 1 GiB of float32 is looked at in 256 KiB."""


def sums_of(state: Collected, copier: Copier) -> dict[str, str]:
    """Name to shape and sum of each tensor that is neither sharded nor a module's nor an optimizer's.

    Devices copy on the streams of ``copier``: on that of training a thread would wait for all that is queued there.
    """
    sums, left = {}, ALTOGETHER
    for name in state.changes.plain:
        entry = state.entries[name]
        size = sum(view.tensor.nbytes for view in entry.views)
        if not isinstance(entry.spread, Whole) or not size:
            continue
        tensor = entry.views[0].tensor
        with copier.on(tensor.device):
            if size <= min(LARGEST, left):
                left -= size
            else:
                tensor = _sampled(tensor)
            sums[name] = f"{entry.dtype} {list(entry.shape)}:{_sum(tensor)}"
    return sums


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """Blocks of a tensor, the first and the last among them, as a small one; of a scattered one where rows begin."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return torch.cat([flat[at : at + BLOCK] for at in _evenly(max(flat.numel() - BLOCK, 0) + 1)])
    return torch.cat([_first_line(tensor[at : at + 1])[:BLOCK] for at in _evenly(len(tensor))])


def _first_line(tensor: torch.Tensor) -> torch.Tensor:
    while tensor.dim() > 1:
        tensor = tensor[0]
    return tensor


def _evenly(count: int) -> list[int]:
    """Positions below ``count``, at most `BLOCKS`, from the first to the last."""
    steps = min(BLOCKS, count)
    return sorted({at * (count - 1) // max(steps - 1, 1) for at in range(steps)})


def _sum(tensor: torch.Tensor) -> str:
    state = xxhash.xxh3_64()
    for part in contiguous_parts(tensor):
        data = bytearray(part.nbytes)
        copy_bytes(part, 0, part.nbytes, torch.frombuffer(data, dtype=torch.uint8).data_ptr())
        state.update(data)
    return state.hexdigest()


def join_sums(of_ranks: Sequence[tuple[int, dict[str, str]]]) -> None:
    """Raise Mismatch for the first tensor whose bytes differ between two ranks. ``of_ranks`` = (rank, its sums)."""
    seen: dict[str, tuple[int, str]] = {}
    for rank, sums in of_ranks:
        for name, total in sums.items():
            first, known = seen.setdefault(name, (rank, total))
            # Another shape or type is the plan's to tell; it says which.
            if known != total and known.partition(":")[0] == total.partition(":")[0]:
                raise Mismatch(
                    f"{name} differs between ranks {first} and {rank}, but has one name, and only one of them could be "
                    "kept. Wrap it as holdfast.PerRank(…) if every rank has its own, else make the ranks agree"
                )
