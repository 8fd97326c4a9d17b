"""From a nested state to its leaves: one walk, the same for saving and for loading.

`save` and `load` call `collect`. Never copies a tensor and never changes an object of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.engine.ranks import Ranks
from holdfast.engine.state import modules, optimizers
from holdfast.engine.state.in_place import Filling
from holdfast.engine.state.leaves import Collected, Entry, PerRankLeaf, Saved, Slot
from holdfast.engine.state.per_rank import RNG, PerRank, is_stateful
from holdfast.engine.state.recall import Recall, so_far
from holdfast.engine.state.structure import kinds_of
from holdfast.engine.state.tensors import dtype_name, entries_of, is_tensor_leaf
from holdfast.errors import Unsupported
from holdfast.ondisk import containers, names, packing, values
from holdfast.ondisk.values import JSON


def collect(
    state: Mapping[str, Any], ranks: Ranks, saved: Saved | None = None, *, recall: Recall | None = None
) -> Collected:
    """All leaves of ``state`` as this rank holds them, tensors as views of their own memory.

    ``saved`` (when loading) says what the checkpoint holds, so that empty optimizers can make room for it. With
    ``recall`` (when saving) what has not changed since the last time is not walked again; then there are no slots.
    Raises Unsupported, naming the path of the first leaf that cannot be saved.
    """
    if not isinstance(state, dict):
        raise Unsupported(f"a state is a dict of names, not a {type(state).__qualname__}: wrap it as {{'model': …}}")
    if recall is not None:
        recall.begin()
    walk = _Walk(ranks, state, saved, recall)
    try:
        walk.container("", state)
    except RecursionError:
        raise Unsupported("a container of the state contains itself, or is nested hundreds of times") from None
    _find_aliases(walk.into)
    return walk.into


def modules_of(path: str, node: Any) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a state with the path that its leaves get."""
    if isinstance(node, nn.Module):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            if type(value) not in values.SINGLE:
                yield from modules_of(names.child(path, str(key)), value)
    elif isinstance(node, (list, tuple)):
        if node and all(isinstance(v, nn.Module) for v in node):
            yield from modules.merged(path, list(node))
        else:
            for i, value in enumerate(node):
                if type(value) not in values.SINGLE:
                    yield from modules_of(names.child(path, str(i)), value)


_GROUPS = "param_groups"


class _Walk:
    """The walk under way; ``into`` fills as it goes."""

    def __init__(self, ranks: Ranks, state: Mapping[str, Any], saved: Saved | None, recall: Recall | None) -> None:
        self.ranks, self.state, self.saved, self.recall = ranks, state, saved, recall
        self.into = Collected()
        self.filling, self.filling_some = Filling(), Filling(keep=True)

    @cached_property
    def known(self) -> dict[int, tuple[str, optimizers.Named]]:
        """What each parameter of the state's modules is called."""
        return optimizers.names_of_parameters(self.owners)

    @cached_property
    def owners(self) -> list[tuple[str, nn.Module]]:
        """The modules of the state by path."""
        return list(modules_of("", self.state))

    def node(self, path: str, node: Any, put: Callable[[Any], None]) -> None:
        """One leaf, object or container at ``path``; ``put`` stores a new value in its place."""
        if is_tensor_leaf(node):
            self.into.plain += [entry.name for entry in self.tensor(path, node)]
        elif isinstance(node, PerRank):
            self.per_rank(path, node.state(), node.put, node.elsewhere)
        elif isinstance(node, RNG):
            self.per_rank(path, node.state_dict(), node.load_state_dict, node.rule())
        elif isinstance(node, nn.Module):
            self.module(path, node)
        elif _is_plain_optimizer(node):
            self.optimizers(path, [node])
        elif _is_container(node):
            if node and isinstance(node, (list, tuple)) and all(isinstance(v, nn.Module) for v in node):
                for at, module in modules.merged(path, list(node)):
                    self.module(at, module)
            elif node and isinstance(node, (list, tuple)) and all(_is_plain_optimizer(v) for v in node):
                self.optimizers(path, list(node))
            elif _only_values(node):
                self.values(path, node, self.into.values)
                self.values_slot(path, node, put)
            else:
                self.container(path, node)
        elif is_stateful(node):
            self.stateful(path, node)
        else:
            self.values(path, node, self.into.values)
            self.values_slot(path, node, put)

    def values_slot(self, path: str, node: Any, put: Callable[[Any], None]) -> None:
        """A place for values: a container that stands there is filled, so that others who hold it see them."""
        self.into.slots.append(Slot(
            path, partial(self.filling.put, node, put), put_some=partial(self.filling_some.put, node, put)
        ))  # fmt: skip

    def container(self, path: str, node: Any) -> None:
        """The children of a container that holds more than plain values; it is filled in place and keeps its class."""
        named = self.note_container(path, node, in_place=True)
        for (name, _), (key, value) in zip(named, _items(node), strict=True):
            at = names.child(path, name)
            if isinstance(node, tuple):
                self.node(at, value, _cannot_put(at))
            elif is_tensor_leaf(value):  # needs no way back: it is filled where it lies
                self.into.plain += [entry.name for entry in self.tensor(at, value)]
            else:
                self.node(at, value, partial(node.__setitem__, key))

    def note_container(self, path: str, node: Any, *, in_place: bool = False) -> list[tuple[str, Any]]:
        """Note what kind of container this is, where its name does not say it (see docs/format.md).

        Returns its children's names, each with the key that it stands for.
        """
        try:
            named = containers.key_names(node) if isinstance(node, dict) else [(str(i), i) for i in range(len(node))]
            if path:
                # A module's state dict is an OrderedDict of tensors: of such the class does not matter.
                exact = not in_place and not (node and all(map(is_tensor_leaf, containers.children(node))))
                ordered = not in_place and isinstance(node, dict) and _comes_back_in_another_order(node)
                note = containers.note_of(node, named, ordered=ordered, exact=exact)
                if note is not None:
                    self.into.containers[path] = note
            else:
                _check_top(named)
        except values.Refused as error:
            raise Unsupported(f"{path or 'the state'}: {error.reason}") from None
        return named

    def values(self, path: str, node: Any, into: dict[str, JSON]) -> None:
        """Plain values, however nested; a long container is one value (see `packing.is_long`)."""
        try:
            if not _is_container(node):
                into[path] = values.encode(node)
                return
            # Optimizer state that torch keeps by number is looked up by the names of these.
            if packing.is_long(node) and _GROUPS not in path.split("/"):
                into[path] = packing.packed(node)
                return
        except values.Refused as error:
            raise Unsupported(f"{path}{error.path}: {error.reason}") from None
        named = self.note_container(path, node)
        for (name, _), (_, value) in zip(named, _items(node), strict=True):
            self.values(names.child(path, name), value, into)

    def tensor(self, path: str, tensor: Any) -> list[Entry]:
        added = list(entries_of(path, tensor, self.ranks))
        for entry in added:
            if entry.name in self.into.entries:
                raise Unsupported(f"two leaves of the state are both named {entry.name}; rename one")
            self.into.entries[entry.name] = entry
        return added

    def module(self, path: str, module: nn.Module) -> None:
        if self.recall is not None and self.recall.module(path, module, self.into):
            return
        before = so_far(self.into) if self.recall is not None else None
        modules.check_not_lazy(path, module)
        state = modules.module_state(path, module, self.ranks)
        for entry in state.entries:
            self.into.entries[entry.name] = entry
        for fqn, tensor in state.tensors.items():
            self.tensor(names.child(path, fqn), tensor)
            if fqn in state.loose:
                self.into.then.append(partial(modules.put_loose, module, fqn, tensor))
        for fqn, value in state.loose.items():
            if fqn not in state.tensors:
                at = names.child(path, fqn)
                self.owned(at, value, partial(modules.put_loose, module, fqn))
        self.into.aliases.update(state.aliases)
        self.into.kinds.update(kinds_of(path, module))
        self.into.buffers |= {names.child(path, fqn) for fqn in modules.buffer_names(module)}
        if not state.entries and not state.tensors and not state.loose:
            self.into.containers[path] = "dict"
        elif self.recall is not None and before is not None and not state.entries and not state.loose:
            self.recall.note_module(path, module, before, self.into)

    def owned(self, path: str, value: Any, put: Callable[[Any], None]) -> None:
        """A value of a module (its extra state): other pipeline stages need not have it."""
        held: dict[str, Any] = {}
        self.saved_tree(path, value, self.into.owned, held)
        self.into.slots.append(Slot(path, put, whole=True, held=held))

    def optimizers(self, path: str, found: list[Optimizer]) -> None:
        if self.recall is None:
            optimizers.collect_optimizers(path, found, self.known, self.ranks, self.into, self.saved)
            return
        params = self.recall.optimizers(path, found, self.owners, self.into)
        if params is not None:
            optimizers.collect_settings(path, found, params, self.into)
            return
        before = so_far(self.into)
        optimizers.collect_optimizers(path, found, self.known, self.ranks, self.into, self.saved)
        params = [group.params for group in self.into.groups[path]]
        self.recall.note_optimizers(path, found, self.owners, before, self.into, params)

    def stateful(self, path: str, node: Any) -> None:
        held: dict[str, Any] = {}
        self.saved_tree(path, node.state_dict(), self.into.values, held)
        self.into.slots.append(Slot(path, node.load_state_dict, whole=True, held=held))

    def saved_tree(self, path: str, node: Any, into: dict[str, JSON], held: dict[str, Any]) -> None:
        """A state dict that an object made: tensors and values in any nest."""
        if is_tensor_leaf(node):
            if self.saved is None or self.fits(path, node):
                self.into.plain += [entry.name for entry in self.tensor(path, node)]
                held[path] = node
        elif _is_container(node) and not _only_values(node):
            named = self.note_container(path, node)
            for (name, _), (_, value) in zip(named, _items(node), strict=True):
                self.saved_tree(names.child(path, name), value, into, held)
        else:
            self.values(path, node, into)

    def fits(self, path: str, tensor: Any) -> bool:
        """Whether an object's present tensor can take the saved one in place; if not, the object gets a new one."""
        if type(tensor) is not torch.Tensor:
            return True
        return self.saved is not None and self.saved.tensors.get(path, ("", ()))[1] == tuple(tensor.shape)

    def per_rank(self, path: str, value: Any, put: Callable[[Any], None], elsewhere: object) -> None:
        tensors: dict[str, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> str:
            if type(tensor) not in (torch.Tensor, nn.Parameter):
                raise values.Refused("", f"a {type(tensor).__qualname__} inside of a PerRank value")
            try:
                dtype_name("it", tensor)
            except Unsupported as error:  # its bytes do not tell it
                raise values.Refused("", str(error)) from None
            reference = str(len(tensors))
            tensors[reference] = tensor.detach()
            return reference

        try:
            encoded = values.encode_tree(value, keep)
        except values.Refused as error:
            raise Unsupported(f"{path}{error.path}: {error.reason}") from None
        self.into.per_rank[path] = PerRankLeaf(path, encoded, tensors, put, elsewhere)


def _is_plain_optimizer(node: Any) -> bool:
    # A subclass with a state_dict of its own (ZeroRedundancyOptimizer) knows better than we do what its state is.
    return isinstance(node, Optimizer) and type(node).state_dict is Optimizer.state_dict


def _is_container(node: Any) -> bool:
    return containers.kind_of(node) is not None


def _items(node: Any) -> Iterable[tuple[Any, Any]]:
    return node.items() if isinstance(node, dict) else enumerate(node)


def _only_values(node: Any) -> bool:
    if not _is_container(node):
        return not (is_tensor_leaf(node) or isinstance(node, (PerRank, RNG, nn.Module, Optimizer)) or is_stateful(node))
    inside = containers.children(node)
    return set(map(type, inside)) <= values.SINGLE or all(map(_only_values, inside))


def _comes_back_in_another_order(node: Mapping[Any, Any]) -> bool:
    """Whether `nest` would give the children of a dict in another order: tensors, then values, then what is empty."""
    if set(map(type, node.values())) <= values.SINGLE:
        return False
    ranks = [0 if not _only_values(value) else 1 if _has_leaf(value) else 2 for value in node.values()]
    return ranks != sorted(ranks)


def _has_leaf(node: Any) -> bool:
    return not _is_container(node) or any(map(_has_leaf, containers.children(node)))


def _check_top(named: Sequence[tuple[str, Any]]) -> None:
    for name, key in named:
        if type(key) is not str:
            raise Unsupported(f"the state has the key {key!r} of type {type(key).__qualname__}; keys are strings")
        if name in ("", "manifest.json"):
            raise Unsupported(f"the state has the key {key!r} at the top, which cannot name a section; rename it")


def _cannot_put(path: str) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        raise Unsupported(f"{path} is a plain value inside of a tuple that also holds tensors; make it a list")

    return put


def _find_aliases(into: Collected) -> None:
    """Names whose every byte is the memory of an earlier name: tied weights. The first name keeps the tensor."""
    first: dict[int, Entry] = {}
    later: dict[int, list[Entry]] = {}
    for name, entry in into.entries.items():
        if not entry.views or 0 in entry.shape:
            continue
        address = entry.views[0].tensor.data_ptr()
        one = first.setdefault(address, entry)
        if one is entry:
            continue
        others = later.setdefault(address, [])
        other = next((e for e in (one, *others) if _same_memory(e, entry)), None)
        if other is None:
            others.append(entry)
        else:
            into.aliases[name] = other.name


def _same_memory(a: Entry, b: Entry) -> bool:
    return (a.dtype, a.shape, a.spread, len(a.views)) == (b.dtype, b.shape, b.spread, len(b.views)) and all(
        (v.box, v.tensor.data_ptr(), v.tensor.stride(), v.tensor.device)
        == (w.box, w.tensor.data_ptr(), w.tensor.stride(), w.tensor.device)
        for v, w in zip(a.views, b.views, strict=True)
    )
