"""Tensors that are the file itself, mapped: nothing is copied before it is looked at, and what is written stays ours.

`Checkpoint.state_dict` asks for them. Never maps what lies in a store, and never changes a file.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence

import torch

from holdfast.ondisk import dtypes
from holdfast.ondisk.datafile import Piece
from holdfast.read.source import damaged
from holdfast.storage.local import disk
from holdfast.storage.naming import naming_unless_missing
from holdfast.storage.place import Place

_PROT_READ, _PROT_WRITE, _MAP_PRIVATE, _MAP_NORESERVE = 1, 2, 2, 0x4000  # of Linux

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

Mapping = ctypes.Array[ctypes.c_ubyte]


class MappedFiles:
    """Files of one checkpoint, each mapped once; a mapping lives as long as any tensor of it."""

    def __init__(self) -> None:
        self._mappings: dict[Place, Mapping | None] = {}

    def tensor(self, path: Place, piece: Piece, dtype: str, shape: Sequence[int]) -> torch.Tensor | None:
        """The whole tensor that a piece of a file is; None if it cannot be mapped (it is not aligned, say).

        Raises Damaged if the file is missing or ends before it.
        """
        if piece.begin % dtypes.itemsize(dtype):
            return None
        if path not in self._mappings:
            self._mappings[path] = _mapping(path)
        mapping = self._mappings[path]
        if mapping is None:
            return None
        if len(mapping) < piece.begin + piece.nbytes:
            raise damaged(path, f"ends at byte {len(mapping)}")
        data = torch.frombuffer(mapping, dtype=torch.uint8, count=piece.nbytes, offset=piece.begin)
        return data.view(dtypes.torch_dtype(dtype)).view(tuple(shape))


def _mapping(path: Place) -> Mapping | None:
    """All of a file, copied page by page where it is written to; None if the file system or the memory has no room."""
    try:
        with naming_unless_missing(path, "open"):
            fd = disk.open_regular(path)
    except FileNotFoundError:
        raise damaged(path, "is missing") from None
    try:
        nbytes = os.fstat(fd).st_size
        # Not Python's mmap: that keeps a descriptor of every file. Nothing is reserved for pages that may be written,
        # else the kernel would refuse a file that is larger than the memory.
        flags = _MAP_PRIVATE | _MAP_NORESERVE
        address = _libc.mmap(None, nbytes, _PROT_READ | _PROT_WRITE, flags, fd, 0) if nbytes else None
    finally:
        os.close(fd)
    if address is None or address == ctypes.c_void_p(-1).value:
        return None
    mapping: Mapping = (ctypes.c_ubyte * nbytes).from_address(address)
    finalizer = weakref.finalize(mapping, _libc.munmap, address, nbytes)
    finalizer.atexit = False  # tensors may outlive the interpreter's end
    return mapping
