"""Rules that change names: which tensors there are, and what they are called.

`Remap` applies them. `Drop` and `Reorder` may leave tensors out, and say so by what they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.remap import nodes
from holdfast.remap.nodes import Node
from holdfast.remap.patterns import captured, check_same, fields_of, filled
from holdfast.remap.rule import Names, Rule, Scope, Size, as_tuples, check_free, in_place, replaced


class Rename(Rule, frozen=True, tag="rename"):
    """Call tensors differently: ``Rename("layers.{i}.wq.weight", "layers.{i}.attn.q.weight")``."""

    source: str
    target: str

    def __post_init__(self) -> None:
        check_same([self.source], [self.target], "Rename")

    def resolve(self, names: Names, scope: Scope) -> Names:
        return replaced(names, [self.source], lambda of, captures: {filled(self.target, captures): of[0]})

    def inverse(self) -> Rename:
        return Rename(self.target, self.source)


class Tie(Rule, frozen=True, tag="tie"):
    """Give a tensor a second name: ``Tie("embed.weight", "head.weight")``."""

    source: str
    target: str

    def __post_init__(self) -> None:
        check_same([self.source], [self.target], "Tie")

    def resolve(self, names: Names, scope: Scope) -> Names:
        if scope.moments:  # an optimizer knows a tied parameter by one name
            return names

        def tie(of: Sequence[Node], captures: Mapping[str, str]) -> Names:
            return {filled(self.source, captures): of[0], filled(self.target, captures): of[0]}

        return replaced(names, [self.source], tie)

    def inverse(self) -> Untie:
        return Untie(self.source, self.target)


class Untie(Rule, frozen=True, tag="untie"):
    """Leave out the second name of a tensor, ``target``. Two tensors of those names are refused."""

    source: str
    target: str

    def __post_init__(self) -> None:
        check_same([self.source], [self.target], "Untie")

    def resolve(self, names: Names, scope: Scope) -> Names:
        if scope.moments:
            second = {n: captured(self.target, n) for n in names}
            there = {
                n
                for n, captures in second.items()
                if captures is not None and filled(self.source, dict(captures)) in names
            }
            left = {name: node for name, node in names.items() if name not in there}
            return Rename(self.target, self.source).resolve(left, scope)

        def untie(of: Sequence[Node], captures: Mapping[str, str]) -> Names:
            if of[0] != of[1]:
                raise Mismatch(
                    f"{filled(self.target, captures)} is to be left out as a second name of "
                    f"{filled(self.source, captures)}, but they are two tensors"
                )
            return {filled(self.source, captures): of[0]}

        return replaced(names, [self.source, self.target], untie)

    def inverse(self) -> Tie:
        return Tie(self.source, self.target)


class Drop(Rule, frozen=True, tag="drop"):
    """Leave tensors out. The way back is a `Constant`, if ``shape`` is given.

    ``only="back"``: the inverse alone leaves them out. Such tensors are in the target only, as ``_extra_state`` may be.
    """

    name: str
    only: Literal["", "there", "back"] = ""
    shape: tuple[Size, ...] | None = None
    dtype: str = "float32"
    value: float = 0.0
    beside: str = ""

    def __post_init__(self) -> None:
        fields_of(self.name)
        if self.shape is not None:
            as_tuples(self, shape=tuple(self.shape))

    def resolve(self, names: Names, scope: Scope) -> Names:
        if self.only == "back":
            return names
        return {name: node for name, node in names.items() if captured(self.name, name) is None}

    def inverse(self) -> Rule:
        if self.only:
            return Drop(self.name, "there" if self.only == "back" else "back")
        if self.shape is None:
            raise Mismatch(f"Drop({self.name!r}) has no inverse: what it leaves out cannot come back")
        return Constant(self.name, self.shape, self.dtype, self.value, self.beside)


class Constant(Rule, frozen=True, tag="constant"):
    """Add a tensor of one number. An optimizer has no state of it.

    ``beside``: add one for each tensor that fits this pattern, as in ``Constant("layers.{i}.bias", (8,),
    beside="layers.{i}.weight")``.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str = "float32"
    value: float = 0.0
    beside: str = ""

    def __post_init__(self) -> None:
        as_tuples(self, shape=tuple(self.shape))
        if self.beside:
            check_same([self.name], [self.beside], "Constant")
        if (fields_of(self.name) and not self.beside) or not dtypes.known(self.dtype):
            raise Mismatch(f"Constant: {self.name!r} has to be one name, and {self.dtype!r} a dtype of torch")

    def resolve(self, names: Names, scope: Scope) -> Names:
        if scope.moments:
            return names
        shape = scope.sizes(self.shape)
        if min(shape, default=0) < 0:
            raise Mismatch(f"{self.name} cannot have shape {list(shape)}")
        added = [self.name]
        if self.beside:
            fits = [captures for name in names if (captures := captured(self.beside, name)) is not None]
            added = [filled(self.name, dict(captures)) for captures in fits]
        for name in added:
            check_free(name, names)
        return {**names, **dict.fromkeys(added, nodes.bounded(nodes.Filled(self.dtype, shape, self.value)))}

    def inverse(self) -> Drop:
        return Drop(self.name, "", self.shape, self.dtype, self.value, self.beside)


class Reorder(Rule, frozen=True, tag="reorder"):
    """Take layers in another order, some of them twice or never: ``Reorder("layers.{i}.{*rest}", (0, 1, 1, 2))``.

    Layer ``k`` of the target is layer ``order[k]`` of the source. A layer that is taken twice is copied.
    """

    name: str
    order: tuple[int, ...]
    field: str = "i"

    def __post_init__(self) -> None:
        as_tuples(self, order=tuple(self.order))
        if self.field not in fields_of(self.name):
            raise Mismatch(f"Reorder: {self.name!r} has no {{{self.field}}} that counts the layers")

    def resolve(self, names: Names, scope: Scope) -> Names:
        layers: dict[str, list[tuple[dict[str, str], Node]]] = {}
        for name, node in names.items():
            captures = captured(self.name, name)
            if captures is not None:
                layers.setdefault(dict(captures)[self.field], []).append((dict(captures), node))
        if not layers:
            return names
        lacking = [i for i in self.order if str(i) not in layers]
        if lacking:
            raise Mismatch(f"Reorder: there is no layer {lacking[0]} among those that fit {self.name!r}")
        made = {
            filled(self.name, {**captures, self.field: str(k)}): node
            for k, i in enumerate(self.order)
            for captures, node in layers[str(i)]
        }
        matched = {name for name in names if captured(self.name, name) is not None}
        return in_place(names, {next(name for name in names if name in matched): made}, matched)

    def inverse(self) -> Reorder:
        if sorted(self.order) != list(range(len(self.order))):
            raise Mismatch(f"Reorder({self.name!r}, …) has no inverse: it takes layers twice, or leaves some out")
        return Reorder(self.name, tuple(sorted(range(len(self.order)), key=self.order.__getitem__)), self.field)
