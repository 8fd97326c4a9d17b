"""One walk over a state: what it has collected so far, and what the kinds of objects ask of it.

`collect` makes one, and the functions of the table take it. Never decides what becomes of an object.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

from torch import nn

from holdfast.ondisk import names, scalars, values
from holdfast.ondisk.containers import kind_of
from holdfast.ondisk.values import SINGLE
from holdfast.ranks.ranks import Ranks
from holdfast.state import modules, trees
from holdfast.state.fresh import Maker
from holdfast.state.kinds import is_dtensor
from holdfast.state.leaves import Collected, Saved
from holdfast.state.parameters import Known, names_of_parameters
from holdfast.state.recall import Recall
from holdfast.state.tensors import PLAIN, entries_of, plain_entry
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
        if type(tensor) in PLAIN:  # by far the most common
            into.add(plain_entry(path, tensor))
            into.changes.plain.append(path)
            return
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
        self._on_mesh = cache(partial(_on_mesh, state, saved.has))

    def maker(self, **options: Any) -> Maker:
        """A `Maker` for tensors that nothing in the state is like. It never refers to the walk, which may hold it."""
        return Maker(self.saved, self.ranks, on_mesh=self._on_mesh, **options)


def _on_mesh(state: Mapping[str, Any], saved: Callable[[str], bool]) -> DTensor | None:
    """One of the DTensors of the state, if they all lie on one mesh."""
    tensors = [t for _, module in modules_of("", state, saved) for t in module.parameters()]
    dtensors = [t for t in (*tensors, *(t for _, t in bare_tensors("", state))) if is_dtensor(t)]
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


class Filling:
    """One load; it remembers what it has filled, since a container may stand at several places of a state.

    With ``keep`` a dict keeps what it has under other keys than the saved ones.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._filled: set[int] = set()

    def put(self, present: Any, put: Callable[[Any], None], saved: Any) -> None:
        """Fill ``present`` with ``saved``, or ``put`` what belongs in its place."""
        made = self.filled(present, saved)
        if made is not present:
            put(made)

    def filled(self, present: Any, saved: Any) -> Any:
        """What now belongs in the place of ``present``: itself, filled with ``saved``, if it is of the same kind."""
        if not _alike(present, saved):
            return saved
        if isinstance(present, tuple):
            return tuple(self._items(present, saved))
        if id(present) in self._filled:  # so it now holds what was saved at another place
            return present if _equal(present, saved) else saved
        self._filled.add(id(present))
        if isinstance(present, dict):
            self._fill_dict(present, saved)
        elif isinstance(present, (list, deque)):
            items = self._items(present, saved)
            present.clear()
            present.extend(items)
        elif isinstance(present, set):
            present.clear()
            present.update(saved)
        else:
            present[... if scalars.is_array(present) else slice(None)] = saved
        return present

    def _fill_dict(self, present: dict[Any, Any], saved: dict[Any, Any]) -> None:
        children = {k: self.filled(present[k], v) if k in present else v for k, v in saved.items()}
        if not self._keep:
            present.clear()
        present.update(children)
        if isinstance(present, defaultdict) and isinstance(saved, defaultdict):
            present.default_factory = saved.default_factory

    def _items(self, present: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        items = list(saved)
        if set(map(type, present)) <= SINGLE:
            return items
        for at, (one, other) in enumerate(zip(present, saved, strict=False)):
            items[at] = self.filled(one, other)
        return items


def _alike(present: Any, saved: Any) -> bool:
    """Whether one can be made equal to the other, and stay of its own type."""
    if isinstance(present, dict) and type(saved) is dict:
        return True  # also one of a class of its own, and a Counter that version 0.1 saved as a dict
    if type(present) is not type(saved):
        return False
    if scalars.is_array(present):
        return bool(present.dtype == saved.dtype and present.shape == saved.shape and present.flags.writeable)
    if isinstance(present, deque):
        return bool(present.maxlen == saved.maxlen)
    return isinstance(present, (set, bytearray)) or kind_of(present) is not None


def _equal(present: Any, saved: Any) -> bool:
    try:
        return bool(present == saved)
    except (ValueError, RuntimeError):  # arrays inside, of which each element is compared
        return False
