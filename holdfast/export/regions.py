"""Where the elements of a target's tensors come from: boxes of the source's tensors, as a map lays them out or plainly.

A conversion from a live state asks for the regions of each tensor. Copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from holdfast.errors import HoldfastError, Unsupported
from holdfast.export.draft import Span
from holdfast.export.patches import Footprint
from holdfast.export.selection import Leaf
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, intersect, relative, whole
from holdfast.remap.boxes import Fill, parts_of, split_axes
from holdfast.remap.nodes import Cast, Node, groups_of, walk

Shape = tuple[int, ...]


class Region(NamedTuple):
    """A box of a source's tensor and where its elements stand in a tensor of the target.

    The first element of the box is element ``start`` of the flattened target, and the next one along an axis lies
    ``strides`` of that axis further. ``shape``: the source's, or one with more axes for the same elements, in which the
    box is counted.
    """

    name: str
    shape: Shape
    box: Box
    start: int
    strides: Shape

    def within(self, box: Box) -> Region | None:
        """What of it lies in another box, or None if nothing does."""
        both = intersect(self.box, box)
        if both is None:
            return None
        further = relative(both, self.box).offsets
        start = self.start + sum(o * s for o, s in zip(further, self.strides, strict=True))
        return self._replace(box=both, start=start)

    def footprint(self, span: Span) -> Footprint:
        """Its bytes. ``span`` is all of the target's tensor."""
        return footprint(span, self.start, self.box.lengths, self.strides)


class Constant(NamedTuple):
    """One number that stands in many places of a tensor of the target."""

    value: float
    start: int
    lengths: Shape
    strides: Shape

    def footprint(self, span: Span) -> Footprint:
        """Its bytes. ``span`` is all of the target's tensor."""
        return footprint(span, self.start, self.lengths, self.strides)

    def memory(self, leaf: Leaf) -> torch.Tensor:
        """The number as a tensor of these lengths."""
        dtype = dtypes.torch_dtype(leaf.record.dtype)
        return torch.full((), self.value, dtype=dtype, device="cpu").expand(self.lengths)


def footprint(span: Span, start: int, lengths: Shape, strides: Shape) -> Footprint:
    """The bytes of elements that stand at these places of a tensor."""
    size = span.leaf.itemsize
    return Footprint(span.path, span.offset + start * size, lengths, tuple(stride * size for stride in strides), size)


def regions_of(leaf: Leaf, node: Node | None) -> list[Region | Constant]:
    """Where all elements of a tensor come from. ``node``: how a map makes it. Raises Unsupported for two casts."""
    shape = leaf.shape
    if node is None:
        strides = tuple(prod(shape[d + 1 :]) for d in range(len(shape)))
        return [Region(leaf.saved, shape, whole(shape), 0, strides)]
    if leaf.dtype != leaf.record.dtype and any(isinstance(inner, Cast) for inner in walk(node)):
        raise Unsupported(f"{leaf.name} is cast by remap= already: leave out dtype=, or the rule")
    regions: list[Region | Constant] = []
    for part in parts_of(node, whole(shape), torch.empty(shape, device="meta")):
        start, lengths, strides = int(part.view.storage_offset()), tuple(part.view.shape), tuple(part.view.stride())
        if isinstance(part, Fill):
            regions.append(Constant(part.value, start, lengths, strides))
        else:
            regions.append(Region(part.saved.name, part.shape, part.box, start, strides))
    return regions


def cells_in(shape: Shape, saved: Shape, box: Box, memory: torch.Tensor) -> Iterator[tuple[Box, torch.Tensor]]:
    """A box of a tensor of shape ``saved`` as boxes of ``shape``, which may have more axes, with their memory."""
    if shape == saved:
        yield box, memory
        return
    groups = groups_of(shape, saved)
    if groups is None:
        raise HoldfastError(f"{list(saved)} has no axes {list(shape)}; a fault of holdfast")
    yield from split_axes(groups, box, memory)


def narrowed(memory: torch.Tensor, box: Box, inner: Box) -> torch.Tensor:
    """The memory of ``inner``, which lies in ``box``, of that of the box."""
    for dim, (start, length) in enumerate(zip(*relative(inner, box), strict=True)):
        if length != memory.shape[dim]:
            memory = memory.narrow(dim, start, length)
    return memory
