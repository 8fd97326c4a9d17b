"""Plain values and the containers around them as leaves: names, types, order.

The walk calls it for the containers of a state and for the state dicts of objects. Never looks into a tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import Unsupported
from holdfast.ondisk import containers, names, packing, values
from holdfast.state.leaves import Collected
from holdfast.state.per_rank import RNG, PerRank, is_stateful
from holdfast.state.subclasses import note_of
from holdfast.state.tensors import is_tensor_leaf

_GROUPS = "param_groups"

Leaf = Callable[[str, Any], None]
"""Adds a tensor at a name."""


def is_container(node: Any) -> bool:
    """Whether the walk goes into ``node``."""
    return containers.kind_of(node) is not None


def only_values(node: Any) -> bool:
    """Whether ``node`` holds plain values alone, however nested."""
    if not is_container(node):
        return not (is_tensor_leaf(node) or isinstance(node, (PerRank, RNG, nn.Module, Optimizer)) or is_stateful(node))
    inside = containers.children(node)
    return set(map(type, inside)) <= values.SINGLE or all(map(only_values, inside))


def bare_tensors(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Every tensor that lies in the containers of a state, with its path: an optimizer may have it as a parameter."""
    if is_tensor_leaf(node):
        yield path, node
    elif is_container(node):
        for key, value in items_of(node):
            if type(value) not in values.SINGLE and (is_tensor_leaf(value) or is_container(value)):
                yield from bare_tensors(names.child(path, str(key)), value)


def note_container(
    path: str, node: Any, into: Collected, *, in_place: bool = False
) -> list[tuple[str, tuple[Any, Any]]]:
    """Note what kind of container this is, where its name does not say it (see docs/format.md).

    Returns the path of each child, with its key and the child. A container that is filled ``in_place`` keeps its class
    and order. Raises Unsupported for keys that a checkpoint does not keep.
    """
    try:
        named = containers.key_names(node) if isinstance(node, dict) else [(str(i), i) for i in range(len(node))]
        if path:
            # A module's state dict is an OrderedDict of tensors, whose class does not matter.
            exact = not in_place and not (node and all(map(is_tensor_leaf, containers.children(node))))
            ordered = not in_place and isinstance(node, dict) and _comes_back_in_another_order(node)
            note = containers.note_of(node, named, ordered=ordered, exact=exact)
            if note is not None:
                into.containers[path] = note
        else:
            _check_top(named)
    except values.Refused as error:
        raise Unsupported(f"{path or 'the state'}: {error.reason}") from None
    return list(zip(names.children(path, [name for name, _ in named]), items_of(node), strict=True))


def add_values(path: str, node: Any, into: Collected, *, owned: bool) -> None:
    """Add plain values, however nested; a long container is one value (see `packing.is_long`)."""
    try:
        if not is_container(node):
            into.add_value(path, values.encode(node), owned=owned)
            return
        # Optimizer state that torch keeps by number is looked up by the names of these.
        if packing.is_long(node) and _GROUPS not in path.split("/"):
            into.add_value(path, packing.packed(node), owned=owned)
            return
    except values.Refused as error:
        raise Unsupported(f"{path}{error.path}: {error.reason}") from None
    for at, (_, value) in note_container(path, node, into):
        add_values(at, value, into, owned=owned)


def add_tree(path: str, node: Any, into: Collected, leaf: Leaf, *, owned: bool) -> None:
    """Add a state dict that an object made: tensors by ``leaf``, values, and containers of both in any nest."""
    if is_tensor_leaf(node):
        leaf(path, node)
    elif is_container(node) and not only_values(node):
        for at, (_, value) in note_container(path, node, into):
            add_tree(at, value, into, leaf, owned=owned)
    else:
        add_values(path, node, into, owned=owned)


def note_tensor(path: str, tensor: Any, parameter: torch.Tensor | None, into: Collected) -> None:
    """Note what a tensor is beside its bytes, if a load has to know it to make the tensor."""
    note = note_of(path, tensor, parameter) if isinstance(tensor, torch.Tensor) else None
    if note is not None:
        into.containers[path] = note


def copied(node: Any) -> Any:
    """A copy of a state dict, tensors included, to be handed back if a load fails."""
    return containers.mapped(
        node, lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else copy.deepcopy(leaf)
    )


def items_of(node: Any) -> Iterable[tuple[Any, Any]]:
    """The children of a container, each with its key or position."""
    return node.items() if isinstance(node, dict) else enumerate(node)


def _comes_back_in_another_order(node: Mapping[Any, Any]) -> bool:
    """Whether `nest` would give the children of a dict in another order: tensors, then values, then what is empty."""
    if set(map(type, node.values())) <= values.SINGLE:
        return False
    ranks = [0 if not only_values(value) else 1 if _has_leaf(value) else 2 for value in node.values()]
    return ranks != sorted(ranks)


def _has_leaf(node: Any) -> bool:
    return not is_container(node) or any(map(_has_leaf, containers.children(node)))


def _check_top(named: Sequence[tuple[str, Any]]) -> None:
    for name, key in named:
        if type(key) is not str:
            raise Unsupported(f"the state has the key {key!r} of type {type(key).__qualname__}; keys are strings")
        if name in ("", "manifest.json"):
            raise Unsupported(f"the state has the key {key!r} at the top, which cannot name a section; rename it")
