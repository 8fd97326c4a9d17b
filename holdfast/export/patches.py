"""Parts of tensors in this rank's memory, and which bytes of the target's files they become: arithmetic on strides.

A conversion from a live state makes a `Patch` of each box that a rank writes. Copies nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import torch

from holdfast.export.draft import WINDOW, Span
from holdfast.export.selection import Leaf
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, intersect, relative, whole
from holdfast.storage.local.disk import SECTOR

LIMIT = WINDOW + SECTOR
"""Bytes of the image of a window: it begins at a whole sector."""


class Region(NamedTuple):
    """A box of a source's tensor and where its elements stand in a tensor of the target.

    The first element of the box is element ``start`` of the flattened target, and the next one along an axis lies
    ``strides`` of that axis further.
    """

    name: str
    box: Box
    start: int
    strides: tuple[int, ...]

    def within(self, box: Box) -> Region | None:
        """What of it lies in another box, or None if nothing does."""
        both = intersect(self.box, box)
        if both is None:
            return None
        further = relative(both, self.box).offsets
        start = self.start + sum(o * s for o, s in zip(further, self.strides, strict=True))
        return Region(self.name, both, start, self.strides)


def regions_of(leaf: Leaf) -> list[Region]:
    """Where the elements of a target's tensor come from."""
    shape = leaf.shape
    return [Region(leaf.saved, whole(shape), 0, tuple(prod(shape[d + 1 :]) for d in range(len(shape))))]


class Patch(NamedTuple):
    """Elements in memory, on any device, and where they stand in a file.

    ``tensor[i, j]`` becomes a ``dtype`` at byte ``offset + i * steps[0] + j * steps[1]``. The steps descend.
    """

    tensor: torch.Tensor
    dtype: torch.dtype
    path: str
    offset: int
    steps: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where its last element ends."""
        return self.offset + self.dtype.itemsize + sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that it has in the file."""
        return self.tensor.numel() * self.dtype.itemsize

    @property
    def is_run(self) -> bool:
        """Whether nothing else lies between its first and its last byte."""
        return self.end - self.offset == self.nbytes

    def runs(self) -> Iterator[tuple[int, int]]:
        """Begin and end of each stretch of the file that it fills; neighbours may follow without a gap."""
        length, axis = self.dtype.itemsize, len(self.steps)
        while axis and self.steps[axis - 1] == length:
            axis -= 1
            length *= self.shape[axis]
        for at in product(*(range(0, n * s, s) for n, s in zip(self.shape[:axis], self.steps[:axis], strict=True))):
            begin = self.offset + sum(at)
            yield begin, begin + length


def patch_of(region: Region, memory: torch.Tensor, span: Span) -> Patch:
    """The patch for a region in ``memory``, which has the shape of its box. ``span`` is all of the target's tensor."""
    leaf = span.leaf
    steps = tuple(stride * leaf.itemsize for stride in region.strides)
    offset = span.offset + region.start * leaf.itemsize
    return folded(Patch(memory, dtypes.torch_dtype(leaf.dtype), span.path, offset, steps))


def folded(patch: Patch) -> Patch:
    """The same with its axes in the order of the file, and as few of them as possible."""
    tensor = patch.tensor
    axes: list[tuple[int, int, int]] = []  # length, step in the file, stride in memory
    for n, step, stride in sorted(zip(tensor.shape, patch.steps, tensor.stride(), strict=True), key=lambda a: -a[1]):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * step and axes[-1][2] == n * stride:
            axes[-1] = axes[-1][0] * n, step, stride
        else:
            axes.append((n, step, stride))
    shape, strides = [n for n, _, _ in axes], [stride for _, _, stride in axes]
    view = tensor.as_strided(shape, strides, tensor.storage_offset())
    return patch._replace(tensor=view, steps=tuple(step for _, step, _ in axes))


def cut(patch: Patch) -> Iterator[Patch]:
    """Parts that each span a window of the file at most, and end at the end of a window where that is possible."""
    if not patch.steps or patch.offset // WINDOW == (patch.end - 1) // WINDOW:
        yield patch
        return
    count, step, begin = patch.shape[0], patch.steps[0], patch.offset
    if len(patch.steps) > 1 and patch.end - begin - (count - 1) * step > WINDOW:  # one row is more than a window
        for row in range(count):
            yield from cut(patch._replace(tensor=patch.tensor[row], offset=begin + row * step, steps=patch.steps[1:]))
        return
    row = 0
    while row < count:
        at = begin + row * step
        rows = max(((at // WINDOW + 1) * WINDOW - at) // step, 1)
        yield patch._replace(tensor=patch.tensor[row : row + rows], offset=at)
        row += rows


def windows_of(patches: Iterable[Patch]) -> list[list[Patch]]:
    """The patches cut and packed into windows of the files, in the order of the files."""
    windows: list[list[Patch]] = []
    path, base, end = "", 0, 0
    for patch in sorted((part for uncut in patches for part in cut(uncut)), key=lambda p: (p.path, p.offset)):
        end = max(end, patch.end)
        if not windows or patch.path != path or patch.offset // WINDOW != base // WINDOW or end - base > LIMIT:
            windows.append([])
            path, base, end = patch.path, base_of(patch), patch.end
        windows[-1].append(patch)
    return windows


def base_of(patch: Patch) -> int:
    """The byte of the file at which the image of a window begins whose first patch this is."""
    return patch.offset // SECTOR * SECTOR


def runs_of(window: Sequence[Patch]) -> list[tuple[int, int]]:
    """The stretches of the file that a window fills, in order, joined where they meet."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(run for patch in window for run in patch.runs()):
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def edges_of(run: tuple[int, int]) -> list[tuple[int, int]]:
    """The ends of a stretch that share a sector with bytes of others: none, one or two."""
    begin, end = run
    low, high = -(-begin // SECTOR) * SECTOR, end // SECTOR * SECTOR
    if low >= high:
        return [run]
    return [edge for edge in ((begin, low), (high, end)) if edge[0] < edge[1]]
