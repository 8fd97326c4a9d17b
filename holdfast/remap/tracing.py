"""Tensors that carry a node in the place of elements: other people's code that arranges tensors runs on them.

`huggingface` calls transformers with them. Never holds an element; what would compute one raises Unsupported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate
from typing import Any

import torch

from holdfast.errors import HoldfastError, Unsupported
from holdfast.ondisk.dtypes import known, name_of, torch_dtype
from holdfast.remap.nodes import Filled, Node, axis, cast, cut, described, joined, permuted, reshaped

_refusals: ContextVar[list[HoldfastError] | None] = ContextVar("refusals", default=None)


class Traced(torch.Tensor):
    """A tensor without memory; operations on it give others, whose nodes say where the elements come from.

    It says that it is on the CPU: there torch makes the index of ``tensor[[0, 3]]``, whose numbers have to be known.
    """

    node: Node
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, node: Node) -> Traced:
        if not known(node.dtype):
            raise Unsupported(f"{described(node)} has a dtype that this torch does not know")
        self = torch.Tensor._make_wrapper_subclass(
            cls, node.shape, dtype=torch_dtype(node.dtype), device=torch.device("cpu"), requires_grad=False
        )
        self.node = node
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({described(self.node)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        try:
            done = _done(func, args, kwargs or {})
        except HoldfastError as error:
            if (noted := _refusals.get()) is not None:
                noted.append(error)
            raise
        return [Traced(node) for node in done] if isinstance(done, list) else Traced(done)


@contextmanager
def refusals() -> Iterator[list[HoldfastError]]:
    """The errors that operations raise, for code that turns errors into text."""
    noted: list[HoldfastError] = []
    token = _refusals.set(noted)
    try:
        yield noted
    finally:
        _refusals.reset(token)


def _done(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Node | list[Node]:
    operation = _OPERATIONS.get(func.overloadpacket)
    if operation is None or func in _OTHER_MEANINGS:
        names = ", ".join(dict.fromkeys(described(t.node) for t in _traced_in([args, kwargs])))
        raise Unsupported(
            f"{func} on {names} computes elements, or depends on them: a map only arranges elements. Convert those "
            "tensors with the code that asks for it, and leave them out of the map"
        )
    bound = {name: value for name, value in kwargs.items() if name not in _ABOUT_MEMORY and value is not None}
    return operation(*args, **bound)


_ABOUT_MEMORY = ("layout", "device", "pin_memory", "non_blocking", "memory_format", "copy")
_OTHER_MEANINGS = (torch.ops.aten.view.dtype,)


def _traced_in(value: Any) -> Iterator[Traced]:
    if isinstance(value, Traced):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _traced_in(inner)


def node_of(tensor: torch.Tensor) -> Node:
    """What a tensor stands for: its node, or the one number that a tensor with memory is full of."""
    if isinstance(tensor, Traced):
        return tensor.node
    shape = tuple(tensor.shape)
    if tensor.device.type != "meta" and tensor.numel():
        first = tensor.reshape(-1)[0]
        if bool((tensor == first).all()):
            return Filled(name_of(tensor.dtype), shape, first.item())
    elif not tensor.numel():
        return Filled(name_of(tensor.dtype), shape, 0)
    raise Unsupported(
        f"a tensor of shape {list(shape)} that is not in the source is arranged with tensors of it: only one that is "
        "full of one number can be"
    )


def _same(x: Traced, *_: Any) -> Node:
    return x.node


def _to_copy(x: Traced, *, dtype: torch.dtype | None = None) -> Node:
    return x.node if dtype is None else cast(x.node, name_of(dtype))


def _cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> Node:
    nodes = [node_of(tensor) for tensor in tensors if tuple(tensor.shape) != (0,)]
    return _joined(nodes or [node_of(tensors[0])], dim)


def _joined(nodes: Sequence[Node], dim: int) -> Node:
    """As torch does it: of several dtypes the one that holds them all."""
    dtype = torch_dtype(nodes[0].dtype)
    for node in nodes[1:]:
        dtype = torch.promote_types(dtype, torch_dtype(node.dtype))
    return joined([cast(node, name_of(dtype)) for node in nodes], dim)


def _stack(tensors: Sequence[torch.Tensor], dim: int = 0) -> Node:
    nodes = [_unsqueezed(node_of(tensor), dim) for tensor in tensors]
    return _joined(nodes, dim % len(nodes[0].shape))


def _unsqueezed(node: Node, dim: int) -> Node:
    dim %= len(node.shape) + 1
    return reshaped(node, (*node.shape[:dim], 1, *node.shape[dim:]))


def _unsqueeze(x: Traced, dim: int) -> Node:
    return _unsqueezed(x.node, dim)


def _squeeze(x: Traced, dim: int | Sequence[int] | None = None) -> Node:
    shape = x.node.shape
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    gone = {axis(x.node, d) for d in dims if shape}
    return reshaped(x.node, [n for k, n in enumerate(shape) if n != 1 or k not in gone])


def _split(x: Traced, sizes: int | Sequence[int], dim: int = 0) -> list[Node]:
    length = x.node.shape[axis(x.node, dim)]
    if isinstance(sizes, int):
        sizes = [min(sizes, length - at) for at in range(0, length, sizes or 1)] or [0]
    starts = [0, *accumulate(sizes)][:-1]
    return [cut(x.node, dim, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _slice(x: Traced, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Node:
    dim = axis(x.node, dim)
    begin, stop, _ = slice(start, end).indices(x.node.shape[dim])
    return _strided(x.node, dim, begin, max(begin, stop), step)


def _strided(node: Node, dim: int, start: int, stop: int, step: int) -> Node:
    """Each ``step``-th of ``start:stop``: rows of as many are cut to their first, and what is left has one more."""
    if step == 1 or stop <= start:
        return cut(node, dim, start, stop)
    length, count = node.shape[dim], -(-(stop - start) // step)
    full = count if start + count * step <= length else count - 1
    parts = [cut(node, dim, start + full * step, start + full * step + 1)] if full < count else []
    if full:
        rows = cut(node, dim, start, start + full * step)
        before, after = node.shape[:dim], node.shape[dim + 1 :]
        first = cut(reshaped(rows, (*before, full, step, *after)), dim + 1, 0, 1)
        parts.insert(0, reshaped(first, (*before, full, *after)))
    return joined(parts, dim)


def _picked(node: Node, dim: int, index: int) -> Node:
    dim = axis(node, dim)
    index %= node.shape[dim]
    row = cut(node, dim, index, index + 1)
    return reshaped(row, (*node.shape[:dim], *node.shape[dim + 1 :]))


def _select(x: Traced, dim: int, index: int) -> Node:
    return _picked(x.node, dim, index)


def _unbind(x: Traced, dim: int = 0) -> list[Node]:
    return [_picked(x.node, dim, index) for index in range(x.node.shape[axis(x.node, dim)])]


def _transpose(x: Traced, first: int, second: int) -> Node:
    order = [*range(len(x.node.shape))]
    if order:
        order[first], order[second] = order[second], order[first]
    return permuted(x.node, order)


def _t(x: Traced) -> Node:
    return permuted(x.node, range(len(x.node.shape))[::-1])


def _permute(x: Traced, dims: Sequence[int]) -> Node:
    return permuted(x.node, dims)


def _view(x: Traced, shape: Sequence[int], *_: Any) -> Node:
    return reshaped(x.node, shape)


def _rows(node: Node, dim: int, indices: Sequence[int]) -> Node:
    """Elements of an axis in any order, runs as one."""
    dim = axis(node, dim)
    length = node.shape[dim]
    if not indices:
        return cut(node, dim, 0, 0)
    return joined([cut(node, dim, i % length, i % length + 1) for i in indices], dim)


def _flip(x: Traced, dims: Sequence[int]) -> Node:
    node = x.node
    for dim in dims:
        node = _rows(node, dim, range(node.shape[axis(node, dim)])[::-1])
    return node


def _roll(x: Traced, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    node = x.node if dims else reshaped(x.node, (-1,))
    for shift, dim in zip(shifts, dims or (0,), strict=True):
        length = node.shape[axis(node, dim)]
        at = -shift % length if length else 0
        node = joined([cut(node, dim, at, length), cut(node, dim, 0, at)], dim)
    return node if dims else reshaped(node, x.node.shape)


def _index_select(x: torch.Tensor, dim: int, index: torch.Tensor) -> Node:
    return _rows(node_of(x), dim, _numbers(index))


def _index(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> Node:
    there = [dim for dim, index in enumerate(indices) if index is not None]
    index = indices[there[0]] if len(there) == 1 else None
    if index is None or index.dtype == torch.bool:
        raise Unsupported(f"{described(node_of(x))} is indexed by several tensors or by a mask: use one of numbers")
    node, dim = node_of(x), there[0]
    taken = _rows(node, dim, _numbers(index.reshape(-1)))
    return reshaped(taken, (*node.shape[:dim], *index.shape, *node.shape[dim + 1 :]))


def _numbers(index: torch.Tensor) -> list[int]:
    if isinstance(index, Traced) or index.device.type == "meta":
        raise Unsupported(f"an index of shape {list(index.shape)} depends on elements: a map only arranges elements")
    return [int(number) for number in index.tolist()]


def _expand(x: Traced, sizes: Sequence[int], *, implicit: bool = False) -> Node:
    node = reshaped(x.node, (*[1] * (len(sizes) - len(x.node.shape)), *x.node.shape))
    for dim, size in enumerate(sizes):
        if size not in (-1, node.shape[dim]):
            node = joined([node] * size, dim) if size else cut(node, dim, 0, 0)
    return node


def _repeat(x: Traced, counts: Sequence[int]) -> Node:
    node = reshaped(x.node, (*[1] * (len(counts) - len(x.node.shape)), *x.node.shape))
    for dim, count in enumerate(counts):
        node = joined([node] * count, dim) if count else cut(node, dim, 0, 0)
    return node


def _pad(x: Traced, pad: Sequence[int], value: float = 0) -> Node:
    node = x.node
    for k in range(len(pad) // 2):
        dim = len(node.shape) - 1 - k
        low, high = pad[2 * k], pad[2 * k + 1]
        node = cut(node, dim, max(-low, 0), node.shape[dim] - max(-high, 0))
        sides = [Filled(node.dtype, (*node.shape[:dim], max(n, 0), *node.shape[dim + 1 :]), value) for n in (low, high)]
        node = joined([sides[0], node, sides[1]], dim)
    return node


def _new(number: float | None, with_shape: bool) -> Callable[..., Node]:
    """What makes a tensor of one number from another's dtype, and its shape or a new one."""

    def made(x: Traced, *args: Any, dtype: torch.dtype | None = None) -> Node:
        rest = list(args)
        shape = tuple(rest.pop(0)) if with_shape else x.node.shape
        value = rest.pop(0) if number is None else number
        return Filled(x.node.dtype if dtype is None else name_of(dtype), shape, value)

    return made


_aten = torch.ops.aten
_OPERATIONS: dict[Any, Callable[..., Node | list[Node]]] = {
    **dict.fromkeys((_aten.clone, _aten.detach, _aten.alias, _aten.lift_fresh, _aten.contiguous), _same),
    **dict.fromkeys((_aten.view, _aten._unsafe_view, _aten.reshape, _aten._reshape_alias), _view),
    **dict.fromkeys((_aten.split, _aten.split_with_sizes, _aten.unsafe_split), _split),
    _aten.unsafe_split_with_sizes: _split,
    _aten._to_copy: _to_copy,
    _aten.cat: _cat,
    _aten.stack: _stack,
    _aten.squeeze: _squeeze,
    _aten.unsqueeze: _unsqueeze,
    _aten.slice: _slice,
    _aten.select: _select,
    _aten.unbind: _unbind,
    _aten.transpose: _transpose,
    _aten.t: _t,
    _aten.permute: _permute,
    _aten.flip: _flip,
    _aten.roll: _roll,
    _aten.index_select: _index_select,
    _aten.index: _index,
    _aten.expand: _expand,
    _aten.repeat: _repeat,
    _aten.constant_pad_nd: _pad,
    _aten.new_zeros: _new(0, True),
    _aten.new_ones: _new(1, True),
    _aten.new_full: _new(None, True),
    _aten.zeros_like: _new(0, False),
    _aten.ones_like: _new(1, False),
    _aten.full_like: _new(None, False),
}  # fmt: skip
