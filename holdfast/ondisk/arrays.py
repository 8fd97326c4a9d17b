"""Arrays among the values of a state, as JSON and back: NumPy arrays, and small tensors such as a learning rate.

`values` calls it. Never imports NumPy before there is an array, never takes memory that the bytes do not fill, and
never takes a large tensor or one without plain bytes.
"""

from __future__ import annotations

import base64
import re
import sys
from math import prod
from typing import Any

import torch

from holdfast.errors import Unsupported
from holdfast.ondisk import scalars
from holdfast.ondisk.scalars import JSON, Refused, full_name

_TYPE = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,8}|[mM]8(?:\[\d{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
"""Types whose bytes mean the same everywhere: no objects, no records, no numbers of the machine's own width."""

MAX_TENSOR = 1 << 20
"""Bytes of a tensor that may be a value."""

_MAX_AXES = 32
_MAX_TEXT = 0x10FFFF


def is_array(value: object) -> bool:
    """Whether it is an array of NumPy's, or of a class made of one."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def encode_array(value: Any) -> JSON:
    """An array as type, shape and its bytes, row-major. Raises Refused for types that have no plain bytes."""
    import numpy

    if type(value) is not numpy.ndarray:
        raise Refused("", f"{full_name(value)} is not kept; store numpy.asarray(it)")
    if value.dtype.kind == "O":
        raise Refused("", "a NumPy array of objects is not kept; store a list (its .tolist()), or an array of numbers")
    if value.dtype.metadata or _TYPE.fullmatch(value.dtype.str) is None:
        raise Refused("", f"a NumPy array of dtype {value.dtype} is not kept; store its fields, or an array of numbers")
    if value.ndim > _MAX_AXES:
        raise Refused("", f"a NumPy array of {value.ndim} axes is not kept")
    return {"$": "array", "v": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}


def decode_array(inner: Any) -> Any:
    """The inverse of `encode_array`. Raises Unsupported without NumPy, ValueError and the like for what is no array."""
    name, shape, text = inner
    if not isinstance(name, str) or _TYPE.fullmatch(name) is None:
        raise ValueError(f"an array of dtype {str(name)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_AXES or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"an array of shape {str(shape)[:40]}")
    try:
        import numpy
    except ImportError:
        raise Unsupported("it is a NumPy array, and NumPy is not installed here: pip install numpy") from None
    dtype = numpy.dtype(name)
    data = base64.b64decode(text, validate=True)
    if prod(shape) * dtype.itemsize != len(data) or prod(n or 1 for n in shape) >= 1 << 60:
        raise ValueError(f"an array of {name} {str(shape)[:40]} in {len(data)} bytes")
    if dtype.kind == "U" and data:
        codes = numpy.frombuffer(data, dtype.str[0] + "u4")
        if int(codes.max()) > _MAX_TEXT:
            raise ValueError("an array of text that is no Unicode")
    if not data:
        return numpy.zeros(shape, dtype)
    return numpy.frombuffer(bytearray(data), dtype).reshape(shape)  # of a bytearray: it can be written to


def encode_tensor(tensor: torch.Tensor) -> JSON:
    """A tensor as ``{"$": "inline", "v": [dtype, shape, base64 of its bytes, whether it is on the host]}``.

    Raises Refused.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused("", f"a {type(tensor).__qualname__} as a setting; use a plain tensor")
    if tensor.is_quantized or tensor.nbytes > MAX_TENSOR:
        raise Refused("", f"a tensor of {tensor.nbytes} bytes as a setting; keep it in the state of a parameter")
    data = bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "$": "inline",
        "v": [dtype, list(tensor.shape), base64.b64encode(data).decode(), tensor.device.type == "cpu"],
    }


def decode_tensor(value: Any) -> torch.Tensor:
    """The inverse of `encode_tensor`; what was on an accelerator is put on the present one, if there is one."""
    name, shape, data, on_host = value
    dtype = scalars.decode("dtype", name)
    text = base64.b64decode(data, validate=True)
    # torch refuses a buffer without bytes.
    flat = torch.frombuffer(bytearray(text or b"0"), dtype=torch.uint8)[: len(text)].clone()
    tensor = flat.view(dtype).reshape(shape)
    accelerator = None if on_host else torch.accelerator.current_accelerator()
    return tensor if accelerator is None else tensor.to(accelerator)
