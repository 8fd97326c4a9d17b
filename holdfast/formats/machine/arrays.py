"""NumPy's arrays and scalars from pickles, without NumPy."""

from __future__ import annotations

import array
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine.pickles import Calls, Name, Record
from holdfast.formats.sources import Memory, all_of
from holdfast.formats.stored import Opaque, Stored, of_bytes, strided
from holdfast.ondisk import dtypes
from holdfast.storage.place import Place

_DTYPES = {
    "b1": "bool", "i1": "int8", "u1": "uint8", "i2": "int16", "u2": "uint16", "i4": "int32", "u4": "uint32",
    "i8": "int64", "u8": "uint64", "f2": "float16", "f4": "float32", "f8": "float64", "c8": "complex64",
    "c16": "complex128",
}  # fmt: skip
_LAYOUTS = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q", "f2": "e",
    "f4": "f", "f8": "d", "c8": "ff", "c16": "dd",
}  # fmt: skip
_ARRAYS = frozenset(["numpy.ndarray", "numpy.memmap", "numpy.core.memmap.memmap"])

MAX_EMPTY = 1 << 20
"""Lists that an array without elements may turn into."""


def is_array(value: object) -> bool:
    """Whether a record stands for an array."""
    return isinstance(value, Record) and value.name in _ARRAYS


def array_of(value: Record, where: Place) -> Stored | list[Any]:
    """The array that a record stands for, as a tensor, or nested lists where it holds objects or texts.

    The same record gives the same tensor each time. Raises Unsupported for types that torch does not have.
    """
    if not value.args:  # kept there: a file may name one array a thousand times
        value.args = (_array_of(value, where),)
    array_or_list: Stored | list[Any] = value.args[0]
    return array_or_list


def _array_of(value: Record, where: Place) -> Any:
    if not isinstance(value.state, tuple) or len(value.state) != 5:
        raise Damaged(f"{where}: an array of NumPy without its parts: the file was altered")
    _, shape, dtype, order, data = value.state
    if not isinstance(shape, tuple) or len(shape) > 64 or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise Damaged(f"{where}: an array of NumPy without a shape: the file was altered")
    if isinstance(data, list):
        return _nested(data, shape, where)
    code, big = _code(dtype)
    if not code:
        raise Unsupported(f"{where}: an array of NumPy of a type that holdfast does not know")
    data = data.encode() if isinstance(data, str) else data  # bytes of Python 2 that happened to be text
    name, size = _DTYPES.get(code, code), _itemsize(code)
    if not isinstance(data, bytes) or prod(shape) * size != len(data):
        raise Damaged(f"{where}: an array of NumPy of shape {shape} and type {code!r} without its bytes")
    if code[0] in "SU":
        return _nested(_texts(code, big, data, size, where), shape, where)
    if not dtypes.known(name):
        raise Unsupported(f"{where}: an array of NumPy of type {code!r}, which torch does not have")
    if big:
        data = _swapped(data, size // 2 if code[0] == "c" else size)
    if order in (None, False, 0):
        return of_bytes(name, shape, data, where)
    axes = tuple(range(len(shape)))[::-1] if isinstance(order, int) else order
    return _transposed(name, shape, axes, data, where)


def _transposed(name: str, shape: tuple[int, ...], axes: Any, data: bytes, where: Place) -> Stored:
    """An array whose bytes are row-major with its axes in another order: axis ``axes[d]`` of those bytes is axis d."""
    ordered = isinstance(axes, tuple) and all(isinstance(d, int) for d in axes)
    if not ordered or sorted(axes) != list(range(len(shape))):
        raise Damaged(f"{where}: an array of NumPy with its axes in no order")
    lengths = [n for _, n in sorted(zip(axes, shape, strict=True))]
    strides = [prod(lengths[axis + 1 :]) for axis in axes]
    return strided(name, shape, strides, all_of(Memory(where, data)), 0)


def _nested(flat: list[Any], shape: Sequence[int], where: Place) -> Any:
    if prod(shape) != len(flat) or (not flat and prod(filter(None, shape)) > MAX_EMPTY):
        raise Damaged(f"{where}: an array of NumPy of shape {tuple(shape)} with {len(flat)} elements")
    if not shape:
        return flat[0]
    row = prod(shape[1:])
    return [_nested(flat[at * row : (at + 1) * row], shape[1:], where) for at in range(shape[0])]


def _code(dtype: Any) -> tuple[str, bool]:
    """``f4`` and whether it is big-endian, of a pickled dtype; torch's name for a type from outside of NumPy.

    Empty for what is no such dtype.
    """
    kind = dtype.args[0] if isinstance(dtype, Record) and dtype.name == "numpy.dtype" and dtype.args else None
    if isinstance(kind, Name) and kind.text.startswith("ml_dtypes."):
        return kind.text.removeprefix("ml_dtypes."), False
    if not isinstance(kind, str):
        return "", False
    state = dtype.state
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else "<"
    return kind.lstrip("<>=|"), order == ">"


def _itemsize(code: str) -> int:
    if dtypes.known(code):
        return dtypes.itemsize(code)
    digits = code[1:]
    size = int(digits) if digits.isdecimal() and len(digits) < 10 else 8 if code in ("M8", "m8") else 0
    return 4 * size if code[0] == "U" else size


def _text(code: str, big: bool, data: bytes) -> str | bytes:
    if code[0] == "S":
        return data.rstrip(b"\0")
    return data.decode("utf-32-be" if big else "utf-32-le").rstrip("\0")


def _texts(code: str, big: bool, data: bytes, size: int, where: Place) -> list[Any]:
    try:
        return [_text(code, big, data[at : at + size]) for at in range(0, len(data), size)] if size else []
    except UnicodeDecodeError as error:
        raise Damaged(f"{where}: an array of texts that are none ({error.reason}); the file was altered") from None


def _swapped(data: bytes, size: int) -> bytes:
    if size == 1:
        return data
    numbers = array.array({2: "H", 4: "I", 8: "Q"}[size], data)
    numbers.byteswap()
    return numbers.tobytes()


def _scalar(dtype: Any, data: Any) -> Any:
    code, big = _code(dtype)
    data = data.encode() if isinstance(data, str) else data
    if code[:1] in ("S", "U") and isinstance(data, bytes):
        return _text(code, big, data)
    if code not in _LAYOUTS:
        return Opaque(f"it is a scalar of NumPy of type {code!r}, which torch does not have")
    parts = struct.unpack((">" if big else "<") + _LAYOUTS[code], data)
    return complex(*parts) if code[0] == "c" else parts[0]


def _reconstruct(cls: Any, *_: Any) -> Record:
    if not isinstance(cls, Name):
        raise TypeError("an array of no class")
    return Record(cls.text)


def _from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: Any = None) -> Record:
    if order == "K" and axes is not None:
        # Here the shape is that of the bytes, before the axes are put in order.
        if not isinstance(axes, tuple) or not all(isinstance(d, int) and 0 <= d < len(shape) for d in axes):
            raise TypeError("axes in no order")
        return Record("numpy.ndarray", (), (1, tuple(shape[d] for d in axes), dtype, axes, data))
    return Record("numpy.ndarray", (), (1, shape, dtype, order == "F", data))


CALLS: Calls = {
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _from_buffer,
}
