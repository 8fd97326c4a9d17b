"""What `collect` finds in a state: tensor entries, values, and the slots that values go back to.

Made by this package alone; read by plan, save and load. Plain data: no torch internals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from holdfast.engine.spread import Spread
from holdfast.ondisk.box import Box
from holdfast.ondisk.containers import Note
from holdfast.ondisk.values import JSON


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


@dataclass(frozen=True)
class Slot:
    """Where values of the checkpoint go: everything saved at or under ``path`` is rebuilt and handed to ``put``.

    A slot of an object with a ``state_dict`` of its own is ``whole``: it takes all that was saved below its path,
    tensors included. ``held`` are its present tensors by name: the ones that fit are filled in place. ``check``
    raises Mismatch, before anything is changed, if the target cannot take what was saved. ``put_some`` takes some of
    what was saved, where the rest is not asked for, and leaves everything else as it is.
    """

    path: str
    put: Callable[[Any], None]
    whole: bool = False
    check: Callable[[Any], object] | None = None
    held: dict[str, Any] = field(default_factory=dict)
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
    ``to_come``: parameters whose optimizer has no state for them yet, and how many tensors of their size it will keep.
    ``kinds``: what kind of layer each module is, by name.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    values: dict[str, JSON] = field(default_factory=dict)
    owned: dict[str, JSON] = field(default_factory=dict)
    containers: dict[str, Note] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    plain: list[str] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    still: set[str] = field(default_factory=set)
    optimizers: list[Any] = field(default_factory=list)
    to_come: dict[str, int] = field(default_factory=dict)
    groups: dict[str, list[Group]] = field(default_factory=dict)
    per_rank: dict[str, PerRankLeaf] = field(default_factory=dict)
    slots: list[Slot] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)

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
    _children: dict[str, list[str]] = field(default_factory=dict)

    def below(self, prefix: str) -> list[str]:
        """Names of tensors and values below ``prefix``, two keys deep at the most: how optimizer state lies."""
        if not self._children:
            for name in self._names():
                self._children.setdefault(name.rpartition("/")[0], []).append(name)
        return self._children.get(prefix, [])

    def _names(self) -> Iterator[str]:
        yield from self.tensors
        yield from self.values
