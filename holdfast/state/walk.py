"""From a nested state to its leaves: one walk, the same for saving and for loading.

`save` and `load` call `collect`. Never copies a tensor and never changes an object of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import Unsupported
from holdfast.ondisk import names, values
from holdfast.ranks.ranks import Ranks
from holdfast.state import module_load, modules, optimizers, own_optimizers, trees
from holdfast.state.fresh import Maker
from holdfast.state.in_place import Filling
from holdfast.state.kinds import is_dtensor, without_fabric
from holdfast.state.leaves import Collected, Entry, PerRankLeaf, Saved, Target
from holdfast.state.own_methods import has_a_say_in_saving
from holdfast.state.parameters import Known, entries_beside, names_of_parameters
from holdfast.state.present import told, undoing
from holdfast.state.recall import Recall, so_far
from holdfast.state.rules import rule_of
from holdfast.state.structure import kinds_of
from holdfast.state.tensors import dtype_name, entries_of, is_tensor_leaf
from holdfast.state.trees import bare_tensors

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def collect(
    state: Mapping[str, Any], ranks: Ranks, saved: Saved | None = None, *, recall: Recall | None = None
) -> Collected:
    """All leaves of ``state`` as this rank holds them, tensors as views of their own memory.

    ``saved`` (when loading) says what the checkpoint holds, so that empty optimizers can make room for it. With
    ``recall`` (when saving) what has not changed since the last time is not walked again; then there are no targets.
    Raises Unsupported, naming the path of the first leaf that cannot be saved.
    """
    if not isinstance(state, dict):
        raise Unsupported(f"a state is a dict of names, not a {type(state).__qualname__}: wrap it as {{'model': …}}")
    if recall is not None:
        recall.begin()
    walk = _Walk(ranks, state, saved, recall)
    try:
        walk.container("", state, _nothing)
    except RecursionError:
        raise Unsupported("a container of the state contains itself, or is nested hundreds of times") from None
    _find_aliases(walk.into)
    return walk.into


def modules_of(path: str, node: Any, saved: Saved | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module of a state with the path that its leaves get."""
    if isinstance(node, nn.Module):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            if type(value) not in values.SINGLE:
                yield from modules_of(names.child(path, str(key)), value, saved)
    elif isinstance(node, (list, tuple)):
        if node and all(isinstance(v, nn.Module) for v in node):
            yield from modules.merged(path, list(node), None if saved is None else saved.has)
        else:
            for i, value in enumerate(node):
                if type(value) not in values.SINGLE:
                    yield from modules_of(names.child(path, str(i)), value, saved)


def parameter_names(state: Mapping[str, Any], saved: Saved | None = None) -> Known:
    """What each parameter is called that the modules of a state have, or that lies in the state as a tensor."""
    return names_of_parameters(list(modules_of("", state, saved)), bare_tensors("", state))


FILLED_IN_PLACE = "holdfast_fills_in_place"
"""An attribute of objects that are told of a load once everything is filled, their own tensors where they lie too."""


class _Walk:
    """The walk under way; ``into`` fills as it goes."""

    def __init__(self, ranks: Ranks, state: Mapping[str, Any], saved: Saved | None, recall: Recall | None) -> None:
        self.ranks, self.state, self.saved, self.recall = ranks, state, saved, recall
        self.into = Collected()
        self.filling, self.filling_some = Filling(), Filling(keep=True)

    @cached_property
    def known(self) -> Known:
        """What each parameter of the state is called."""
        return parameter_names(self.state, self.saved)

    @cached_property
    def owners(self) -> list[tuple[str, nn.Module]]:
        """The modules of the state by path."""
        return list(modules_of("", self.state, self.saved))

    @cached_property
    def on_mesh(self) -> DTensor | None:
        """One of the DTensors of the state, if they all lie on one mesh."""
        tensors = [t for _, module in self.owners for t in module.parameters()]
        found = [t for t in (*tensors, *(t for _, t in bare_tensors("", self.state))) if is_dtensor(t)]
        return found[0] if found and all(t.device_mesh == found[0].device_mesh for t in found) else None

    def node(self, path: str, node: Any, put: Callable[[Any], None]) -> None:
        """One leaf, object or container at ``path``; ``put`` stores a new value in its place."""
        node = without_fabric(node)
        match rule_of(node).kind:
            case "tensor":
                self.plain(path, node)
            case "per rank":
                self.per_rank(path, node.state(), node.put, node.elsewhere)
            case "rng":
                self.per_rank(path, node.state_dict(), node.load_state_dict, node.rule())
            case "module":
                self.module(path, node)
            case "modules":
                self.module_list(path, node)
            case "optimizer":
                self.optimizers(path, [node])
            case "own optimizer":
                self.own_optimizer(path, node)
            case "optimizers":
                self.optimizer_list(path, [without_fabric(optimizer) for optimizer in node])
            case "container":
                self.container(path, node, put)
            case "object":
                self.stateful(path, node)
            case "values" | "value":
                trees.add_values(path, node, self.into, owned=False)
                self.values_target(path, node, put)

    def values_target(self, path: str, node: Any, put: Callable[[Any], None]) -> None:
        """A place for values: a container that stands there is filled, so that others who hold it see them."""
        self.into.targets.append(Target(
            path, partial(self.filling.put, node, put), put_some=partial(self.filling_some.put, node, put)
        ))  # fmt: skip

    def container(self, path: str, node: Any, put: Callable[[Any], None]) -> None:
        """The children of a container that holds more than plain values; it is filled in place and keeps its class."""
        new_items = list(node) if isinstance(node, tuple) else node
        for name, (key, value) in trees.note_container(path, node, self.into, in_place=True):
            at = names.child(path, name)
            if is_tensor_leaf(value):  # needs no way back: it is filled where it lies
                self.plain(at, value)
            else:
                self.node(at, value, partial(new_items.__setitem__, key))
        if isinstance(node, tuple) and self.saved is not None:
            self.into.after.append(partial(_put_tuple, node, new_items, put))

    def tensor(self, path: str, tensor: Any) -> None:
        for entry in entries_of(path, tensor, self.ranks):
            self.into.add(entry)

    def plain(self, path: str, tensor: Any) -> None:
        """A tensor that belongs to no module or optimizer."""
        for entry in entries_of(path, tensor, self.ranks):
            self.into.add(entry)
            self.into.plain.append(entry.name)
        if is_dtensor(tensor):
            self.into.given.append(tensor)

    def module_list(self, path: str, found: Sequence[nn.Module]) -> None:
        for at, module in modules.merged(path, found, None if self.saved is None else self.saved.has):
            self.module(at, module)

    def module(self, path: str, module: nn.Module) -> None:
        if self.recall is not None and self.recall.module(path, module, self.into):
            return
        before = so_far(self.into) if self.recall is not None else None
        modules.check_not_lazy(path, module)
        state = modules.module_state(path, module, self.ranks)
        self.into.aliases.update(state.aliases)
        self.into.kinds.update(kinds_of(path, module))
        self.into.buffers |= {names.child(path, fqn) for fqn in modules.buffer_names(module)}
        if self.saved is not None:
            module_load.collect(path, module, state, self.saved, self.ranks, self.into)
            return
        for entry in state.entries:
            self.into.add(entry)
        for fqn, value in state.leaves.items():
            if isinstance(value, torch.Tensor):
                self.tensor(names.child(path, fqn), value)
            else:
                trees.add_tree(names.child(path, fqn), value, self.into, self.noted, owned=True)
        if not state.entries and not state.leaves:
            self.into.containers[path] = "dict"
        elif before is not None and not state.entries and not has_a_say_in_saving(module):
            self.recall.note_module(path, module, before, self.into)  # type: ignore[union-attr]

    def optimizers(self, path: str, found: list[Optimizer]) -> None:
        if self.recall is None:
            self._collect_optimizers(path, found)
            return
        params = self.recall.optimizers(path, found, self.owners, self.into)
        if params is not None:
            optimizers.collect_settings(path, found, params, self.into)
            return
        before = so_far(self.into)
        self._collect_optimizers(path, found)
        params = [group.params for group in self.into.groups[path]]
        self.recall.note_optimizers(path, found, self.owners, before, self.into, params)

    def _collect_optimizers(self, path: str, found: list[Optimizer]) -> None:
        optimizers.collect_optimizers(path, found, self.known, self.ranks, self.into, self.saved)

    def optimizer_list(self, path: str, found: Sequence[Any]) -> None:
        saved = None if self.saved is None else self.saved.has
        if optimizers.share_a_path(found, self.known, saved, path):
            self.optimizers(path, list(found))
            return
        for i, optimizer in enumerate(found):
            self.node(names.child(path, str(i)), optimizer, _nothing)

    def own_optimizer(self, path: str, node: Any) -> None:
        """An optimizer with methods of its own: they are called, with names in the place of numbers."""
        fqns = own_optimizers.called_of(path, node, self.known)
        if fqns is None:
            self.stateful(path, node)
            return
        parameter_of = own_optimizers.parameter_of(node, fqns)
        if self.saved is None:

            def leaf(name: str, tensor: Any) -> None:
                parameter = parameter_of(name)
                for entry in entries_beside(name, tensor, parameter, None, self.ranks):
                    self.into.add(entry)
                trees.note_tensor(name, tensor, parameter, self.into)

            trees.add_tree(path, own_optimizers.named(node.state_dict(), fqns), self.into, leaf, owned=True)
            return
        counts = [len(group["params"]) for group in node.param_groups]
        rest = iter(fqns)
        live = [[next(rest) for _ in range(count)] for count in counts]
        maker = Maker(self.saved, self.ranks, parameter_of=parameter_of, on_mesh=lambda: self.on_mesh)
        put = partial(_load_numbered, path, node, live)
        self.into.targets.append(
            Target(
                path,
                put,
                whole=True,
                make=maker.make,
                assemble=maker.assemble,
                undoing=partial(undoing, node),
                present=partial(_present, path, node, fqns),
            )
        )

    def stateful(self, path: str, node: Any) -> None:
        if self.saved is None:
            trees.add_tree(path, node.state_dict(), self.into, self.noted, owned=False)
            return
        present = dict(bare_tensors(path, told(node)))  # an object may also say that now is no time to load
        # An object may say that the tensors of its state dict are memory that it keeps, to be filled where they lie.
        in_place = bool(getattr(node, FILLED_IN_PLACE, False))
        maker = Maker(self.saved, self.ranks, present=present, in_place=in_place, on_mesh=lambda: self.on_mesh)
        undo = None if in_place else partial(undoing, node)
        self.into.targets.append(
            Target(path, node.load_state_dict, whole=True, make=maker.make, assemble=maker.assemble, undoing=undo)
        )

    def noted(self, path: str, tensor: Any) -> None:
        """A tensor of an object that takes its state whole."""
        self.plain(path, tensor)
        trees.note_tensor(path, tensor, None, self.into)

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


def _present(path: str, optimizer: Any, fqns: list[str]) -> dict[str, Any]:
    """The tensors that an optimizer's own state dict has now, by name; none if it does not tell them."""
    try:
        return dict(bare_tensors(path, own_optimizers.named(optimizer.state_dict(), fqns)))
    except Exception:  # noqa: BLE001 - it took its state, and this is asked for the report alone
        return {}


def _load_numbered(path: str, node: Any, live: list[list[str]], tree: Any) -> None:
    node.load_state_dict(own_optimizers.numbered(path, tree, live))


def _put_tuple(present: tuple[Any, ...], items: list[Any], put: Callable[[Any], None]) -> None:
    """Put a new tuple around the same tensors and objects, if a value in it is another now."""
    if any(new is not old for new, old in zip(items, present, strict=True)):
        put(tuple(items))


def _nothing(value: Any) -> None:
    """Puts nothing: for what stays the object that it is."""


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
