"""A tensor's bytes, row-major, in host memory at a given address; and a few of them, to see whether they change.

Called by the writer for each stretch of a piece. Memory stays bounded for tensors that lie scattered or on a device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from ctypes import string_at

import torch

from holdfast.buffers.memory import buffer, move
from holdfast.errors import Unsupported
from holdfast.state import extent
from holdfast.state.tensors import LOWEST, is_freed

SLAB = 16 << 20
"""A tensor that is not contiguous is made so in parts of at most this many bytes. Two may be there at a time."""

LARGE = 1 << 20
"""From this many bytes on, a contiguous copy on the host has pages of its own."""


HOST = torch.device("cpu")
"""To compare devices with: to ask one for its type costs three times as much."""


def is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes, row-major, lie one after the other: contiguous, no lazy conjugate or minus."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()


def address_of(tensor: torch.Tensor, name: str = "") -> int:
    """Where a tensor lies. Raises Unsupported if its storage was freed meanwhile; reading it would end the process."""
    address = tensor.data_ptr()
    if address < LOWEST and is_freed(tensor):
        raise Unsupported(
            f"{name or f'a tensor of shape {list(tensor.shape)}'} lost its memory while it was being saved: call "
            "saving.wait_staged() before you free it (untyped_storage().resize_(0))"
        )
    return address


def contiguous_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as contiguous tensors in row-major order: itself if it is one, else slabs made on the way."""
    if not is_plain_memory(tensor):
        address_of(tensor)
        if tensor.dim() and tensor.nbytes > SLAB and max(tensor.shape) > 1:
            rows = max(1, SLAB * tensor.shape[0] // tensor.nbytes)
            for start in range(0, tensor.shape[0], rows):
                part = tensor.narrow(0, start, min(rows, tensor.shape[0] - start))
                if tensor.shape[0] == 1 or part.shape[0] == 1:
                    yield from contiguous_parts(part.squeeze(0))
                else:
                    yield from contiguous_parts(part)
            return
        tensor = _made_contiguous(as_integers(tensor.resolve_conj().resolve_neg()))
    yield tensor


def _made_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy. A large one on the host gets pages of its own, which go back to the kernel with it.

    The C library's allocator keeps such memory once it has seen a few: 70 MB more at the peak of a save.
    """
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE or tensor.is_contiguous():
        return tensor.contiguous()
    memory = torch.frombuffer(buffer(tensor.nbytes).memory, dtype=tensor.dtype)
    return memory.view(tensor.shape).copy_(tensor)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: torch can copy those in any layout, ``int4`` and its like not."""
    if tensor.itemsize in _INTEGERS and not tensor.is_neg() and not tensor.is_conj():
        return tensor.view(_INTEGERS[tensor.itemsize])
    return tensor


def copy_bytes(tensor: torch.Tensor, start: int, nbytes: int, address: int) -> None:
    """Bytes ``start:start + nbytes`` of a contiguous tensor on any device to host memory at ``address``."""
    if tensor.device.type == "cpu":
        move(address, address_of(tensor) + start, nbytes)
        return
    flat = tensor.reshape(-1).view(torch.uint8)[start : start + nbytes]
    host_tensor(address, nbytes).copy_(flat)


_WRITABLE = 0x200  # PyBUF_WRITE
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def host_tensor(address: int, nbytes: int) -> torch.Tensor:
    """Host memory at ``address`` as a uint8 tensor; the caller keeps the memory alive."""
    return torch.frombuffer(host_view(address, nbytes), dtype=torch.uint8)


def host_view(address: int, nbytes: int) -> memoryview:
    """Host memory at ``address`` as writable bytes; the caller keeps the memory alive."""
    # Not as a ctypes array: each new length would be a class of its own, which waits for the garbage collector.
    view: memoryview = _memory_view(address, nbytes, _WRITABLE)
    return view


_LENGTH = 48

Samples = list[tuple[str, torch.Tensor, bytes]]


def samples_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> Samples:
    """Names and tensors, each with bytes of it as they are now."""
    return [(name, tensor, _sample(tensor)) for name, tensor in tensors if tensor.device.type == "cpu"]


def differing(samples: Samples) -> list[str]:
    """Names of tensors whose bytes are others by now."""
    return [name for name, tensor, before in samples if _sample(tensor) != before]


def _sample(tensor: torch.Tensor) -> bytes:
    """Bytes in the middle; of a tensor with gaps the first and last element; none of freed memory."""
    begin, end = extent(tensor)
    if begin == end or is_freed(tensor):
        return b""
    if end - begin != tensor.nbytes:
        return string_at(begin, tensor.itemsize) + string_at(end - tensor.itemsize, tensor.itemsize)
    length = min(end - begin, _LENGTH)
    return string_at((begin + end - length) // 2, length)
