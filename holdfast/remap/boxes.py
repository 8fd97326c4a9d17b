"""Which boxes of saved tensors fill a box of a node, and which part of the target's memory each of them goes to.

An opened checkpoint with a map asks here before it reads. All is arithmetic on offsets: no element is touched, and the
views are slices of the memory that the caller gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from holdfast.ondisk.box import Box, flat_boxes
from holdfast.remap.nodes import Cast, Cut, Filled, Group, Joined, Node, Permuted, Reshaped, Saved, groups_of


class Part(NamedTuple):
    """A box of a saved tensor and the memory that takes it, which has the box's lengths as shape.

    ``shape``: the saved tensor's, or one with more axes for the same elements, in which the box is counted.
    """

    saved: Saved
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor


class Fill(NamedTuple):
    """Memory that takes one number."""

    value: float
    view: torch.Tensor


def parts_of(node: Node, box: Box, view: torch.Tensor) -> Iterator[Part | Fill]:
    """What fills ``view``, which has the box's lengths as shape; a view of a meta tensor does as well."""
    if 0 in box.lengths:
        return
    if isinstance(node, Saved):
        yield Part(node, node.shape, box, view)
    elif isinstance(node, Filled):
        yield Fill(node.value, view)
    elif isinstance(node, Cast):
        yield from parts_of(node.of, box, view)
    elif isinstance(node, Cut):
        yield from parts_of(node.of, _moved(box, node.dim, node.start), view)
    elif isinstance(node, Permuted):
        back = sorted(range(len(node.dims)), key=node.dims.__getitem__)
        turned = Box(tuple(box.offsets[k] for k in back), tuple(box.lengths[k] for k in back))
        yield from parts_of(node.of, turned, view.permute(back))
    elif isinstance(node, Joined):
        yield from _of_parts(node, box, view)
    else:
        yield from _of_reshaped(node, box, view)


def _moved(box: Box, dim: int, by: int) -> Box:
    return Box((*box.offsets[:dim], box.offsets[dim] + by, *box.offsets[dim + 1 :]), box.lengths)


def _of_parts(node: Joined, box: Box, view: torch.Tensor) -> Iterator[Part | Fill]:
    dim, starts = node.dim, node.starts
    begin, end = box.offsets[dim], box.offsets[dim] + box.lengths[dim]
    for number in range(bisect_right(starts, begin) - 1, len(node.parts)):
        low, high = max(begin, starts[number]), min(end, starts[number + 1])
        if starts[number] >= end:
            return
        if low < high:
            offsets = (*box.offsets[:dim], low - starts[number], *box.offsets[dim + 1 :])
            lengths = (*box.lengths[:dim], high - low, *box.lengths[dim + 1 :])
            yield from parts_of(node.parts[number], Box(offsets, lengths), view.narrow(dim, low - begin, high - low))


def _of_reshaped(node: Reshaped, box: Box, view: torch.Tensor) -> Iterator[Part | Fill]:
    groups, factors = _groups(node.of.shape, node.shape), factors_of(node)
    for cell, part in split_axes(groups, box, view):
        if isinstance(node.of, Saved):  # its elements lie in row-major order, whatever its axes are
            yield Part(node.of, factors, cell, part)
        else:
            for merged, memory in joined_axes(groups, cell, part):
                yield from parts_of(node.of, merged, memory)


def factors_of(node: Reshaped) -> tuple[int, ...]:
    """The axes into which both shapes of a reshape can be cut."""
    return tuple(factor for group in _groups(node.of.shape, node.shape) for factor in group.factors)


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Group, ...]:
    groups = groups_of(source, target)
    if groups is None:
        raise AssertionError("a reshape without common factors is made by way of one axis")
    return groups


def merged_boxes(part: Part) -> Iterator[tuple[Box, torch.Tensor]]:
    """A part as boxes of the saved tensor's own axes, each with its memory."""
    if part.shape == part.saved.shape:
        yield part.box, part.view
    else:
        yield from joined_axes(_groups(part.saved.shape, part.shape), part.box, part.view)


def split_axes(groups: Sequence[Group], box: Box, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of the target as boxes of the factors."""
    spans = [span for group in groups for span in group.target_spans]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]] = [((), (), view)]
    for axis, factors in enumerate(spans):
        count = len(factors)
        start, stop = box.offsets[axis], box.offsets[axis] + box.lengths[axis]
        cells = flat_boxes(factors, start, stop) if count != 1 else [Box((start,), (stop - start,))]
        longer = []
        for offsets, lengths, memory in boxes:
            at, dim = 0, len(lengths)
            for cell in cells:
                part = memory if len(cells) == 1 else memory.narrow(dim, at, cell.size)
                part = part.squeeze(dim) if not count else part.unflatten(dim, cell.lengths) if count > 1 else part
                longer.append((offsets + cell.offsets, lengths + cell.lengths, part))
                at += cell.size
        boxes = longer
    for offsets, lengths, memory in boxes:
        yield Box(offsets, lengths), memory


def joined_axes(groups: Sequence[Group], box: Box, view: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of the factors as boxes of the source, each of whose axes is made up of several factors."""
    spans = [span for group in groups for span in group.source_spans]
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]] = [((), (), view)]
    at = 0
    for factors in spans:
        offsets, lengths = box.offsets[at : at + len(factors)], box.lengths[at : at + len(factors)]
        at += len(factors)
        boxes = [
            ((*before, start), (*sizes, length), part)
            for before, sizes, memory in boxes
            for start, length, part in _merged(factors, offsets, lengths, memory, len(sizes))
        ]
    for before, sizes, memory in boxes:
        yield Box(before, sizes), memory


def _merged(
    factors: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], view: torch.Tensor, dim: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """The intervals of one axis that a box of its factors is, each with the memory, whose axes become one."""
    if not factors:
        yield 0, 1, view.unsqueeze(dim)
        return
    if len(factors) == 1:
        yield offsets[0], lengths[0], view
        return
    inner = prod(factors[1:])
    if tuple(lengths[1:]) == tuple(factors[1:]) and (flat := _flat(view, dim, len(factors))) is not None:
        yield offsets[0] * inner, lengths[0] * inner, flat
        return
    for i in range(lengths[0]):
        for start, length, part in _merged(factors[1:], offsets[1:], lengths[1:], view.select(dim, i), dim):
            yield (offsets[0] + i) * inner + start, length, part


def _flat(view: torch.Tensor, dim: int, count: int) -> torch.Tensor | None:
    """So many axes of a view as one; None if that would need a copy."""
    stride, axes = None, []
    for k in range(dim + count - 1, dim - 1, -1):
        if view.shape[k] == 1:
            continue
        if stride is not None and view.stride(k) != stride:
            return None
        axes.append(k)
        stride = view.stride(k) * view.shape[k]
    step = view.stride(axes[0]) if axes else 1
    shape, strides = list(view.shape), list(view.stride())
    shape[dim : dim + count] = [prod(view.shape[dim : dim + count])]
    strides[dim : dim + count] = [step]
    return view.as_strided(shape, strides)
