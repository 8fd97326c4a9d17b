"""Leaves by name as the nested dicts, lists and other containers that they were saved from.

What hands values or tensors back calls it. Never looks at a leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.errors import Damaged
from holdfast.ondisk import names
from holdfast.ondisk.containers import Note, is_sequence, is_tensor, mapping_of, sequence_of

MOST_EMPTY = 1_000_000
"""Positions of a list that may be empty, since other values stand there: of one rank, say."""


class _Branch(dict[str, Any]):
    """What lies below a name, by key. A leaf may be a dict too."""


def nest(leaves: Mapping[str, Any], containers: Mapping[str, Note]) -> dict[str, Any]:
    """Leaves by name as nested containers.

    Where no order is noted a dict has its keys in the order of ``leaves``, and then its empty containers.
    """
    root = _Branch()
    known: dict[str, _Branch] = {"": root}
    for name, value in leaves.items():
        head, _, last = name.rpartition("/")
        above = known.get(head)
        if above is None:
            above = known[head] = _branch(head, _at(root, head.split("/")))
        above[names.unescape(last)] = value
    for path, note in containers.items():
        if path and not is_tensor(note):
            _at(root, path.split("/"))
    return {key: _shaped(names.escape(key), value, containers) for key, value in root.items()}


def nested(leaves: Mapping[str, Any], containers: Mapping[str, Note], where: object) -> dict[str, Any]:
    """`nest` of what ``where`` says. Raises Damaged if it contradicts itself."""
    try:
        return nest(leaves, containers)
    except ValueError as error:  # a list of names that are no positions, say
        raise Damaged(f"{where} contradicts itself: {error}") from None


def _at(root: _Branch, keys: Sequence[str]) -> Any:
    at: Any = root
    for key in keys:
        at = _branch("/".join(keys), at).setdefault(names.unescape(key), _Branch())
    return at


def _branch(path: str, node: Any) -> _Branch:
    if type(node) is not _Branch:
        raise Damaged(f"{path[:200]} is a leaf, and there are others below it")
    return node


def _shaped(path: str, node: Any, containers: Mapping[str, Note]) -> Any:
    """A branch as the container that is noted; leaves pass as they are."""
    if type(node) is not _Branch:
        return node
    children = {
        key: _shaped(f"{path}/{names.escape(key)}", value, containers) if type(value) is _Branch else value
        for key, value in node.items()
    }
    note = containers.get(path)
    if note is not None and is_sequence(note):
        return sequence_of(note, _in_positions(path, children))
    return mapping_of(note, children)


def _in_positions(path: str, children: Mapping[str, Any]) -> list[Any]:
    """Children of a list by their position; one that is left out (it differs by rank, say) leaves None there."""
    if not all(key.isdecimal() for key in children):
        raise Damaged(f"{path} is noted as a list, but has the keys {sorted(children)[:5]}")
    length = max(map(int, children), default=-1) + 1
    if length > MOST_EMPTY + 2 * len(children):
        raise Damaged(f"{path} is noted as a list of {length} elements, but has only {len(children)}")
    ordered: list[Any] = [None] * length
    for key, value in children.items():
        ordered[int(key)] = value
    return ordered
