"""The names of a checkpoint as the target of a load calls them.

`load` and torch's calls make a `Names` before they compare. Reads nothing but the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Mismatch
from holdfast.ondisk import names, values
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.manifest import FORMAT
from holdfast.ondisk.patterns import Patterns, Rename, asked_in_target
from holdfast.ondisk.values import JSON
from holdfast.read.nested import nest
from holdfast.state import Collected, Saved, Target
from holdfast.state.own_optimizers import names_for_ids, optimizers_of


@dataclass(frozen=True)
class Names:
    """What a checkpoint holds, by the names of the target.

    ``saved``: what is asked for. ``sources``: every tensor's name in the checkpoint. ``per_rank``: the same for values
    that differ by rank, as far as they are asked for. ``in_part``: paths above a name that is not asked for.
    """

    checkpoint: Checkpoint
    saved: Saved
    sources: dict[str, str]
    per_rank: dict[str, str]
    renamed: dict[str, str]
    skipped: list[str]
    in_part: set[str]

    def stored(self, name: str) -> tuple[str, TensorRecord]:
        """The name under which a tensor's bytes are stored, and its record."""
        source = self.sources[name]
        return self.checkpoint.saved_name(source), self.checkpoint.records[source]

    @property
    def asked_for(self) -> list[str]:
        """Everything that is asked for, sorted: the same list on every rank."""
        return sorted({**self.saved.tensors, **self.saved.values, **self.per_rank})


def names_of(
    checkpoint: Checkpoint, called: Callable[[str], str], values: Mapping[str, JSON], asked: Callable[[str], bool]
) -> Names:
    """The names of a checkpoint, each as ``called`` in the target, and which of them are ``asked`` for there.

    ``called`` and ``values`` come from `with_named_ids`. Raises Mismatch if two saved names get the same new one.
    """
    manifest = checkpoint.manifest
    everything = [*checkpoint.records, *manifest.values, *manifest.per_rank]
    own = {name: called(name) for name in everything}
    if len(set(own.values())) < len(everything):
        raise Mismatch(f"rename= gives two saved names of {checkpoint.path} the same new name")
    skipped = [name for name, here in own.items() if not asked(here)]
    in_part: set[str] = set()
    for name in skipped:
        above = own[name]
        while "/" in above and (above := above.rpartition("/")[0]) not in in_part:
            in_part.add(above)
    wanted = own.keys() - skipped
    records = checkpoint.records
    sources = {own[name]: name for name in records}
    saved = Saved(
        {own[name]: (record.dtype, record.shape) for name, record in records.items() if name in wanted},
        {own[name]: value for name, value in values.items() if name in wanted},
        {called(path): note for path, note in manifest.containers.items()},
        asked,
        lambda name: records[sources[name]].shape if name in sources else None,
    )
    return Names(
        checkpoint, saved, sources,
        {own[path]: path for path in manifest.per_rank if path in wanted},
        {name: here for name, here in own.items() if name != here}, skipped, in_part,
    )  # fmt: skip


def with_named_ids(
    checkpoint: Checkpoint, called: Callable[[str], str], into: Mapping[str, Any]
) -> tuple[Callable[[str], str], dict[str, JSON]]:
    """``called`` and the saved values, with optimizer state under integer ids called by its parameters' names."""
    values = dict(checkpoint.manifest.values)
    states: dict[str, str] = {}
    renamed = {called(name): name for name in values}
    for path in optimizers_of(renamed):
        named, params = names_for_ids(path, {name: values[source] for name, source in renamed.items()}, into)
        states.update(named)
        values.update((renamed[at], fqn) for at, fqn in params.items())
    if not states:
        return called, values

    def called_by_parameter(name: str) -> str:
        own = called(name)
        head = own.rpartition("/")[0]
        while head and head not in states:
            head = head.rpartition("/")[0]
        return states[head] + own[len(head) :] if head else own

    return called_by_parameter, values


def asked_of(
    checkpoint: Checkpoint, only: Patterns, rename: Rename | None, renamed: Mapping[str, str], into: Mapping[str, Any]
) -> Callable[[str], bool]:
    """Tells whether a name, as the target calls it, is to be loaded; ``renamed``: the target's name of each saved one.

    Other trainers keep much that no object here could take (their timers, their arguments). So of a foreign checkpoint
    what ``into`` has no first key for is skipped.
    """
    if checkpoint.format == FORMAT or only != "*":
        return asked_in_target(only, rename, renamed)
    sections = {names.escape(key) for key in into if isinstance(key, str)}
    return lambda name: name.partition("/")[0] in sections


def own_names(state: Collected, into: Mapping[str, Any]) -> set[str]:
    """The names of all that the target has, and of places that may be empty: its first keys, optimizers' states."""
    paths = (target.path for target in state.handback.targets)
    keys = (names.escape(key) for key in into if isinstance(key, str))
    states = (names.child(path, "state") for path in state.groups)
    return {*state.entries, *state.values, *state.owned, *state.per_rank, *paths, *keys, *states}


def names_below(target: Target, saved: Saved) -> Sequence[str]:
    """The names that a target takes, of all that was saved at or below its path."""
    return target.names if target.names is not None else (target.path, *saved.below(target.path))


def leaves_of(target: Target, saved: Saved) -> list[str]:
    """What the checkpoint has of a target: values, containers, and for a whole target tensors too."""
    names = names_below(target, saved)
    held = [n for n in names if n in saved.values or (target.whole and n in saved.tensors)]
    empty = [n for n in names if n in saved.containers]
    return [*held, *empty] if held or any(saved.asked(n) for n in empty) else []


def tree_of(target: Target, saved: Saved, fresh: Mapping[str, Any], where: object) -> Any:
    """What was saved at a target, nested as it was; ``fresh`` has its tensors by name."""
    below = names_below(target, saved)
    leaves: dict[str, Any] = {}
    if target.maker is not None:
        leaves.update((name, fresh[name]) for name in below if name in fresh)
        target.maker.assemble(leaves)
    leaves.update((n, values.decoded(saved.values[n], n, where)) for n in below if n in saved.values)
    notes = {n: saved.containers[n] for n in below if n in saved.containers and n not in leaves}
    root, cut = "r", len(target.path)
    tree = nest({root + n[cut:]: v for n, v in leaves.items()}, {root + n[cut:]: note for n, note in notes.items()})
    return tree[root]
