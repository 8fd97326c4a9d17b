"""What `collect` finds in a state: tensor entries, values, and the targets that values go back to.

Made by this package alone; read by plan, save and load. Plain data: no torch internals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from holdfast.errors import Unsupported
from holdfast.ondisk.box import Box
from holdfast.ondisk.containers import Note
from holdfast.ondisk.values import JSON
from holdfast.plan.spread import Spread


class View(NamedTuple):
    """This rank's memory for one box of a tensor; ``tensor`` has the box's lengths as shape."""

    box: Box
    tensor: torch.Tensor


class Entry(NamedTuple):
    """One named tensor as this rank sees it: global ``shape``, torch's dtype name, spread, and its own views."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    spread: Spread
    views: list[View]


class Made(NamedTuple):
    """A new tensor for an object that takes its state whole: ``value`` is handed over once ``entries`` are filled."""

    value: Any
    entries: list[Entry]


Make = Callable[[str, str, tuple[int, ...]], Made]
"""Makes memory for the saved tensor of a name, dtype and global shape, laid out as the object keeps it here."""


@dataclass(frozen=True)
class Target:
    """Where values of the checkpoint go: everything saved at or under ``path`` is rebuilt and handed to ``put``.

    The target of an object that takes its state by a method of its own is ``whole``: it takes all that was saved below
    its path, or those of it in ``names``, tensors included, in new memory that ``make`` makes. ``needs`` are names that
    must have been saved, at which or below which something lies. ``check`` raises Mismatch, before anything is changed,
    if the target cannot take what was saved. ``expects``: the dtype and shape (None: any) of tensors by name.
    ``undoing()``, called before ``put``, gives what undoes it: the object's own method may refuse what was saved. With
    ``again`` it is put once more when all tensors are filled. ``present()`` gives the tensors that are there
    afterwards, by name, to tell what arrived. ``put_some`` takes some of what was saved, where the rest
    is not asked for, and leaves everything else as it is.
    """

    path: str
    put: Callable[[Any], None]
    whole: bool = False
    check: Callable[[Any], object] | None = None
    names: Sequence[str] | None = None
    make: Make | None = None
    assemble: Callable[[dict[str, Any]], None] | None = None
    needs: Collection[str] = ()
    expects: Mapping[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    undoing: Callable[[], Callable[[], None]] | None = None
    again: bool = False
    present: Callable[[], Mapping[str, Any]] | None = None
    put_some: Callable[[Any], None] | None = None


@dataclass(frozen=True)
class PerRankLeaf:
    """A value that differs by rank: its JSON, the tensors that the JSON refers to, and how it goes back."""

    path: str
    encoded: JSON
    tensors: dict[str, torch.Tensor]
    put: Callable[[Any], None]
    elsewhere: object


@dataclass(frozen=True)
class Group:
    """One parameter group of an optimizer: its settings as JSON by key, and the names of its parameters."""

    settings: dict[str, JSON]
    params: list[str]


@dataclass
class Collected:
    """All leaves of one rank's state.

    ``values`` must be equal on every rank; ``owned`` belong to modules and optimizers, which a pipeline stage may
    lack. ``aliases`` are names whose tensor is the same memory as an entry's. ``plain`` are names of tensors that
    belong to no module or optimizer, ``buffers`` those of modules' buffers, which ranks update each on its own.
    ``still`` are names of tensors that nothing but a step of one of ``optimizers`` changes: its parameters and state.
    ``given`` are the DTensors among these: torch counts the changes of a DTensor apart from those of its local part.
    ``to_come``: parameters whose optimizer has no state for them yet, and how many tensors of their size it will keep.
    ``kinds``: what kind of layer each module is, by name.

    Of a load: ``then`` is called once every byte is there, before values are handed back, and ``after`` afterwards.
    ``must_equal`` are present tensors by name that nothing can take back: the saved ones have to be equal. ``clears``:
    names of leaves that go, since the checkpoint says that there is nothing in their place.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, JSON] = field(default_factory=dict)
    owned: dict[str, JSON] = field(default_factory=dict)
    containers: dict[str, Note] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    given: list[torch.Tensor] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    optimizers: list[Any] = field(default_factory=list)
    to_come: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    per_rank: dict[str, PerRankLeaf] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    must_equal: dict[str, torch.Tensor] = field(default_factory=dict)
    clears: dict[str, Callable[[], None]] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        """Add a tensor. Raises Unsupported if its name is taken."""
        self._check_free(entry.name)
        self.entries[entry.name] = entry

    def add_value(self, name: str, value: JSON, *, owned: bool) -> None:
        """Add a value, of a module or optimizer if ``owned``. Raises Unsupported if its name is taken."""
        self._check_free(name)
        (self.owned if owned else self.values)[name] = value

    def _check_free(self, name: str) -> None:
        if name in self.entries or name in self.values or name in self.owned or name in self.per_rank:
            raise Unsupported(f"two leaves of the state are both named {name}; rename one")

    def tensors(self) -> Iterator[torch.Tensor]:
        """All memory that the leaves are views of."""
        for entry in self.entries.values():
            yield from (view.tensor for view in entry.views)
        for leaf in self.per_rank.values():
            yield from leaf.tensors.values()


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, by the names that the target uses; loading shows it to `collect`.

    ``tensors`` maps a name to (dtype name, shape). An optimizer that has not stepped makes its state from it.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, JSON]
    containers: Mapping[str, Note] = field(default_factory=dict)
    asked: Callable[[str], bool] = field(default=lambda name: True)

    def has(self, path: str) -> bool:
        """Whether anything was saved at ``path`` or below it."""
        return path in self.tensors or path in self.values or path in self.containers or path in self._below

    def below(self, path: str) -> list[str]:
        """Names of the tensors, values and noted containers below ``path``."""
        return self._below.get(path, [])

    @cached_property
    def _below(self) -> dict[str, list[str]]:
        """Every path that is above something, with all that is below it."""
        below: dict[str, list[str]] = {}
        for name in dict.fromkeys([*self.values, *self.containers, *self.tensors]):
            at = name
            while "/" in at:
                at = at.rpartition("/")[0]
                below.setdefault(at, []).append(name)
        return below
