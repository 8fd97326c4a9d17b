"""What all rules have in common: what they apply to, and how names are found and put in place.

The files of rules beside this one call it. Never looks at a byte.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from holdfast.errors import Mismatch
from holdfast.remap import nodes
from holdfast.remap.nodes import Node
from holdfast.remap.patterns import Captures, filled, finder

Names = dict[str, Node]
"""Tensors by name, as the rules so far have made them."""

Size = int | str
"""A number, or an expression of the map's values, such as ``"heads * head_dim"``."""


@dataclass(frozen=True)
class Scope:
    """What the rules apply to: the ``values`` that sizes may name, and whether tensors are an optimizer's moments.

    A moment is laid out like its parameter. It keeps its own dtype, and is zero where a parameter is made up.
    """

    values: Mapping[str, int]
    moments: bool = False

    def size(self, size: Size) -> int:
        """A size as a number. Raises Mismatch for an expression that is none, or names what is not known."""
        number = size if isinstance(size, int) else _evaluated(size, self.values)
        if abs(number) > _LARGEST:
            raise Mismatch(f"the size {str(size)[:_LONGEST]!r} is larger than any tensor")
        return number

    def sizes(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """Sizes as numbers."""
        return tuple(map(self.size, sizes))


_LARGEST, _LONGEST = 1 << 60, 200
"""Of sizes, and of the text of one: a map may come from anywhere."""

_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def _evaluated(text: str, values: Mapping[str, int]) -> int:
    if len(text) > _LONGEST:
        raise Mismatch(f"a size of {len(text)} characters, {text[:20]!r}…, is longer than {_LONGEST}")

    def number(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -number(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](number(node.left), number(node.right))
        if isinstance(node, ast.Name):
            raise Mismatch(f"the size {text!r} names {node.id!r}, which has no value: give it to Remap(…, values=)")
        raise Mismatch(f"the size {text!r} is no sum or product of whole numbers and names")

    try:
        return number(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError) as error:
        if isinstance(error, Mismatch):
            raise
        raise Mismatch(f"the size {text!r} is no sum or product of whole numbers and names") from None


class Rule(msgspec.Struct, frozen=True):
    """One step of a map."""

    def resolve(self, names: Names, scope: Scope) -> Names:
        """Return what becomes of these tensors.

        Args:
            names: Tensors by name, as the rules before have made them.
            scope: What sizes may name.

        Raises:
            Mismatch: They do not fit the rule; it names them.
        """
        raise NotImplementedError

    def inverse(self) -> Rule:
        """Return the rule that takes the way back. Raises Mismatch if there is none, and says why."""
        raise NotImplementedError


def as_tuples(rule: Rule, **fields: object) -> None:
    """Lists become tuples, so that rules compare."""
    for name, value in fields.items():
        msgspec.structs.force_setattr(rule, name, value)


def replaced(
    names: Names, patterns: Sequence[str], make: Callable[[Sequence[Node], Mapping[str, str]], Names]
) -> Names:  # fmt: skip
    """The tensors that fit ``patterns``, together for equal captures, by what ``make`` makes of them."""
    groups: dict[Captures, dict[int, str]] = {}
    finders = [finder(pattern) for pattern in patterns]
    for name in names:
        for number, find in enumerate(finders):
            captures = find(name)
            if captures is not None:
                groups.setdefault(captures, {})[number] = name
                break
    made: dict[str, Names] = {}
    used: set[str] = set()
    for captures, members in groups.items():
        lacking = [filled(p, dict(captures)) for n, p in enumerate(patterns) if n not in members]
        if lacking:
            there = next(iter(members.values()))
            raise Mismatch(f"{there} goes together with {', '.join(lacking)}, which {_is_not(lacking)} there")
        ordered = [members[n] for n in range(len(patterns))]
        made[next(iter(members.values()))] = make([names[name] for name in ordered], dict(captures))
        used.update(ordered)
    return in_place(names, made, used)


def _is_not(names: Sequence[str]) -> str:
    return "is not" if len(names) == 1 else "are not"


def in_place(names: Names, made: Mapping[str, Names], used: set[str]) -> Names:
    """The names with what was made where its first source stood. Raises Mismatch if a name is made twice."""
    result: Names = {}
    for name, node in _entries(names, made, used):
        check_free(name, result)
        result[name] = node
    return result


def _entries(names: Names, made: Mapping[str, Names], used: set[str]) -> Iterator[tuple[str, Node]]:
    for name, node in names.items():
        if name in made:
            yield from made[name].items()
        elif name not in used:
            yield name, node


def check_free(name: str, names: Names) -> None:
    if name in names:
        raise Mismatch(f"two tensors would be called {name}: {nodes.described(names[name])} is called so already")
