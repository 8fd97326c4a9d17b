"""Small tensors that are values, such as a learning rate: kept in the manifest, with their type and shape.

`values` calls it for the settings of parameter groups. Never takes a large tensor, or one without plain bytes.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from holdfast.ondisk.scalars import JSON, Refused

MOST = 1 << 20
"""Bytes of a tensor that may be a value."""


def encode(tensor: torch.Tensor) -> JSON:
    """A tensor as ``{"$": "inline", "v": [dtype, shape, base64 of its bytes, whether it is on the host]}``.

    Raises Refused.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused("", f"a {type(tensor).__qualname__} as a setting; use a plain tensor")
    if tensor.is_quantized or tensor.nbytes > MOST:
        raise Refused("", f"a tensor of {tensor.nbytes} bytes as a setting; keep it in the state of a parameter")
    data = bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {
        "$": "inline",
        "v": [dtype, list(tensor.shape), base64.b64encode(data).decode(), tensor.device.type == "cpu"],
    }


def decode(value: Any) -> torch.Tensor:
    """The inverse of `encode`; what was on an accelerator is put on the present one, if there is one."""
    dtype, shape, data, on_host = value
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"this torch has no dtype {dtype!r}")
    text = base64.b64decode(data, validate=True)
    flat = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8).clone()
        if text
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
    tensor = flat.view(kind).reshape(shape)
    accelerator = None if on_host else torch.accelerator.current_accelerator()
    return tensor if accelerator is None else tensor.to(accelerator)
