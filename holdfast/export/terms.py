"""The tensors of several checkpoints side by side: which are summed, which must be equal, and what does not fit.

`MergeWork` asks here. No tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.export.selection import Leaf, Selection, Term, can_cast
from holdfast.matching.differences import listed
from holdfast.ondisk import dtypes

_COMPLEX = {"float32": "complex64", "float64": "complex128"}
_SCALES = ("_scale", "_scale_inv")


@dataclass(frozen=True)
class Other:
    """A source besides the last one, and what it has of what is merged."""

    checkpoint: Checkpoint
    selection: Selection

    @property
    def names(self) -> list[str]:
        return [*self.selection.tensors, *self.selection.aliases]

    def leaf(self, group: Sequence[str]) -> Leaf | None:
        """The tensor under the first of these names that it has."""
        tensors, aliases = self.selection.tensors, self.selection.aliases
        return next((tensors[aliases.get(name, name)] for name in group if aliases.get(name, name) in tensors), None)

    def unties(self, one: str, other: str) -> bool:
        """Whether these names are two tensors."""
        records, stored = self.checkpoint.records, self.checkpoint.saved_name
        return one in records and other in records and stored(one) != stored(other)


def with_terms(
    selection: Selection, last: Checkpoint, others: Sequence[Other], weights_of: Callable[[str], Sequence[float]],
    total: str,
) -> Selection:  # fmt: skip
    """The selection of the last source with terms of all. Raises Mismatch with every name that does not fit."""
    selection = _untied(selection, others)
    faults = [f"{last.path} has no {name}, which {other.checkpoint.path} has" for other, name in _unknown(last, others)]
    tensors: dict[str, Leaf] = {}
    groups = _groups(last)
    for name, leaf in selection.tensors.items():
        saved = selection.origin[name]
        group = [saved, *groups[last.saved_name(saved)]]  # what a source lacks may be tied to what it has
        terms = [(other.checkpoint, other.leaf(group)) for other in others]
        there = [(checkpoint, term) for checkpoint, term in terms if term is not None]
        faults += [f"{checkpoint.path} has no {saved}" for checkpoint, term in terms if term is None]
        faults += _unlike(leaf, saved, there, last)
        if len(there) == len(others):
            tensors[name] = _with_terms(leaf, [*there, (last, leaf)], weights_of(name), total)
    if faults:
        raise Mismatch(
            f"the sources do not have the same tensors; nothing was written (only= names what all of them have):"
            f"{listed(faults)}"
        )
    return replace(selection, tensors=tensors)


def _untied(selection: Selection, others: Sequence[Other]) -> Selection:
    """Tied tensors are one in the target if they are one in every source that has them."""
    origin, tensors, aliases = selection.origin, dict(selection.tensors), {}
    for alias, name in selection.aliases.items():
        if any(other.unties(origin[alias], origin[name]) for other in others):
            tensors[alias] = replace(tensors[name], name=alias)
        else:
            aliases[alias] = name
    return replace(selection, tensors=tensors, aliases=aliases)


def _groups(checkpoint: Checkpoint) -> Mapping[str, list[str]]:
    """The names of each tensor, by the one that it is stored under."""
    groups: dict[str, list[str]] = {}
    for name in checkpoint.records:
        groups.setdefault(checkpoint.saved_name(name), []).append(name)
    return groups


def _unknown(last: Checkpoint, others: Sequence[Other]) -> Iterator[tuple[Other, str]]:
    """What others have and the last source lacks, unless it is tied to something that this has."""
    for other in others:
        groups = _groups(other.checkpoint)
        for name in other.names:
            tied = groups[other.checkpoint.saved_name(name)]
            if name not in last.records and not any(one in last.records for one in tied):
                yield other, name


def _unlike(leaf: Leaf, name: str, there: Sequence[tuple[Checkpoint, Leaf]], last: Checkpoint) -> Iterator[str]:
    """What speaks against summing a tensor with those of other sources."""
    kind, dtype = _kind(leaf), leaf.record.dtype
    if dtype.startswith("float8") and any(f"{name}{scale}" in last.records for scale in _SCALES):
        yield f"{name} is {dtype} with scales of its own: a sum of both is no sum of the weights"
    for checkpoint, other in there:
        if other.shape != leaf.shape:
            yield f"{name} is {list(other.shape)} in {checkpoint.path} and {list(leaf.shape)} in {last.path}"
        elif _kind(other) != kind:
            yield f"{name} is {other.record.dtype} in {checkpoint.path} and {dtype} in {last.path}"


def _kind(leaf: Leaf) -> str:
    """Tensors of one kind are summed, or compared if it is a dtype."""
    dtype = leaf.record.dtype
    return "float" if can_cast(dtype) else "complex" if dtypes.torch_dtype(dtype).is_complex else dtype


def _with_terms(leaf: Leaf, terms: Sequence[tuple[Checkpoint, Leaf]], weights: Sequence[float], total: str) -> Leaf:
    kind = _kind(leaf)
    if kind not in ("float", "complex"):
        if prod(leaf.shape) == 1:  # a counter, such as that of steps: the last source's
            return leaf
        weights, total = [1.0] * len(terms), ""
    elif kind == "complex":
        total = _COMPLEX[total]
    summed = tuple(Term(*term, weight) for term, weight in zip(terms, weights, strict=True))
    return replace(leaf, terms=summed, total=total)
