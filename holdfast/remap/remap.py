"""A map from one layout of a model to another: an ordered list of rules.

Users make one and give it to `open`, `load` or `convert`. It is data: it prints, compares and travels as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import msgspec

from holdfast.errors import Mismatch
from holdfast.ondisk import dtypes
from holdfast.remap.architecture import Transformers
from holdfast.remap.joining import Concatenate, Split, Stack, Unstack
from holdfast.remap.layouts import Cast, Crop, Flatten, Pad, PermuteBlocks, Transpose, Unflatten
from holdfast.remap.naming import Constant, Drop, Rename, Reorder, Tie, Untie
from holdfast.remap.nodes import Saved
from holdfast.remap.proof import Proof, compared
from holdfast.remap.rule import Names, Rule, Scope

AnyRule = (
    Rename | Concatenate | Split | Stack | Unstack | Transpose | PermuteBlocks | Unflatten | Flatten | Pad | Crop | Cast
    | Tie | Untie | Drop | Constant | Reorder | Transformers
)  # fmt: skip


_SHOWN = 1000
"""Characters of a rule in an error."""


class Tensor(Protocol):
    """What a map has to know of a tensor: a torch.Tensor has it, and so does `TensorInfo`."""

    @property
    def dtype(self) -> Any: ...

    @property
    def shape(self) -> Any: ...


class Remap(msgspec.Struct, frozen=True):
    """Rules from the names and shapes of a checkpoint to those of a model.

    Attributes:
        rules: Applied in order. Names that no rule matches stay as they are.
        values: Numbers that sizes may name, such as ``{"heads": 32}`` or ``config.to_dict()``. Others are left out.

    Example:
        >>> remap = Remap([
        ...     Concatenate(["layers.{i}.wq.weight", "layers.{i}.wk.weight"], "layers.{i}.qk.weight"),
        ...     Rename("tok.weight", "embed.weight"),
        ... ])
        >>> remap.inverse().inverse() == remap
        True
    """

    rules: tuple[AnyRule, ...]
    values: dict[str, int] = {}

    def __post_init__(self) -> None:
        rules = tuple(self.rules)
        for rule in rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"a Remap consists of rules, such as Rename or Split, not of {type(rule).__name__}")
        words = _words_in(rules)
        msgspec.structs.force_setattr(self, "rules", rules)
        whole = {name: value for name, value in self.values.items() if name in words and type(value) is int}
        msgspec.structs.force_setattr(self, "values", whole)

    def __repr__(self) -> str:
        lines = "".join(f"    {rule!r},\n" for rule in self.rules)
        return f"Remap([\n{lines}]{f', {self.values}' if self.values else ''})" if lines else "Remap([])"

    def inverse(self) -> Remap:
        """Return the map that takes the way back.

        Raises:
            Mismatch: A rule has no inverse; it says which, and why.
        """
        return Remap(tuple(cast("AnyRule", rule.inverse()) for rule in reversed(self.rules)), self.values)

    def __matmul__(self, first: Remap) -> Remap:
        """``second @ first`` is the map that applies ``first``, then ``second``. Raises Mismatch for unlike values."""
        unlike = [name for name in self.values.keys() & first.values.keys() if self.values[name] != first.values[name]]
        if unlike:
            name = min(unlike)
            raise Mismatch(f"the maps disagree: {name} is {first.values[name]} in the first, then {self.values[name]}")
        return Remap(first.rules + self.rules, first.values | self.values)

    def resolve(self, source: Mapping[str, Tensor], *, moments: bool = False) -> Names:
        """Return the tensors of the target, each as an arrangement of the source's.

        Args:
            source: Tensors by name; only their shapes and dtypes are looked at.
            moments: They are an optimizer's moments, under the names of their parameters.

        Raises:
            Mismatch: A rule does not fit; it names the tensors.
        """
        names: Names = {name: saved(name, tensor) for name, tensor in source.items()}
        scope = Scope(self.values, moments)
        for rule in self.rules:
            try:
                names = rule.resolve(names, scope)
            except Mismatch as error:
                raise Mismatch(f"{error}. The rule is {repr(rule)[:_SHOWN]}") from None
        return names

    def check(self, source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Proof:
        """Prove, without reading a byte, that each element of the target comes from one element of the source.

        Args:
            source: The tensors of a checkpoint by name; only their shapes and dtypes are looked at.
            target: Those of the other layout, such as ``model.state_dict()``.

        Returns:
            What the map leaves over, repeats or makes up, which it does only if a rule says so.

        Raises:
            Mismatch: A rule does not fit, or names, shapes or dtypes are not the target's; it lists all of them.

        Example:
            >>> remap = Remap([Rename("0.{w}", "first.{w}")])
            >>> source = {"0.weight": torch.ones(2, 3)}
            >>> remap.check(source, {"first.weight": torch.ones(2, 3)}).is_exact
            True
        """
        return compared(self.resolve(source), source, {name: saved(name, tensor) for name, tensor in target.items()})

    def to_json(self) -> str:
        """Return the map as JSON."""
        return msgspec.json.encode({"version": 1, "rules": self.rules, "values": self.values}).decode()

    @staticmethod
    def from_json(text: str | bytes) -> Remap:
        """Return the map that `to_json` wrote.

        Args:
            text: JSON.

        Raises:
            Mismatch: It is no map, or has rules that this version does not know.
        """
        try:
            read = msgspec.json.decode(text, type=_Written)
        except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
            raise Mismatch(f"this is no map of holdfast.remap: {error}") from None
        if read.version != 1:
            raise Mismatch(f"the map is of version {read.version}: a newer holdfast knows it")
        return Remap(read.rules, read.values)


class _Written(msgspec.Struct):
    version: int
    rules: tuple[AnyRule, ...]
    values: dict[str, int] = {}


def saved(name: str, tensor: Tensor) -> Saved:
    """A tensor as a leaf of arrangements."""
    dtype = tensor.dtype if isinstance(tensor.dtype, str) else dtypes.name_of(tensor.dtype)
    return Saved(tensor.name if isinstance(tensor, Saved) else name, dtype, tuple(tensor.shape))


def _words_in(rules: Iterable[Rule]) -> set[str]:
    """The words in the sizes of rules."""
    return set(re.findall(r"[A-Za-z_]\w*", repr([msgspec.structs.astuple(rule) for rule in rules])))
