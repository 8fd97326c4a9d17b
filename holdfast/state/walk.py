"""One walk over a state: what it has collected so far, and what the kinds of objects ask of it.

`collect` makes one, and the functions of the table take it. Never decides what becomes of an object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.ondisk import names, values
from holdfast.ranks.ranks import Ranks
from holdfast.state import modules, trees
from holdfast.state.fresh import Maker
from holdfast.state.in_place import Filling
from holdfast.state.kinds import is_dtensor
from holdfast.state.leaves import Collected, Saved
from holdfast.state.parameters import Known, names_of_parameters
from holdfast.state.recall import Recall
from holdfast.state.tensors import entries_of
from holdfast.state.trees import bare_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Put = Callable[[Any], None]
"""Stores a new value in the place of an object of the state."""


class Walk:
    """A walk to save ``state``; ``into`` fills as it goes."""

    saved: Saved | None = None

    def __init__(self, ranks: Ranks, state: Mapping[str, Any], recall: Recall | None = None) -> None:
        self.ranks, self.state, self.recall = ranks, state, recall
        self.into = Collected()

    @property
    def has(self) -> Callable[[str], bool] | None:
        """Of a load, whether the checkpoint has anything at or below a path."""
        return None if self.saved is None else self.saved.has

    @cached_property
    def owners(self) -> list[tuple[str, nn.Module]]:
        """The modules of the state by path."""
        return list(modules_of("", self.state, self.has))

    @cached_property
    def known(self) -> Known:
        """What each parameter of the state is called."""
        return names_of_parameters(self.owners, bare_tensors("", self.state))

    def plain(self, path: str, tensor: Any, into: Collected | None = None) -> None:
        """Add a tensor that belongs to no module or optimizer."""
        into = into or self.into
        for entry in entries_of(path, tensor, self.ranks):
            into.add(entry)
            into.changes.plain.append(entry.name)
        if is_dtensor(tensor):
            into.changes.dtensors.append(tensor)

    def noted(self, path: str, tensor: Any, into: Collected | None = None) -> None:
        """Add a tensor of an object that takes its state whole."""
        self.plain(path, tensor, into)
        trees.note_tensor(path, tensor, None, into or self.into)


class Loading(Walk):
    """A walk to load ``saved`` into ``state``."""

    saved: Saved

    def __init__(self, ranks: Ranks, state: Mapping[str, Any], saved: Saved) -> None:
        super().__init__(ranks, state)
        self.saved = saved
        self.filling, self.filling_some = Filling(), Filling(keep=True)

    def maker(self, **options: Any) -> Maker:
        """A `Maker` for tensors that nothing in the state is like."""
        return Maker(self.saved, self.ranks, on_mesh=lambda: self._on_mesh, **options)

    @cached_property
    def _on_mesh(self) -> DTensor | None:
        """One of the DTensors of the state, if they all lie on one mesh."""
        tensors = [t for _, module in self.owners for t in module.parameters()]
        dtensors = [t for t in (*tensors, *(t for _, t in bare_tensors("", self.state))) if is_dtensor(t)]
        same = dtensors and all(t.device_mesh == dtensors[0].device_mesh for t in dtensors)
        return dtensors[0] if same else None


def modules_of(
    path: str, node: Any, saved: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, nn.Module]]:  # fmt: skip
    """Every module of a state with the path that its leaves get; ``saved``: see `modules.merged`."""
    if isinstance(node, nn.Module):
        yield path, node
    elif isinstance(node, (list, tuple)) and node and all(isinstance(v, nn.Module) for v in node):
        yield from modules.merged(path, list(node), saved)
    elif isinstance(node, (dict, list, tuple)):
        for key, value in trees.items_of(node):
            if type(value) not in values.SINGLE:
                yield from modules_of(names.child(path, str(key)), value, saved)
