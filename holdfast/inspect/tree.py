"""Tensors by module: names cut at ``/`` and ``.``, repeated layers folded into one, sizes added up."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from holdfast.ondisk.spans import ranges

_PARTS = re.compile(r"([^/.]*)([/.]|$)")
_NUMBER = re.compile(r"\{[^}]*\}|(?<!\d)(\d{1,18})(?!\d)")  # what is folded already is passed over
DEEPEST = 64
"""Levels of modules; what a name has below them is one part."""


@dataclass(frozen=True)
class Leaf:
    """A tensor: its whole name, its bytes and elements, and what has to be equal for two layers to be alike.

    ``note`` is shown with it, if it is the same for all that are folded together.
    """

    name: str
    nbytes: int
    elements: int
    alike: Hashable = None
    note: str = ""


@dataclass(frozen=True)
class Node:
    """A module, or a tensor if it has a ``leaf``. ``label`` is how it continues the name of the node above.

    ``count`` modules are folded into it (``{0-31}`` in its label). ``tensors``, ``nbytes`` and ``elements`` are of all
    that are folded into it or into one above it; its ``leaf`` is that of the first.
    """

    label: str
    children: tuple[Node, ...] = ()
    leaf: Leaf | None = None
    count: int = 1
    tensors: int = 0
    nbytes: int = 0
    elements: int = 0

    def walk(self, depth: int = 0, *, deepest: int | None = None) -> Iterator[tuple[int, Node]]:
        """Every node below this one with its depth, parents first, down to ``deepest`` levels."""
        for child in self.children:
            yield depth, child
            if deepest is None or depth + 1 < deepest:
                yield from child.walk(depth + 1, deepest=deepest)


@dataclass
class _Open:
    below: dict[str, _Open] = field(default_factory=dict)
    leaf: Leaf | None = None


def tree(leaves: Iterable[Leaf], *, fold: bool = True) -> Node:
    """The root of all ``leaves``; with ``fold``, neighbours that differ by a number in their name alone are one."""
    top = _Open()
    for leaf in leaves:
        at = top
        for label in labels_of(leaf.name):
            at = at.below.setdefault(label, _Open())
        at.leaf = leaf
    return _closed("", top, fold)[0]


def labels_of(name: str) -> list[str]:
    """The parts of a name with what joins them: ``model/layers.0.w`` is ``model/``, ``layers.``, ``0.``, ``w``."""
    labels = [part + joint for part, joint in _PARTS.findall(name) if part or joint]
    return labels if len(labels) <= DEEPEST else [*labels[: DEEPEST - 1], "".join(labels[DEEPEST - 1 :])]


def _closed(label: str, node: _Open, fold: bool) -> tuple[Node, Hashable]:
    """A node with all below it, and what tells whether another one is alike."""
    closed = [_closed(name, below, fold) for name, below in node.below.items()]
    kind: Hashable = (node.leaf.alike if node.leaf else None, tuple((child.label, alike) for child, alike in closed))
    children = [child for child, _ in (_folded(closed) if fold else closed)]
    own = node.leaf
    result = Node(
        label, tuple(children), own, 1, sum(c.tensors for c in children) + (own is not None),
        sum(c.nbytes for c in children) + (own.nbytes if own else 0),
        sum(c.elements for c in children) + (own.elements if own else 0),
    )  # fmt: skip
    if len(children) == 1 and own is None and label:  # a module with one part is that part
        only = children[0]
        result = replace(only, label=label + only.label)
    return result, hash(kind)


def _folded(closed: list[tuple[Node, Hashable]]) -> list[tuple[Node, Hashable]]:
    groups: dict[Hashable, list[tuple[Node, Hashable]]] = {}
    for node, alike in closed:
        # Only one number may differ; a label without one is alone.
        key = (_with(node.label, "#"), alike) if len(_numbers(node.label)) == 1 else (node.label, None)
        groups.setdefault(key, []).append((node, alike))
    folded = []
    for group in groups.values():
        first, alike = group[0]
        if len(group) > 1:
            text = ranges(sorted(_numbers(node.label)[0] for node, _ in group))
            label = _with(first.label, f"{{{text}}}")
            first = replace(_joined([node for node, _ in group]), label=label, count=len(group))
        folded.append((first, alike))
    return folded


def _numbers(label: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(label) if number]


def _with(label: str, text: str) -> str:
    """A label with ``text`` in the place of its number."""
    return _NUMBER.sub(lambda match: text if match[1] else match[0], label)


def _joined(nodes: Sequence[Node]) -> Node:
    """Nodes that are alike as one."""
    first = nodes[0]
    leaf = first.leaf
    if leaf is not None and any(node.leaf is not None and node.leaf.note != leaf.note for node in nodes):
        leaf = replace(leaf, note="")
    below = zip(*(node.children for node in nodes), strict=True)
    return replace(
        first, leaf=leaf, children=tuple(_joined(some) for some in below),
        tensors=sum(n.tensors for n in nodes), nbytes=sum(n.nbytes for n in nodes),
        elements=sum(n.elements for n in nodes),
    )  # fmt: skip
