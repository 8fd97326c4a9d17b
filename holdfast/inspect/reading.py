"""Reads tensors of a checkpoint in pieces that fit in memory: in boxes, or many small tensors at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, whole
from holdfast.read.read import read_boxes
from holdfast.read.wanted import Wanted

BOX = 64 << 20
"""Bytes that are read at a time: eight blocks, so that most of them are read whole and checked."""

STRETCH = 1 << 18
"""Elements of one stretch: as float64 they fit in a processor's cache."""

# The 16 numbers of float4_e2m1fn; torch keeps two in a byte and converts none of them.
_FLOAT4 = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], device="cpu"
)


def boxes_of(shape: Sequence[int], itemsize: int, most: int = BOX) -> Iterator[Box]:
    """Boxes that tile ``shape`` in row-major order, each of at most ``most`` bytes (or one element)."""
    return _cut(whole(shape), itemsize, most, 0) if prod(shape) else iter(())


def _cut(box: Box, itemsize: int, most: int, axis: int) -> Iterator[Box]:
    if box.size * itemsize <= most or axis == len(box.lengths):
        yield box
        return
    # Whole rows of this axis while a row fits; else one row at a time, cut along the next axis.
    length = box.lengths[axis]
    rows = max(1, most // (prod(box.lengths[axis + 1 :]) * itemsize))
    for start in range(0, length, rows):
        offsets = (*box.offsets[:axis], box.offsets[axis] + start, *box.offsets[axis + 1 :])
        lengths = (*box.lengths[:axis], min(rows, length - start), *box.lengths[axis + 1 :])
        yield from _cut(Box(offsets, lengths), itemsize, most, axis + 1)


def read_box(checkpoint: Checkpoint, name: str, box: Box) -> torch.Tensor:
    """One box of a tensor, on the CPU."""
    return checkpoint.read(name, list(zip(box.offsets, box.ends, strict=True)))


def groups(sizes: Iterable[tuple[str, int]], most: int = BOX) -> Iterator[list[str]]:
    """Names with their bytes, in order, as groups of at most ``most`` bytes; what is larger is alone in its group."""
    group: list[str] = []
    total = 0
    for name, nbytes in sizes:
        if group and total + nbytes > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += nbytes
    if group:
        yield group


def read_together(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Several whole tensors by one pass over the files: thousands of small ones cost a request each otherwise."""
    checkpoint.prove(names)
    tensors = {}
    wanted = []
    for name in names:
        record = checkpoint.records[name]
        tensors[name] = torch.empty(record.shape, dtype=dtypes.torch_dtype(record.dtype), device="cpu")
        wanted.append(Wanted(checkpoint.saved_name(name), record, whole(record.shape), tensors[name]))
    read_boxes(checkpoint.files, wanted, verify=checkpoint.reader.verifying(True))
    return tensors


def has_numbers(dtype: str) -> bool:
    """Whether the elements of a type are numbers to compute with (bits and the like are not)."""
    kind = dtypes.torch_dtype(dtype)
    if kind.is_floating_point or kind.is_complex or kind == torch.bool:
        return True
    return dtype in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


def numbers(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements of a tensor in stretches, as float64, or as complex128 if it is complex."""
    flat = tensor.reshape(-1)
    if flat.dtype == getattr(torch, "float4_e2m1fn_x2", None):
        packed = flat.view(torch.uint8)
        for part in packed.split(STRETCH):
            yield _FLOAT4.double()[torch.stack((part & 15, part >> 4), dim=1).reshape(-1).long()]
        return
    kind = torch.complex128 if flat.dtype.is_complex else torch.float64
    for part in flat.split(STRETCH):
        yield part.to(kind)
