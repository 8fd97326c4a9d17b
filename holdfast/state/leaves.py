"""What `collect` makes of a state: tensor entries, values, and the targets that a load hands values back to.

Only this room makes them; plan, save and load read them. Plain data that knows no torch internals.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from holdfast.errors import Unsupported
from holdfast.ondisk.box import Box
from holdfast.ondisk.containers import Note
from holdfast.ondisk.values import JSON, version_of_tree
from holdfast.plan.layout import Layout, OwnedValues, TensorLayout, digest_of
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


class TensorMaker(Protocol):
    """Makes the tensors of an object that takes its state whole; see `fresh.Maker`."""

    def make(self, name: str, dtype: str, shape: tuple[int, ...]) -> Made:
        """Memory for the saved tensor ``name``, laid out as the object keeps it here."""

    def assemble(self, leaves: dict[str, Any]) -> None:
        """Replace the parts of tensor subclasses among ``leaves``, tensors by name, by the tensors they make up."""


@dataclass(frozen=True)
class Target:
    """Where values of the checkpoint go: everything saved at or under ``path`` is rebuilt and handed to ``put``.

    With a ``maker`` the target is ``whole``: an object's own method takes all that was saved below the path, or those
    of it in ``names``, tensors included, in memory that ``maker`` makes. ``needs``: names at or below which something
    must have been saved. ``check`` raises Mismatch, before anything is changed, if the target cannot take what was
    saved. ``expects``: the dtype and shape (None: any) of tensors by name. ``undoing()``, called before ``put``,
    returns a function that undoes it, because an object may refuse its state. With ``again``, ``put`` is called once
    more when all tensors are filled. ``present()`` gives the object's tensors after the load, by name. ``put_some``
    takes a part of what was saved and leaves everything else as it is.
    """

    path: str
    put: Callable[[Any], None]
    maker: TensorMaker | None = None
    check: Callable[[Any], object] | None = None
    names: Sequence[str] | None = None
    needs: Collection[str] = ()
    expects: Mapping[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    undoing: Callable[[], Callable[[], None]] | None = None
    again: bool = False
    present: Callable[[], Mapping[str, Any]] | None = None
    put_some: Callable[[Any], None] | None = None

    @property
    def whole(self) -> bool:
        return self.maker is not None


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
class Changes:
    """Which tensors of a state may change, and when: for saves that copy them later.

    ``plain``: names of tensors that belong to no module or optimizer; ``dtensors`` are the DTensors among them, whose
    changes torch counts apart from those of their local parts. ``buffers``: names of modules' buffers, which each rank
    updates on its own. ``stable``: names of tensors that only a step of one of ``optimizers`` changes: its parameters
    and state. ``to_come``: parameters that have no optimizer state yet, and how many tensors of their size they will
    get.
    """

    plain: list[str] = field(default_factory=list)
    dtensors: list[torch.Tensor] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    stable: set[str] = field(default_factory=set)
    optimizers: list[Any] = field(default_factory=list)
    to_come: dict[str, int] = field(default_factory=dict)

    def merge(self, other: Changes) -> None:
        """Add what is known of other leaves of the same state."""
        self.plain += other.plain
        self.dtensors += other.dtensors
        self.buffers |= other.buffers
        self.stable |= other.stable
        self.optimizers += other.optimizers
        self.to_come.update(other.to_come)


@dataclass
class HandBack:
    """What a load does with a state beside filling its tensors, in this order.

    ``clears``: by name, leaves that go because the checkpoint says that nothing is in their place. ``before``: calls
    once every byte is there. ``targets`` get their values. ``after``: calls at the end. ``must_equal``: present tensors
    that nothing can take back, by name; the saved ones have to be equal.
    """

    clears: dict[str, Callable[[], None]] = field(default_factory=dict)
    before: list[Callable[[], None]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    must_equal: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass
class Collected:
    """All leaves of one rank's state.

    ``values`` must be equal on every rank; ``owned`` values belong to modules and optimizers, which a pipeline stage
    may lack. ``aliases`` are names whose tensor is the same memory as an entry's. ``kinds``: the kind of layer of each
    module, by name. ``handback`` is of a load.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, JSON] = field(default_factory=dict)
    owned: dict[str, JSON] = field(default_factory=dict)
    containers: dict[str, Note] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    per_rank: dict[str, PerRankLeaf] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    changes: Changes = field(default_factory=Changes)
    handback: HandBack = field(default_factory=HandBack)

    def add(self, entry: Entry) -> None:
        """Add a tensor. Raises Unsupported if its name is taken."""
        self._check_free(entry.name)
        self.entries[entry.name] = entry

    def add_stable(self, entries: list[Entry]) -> None:
        """Add tensors that only an optimizer's step changes."""
        for entry in entries:
            self.add(entry)
            self.changes.stable.add(entry.name)

    def add_value(self, name: str, value: JSON, *, owned: bool) -> None:
        """Add a value, of a module or optimizer if ``owned``. Raises Unsupported if its name is taken."""
        self._check_free(name)
        (self.owned if owned else self.values)[name] = value

    def merge(self, other: Collected) -> None:
        """Add the leaves of one module or optimizer. Raises Unsupported if a name is taken."""
        for entry in other.entries.values():
            self.add(entry)
        for name, value in other.owned.items():
            self.add_value(name, value, owned=True)
        self.containers.update(other.containers)
        self.aliases.update(other.aliases)
        self.groups.update(other.groups)
        self.kinds.update(other.kinds)
        self.changes.merge(other.changes)

    def _check_free(self, name: str) -> None:
        if name in self.entries or name in self.values or name in self.owned or name in self.per_rank:
            raise Unsupported(f"two leaves of the state are both named {name}; rename one")

    def tensors(self) -> list[torch.Tensor]:
        """All memory that the leaves are views of."""
        tensors = [view.tensor for entry in self.entries.values() for view in entry.views]
        return tensors + [tensor for leaf in self.per_rank.values() for tensor in leaf.tensors.values()]


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds, by the names that the target uses; loading shows it to `collect`.

    ``tensors`` maps a name to (dtype name, shape). An optimizer that has not stepped makes its state from it.
    ``shape_of`` gives the shape of any saved tensor, also of one that is not asked for; None if there is none.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    values: Mapping[str, JSON]
    containers: Mapping[str, Note] = field(default_factory=dict)
    asked: Callable[[str], bool] = field(default=lambda name: True)
    shape_of: Callable[[str], tuple[int, ...] | None] = field(default=lambda name: None)

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


def layout_of(state: Collected) -> Layout:
    table: dict[int, int] = {}
    spreads: list[Spread] = []
    known: dict[Spread, int] = {}
    tensors = []
    for entry in state.entries.values():
        index = table.get(id(entry.spread))
        if index is None:
            index = known.setdefault(entry.spread, len(spreads))
            if index == len(spreads):
                spreads.append(entry.spread)
            table[id(entry.spread)] = index
        alias = state.aliases.get(entry.name)
        empty = not entry.views and 0 not in entry.shape
        # A rank without elements leaves this to others, so that its layout equals that of its mesh neighbours.
        lone = empty and alias is None
        buffer = entry.name in state.changes.buffers
        tensors.append(TensorLayout(entry.name, entry.dtype, entry.shape, index, alias, lone, buffer))
    unheld = {a: n for a, n in state.aliases.items() if a not in state.entries}
    params = {path: [g.params for g in groups] for path, groups in state.groups.items()}
    version = max((version_of_tree(leaf.encoded) for leaf in state.per_rank.values()), default=1)
    return Layout(tensors, spreads, unheld, dict(state.containers), list(state.per_rank), params, version)


def owned_digest(state: Collected) -> str:
    """A digest of the owned values and of the parameters of each group: pipeline stages may differ in either."""
    return digest_of([owned_values(state), {path: [g.params for g in groups] for path, groups in state.groups.items()}])


def owned_values(state: Collected) -> OwnedValues:
    """The values that may be missing on other ranks."""
    settings = {path: [g.settings for g in groups] for path, groups in state.groups.items()}
    return OwnedValues(dict(state.owned), settings)
