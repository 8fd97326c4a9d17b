"""Rules that change the layout of each tensor whose name fits, and not its name.

`Remap` applies them. `Pad` and `Crop` alone add or drop elements, `Cast` alone changes them.
"""

from __future__ import annotations

from math import prod

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.remap import nodes
from holdfast.remap.nodes import Node
from holdfast.remap.patterns import captured, fields_of
from holdfast.remap.rule import Names, Rule, Scope, Size, as_tuples


class EachTensor(Rule, frozen=True):
    """A rule that changes the layout of each tensor that fits ``name``, which keeps its name."""

    name: str

    def __post_init__(self) -> None:
        fields_of(self.name)

    def resolve(self, names: Names, scope: Scope) -> Names:
        return {
            name: node if captured(self.name, name) is None else self.changed(node, scope)
            for name, node in names.items()
        }

    def changed(self, node: Node, scope: Scope) -> Node:
        raise NotImplementedError


class Transpose(EachTensor, frozen=True, tag="transpose"):
    """Exchange two axes."""

    dim0: int = 0
    dim1: int = 1

    def changed(self, node: Node, scope: Scope) -> Node:
        order = list(range(len(node.shape)))
        first, second = nodes.axis(node, self.dim0), nodes.axis(node, self.dim1)
        order[first], order[second] = second, first
        return nodes.permuted(node, order)

    def inverse(self) -> Transpose:
        return self


class PermuteBlocks(EachTensor, frozen=True, tag="permute"):
    """Take an axis as blocks within blocks, and put those into another order.

    ``PermuteBlocks("{*x}.wq.weight", 0, ("heads", 2, -1), (0, 2, 1))`` turns rotary halves into pairs. One of
    ``blocks`` may be -1, for all that is left.
    """

    dim: int
    blocks: tuple[Size, ...]
    order: tuple[int, ...]

    def __post_init__(self) -> None:
        as_tuples(self, blocks=tuple(self.blocks), order=tuple(self.order))
        super().__post_init__()
        if sorted(self.order) != list(range(len(self.blocks))):
            raise Mismatch(
                f"PermuteBlocks: order={list(self.order)} does not name each of {len(self.blocks)} blocks once"
            )

    def changed(self, node: Node, scope: Scope) -> Node:
        dim, shape = nodes.axis(node, self.dim), node.shape
        blocks = nodes.lengths(scope.sizes(self.blocks), shape[dim], f"axis {dim} of {nodes.described(node)}")
        order = [*range(dim), *(dim + k for k in self.order), *range(dim + len(blocks), len(shape) + len(blocks) - 1)]
        cut_up = nodes.reshaped(node, (*shape[:dim], *blocks, *shape[dim + 1 :]))
        return nodes.reshaped(nodes.permuted(cut_up, order), shape)

    def inverse(self) -> PermuteBlocks:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return PermuteBlocks(self.name, self.dim, tuple(self.blocks[k] for k in self.order), tuple(back))


class _Axes(EachTensor, frozen=True):
    """One axis, and those that it consists of."""

    dim: int
    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        as_tuples(self, sizes=tuple(self.sizes))
        super().__post_init__()


class Unflatten(_Axes, frozen=True, tag="unflatten"):
    """Make several axes of one, as `torch.unflatten` does; one of ``sizes`` may be -1."""

    def changed(self, node: Node, scope: Scope) -> Node:
        dim = nodes.axis(node, self.dim)
        sizes = nodes.lengths(scope.sizes(self.sizes), node.shape[dim], f"axis {dim} of {nodes.described(node)}")
        return nodes.reshaped(node, (*node.shape[:dim], *sizes, *node.shape[dim + 1 :]))

    def inverse(self) -> Flatten:
        return Flatten(self.name, self.dim, self.sizes)


class Flatten(_Axes, frozen=True, tag="flatten"):
    """Make one axis of several, from ``dim`` on, which have to be of these ``sizes``; one of them may be -1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim < 0:
            raise Mismatch("Flatten: dim is counted from the front")

    def changed(self, node: Node, scope: Scope) -> Node:
        dim, sizes = self.dim, scope.sizes(self.sizes)
        has = node.shape[dim : dim + len(sizes)]
        if len(has) != len(sizes) or any(size not in (-1, n) for size, n in zip(sizes, has, strict=True)):
            raise Mismatch(f"{nodes.described(node)} has axes {list(has)} from axis {dim} on, not {list(sizes)}")
        return nodes.reshaped(node, (*node.shape[:dim], prod(has), *node.shape[dim + len(sizes) :]))

    def inverse(self) -> Unflatten:
        return Unflatten(self.name, self.dim, self.sizes)


class _Ends(EachTensor, frozen=True):
    """How many elements stand at the ends of an axis, and what they are."""

    dim: int
    before: Size = 0
    after: Size = 0
    value: float = 0.0
    like: int | None = None


class Pad(_Ends, frozen=True, tag="pad"):
    """Add elements at the ends of an axis, all of one ``value``, or copies of the element with the index ``like``."""

    def changed(self, node: Node, scope: Scope) -> Node:
        dim, ends = nodes.axis(node, self.dim), scope.sizes((self.before, self.after))
        if min(ends) < 0:
            raise Mismatch(f"{nodes.described(node)} cannot be padded by {list(ends)} on axis {dim}")

        def end(count: int) -> list[Node]:
            shape = (*node.shape[:dim], count, *node.shape[dim + 1 :])
            if self.like is None:
                return [nodes.Filled(node.dtype, shape, 0.0 if scope.moments else self.value)] if count else []
            if count > nodes.MOST_LEAVES:
                raise Mismatch(f"{nodes.described(node)} cannot be padded by {count} copies on axis {dim}")
            like = self.like % max(node.shape[dim], 1)
            return [nodes.cut(node, dim, like, like + 1)] * count

        return nodes.joined([*end(ends[0]), node, *end(ends[1])], dim)

    def inverse(self) -> Crop:
        return Crop(self.name, self.dim, self.before, self.after, self.value, self.like)


class Crop(_Ends, frozen=True, tag="crop"):
    """Take elements away at the ends of an axis. The way back is a `Pad` with ``value`` or ``like``."""

    def changed(self, node: Node, scope: Scope) -> Node:
        dim, (before, after) = nodes.axis(node, self.dim), scope.sizes((self.before, self.after))
        return nodes.cut(node, dim, before, node.shape[dim] - after)

    def inverse(self) -> Pad:
        return Pad(self.name, self.dim, self.before, self.after, self.value, self.like)


class Cast(EachTensor, frozen=True, tag="cast"):
    """Convert to a ``dtype``, such as ``"bfloat16"``. ``was``: the dtype before, which the way back needs.

    Moments of an optimizer keep theirs.
    """

    dtype: str
    was: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        for dtype in filter(None, (self.dtype, self.was)):
            if not dtypes.known(dtype):
                raise Mismatch(f"Cast: {dtype!r} is no dtype of torch; write it as in 'bfloat16'")

    def changed(self, node: Node, scope: Scope) -> Node:
        if scope.moments:
            return node
        if self.was and node.dtype != self.was:
            raise Mismatch(f"{nodes.described(node)} is to be cast from {self.was}")
        return nodes.cast(node, self.dtype)

    def inverse(self) -> Cast:
        if not self.was:
            raise Mismatch(
                f"Cast({self.name!r}, {self.dtype!r}) has no inverse, as it does not say was=, the dtype before"
            )
        return Cast(self.name, self.was, self.dtype)
