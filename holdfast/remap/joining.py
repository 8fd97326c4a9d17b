"""Rules that make one tensor of several, and several of one.

`Remap` applies them. None of them drops an element, or takes one twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.errors import Mismatch
from holdfast.remap import nodes
from holdfast.remap.nodes import Node
from holdfast.remap.patterns import Captures, check_same, fields_of, filled, finder
from holdfast.remap.rule import Names, Rule, Scope, Size, as_tuples, in_place, replaced

_MOST = 1 << 16
"""Tensors that one is taken apart into."""


class Concatenate(Rule, frozen=True, tag="concatenate"):
    """Join tensors along an axis, in the order of ``sources``.

    ``sizes``: the length of each on the axis. Without them all are equally long.
    """

    sources: tuple[str, ...]
    target: str
    dim: int = 0
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        as_tuples(self, sources=tuple(self.sources), sizes=tuple(self.sizes))
        _check_sizes(self.sizes, self.sources, "Concatenate")
        check_same(self.sources, [self.target], "Concatenate")

    def resolve(self, names: Names, scope: Scope) -> Names:
        def join(of: Sequence[Node], captures: Mapping[str, str]) -> Names:
            node = nodes.joined(of, self.dim)
            dim = nodes.axis(node, self.dim)
            has = tuple(part.shape[dim] for part in of)
            wanted = _lengths_of(self.sizes, len(of), node.shape[dim], scope)
            if has != wanted:
                said = f"sizes={list(self.sizes)} says {list(wanted)}" if self.sizes else "sizes= is not given"
                raise Mismatch(
                    f"{filled(self.target, captures)} is joined from lengths {list(has)} on axis {dim}, but {said}: "
                    "without the sizes the way back is not known"
                )
            return {filled(self.target, captures): node}

        return replaced(names, self.sources, join)

    def inverse(self) -> Split:
        return Split(self.target, self.sources, self.dim, self.sizes)


class Split(Rule, frozen=True, tag="split"):
    """Cut a tensor along an axis into ``targets``: into equal parts, or by ``sizes``."""

    source: str
    targets: tuple[str, ...]
    dim: int = 0
    sizes: tuple[Size, ...] = ()

    def __post_init__(self) -> None:
        as_tuples(self, targets=tuple(self.targets), sizes=tuple(self.sizes))
        _check_sizes(self.sizes, self.targets, "Split")
        check_same([self.source], self.targets, "Split")

    def resolve(self, names: Names, scope: Scope) -> Names:
        def split(of: Sequence[Node], captures: Mapping[str, str]) -> Names:
            (node,) = of
            dim = nodes.axis(node, self.dim)
            lengths = _lengths_of(self.sizes, len(self.targets), node.shape[dim], scope)
            if sum(lengths) != node.shape[dim] or min(lengths) < 0:
                raise Mismatch(
                    f"{filled(self.source, captures)} has {node.shape[dim]} elements on axis {dim}, and would be cut "
                    f"into {list(lengths)}: {nodes.described(node)}"
                )
            parts, at = {}, 0
            for target, length in zip(self.targets, lengths, strict=True):
                parts[filled(target, captures)] = nodes.cut(node, dim, at, at + length)
                at += length
            return parts

        return replaced(names, [self.source], split)

    def inverse(self) -> Concatenate:
        return Concatenate(self.targets, self.source, self.dim, self.sizes)


class Stack(Rule, frozen=True, tag="stack"):
    """Stack a list of tensors along a new axis: ``Stack("experts.{e}.w1", "experts.w1")``.

    The capture that ``target`` lacks counts them from 0.
    """

    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        _index_field(self.source, self.target, "Stack")

    def resolve(self, names: Names, scope: Scope) -> Names:
        field = _index_field(self.source, self.target, "Stack")
        groups: dict[Captures, dict[str, str]] = {}
        find = finder(self.source)
        for name in names:
            captures = find(name)
            if captures is not None:
                rest = tuple(one for one in captures if one[0] != field)
                groups.setdefault(rest, {})[dict(captures)[field]] = name
        made: dict[str, Names] = {}
        used: set[str] = set()
        for rest, by_index in groups.items():
            target = filled(self.target, dict(rest))
            lacking = [i for i in range(len(by_index)) if str(i) not in by_index]
            if lacking:
                raise Mismatch(f"{target} is stacked from {field}=0, 1, 2, …, but {field}={lacking[0]} is not there")
            members = [by_index[str(i)] for i in range(len(by_index))]
            dim = self.dim % (len(names[members[0]].shape) + 1)
            parts = [nodes.reshaped(n, (*n.shape[:dim], 1, *n.shape[dim:])) for n in map(names.__getitem__, members)]
            made[next(iter(by_index.values()))] = {target: nodes.joined(parts, dim)}
            used.update(members)
        return in_place(names, made, used)

    def inverse(self) -> Unstack:
        return Unstack(self.target, self.source, self.dim)


class Unstack(Rule, frozen=True, tag="unstack"):
    """Take a tensor apart along an axis, which goes: ``Unstack("experts.w1", "experts.{e}.w1")``."""

    source: str
    target: str
    dim: int = 0

    def __post_init__(self) -> None:
        _index_field(self.target, self.source, "Unstack")

    def resolve(self, names: Names, scope: Scope) -> Names:
        field = _index_field(self.target, self.source, "Unstack")

        def unstack(of: Sequence[Node], captures: Mapping[str, str]) -> Names:
            (node,) = of
            dim = nodes.axis(node, self.dim)
            shape = (*node.shape[:dim], *node.shape[dim + 1 :])
            if node.shape[dim] > _MOST:
                raise Mismatch(f"{nodes.described(node)} would be taken apart into {node.shape[dim]} tensors")
            return {
                filled(self.target, {**captures, field: str(i)}): nodes.reshaped(nodes.cut(node, dim, i, i + 1), shape)
                for i in range(node.shape[dim])
            }

        return replaced(names, [self.source], unstack)

    def inverse(self) -> Stack:
        return Stack(self.target, self.source, self.dim)


def _check_sizes(sizes: Sequence[Size], patterns: Sequence[str], rule: str) -> None:
    if not patterns:
        raise Mismatch(f"{rule}: there are no names")
    if sizes and len(sizes) != len(patterns):
        raise Mismatch(f"{rule}: {len(patterns)} names have {len(sizes)} sizes")


def _lengths_of(sizes: Sequence[Size], count: int, length: int, scope: Scope) -> tuple[int, ...]:
    if sizes:
        return scope.sizes(sizes)
    if length % count:
        raise Mismatch(f"{length} elements are no {count} equal parts: give sizes=")
    return (length // count,) * count


def _index_field(many: str, one: str, rule: str) -> str:
    extra = set(fields_of(many)) - set(fields_of(one))
    if len(extra) != 1 or set(fields_of(one)) - set(fields_of(many)):
        raise Mismatch(f"{rule}: {many!r} has to capture what {one!r} does, and one more that counts the tensors")
    return extra.pop()
