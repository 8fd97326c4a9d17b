"""A tensor as an arrangement of elements of other tensors: cut, joined, permuted, reshaped, never computed.

Rules build these nodes, `boxes` turns a box of one into boxes of saved tensors. Never holds an element.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import prod

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk.cells import MAX_AXES


@dataclass(frozen=True)
class Saved:
    """A tensor of the source, by its name there."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Filled:
    """A tensor of one number."""

    dtype: str
    shape: tuple[int, ...]
    value: float


class _Composed:
    """A node above others."""

    @cached_property
    def weight(self) -> tuple[int, int]:
        """How many leaves there are below, each as often as it is met, and how many nodes one above the other."""
        below = [_weight(node) for node in _below(self)]
        return sum(leaves for leaves, _ in below), 1 + max(depth for _, depth in below)


@dataclass(frozen=True)
class Joined(_Composed):
    """Tensors one after the other along an axis."""

    parts: tuple[Node, ...]
    dim: int

    @property
    def dtype(self) -> str:
        return self.parts[0].dtype

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each part begins on the axis, and the end of the last."""
        return (0, *accumulate(part.shape[self.dim] for part in self.parts))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        first = self.parts[0].shape
        return (*first[: self.dim], self.starts[-1], *first[self.dim + 1 :])


@dataclass(frozen=True)
class Cut(_Composed):
    """Elements ``start:stop`` of an axis."""

    of: Node
    dim: int
    start: int
    stop: int

    @property
    def dtype(self) -> str:
        return self.of.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (*self.of.shape[: self.dim], self.stop - self.start, *self.of.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Permuted(_Composed):
    """The axes in another order: axis ``k`` is axis ``dims[k]`` of the other tensor."""

    of: Node
    dims: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.of.dtype

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.of.shape[dim] for dim in self.dims)


@dataclass(frozen=True)
class Reshaped(_Composed):
    """The same elements, in row-major order, under another shape."""

    of: Node
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.of.dtype


@dataclass(frozen=True)
class Cast(_Composed):
    """The elements as another dtype."""

    of: Node
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape


Node = Saved | Filled | Joined | Cut | Permuted | Reshaped | Cast

MOST_LEAVES, _DEEPEST, _MOST_ELEMENTS = 1 << 20, 100, 1 << 59
"""Bounds of an arrangement: a map may come from anywhere, and its rules may double what there is."""


def _below(node: object) -> Sequence[Node]:
    if isinstance(node, Joined):
        return node.parts
    return (node.of,) if isinstance(node, (Cut, Permuted, Reshaped, Cast)) else ()


def _weight(node: Node) -> tuple[int, int]:
    return node.weight if isinstance(node, _Composed) else (1, 0)


def bounded(node: Node) -> Node:
    """The node. Raises Mismatch for one beyond the bounds."""
    leaves, depth = _weight(node)
    if leaves > MOST_LEAVES or depth > _DEEPEST or len(node.shape) > MAX_AXES or prod(node.shape) > _MOST_ELEMENTS:
        raise Mismatch(
            f"the map makes a tensor of shape {str(list(node.shape[:MAX_AXES]))[:200]} of {leaves} parts, by {depth} "
            "steps: that is beyond what holdfast works with"
        )
    return node


def joined(parts: Sequence[Node], dim: int) -> Node:
    """Join tensors of equal dtype along an axis. Raises Mismatch for those that do not fit."""
    if not parts:
        raise Mismatch("nothing to concatenate")
    dim = axis(parts[0], dim)
    flat: list[Node] = []
    for part in parts:
        other = (*part.shape[:dim], *part.shape[dim + 1 :])
        if part.dtype != parts[0].dtype or other != (*parts[0].shape[:dim], *parts[0].shape[dim + 1 :]):
            raise Mismatch(
                f"{described(part)} cannot be concatenated with {described(parts[0])} along axis {dim}: all other "
                "axes and the dtype have to be equal"
            )
        flat += part.parts if isinstance(part, Joined) and part.dim == dim else [part]
        if len(flat) > MOST_LEAVES:
            raise Mismatch(f"more than {MOST_LEAVES} tensors would become one along axis {dim}")
    return _without_seams(flat, dim)


def _without_seams(parts: Sequence[Node], dim: int) -> Node:
    """Neighbours that were cut from one tensor as one again."""
    merged: list[Node] = []
    for part in parts:
        last = merged[-1] if merged else None
        if (
            isinstance(part, Cut)
            and isinstance(last, Cut)
            and (last.dim, last.stop) == (part.dim, part.start) == (dim, part.start)
            and last.of == part.of
        ):
            merged[-1] = cut(part.of, dim, last.start, part.stop)
        elif part.shape[dim] or len(parts) == 1:
            merged.append(part)
    if not merged:
        return parts[0]
    return merged[0] if len(merged) == 1 else bounded(Joined(tuple(merged), dim))


def cut(node: Node, dim: int, start: int, stop: int) -> Node:
    """Elements ``start:stop`` of an axis. Raises Mismatch if they lie outside."""
    dim = axis(node, dim)
    if not 0 <= start <= stop <= node.shape[dim]:
        raise Mismatch(f"{described(node)} has no elements {start}:{stop} on axis {dim}")
    if (start, stop) == (0, node.shape[dim]):
        return node
    if isinstance(node, Cut) and node.dim == dim:
        return cut(node.of, dim, node.start + start, node.start + stop)
    if isinstance(node, Joined) and node.dim == dim and start < stop:
        numbers = range(bisect_right(node.starts, start) - 1, bisect_left(node.starts, stop))
        parts = [
            cut(node.parts[n], dim, max(start - node.starts[n], 0), min(stop, node.starts[n + 1]) - node.starts[n])
            for n in numbers
        ]
        return joined(parts, dim)
    if isinstance(node, Cast):
        return cast(cut(node.of, dim, start, stop), node.dtype)
    return bounded(Cut(node, dim, start, stop))


def permuted(node: Node, dims: Sequence[int]) -> Node:
    """The axes in another order. Raises Mismatch unless ``dims`` names each axis once."""
    order = tuple(axis(node, dim) for dim in dims)
    if sorted(order) != list(range(len(node.shape))):
        raise Mismatch(f"{list(dims)} does not name each axis of {described(node)} once")
    if order == tuple(range(len(order))):
        return node
    if isinstance(node, Permuted):
        return permuted(node.of, [node.dims[dim] for dim in order])
    return bounded(Permuted(node, order))


def reshaped(node: Node, shape: Sequence[int]) -> Node:
    """The same elements under another shape, of which one length may be -1. Raises Mismatch for another number."""
    shape = tuple(shape)
    if min(shape, default=0) < 0 or prod(shape) != prod(node.shape):
        shape = lengths(shape, prod(node.shape), described(node))
    if shape == node.shape:
        return node
    if isinstance(node, Reshaped):
        return reshaped(node.of, shape)
    if groups_of(node.shape, shape) is None:  # no factors in common: by way of one axis, which has all
        return bounded(Reshaped(Reshaped(node, (prod(shape),)), shape))
    return bounded(Reshaped(node, shape))


def cast(node: Node, dtype: str) -> Node:
    """The elements as another dtype. Raises Unsupported for a second cast, which would skip the first's rounding."""
    if node.dtype == dtype:
        return node
    if any(isinstance(inner, Cast) for inner in walk(node)):
        raise Unsupported(
            f"{described(node)} is cast already, and would be cast to {dtype}: leave out one of the casts"
        )
    return bounded(Cast(node, dtype))


def axis(node: Node, dim: int) -> int:
    """An axis counted from the front. Raises Mismatch if there is none of that number."""
    ndim = len(node.shape)
    if not -ndim <= dim < ndim:
        raise Mismatch(f"{described(node)} has no axis {dim}")
    return dim % ndim


def lengths(shape: Sequence[int], size: int, what: str) -> tuple[int, ...]:
    """A shape of ``size`` elements with its -1 filled in. Raises Mismatch if there is none."""
    known = prod(n for n in shape if n != -1)
    if list(shape).count(-1) == 1 and known and size % known == 0:
        shape = [size // known if n == -1 else n for n in shape]
    if any(n < 0 for n in shape) or prod(shape) != size:
        raise Mismatch(f"{what} has {size} elements, which is not what shape {list(shape)} has")
    return tuple(shape)


def described(node: Node) -> str:
    """A node as errors call it: the saved tensors that it comes from, its dtype and its shape."""
    names = list(dict.fromkeys(saved.name for saved in saved_in(node)))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return f"{', '.join(names[:2]) or 'a constant'}{more} ({node.dtype} {list(node.shape)})"


def walk(node: Node) -> Iterator[Node]:
    """A node and all below it."""
    todo = [node]
    while todo:
        one = todo.pop()
        yield one
        todo += reversed(_below(one))


def saved_in(node: Node) -> Iterator[Saved]:
    """The saved tensors below a node, in order."""
    return (inner for inner in walk(node) if isinstance(inner, Saved))


@dataclass(frozen=True)
class Group:
    """Axes of two shapes that have the same elements, and the factors into which both can be cut.

    ``source[k]`` and ``target[k]``: how many of the factors make up each axis.
    """

    factors: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]

    @cached_property
    def source_spans(self) -> tuple[tuple[int, ...], ...]:
        """The factors of each axis of the source."""
        return self._spans(self.source)

    @cached_property
    def target_spans(self) -> tuple[tuple[int, ...], ...]:
        """The factors of each axis of the target."""
        return self._spans(self.target)

    def _spans(self, counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        ends = [0, *accumulate(counts)]
        return tuple(self.factors[a:b] for a, b in pairwise(ends))


@lru_cache(maxsize=4096)
def groups_of(source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Group, ...] | None:
    """The groups of axes of a reshape, from left to right; None if one has no factors in common."""
    if 0 in source:
        return ()
    groups: list[Group] = []
    a = b = 0
    while a < len(source) or b < len(target):
        first, second = a, b
        a, b = min(a + 1, len(source)), min(b + 1, len(target))
        left, right = prod(source[first:a]), prod(target[second:b])
        while left != right:
            if left < right:
                left, a = left * source[a], a + 1
            else:
                right, b = right * target[b], b + 1
        group = _group(source[first:a], target[second:b])
        if group is None:
            return None
        groups.append(group)
    return tuple(groups)


def _group(source: tuple[int, ...], target: tuple[int, ...]) -> Group | None:
    ends = sorted({prod(shape[k:]) for shape in (source, target) for k in range(len(shape) + 1)}, reverse=True)
    if any(outer % inner for outer, inner in pairwise(ends)):
        return None
    factors = tuple(outer // inner for outer, inner in pairwise(ends))

    def counts(shape: tuple[int, ...]) -> tuple[int, ...]:
        at = [ends.index(prod(shape[k:])) for k in range(len(shape) + 1)]
        return tuple(b - a for a, b in pairwise(at))

    return Group(factors, counts(source), counts(target))
