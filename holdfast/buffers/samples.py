"""A few bytes of each tensor in host memory, to see changes of which torch keeps no count.

`still` takes them when a save is called and compares them when all is copied. A net and no promise: what changes other
bytes alone is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from ctypes import string_at

import torch

from holdfast.state import extent
from holdfast.state.tensors import is_freed

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
