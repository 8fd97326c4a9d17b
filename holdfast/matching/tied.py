"""Whether tensors of a checkpoint hold the same bytes: of names that are one tensor here, and of what cannot change.

The comparison of a load asks before anything is read into its place. Never holds more than two parts of 16 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box

_PART = 16 << 20
"""Bytes of two tensors that are compared at a time."""


def same_saved(checkpoint: Checkpoint, one: str, other: str, boxes: Iterable[Box]) -> bool:
    """Whether two saved tensors are alike in these boxes."""
    first, second = checkpoint.records[one], checkpoint.records[other]
    return (first.dtype, first.shape) == (second.dtype, second.shape) and all(
        same_bytes(_read(checkpoint, one, part), _read(checkpoint, other, part))
        for box in boxes
        for part in _parts(box, dtypes.itemsize(first.dtype))
    )


def same_as_saved(checkpoint: Checkpoint, name: str, tensor: torch.Tensor) -> bool:
    """Whether a saved tensor is alike a present one."""
    return checkpoint.records[name].shape == tuple(tensor.shape) and same_bytes(checkpoint.read(name), tensor)


def _read(checkpoint: Checkpoint, name: str, box: Box) -> torch.Tensor:
    return checkpoint.read(name, list(zip(box.offsets, box.ends, strict=True)) or None)


def _parts(box: Box, itemsize: int) -> Iterator[Box]:
    if not box.lengths:
        yield box
        return
    step = max(1, _PART // max(box.size // max(box.lengths[0], 1) * itemsize, 1))
    for at in range(0, box.lengths[0], step):
        yield Box((box.offsets[0] + at, *box.offsets[1:]), (min(step, box.lengths[0] - at), *box.lengths[1:]))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes on this rank; a NaN is the same as itself."""
    one, other = getattr(one, "_local_tensor", one), getattr(other, "_local_tensor", other)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.device == other.device and one.data_ptr() == other.data_ptr() and one.stride() == other.stride():
        return True
    device = one.device if one.device == other.device else torch.device("cpu")
    first, second = (t.detach().to(device).contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)
