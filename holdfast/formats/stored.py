"""A tensor as it lies in foreign files: its boxes, each a stretch of bytes; cut, joined and reshaped unread."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.gather import View, carrier, gather
from holdfast.formats.sources import Memory, Stretch, Unpacked, all_of
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes, intersect, tiling_fault, whole
from holdfast.storage.place import Place

MAX_AXES = 64
"""As many as NumPy allows; nobody has more."""

MAX_SPREAD = 64
"""How many times its stored bytes a tensor may be: an expanded one may claim any size for a few bytes."""


@dataclass(frozen=True)
class Opaque:
    """A tensor that a file holds, but not as elements that could be read (sparse, quantized, …): ``reason`` why."""

    reason: str


@dataclass(frozen=True)
class Stored:
    """A tensor of torch's dtype name and global shape; ``pieces`` tile it, each row-major in its stretch.

    Two are equal if they are the same bytes of the same files: so tied weights are recognised.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[Box, Stretch], ...]

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * dtypes.itemsize(self.dtype)

    def fault(self) -> str | None:
        """Why the pieces do not make up the tensor exactly, or None."""
        if 0 in self.shape:
            return None
        size = dtypes.itemsize(self.dtype)
        for box, stretch in self.pieces:
            if stretch.nbytes != box.size * size:
                return f"its part {box} has {stretch.nbytes} bytes instead of {box.size * size}"
        if len(self.pieces) == 1 and self.pieces[0][0] == whole(self.shape):
            return None
        try:
            return tiling_fault(self.shape, [box for box, _ in self.pieces])
        except ValueError as error:
            return str(error)

    def read(self) -> torch.Tensor:
        """The tensor itself: for the small ones that say how others are to be read."""
        result = torch.empty(self.shape, dtype=carrier(self.dtype), device="cpu")
        for box, stretch in self.pieces:
            if not box.size:
                continue
            data = torch.frombuffer(bytearray(stretch.read()), dtype=torch.uint8)
            view = result
            for dim, (start, length) in enumerate(zip(*box, strict=True)):
                view = view.narrow(dim, start, length)
            view.copy_(data.view(result.dtype).view(box.lengths))
        return result.view(dtypes.torch_dtype(self.dtype))


def _shape(shape: Iterable[Any], path: Place) -> tuple[int, ...]:
    sizes = tuple(shape)
    if len(sizes) > MAX_AXES or not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
        short = [n if type(n) is int and n.bit_length() < 100 else type(n).__name__ for n in sizes[:5]]
        raise Damaged(f"{path}: {short} is no shape of a tensor: the file was altered")
    return sizes


def _itemsize(dtype: str, path: Place) -> int:
    if not dtypes.known(dtype):
        raise Unsupported(f"{path}: this torch has no type {dtype[:60]!r}; a newer one may")
    return dtypes.itemsize(dtype)


def plain(dtype: str, shape: Sequence[int], stretch: Stretch) -> Stored:
    """A whole tensor, row-major at the beginning of a stretch. Raises Damaged if the stretch is too short."""
    path = stretch.source.path
    shape, size = _shape(shape, path), _itemsize(dtype, path)
    return Stored(dtype, shape, () if 0 in shape else ((whole(shape), stretch.part(0, prod(shape) * size)),))


def of_bytes(dtype: str, shape: Sequence[int], data: bytes, path: Place) -> Stored:
    """A tensor whose bytes are at hand; ``path`` names in errors where they came from."""
    return plain(dtype, shape, all_of(Memory(path, data)))


def float_scalar(value: float, path: Place) -> Stored:
    """A 0-dimensional float32: how torch's optimizers keep their step."""
    try:
        data = struct.pack("<f", value)
    except OverflowError:
        raise Damaged(f"{path}: {value!r} is too large for the step of an optimizer: the file was altered") from None
    return of_bytes("float32", (), data, path)


@dataclass(eq=False)
class _Scattered(Unpacked):
    """Elements that are gathered when they are read. Equal to another of the same view: tied weights are."""

    view: View = field(kw_only=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Scattered) and self.view == other.view

    def __hash__(self) -> int:
        return hash(self.view)


def strided(
    dtype: str, shape: Sequence[int], strides: Sequence[int], storage: Stretch, offset: int, *, conj: bool = False,
    neg: bool = False,
) -> Stored:  # fmt: skip
    """A view of a storage, as torch pickles one: sizes, strides and offset in elements; ``conj`` of complex ones alone.

    What is not row-major, or is to be conjugated or negated, is gathered when it is read. Raises Damaged if the view
    leaves its storage, Unsupported if it is spread over far fewer bytes than it claims.
    """
    path = storage.source.path
    shape, strides, size = _shape(shape, path), _shape(strides, path), _itemsize(dtype, path)
    if len(shape) != len(strides) or type(offset) is not int or not 0 <= offset < 1 << 63:
        raise Damaged(f"{path}: a tensor of shape {shape} cannot have strides {strides}, or begins outside")
    if 0 in shape:
        return Stored(dtype, shape, ())
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    part = storage.part(offset * size, extent * size)
    row_major = all(n == 1 or s == prod(shape[d + 1 :]) for d, (n, s) in enumerate(zip(shape, strides, strict=True)))
    if row_major and not conj and not neg:
        return plain(dtype, shape, part)
    nbytes = prod(shape) * size
    if nbytes > MAX_SPREAD * max(part.nbytes, 1 << 20):
        raise Unsupported(f"{path}: a tensor of shape {shape} is spread over only {extent} elements")
    view = View(dtype, shape, strides, part, conj, neg)
    return plain(dtype, shape, all_of(_Scattered(path, nbytes, lambda target: gather(view, target), view=view)))


def joined(dtype: str, shape: Sequence[int], parts: Iterable[tuple[Sequence[int], Stored]]) -> Stored:
    """A tensor from its shards, each with its offsets. Shards equal in place (replicas) count once."""
    pieces: dict[Box, Stretch] = {}
    for offsets, part in parts:
        if part.dtype != dtype or len(offsets) != len(part.shape) or len(offsets) != len(shape):
            raise _misfit(part, f"a shard at {list(offsets)}", dtype, shape)
        for box, stretch in part.pieces:
            moved = Box(tuple(a + b for a, b in zip(offsets, box.offsets, strict=True)), box.lengths)
            pieces.setdefault(moved, stretch)
    return Stored(dtype, tuple(shape), tuple(pieces.items()))


def _misfit(part: Stored, what: str, dtype: str, shape: Sequence[int]) -> Damaged:
    return Damaged(f"{_where(part)}{what}, {part.dtype} {list(part.shape)}, is no part of {dtype} {list(shape)}")


def _where(tensor: Stored) -> str:
    return f"{tensor.pieces[0][1].source.path}: " if tensor.pieces else ""


def from_flat(dtype: str, shape: Sequence[int], parts: Iterable[tuple[int, Stored]]) -> Stored:
    """A tensor from parts of itself flattened: each a 1-dimensional tensor with its first element's number."""
    shape, size = tuple(shape), dtypes.itemsize(dtype)
    pieces: dict[Box, Stretch] = {}
    for start, part in parts:
        if part.dtype != dtype or len(part.shape) != 1 or start < 0 or start + part.shape[0] > prod(shape):
            raise _misfit(part, f"a flat part from element {start} on", dtype, shape)
        for piece, stretch in part.pieces:
            first, at = start + piece.offsets[0], 0
            for box in flat_boxes(shape, first, first + piece.lengths[0]):
                pieces.setdefault(box, stretch.part(at, box.size * size))
                at += box.size * size
    return Stored(dtype, shape, tuple(pieces.items()))


def concatenated(parts: Sequence[Stored], dim: int = 0) -> Stored:
    """Tensors one after the other along an axis. Raises ValueError for none, Damaged for those that do not fit."""
    if not parts:
        raise ValueError("nothing to concatenate")
    placed, at = [], 0
    first = parts[0]
    for part in parts:
        alike = (*part.shape[:dim], *part.shape[dim + 1 :]) == (*first.shape[:dim], *first.shape[dim + 1 :])
        if not alike or not 0 <= dim < len(part.shape):
            raise _misfit(part, f"a part along axis {dim}", first.dtype, first.shape)
        placed.append(((*(0,) * dim, at, *(0,) * (len(part.shape) - dim - 1)), part))
        at += part.shape[dim]
    return joined(first.dtype, (*first.shape[:dim], at, *first.shape[dim + 1 :]), placed)


def cut(tensor: Stored, start: int, stop: int) -> Stored:
    """Rows ``start:stop`` of a tensor (elements, of a 1-dimensional one)."""
    if not tensor.shape or not 0 <= start <= stop <= tensor.shape[0]:
        raise Damaged(f"{_where(tensor)}rows {start}:{stop} of a tensor of shape {tensor.shape} were asked for")
    rest = tensor.shape[1:]
    wanted = Box((start, *(0,) * len(rest)), (stop - start, *rest))
    size, pieces = dtypes.itemsize(tensor.dtype), []
    for box, stretch in tensor.pieces:
        share = intersect(box, wanted)
        if share is None:
            continue
        row = prod(box.lengths[1:]) * size
        skip = (share.offsets[0] - box.offsets[0]) * row
        moved = Box((share.offsets[0] - start, *share.offsets[1:]), share.lengths)
        pieces.append((moved, stretch.part(skip, share.lengths[0] * row)))
    return Stored(tensor.dtype, (stop - start, *rest), tuple(pieces))


def reshaped(tensor: Stored, shape: Sequence[int]) -> Stored:
    """The same elements under another shape. Raises Unsupported for parts that are no runs of the flat tensor."""
    if prod(shape) != prod(tensor.shape) or any(n < 0 for n in shape):
        raise Damaged(f"{_where(tensor)}a tensor of shape {tensor.shape} is said to have shape {tuple(shape)}")
    if tuple(shape) == tensor.shape:
        return tensor
    parts = []
    for box, stretch in tensor.pieces:
        begin = sum(o * prod(tensor.shape[d + 1 :]) for d, o in enumerate(box.offsets))
        if flat_boxes(tensor.shape, begin, begin + box.size) != [box]:
            raise Unsupported(f"{_where(tensor)}part {box} of a tensor {list(tensor.shape)} is no run of its elements")
        parts.append((begin, plain(tensor.dtype, (box.size,), stretch)))
    return from_flat(tensor.dtype, shape, parts)


def flat(tensor: Stored) -> Stored:
    """The tensor with one axis."""
    return reshaped(tensor, (prod(tensor.shape),))
