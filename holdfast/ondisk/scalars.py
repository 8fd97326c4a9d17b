"""Values that hold no others, as JSON and back: numbers, text, bytes, arrays, small tensors, keys of dicts and sets.

`values` calls it for every leaf. Never guesses: an unknown type is refused. Never imports NumPy before there is an
array, and never takes memory that the bytes of an array do not fill.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from math import prod
from typing import Any

import msgspec
import torch

from holdfast.errors import Unsupported

JSON = Any
_INT64 = 1 << 63
_MAX_BITS = 14_000  # Python reads no more than 4300 decimal digits back as an int
_MAX_KEY = 50
"""Tuples within tuples of one key."""


class Refused(TypeError):
    """A value that the format does not keep. ``path`` says where below the value it sits, ``reason`` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def encode(value: object) -> JSON:
    """A single value as JSON: plain where JSON has it, else ``{"$": tag, "v": …}``. Raises Refused."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, str) and kind is str:
        return _text(value)
    if isinstance(value, int) and kind is int:
        return value if -_INT64 <= value < _INT64 else _big_integer(value)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}  # type: ignore[arg-type]
    if kind is bytes or kind is bytearray:
        return {"$": kind.__name__, "v": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}  # type: ignore[attr-defined]
    if kind is torch.dtype:
        return {"$": "dtype", "v": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$": "device", "v": str(value)}
    if kind is torch.Size:
        return {"$": "size", "v": list(value)}  # type: ignore[call-overload]
    if is_numpy_scalar(value):
        return encode(python_scalar(value))
    raise Refused("", why_not(value))


def is_numpy_scalar(value: object) -> bool:
    """Whether it is a single value of NumPy's, as ``numpy.float32(0.5)``."""
    # A program that has not imported NumPy cannot have one; importing it here would cost every start.
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def python_scalar(value: Any) -> object:
    """What Python has for a NumPy scalar, without loss. Raises Refused."""
    plain = value.item() if value.dtype.kind in "biufcUS" else value
    if type(plain) in (bool, int, float, complex, str, bytes):
        return plain
    raise Refused("", f"{full_name(value)} is not kept: Python has no number that is exactly that")


def _text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise Refused("", f"{value[:40]!r} is no Unicode text (a lone surrogate); store bytes") from None
    return value


def _big_integer(value: int) -> JSON:
    if value.bit_length() > _MAX_BITS:
        raise Refused("", f"an integer of {value.bit_length()} bits; store bytes")
    return {"$": "int", "v": str(value)}


def full_name(value: object) -> str:
    """The type of a value with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def why_not(value: object) -> str:
    """Why a value is refused, and what to store instead."""
    kind = full_name(value)
    for plain in (int, float, str, bytes, tuple, list):
        if isinstance(value, plain):
            store = "its .value" if isinstance(value, Enum) else f"{plain.__name__}(it)"
            return f"{kind} is not kept, since it would come back as a plain {plain.__name__}; store {store}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{kind} is not kept; store numpy.asarray(it), or a tensor"
    if kind.startswith("torch.utils.data."):
        return (
            f"{kind} does not tell where it is; leave it out and keep the number of samples seen, or take a "
            "torchdata.StatefulDataLoader (docs/trainers.md)"
        )
    if callable(value):
        return f"{kind} is code, and a checkpoint holds nothing executable; store its name or its settings"
    return (
        f"{kind} is not kept; a state holds tensors, dicts, lists, tuples, sets, deques, None, bool, int, float, str, "
        "bytes, complex, NumPy arrays, torch dtypes, devices and sizes, and objects with state_dict() and "
        "load_state_dict()"
    )


def decode(tag: object, inner: Any) -> Any:
    """The inverse of `encode` for a value with a tag. Raises ValueError and the like for what it cannot have made."""
    if tag not in _DECODERS:
        raise ValueError(f"unknown value tag {tag!r}")
    return _DECODERS[tag](inner)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"this torch has no dtype {name!r}")
    return dtype


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_DECODERS: dict[object, Callable[[Any], object]] = {
    "int": int, "float": float, "bytes": _bytes, "bytearray": lambda text: bytearray(_bytes(text)),
    "complex": lambda parts: complex(float(parts[0]), float(parts[1])), "dtype": _dtype, "device": torch.device,
    "size": torch.Size,
}  # fmt: skip


# What a dict or a set is keyed by


def plain_key(key: object) -> object:
    """A key as it will come back: a NumPy scalar as Python's, which is equal to it and has the same hash."""
    if type(key) is tuple:
        return tuple(map(plain_key, key))
    return python_scalar(key) if is_numpy_scalar(key) else key


def encode_key(key: object, depth: int = 0) -> JSON:
    """A key, or an element of a set: a single value, or a tuple or frozenset of such. Raises Refused."""
    if type(key) is tuple or type(key) is frozenset:
        if depth >= _MAX_KEY:
            raise Refused("", f"a key of tuples that are nested more than {_MAX_KEY} deep")
        inner = [encode_key(part, depth + 1) for part in key]
        return {"$": type(key).__name__, "v": inner if type(key) is tuple else _in_order(inner)}
    return encode(key)


def decode_key(value: JSON, depth: int = 0) -> Any:
    """The inverse of `encode_key`. Raises ValueError and the like for what it cannot have made."""
    if isinstance(value, list):
        raise ValueError("a list cannot be a key")
    if not isinstance(value, dict):
        return value
    tag, inner = value.get("$"), value.get("v")
    if tag in ("tuple", "frozenset") and isinstance(inner, list) and depth < _MAX_KEY:
        items = [decode_key(part, depth + 1) for part in inner]
        return tuple(items) if tag == "tuple" else frozenset(items)
    return decode(tag, inner)


def encode_set(value: set[Any] | frozenset[Any]) -> JSON:
    """A set, in an order of its own: that of Python's differs from process to process."""
    return {"$": type(value).__name__, "v": _in_order(encode_key(element) for element in value)}


def decode_set(tag: str, inner: Any) -> set[Any] | frozenset[Any]:
    """The inverse of `encode_set`."""
    if not isinstance(inner, list):
        raise ValueError(f"a {tag} is a list of elements")
    items = [decode_key(element) for element in inner]
    return set(items) if tag == "set" else frozenset(items)


def _in_order(encoded: Iterable[JSON]) -> list[JSON]:
    return sorted(encoded, key=msgspec.json.encode)


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
    dtype = decode("dtype", name)
    text = base64.b64decode(data, validate=True)
    # torch refuses a buffer without bytes.
    flat = torch.frombuffer(bytearray(text or b"0"), dtype=torch.uint8)[: len(text)].clone()
    tensor = flat.view(dtype).reshape(shape)
    accelerator = None if on_host else torch.accelerator.current_accelerator()
    return tensor if accelerator is None else tensor.to(accelerator)
