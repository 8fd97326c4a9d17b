"""Elements that lie scattered in a storage, written out row-major in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import BinaryIO, NamedTuple

import torch

from holdfast.buffers.stage import host_view
from holdfast.errors import Damaged
from holdfast.formats.sources import Stretch, opened
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, runs, whole
from holdfast.read.source import Descriptors
from holdfast.storage.local import disk
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

TILE = 32 << 20
READ = 2 * TILE
SHORT = 64 << 10
"""Bytes that are read at once whatever lies between those that are wanted."""

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class View(NamedTuple):
    """A tensor as torch sees one: sizes and strides in elements, over the bytes from its first element to its last.

    ``conj``, ``neg``: its elements are conjugates, negatives of what is stored.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    stretch: Stretch
    conj: bool = False
    neg: bool = False


def carrier(dtype: str) -> torch.dtype:
    """A type of the same width whose elements torch can copy in any layout."""
    return _CARRIERS[dtypes.itemsize(dtype)]


def gather(view: View, target: BinaryIO) -> None:
    """Write the view's elements, row-major. Raises Damaged, StorageError."""
    place = view.stretch.located()
    size = dtypes.itemsize(view.dtype)
    with opened(place.source) as source:
        for box in _tiles(view.shape, view.strides, size):
            dense = torch.empty(box.lengths, dtype=carrier(view.dtype), device="cpu")
            first = sum(o * s for o, s in zip(box.offsets, view.strides, strict=True))
            _fill(dense, view.strides, source, place.begin + first * size, place.source.path)
            if view.conj or view.neg:
                _resolve(dense, view)
            data = host_view(dense.data_ptr(), dense.nbytes)
            length, starts = runs(whole(view.shape), box)
            for i, start in enumerate(starts):
                target.seek(start * size)
                target.write(data[i * length * size : (i + 1) * length * size])


def _tiles(shape: Sequence[int], strides: Sequence[int], size: int) -> Iterator[Box]:
    # A tile is cut where neither its elements in the storage nor those in the result are neighbours, else evenly:
    # so it is read and written in runs that are as long as can be had.
    tile = list(shape)
    outer = [min(s, prod(shape[d + 1 :])) for d, s in enumerate(strides)]
    while prod(tile) * size > TILE:
        d = max((d for d, n in enumerate(tile) if n > 1), key=lambda d: (outer[d], tile[d]))
        tile[d] = -(-tile[d] // 2)
    for starts in product(*(range(0, n, t) for n, t in zip(shape, tile, strict=True))):
        yield Box(starts, tuple(min(t, n - o) for t, n, o in zip(tile, shape, starts, strict=True)))


def _fill(
    dense: torch.Tensor, strides: Sequence[int], source: Descriptors | StorePlace, begin: int, path: Place
) -> None:
    size, extent = dense.itemsize, 1 + sum((n - 1) * s for n, s in zip(dense.shape, strides, strict=True))
    if extent * size <= SHORT or (extent * size <= READ and extent <= 4 * dense.numel()):
        wide = torch.frombuffer(_read(source, begin, extent * size, path), dtype=torch.uint8).view(dense.dtype)
        dense.copy_(wide.as_strided(dense.shape, strides))
        return
    d = max(range(dense.dim()), key=lambda d: (dense.shape[d] - 1) * strides[d])
    half = dense.shape[d] // 2
    _fill(dense.narrow(d, 0, half), strides, source, begin, path)
    _fill(dense.narrow(d, half, dense.shape[d] - half), strides, source, begin + half * strides[d] * size, path)


def _read(source: Descriptors | StorePlace, begin: int, nbytes: int, path: Place) -> bytearray:
    if not isinstance(source, tuple):
        with naming(path, "read"):
            data = bytearray(source.store.get(source.key, begin, begin + nbytes).data)
        at = len(data)
    else:
        data, at = bytearray(nbytes), 0
        while at < nbytes and (got := disk.read(source[0], memoryview(data)[at:], begin + at, path)):
            at += got
    if at < nbytes:
        raise Damaged(f"{path} ends at byte {begin + at}: it is truncated; bring it back from a copy")
    return data


def _resolve(dense: torch.Tensor, view: View) -> None:
    # By signs of real numbers: torch's own negation of complex ones gives zeros now this sign, now that.
    values = dense.view(dtypes.torch_dtype(view.dtype))
    parts = torch.view_as_real(values) if values.is_complex() else values
    if view.neg:
        parts.neg_()
    if view.conj:
        parts[..., 1].neg_()
