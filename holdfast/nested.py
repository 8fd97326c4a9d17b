"""Leaves by name as the nested dicts, lists and tuples that they were saved from.

Called by whoever hands values or tensors back. Never looks at a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import Damaged
from holdfast.ondisk import names


def nest(leaves: Mapping[str, Any], containers: Mapping[str, str]) -> dict[str, Any]:
    """Leaves by name as nested dicts, lists and tuples."""
    root: dict[str, Any] = {}
    known: dict[str, dict[str, Any]] = {"": root}
    for name, value in leaves.items():
        head, _, last = name.rpartition("/")
        above = known.get(head)
        if above is None:
            above = known[head] = _at(root, head.split("/"))
        above[names.unescape(last)] = value
    for path in containers:
        if path:
            _at(root, path.split("/"))
    return {key: _shaped(names.escape(key), value, containers) for key, value in root.items()}


def _in_positions(path: str, children: Mapping[str, Any]) -> list[Any]:
    """Children of a list by their position; one that is left out (it differs by rank, say) leaves None there."""
    if not all(key.isdecimal() for key in children):
        raise Damaged(f"{path} is noted as a list, but has the keys {sorted(children)[:5]}")
    length = max(map(int, children), default=-1) + 1
    if length > 1_000_000 + 2 * len(children):
        raise Damaged(f"{path} is noted as a list of {length} elements, but has only {len(children)}")
    ordered: list[Any] = [None] * length
    for key, value in children.items():
        ordered[int(key)] = value
    return ordered


def _at(root: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    for key in keys:
        root = root.setdefault(names.unescape(key), {})
    return root


def _shaped(path: str, node: Any, containers: Mapping[str, str]) -> Any:
    """Turn a dict of dicts into what the containers say; leaves pass as they are."""
    if type(node) is not dict:
        return node
    children = {
        key: _shaped(f"{path}/{names.escape(key)}", value, containers) if type(value) is dict else value
        for key, value in node.items()
    }
    kind = containers.get(path)
    if kind in ("list", "tuple"):
        ordered = _in_positions(path, children)
        return ordered if kind == "list" else tuple(ordered)
    if kind == "dict":  # noted although it is not empty: its keys are integers
        return {int(key) if key.removeprefix("-").isdecimal() else key: value for key, value in children.items()}
    return children
