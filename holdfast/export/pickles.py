"""Writes pickles: the few instructions of protocol 2 for containers, numbers, and torch's tensors."""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from holdfast.errors import Unsupported

_MAX_BITS = 8 * 255 - 1
"""Wider integers need an instruction that the safe half of `torch.load` does not know."""


class Global(NamedTuple):
    """A class or function by its module and name."""

    module: str
    name: str


class Call(NamedTuple):
    """What a function gives for these arguments."""

    function: Global
    args: tuple[Any, ...]


class Instance(NamedTuple):
    """An object of a class, made without its constructor and given a state."""

    kind: Global
    state: Any


class Persistent(NamedTuple):
    """What the reader finds by this key: a storage."""

    key: tuple[Any, ...]


class Pairs(NamedTuple):
    """A dict whose keys are nodes."""

    items: list[tuple[Any, Any]]


def dumps(tree: Any) -> bytes:
    """The pickle of a tree of nodes and of dicts, lists, tuples and plain values. Raises Unsupported for others."""
    writer = _Writer()
    writer.node(tree)
    return b"".join([b"\x80\x02", *writer.out, b"."])


class _Writer:
    """Instructions so far. Texts and names are memoized, and referred to by number the second time."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self._memo: dict[str | Global, int] = {}

    def node(self, node: Any) -> None:
        kind = type(node)
        if kind is dict or kind is Pairs:
            self.out.append(b"}(")
            for key, value in node.items if kind is Pairs else node.items():
                self.node(key)
                self.node(value)
            self.out.append(b"u")
        elif kind is list:
            self.out.append(b"](")
            self._all(node)
            self.out.append(b"e")
        elif kind is tuple:
            self.out.append(b"(")
            self._all(node)
            self.out.append(b"t")
        elif kind is Global:
            if not self._known(node):
                self._remember(node, f"c{node.module}\n{node.name}\n".encode())
        elif kind is Call:
            self.node(node.function)
            self.node(node.args)
            self.out.append(b"R")
        elif kind is Instance:
            self.node(node.kind)
            self.out.append(b")\x81")
            self.node(node.state)
            self.out.append(b"b")
        elif kind is Persistent:
            self.node(node.key)
            self.out.append(b"Q")
        else:
            self._leaf(node, kind)

    def _all(self, nodes: list[Any] | tuple[Any, ...]) -> None:
        for node in nodes:
            self.node(node)

    def _leaf(self, node: Any, kind: type) -> None:
        if node is None:
            self.out.append(b"N")
        elif kind is bool:
            self.out.append(b"\x88" if node else b"\x89")
        elif kind is int:
            self.out.append(_integer(node))
        elif kind is float:
            self.out.append(b"G" + struct.pack(">d", node))
        elif kind is str:
            if not self._known(node):
                text = node.encode("utf-8", "surrogatepass")
                self._remember(node, b"X" + struct.pack("<I", len(text)) + text)
        elif kind in _AS_NODES:
            self.node(_AS_NODES[kind](node))
        else:
            raise Unsupported(f"{kind.__module__}.{kind.__qualname__} has no place in a file that torch is to load")

    def _known(self, node: str | Global) -> bool:
        number = self._memo.get(node)
        if number is not None:
            self.out.append(b"h" + bytes([number]) if number < 256 else b"j" + struct.pack("<I", number))
        return number is not None

    def _remember(self, node: str | Global, instruction: bytes) -> None:
        number = self._memo[node] = len(self._memo)
        put = b"q" + bytes([number]) if number < 256 else b"r" + struct.pack("<I", number)
        self.out.append(instruction + put)


def _integer(value: int) -> bytes:
    if 0 <= value < 1 << 8:
        return b"K" + bytes([value])
    if 0 <= value < 1 << 16:
        return b"M" + struct.pack("<H", value)
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    if value.bit_length() > _MAX_BITS:
        raise Unsupported(f"an integer of {value.bit_length()} bits: torch loads at most {_MAX_BITS} without executing")
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def size(lengths: Any) -> Call:
    """A ``torch.Size``."""
    return Call(Global("torch", "Size"), (tuple(lengths),))


def _device(device: torch.device) -> Call:
    return Call(Global("torch", "device"), (device.type,) if device.index is None else (device.type, device.index))


_AS_NODES: dict[type, Callable[[Any], Any]] = {
    OrderedDict: lambda value: Call(Global("collections", "OrderedDict"), (list(value.items()),)),
    Counter: lambda value: Call(Global("collections", "Counter"), (dict(value),)),
    set: lambda value: Call(Global("__builtin__", "set"), (sorted(value, key=repr),)),
    bytes: lambda value: Call(Global("_codecs", "encode"), (value.decode("latin1"), "latin1")),
    bytearray: lambda value: Call(Global("__builtin__", "bytearray"), (bytes(value),)),
    complex: lambda value: Call(Global("__builtin__", "complex"), (value.real, value.imag)),
    torch.Size: size,
    torch.dtype: lambda value: Global("torch", str(value).removeprefix("torch.")),
    torch.device: _device,
}
"""What stands for a value of these types."""

# torch keeps its first dtypes in storages of their own class; the later ones in untyped bytes beside the dtype.
_STORAGES = {
    "float64": "DoubleStorage", "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage", "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}  # fmt: skip


def tensor(dtype: str, shape: tuple[int, ...], nbytes: int, key: str) -> Call:
    """A contiguous tensor on the CPU that is all of the storage ``key``."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    numel = step if 0 not in shape else 0
    hooks = Call(Global("collections", "OrderedDict"), ())
    layout = (0, shape, tuple(reversed(strides)), False, hooks)
    typed = _STORAGES.get(dtype)
    if typed is not None:
        storage = Persistent(("storage", Global("torch", typed), key, "cpu", numel))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *layout))
    storage = Persistent(("storage", Global("torch.storage", "UntypedStorage"), key, "cpu", nbytes))
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (storage, *layout, Global("torch", dtype)))
