"""Leaves that are no tensors, as JSON and back; nothing executable can be written or read.

Called by the state on save and by the checkpoint on load. Never guesses: a type outside of the table is refused.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from typing import Any

import torch

from holdfast.errors import Damaged

JSON = Any
_INT64 = 1 << 63
_MAX_INLINE = 1 << 20
_MAX_BITS = 14_000  # Python reads no more than 4300 decimal digits back as an int


class Refused(TypeError):
    """A value that the format does not keep. ``path`` says where below the value it sits, ``reason`` why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}" if path else reason)
        self.path, self.reason = path, reason


def encode(value: object) -> JSON:
    """One leaf as JSON: plain where JSON has it, else ``{"$": tag, "v": …}``. Raises Refused."""
    kind = type(value)
    if value is None or kind is bool:
        return value
    if isinstance(value, str) and kind is str:
        return _text(value)
    if isinstance(value, int) and kind is int:
        return value if -_INT64 <= value < _INT64 else _big_integer(value)
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "v": repr(value)}  # type: ignore[arg-type]
    if kind is bytes:
        return {"$": "bytes", "v": base64.b64encode(value).decode()}  # type: ignore[arg-type]
    if kind is complex:
        return {"$": "complex", "v": [repr(value.real), repr(value.imag)]}  # type: ignore[attr-defined]
    if kind is torch.dtype:
        return {"$": "dtype", "v": str(value).removeprefix("torch.")}
    if kind is torch.device:
        return {"$": "device", "v": str(value)}
    if kind is torch.Size:
        return {"$": "size", "v": list(value)}  # type: ignore[call-overload]
    if isinstance(value, torch.Tensor):
        return {"$": "tensor", "v": inline_tensor(value)}
    raise Refused("", _why_not(value))


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


def _why_not(value: object) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "dtype") and hasattr(value, "item"):
        return f"{kind} is not kept; store .item() of a NumPy scalar, or torch.from_numpy(array) of an array"
    if kind.startswith("torch.utils.data."):
        return (
            f"{kind} does not tell where it is; leave it out and keep the number of samples seen, or take a "
            "torchdata.StatefulDataLoader (docs/trainers.md)"
        )
    if callable(value):
        return f"{kind} is code, and a checkpoint holds nothing executable; store its name or its settings"
    return (
        f"{kind} is not kept; a state holds tensors, dicts, lists, tuples, None, bool, int, float, str, bytes, "
        "complex, torch dtypes, devices and sizes, and objects with state_dict() and load_state_dict()"
    )


def decode(value: JSON) -> object:
    """The inverse of `encode`. Raises ValueError on what `encode` cannot have made, or made for a newer torch."""
    if not isinstance(value, dict):
        return value
    try:
        return _untagged(value.get("$"), value.get("v"))
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise ValueError(f"{str(value)[:200]} is no value: {error}") from None


def decoded(value: JSON, path: str, where: object) -> object:
    """`decode` of the value at ``path`` of the file ``where``. Raises Damaged, naming both."""
    try:
        return decode(value)
    except ValueError as error:
        raise Damaged(f"{where}: {path[:200]}: {error}") from None


def _untagged(tag: object, inner: Any) -> object:
    if tag == "int":
        return int(inner)
    if tag == "float":
        return float(inner)
    if tag == "bytes":
        return base64.b64decode(inner, validate=True)
    if tag == "complex":
        return complex(float(inner[0]), float(inner[1]))
    if tag == "dtype":
        found = getattr(torch, inner, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"this torch has no dtype {inner!r}")
        return found
    if tag == "device":
        return torch.device(inner)
    if tag == "size":
        return torch.Size(inner)
    if tag == "tensor" and isinstance(inner, list):
        return _inlined(inner)
    raise ValueError(f"unknown value tag {tag!r}")


def encode_tree(value: object, tensor_at: Callable[[torch.Tensor], JSON], path: str = "") -> JSON:
    """A nested value of one rank as one JSON text: containers inside, tensors as references.

    ``tensor_at(tensor)`` stores a tensor and returns the reference that stands for it.
    """
    if isinstance(value, torch.Tensor):
        try:
            return {"$": "tensor", "v": tensor_at(value)}
        except Refused as error:
            raise Refused(path, error.reason) from None
    if type(value) is list:
        return [encode_tree(v, tensor_at, f"{path}/{i}") for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"$": "tuple", "v": [encode_tree(v, tensor_at, f"{path}/{i}") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        pairs = [(_encode_at(path, k), encode_tree(v, tensor_at, f"{path}/{k}")) for k, v in value.items()]
        if all(type(k) is str for k in value) and "$" not in value:
            return dict(pairs)
        return {"$": "dict", "v": [[k, v] for k, v in pairs]}
    return _encode_at(path, value)


def _encode_at(path: str, value: object) -> JSON:
    try:
        return encode(value)
    except Refused as error:
        raise Refused(path, error.reason) from None


def inline_tensor(tensor: torch.Tensor) -> JSON:
    """A small tensor that is a value, such as a learning rate: its dtype, shape, bytes, and whether on the host.

    Raises Refused for a large one, and for one that is no plain tensor.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused("", f"a {type(tensor).__qualname__} as a setting; use a plain tensor")
    if tensor.nbytes > _MAX_INLINE:
        raise Refused("", f"a tensor of {tensor.nbytes} bytes as a setting; keep it in the state of a parameter")
    data = bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return [dtype, list(tensor.shape), base64.b64encode(data).decode(), tensor.device.type == "cpu"]


def _inlined(value: JSON) -> torch.Tensor:
    dtype, shape, data, on_host = value
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"this torch has no dtype {dtype!r}")
    flat = torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8).clone()
    tensor = flat.view(kind).reshape(shape)
    accelerator = None if on_host else torch.accelerator.current_accelerator()
    return tensor if accelerator is None else tensor.to(accelerator)


def decode_tree(value: JSON, tensor_of: Callable[[str], torch.Tensor]) -> object:
    """The inverse of `encode_tree`; ``tensor_of(reference)`` fetches a tensor."""
    if isinstance(value, list):
        return [decode_tree(v, tensor_of) for v in value]
    if isinstance(value, dict):
        tag = value.get("$")
        if tag is None:
            return {k: decode_tree(v, tensor_of) for k, v in value.items()}
        if tag == "tensor" and isinstance(value["v"], str):
            return tensor_of(value["v"])
        if tag == "tuple":
            return tuple(decode_tree(v, tensor_of) for v in value["v"])
        if tag == "dict":
            return {decode(k): decode_tree(v, tensor_of) for k, v in value["v"]}
    return decode(value)
