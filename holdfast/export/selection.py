"""What is to be converted: the tensors and values that were asked for, and the names and dtypes that they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import datafile, dtypes, names, values
from holdfast.ondisk.box import relative, runs, whole
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.containers import Note, is_sequence, mapping_of, sequence_of
from holdfast.read.nested import nest


class Update(NamedTuple):
    """A matrix that is a product of two small ones, which are in memory: ``left @ right``."""

    left: torch.Tensor
    right: torch.Tensor

    def fill(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Elements ``start:stop`` of the flattened matrix. Only the rows that they lie in are computed."""
        columns = self.right.shape[1]
        first, last = start // columns, -(-stop // columns)
        rows = self.left[first:last].to(into.dtype) @ self.right.to(into.dtype)
        into.copy_(rows.reshape(-1)[start - first * columns : stop - first * columns])


class Term(NamedTuple):
    """What one of several checkpoints adds to a tensor: its own tensor, or an ``update`` of it, times ``weight``."""

    checkpoint: Checkpoint
    leaf: Leaf
    weight: float
    update: Update | None = None


class Run(NamedTuple):
    """Elements ``start:stop`` of a flattened tensor that are all of one piece of the source."""

    start: int
    stop: int
    key: str
    file: int


@dataclass(frozen=True)
class Leaf:
    """A tensor on its way: what the source calls it and how it keeps it, what the target calls it, and its new dtype.

    ``sealed``: the source has sums of its blocks. ``terms``: of a merge, what is summed in ``total``, a dtype; with no
    ``total`` the tensors of all terms must be equal. What a merge does not sum has none. ``made``: a map
    makes the tensor of others.
    """

    name: str
    saved: str
    record: TensorRecord
    dtype: str
    sealed: bool
    terms: tuple[Term, ...] = ()
    total: str = ""
    made: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.record.shape

    @property
    def nbytes(self) -> int:
        """Its bytes in the target."""
        return prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @cached_property
    def width(self) -> int:
        """Bytes of one element in a source, at most."""
        return max(dtypes.itemsize(leaf.record.dtype) for leaf in (self, *(term.leaf for term in self.terms)))

    @cached_property
    def layout(self) -> Leaf:
        """The tensor of a source whose blocks say where to cut: of a merge, the first one that has sums."""
        return next((term.leaf for term in self.terms if term.leaf.runs is not None), self)

    @cached_property
    def runs(self) -> list[Run] | None:
        """Its pieces in order if each is a run of the flattened tensor and has sums; else None."""
        if not self.sealed or self.made or 0 in self.shape:
            return None
        pieces = []
        for box, file in self.record.boxes():
            run, starts = runs(whole(self.shape), relative(box, whole(self.shape)))
            if len(starts) > 1:
                return None
            key = datafile.key_of(names.in_section(self.saved), box, self.shape)
            pieces.append(Run(starts[0], starts[0] + run, key, file))
        return sorted(pieces)


@dataclass(frozen=True)
class Selection:
    """What was selected, by the names of the target.

    ``tensors``: each that is stored once; ``aliases``: the other names of tied ones; ``values`` as a manifest has
    them; ``per_rank``: what differs by rank, with the path that the source has for it. ``origin``: the source's name
    of everything. ``skipped``: what was not asked for.
    """

    tensors: dict[str, Leaf]
    aliases: dict[str, str]
    values: dict[str, Any]
    containers: dict[str, Note]
    per_rank: dict[str, str]
    world_size: int
    origin: dict[str, str]
    skipped: list[str]

    def plain(self) -> list[Any]:
        """All of it as plain data, to be summed."""
        tensors = [[x.name, x.saved, x.record, x.dtype, *_terms(x)] for x in self.tensors.values()]
        return [tensors, self.aliases, self.values, self.containers, self.per_rank, self.world_size]


def _terms(leaf: Leaf) -> list[Any]:
    return [leaf.total, *([t.leaf.saved, t.leaf.record, t.weight] for t in leaf.terms)] if leaf.terms else []


def select(checkpoint: Checkpoint, wanted: Callable[[str], bool]) -> Selection:
    """Everything whose name is ``wanted``, under its own name. Of tied tensors the first one wanted is kept."""
    record = checkpoint.manifest
    sealed = all(file.header_bytes for file in record.data_files)
    tensors: dict[str, Leaf] = {}
    aliases: dict[str, str] = {}
    keeper: dict[str, str] = {}
    for name, tensor in checkpoint.records.items():
        if wanted(name):
            stored = checkpoint.saved_name(name)
            if keeper.setdefault(stored, name) == name:
                tensors[name] = Leaf(name, stored, tensor, tensor.dtype, sealed, made=checkpoint.files.is_made(stored))
            else:
                aliases[name] = keeper[stored]
    leaves = {path: value for path, value in record.values.items() if wanted(path)}
    per_rank = {path: path for path in record.per_rank if wanted(path)}
    origin_names = [*tensors, *aliases, *leaves, *per_rank]
    above = set(origin_names)
    for name in origin_names:
        while "/" in name and (name := name.rpartition("/")[0]) not in above:
            above.add(name)
    containers = {path: kind for path, kind in record.containers.items() if path in above or wanted(path)}
    everything = [*checkpoint.records, *record.values, *record.per_rank]
    skipped = [name for name in everything if not wanted(name)]
    origin = {name: name for name in origin_names}
    return Selection(tensors, aliases, leaves, containers, per_rank, checkpoint.world_size, origin, skipped)


def renamed(selection: Selection, rename: Callable[[str], str]) -> Selection:
    """The same under other names. Raises Mismatch if two get the same name, or one gets none."""
    new = {name: rename(name) for name in selection.origin}
    taken: dict[str, str] = {}
    for old, name in new.items():
        if not isinstance(name, str) or not name:
            raise Mismatch(f"rename= makes {name!r} of {old}; a name is a text that is not empty")
        if taken.setdefault(name, old) != old:
            raise Mismatch(f"rename= gives {taken[name]} and {old} the same name {name}")
    return replace(
        selection,
        tensors={new[name]: replace(leaf, name=new[name]) for name, leaf in selection.tensors.items()},
        aliases={new[alias]: new[name] for alias, name in selection.aliases.items()},
        values={new[path]: value for path, value in selection.values.items()},
        containers={rename(path): kind for path, kind in selection.containers.items()},
        per_rank={new[path]: source for path, source in selection.per_rank.items()},
        origin={new[name]: source for name, source in selection.origin.items()},
    )


def check_names(selection: Selection) -> None:
    """Raise Mismatch for a name that is no path of keys, or that is both a leaf and above one."""
    for name in selection.origin:
        if names.join(names.split(name)) != name or "" in name.split("/"):
            raise Mismatch(
                f"rename= makes {name!r}, which is no path of escaped keys; {names.join((name,))!r} is one key"
            )
        above = name
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in selection.origin:
                raise Mismatch(f"rename= makes {above} and {name}: a leaf cannot be above another")


def cast(selection: Selection, dtype: torch.dtype | None) -> Selection:
    """The same with all floating tensors of ``dtype``."""
    if dtype is None:
        return selection
    tensors = {
        name: replace(leaf, dtype=dtypes.name_of(dtype)) if can_cast(leaf.record.dtype) else leaf
        for name, leaf in selection.tensors.items()
    }
    return replace(selection, tensors=tensors)


def can_cast(dtype: str) -> bool:
    """Whether ``dtype`` is of floating numbers, one by one; packed ones have their scales elsewhere."""
    return dtypes.torch_dtype(dtype).is_floating_point and not dtype.startswith("float4")


def nested(selection: Selection, fetch: Callable[[str, int], Any]) -> dict[str, Any]:
    """The state that was selected: nested as it was saved, a `Leaf` for each tensor, a list by rank of what differs."""
    leaves: dict[str, Any] = dict(selection.tensors)
    leaves.update((alias, selection.tensors[name]) for alias, name in selection.aliases.items())
    leaves.update((path, values.decoded(value, path, "the selection")) for path, value in selection.values.items())
    for path, source in selection.per_rank.items():
        leaves[path] = [fetch(source, rank) for rank in range(selection.world_size)]
    return nest(leaves, selection.containers)


def check_values(selection: Selection, check: Callable[[Any], object]) -> None:
    """Raise Unsupported, with its path, for a value that ``check`` refuses: before anything is copied."""
    for path, value in selection.values.items():
        try:
            check(values.decoded(value, path, "the selection"))
        except Unsupported as error:
            raise Unsupported(f"{path}: {error}; leave it out by only=") from None
    for path, note in selection.containers.items():
        try:
            check(sequence_of(note, []) if is_sequence(note) else mapping_of(note, {}))
        except Unsupported as error:
            raise Unsupported(f"{path}: {error}; leave it out by only=") from None
