"""Element types: torch's name of each, its size in bytes, and what safetensors calls it.

Called by the data file and the state; the manifest speaks torch's names (``bfloat16``).
Never converts a value: a type that safetensors cannot name is kept as its bytes.
"""

from __future__ import annotations

import torch

# The codes that every safetensors reader since 0.4 knows; younger ones (C64, F8_E8M0, F4) are avoided on purpose,
# so that any reader can open a data file.
_CODES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip

_BY_NAME: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith("torch.q")
}
_BY_TYPE = {value: name for name, value in _BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str:
    """``"bfloat16"`` for ``torch.bfloat16``. Raises KeyError for quantized types, which carry scales elsewhere."""
    return _BY_TYPE[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The torch type of that name. Raises KeyError if this torch does not have it."""
    return _BY_NAME[name]


def known(name: str) -> bool:
    """Whether this torch has a type of that name."""
    return name in _BY_NAME


def itemsize(name: str) -> int:
    """Bytes of one element as torch stores it (a packed sub-byte type counts its carrier byte)."""
    return _BY_NAME[name].itemsize


def code_of(name: str) -> str | None:
    """The safetensors code of a type, or None if it must be stored as ``U8`` bytes."""
    return _CODES.get(name)


_NAMES = {code: name for name, code in _CODES.items()}


def name_of_code(code: str) -> str | None:
    """torch's name of a safetensors code, or None if it is not one that we write."""
    return _NAMES.get(code)
