"""The leaves of a module, and where they go in a load: into its own memory, or through its own methods.

The table names `gather` and `hand_back`. Never calls a loading method of the module before every byte has been read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from holdfast.errors import HoldfastError, Mismatch, Unsupported
from holdfast.ondisk import names
from holdfast.ranks.ranks import Ranks
from holdfast.state import modules, own_methods, trees
from holdfast.state.fresh import Maker, key_of
from holdfast.state.layers import kinds_of
from holdfast.state.leaves import Collected, Saved, Target
from holdfast.state.modules import EXTRA_STATE, ModuleState, is_live, named_modules, storages_of, unwrapped
from holdfast.state.own_methods import Scope
from holdfast.state.tensors import entries_of
from holdfast.state.trees import bare_tensors, copied
from holdfast.state.walk import Loading, Put, Walk


def gather(walk: Walk, path: str, module: nn.Module, put: Put) -> None:
    """Add what the module's state dict holds, or what it held at the last save if it is still the same."""
    recall = walk.recall
    if recall is None:
        _gather(walk, path, module, walk.into)
    elif not recall.module(path, module, walk.into):
        added = Collected()
        live = _gather(walk, path, module, added)
        walk.into.merge(added)
        if live and not own_methods.has_a_say_in_saving(module):
            recall.note_module(path, module, added)


def _gather(walk: Walk, path: str, module: nn.Module, into: Collected) -> bool:
    """True if the leaves are the module's live parameters and buffers, all of them."""
    state = _present(walk, path, module, into)
    for entry in state.entries:
        into.add(entry)
    for fqn, value in state.leaves.items():
        name = names.child(path, fqn)
        if isinstance(value, torch.Tensor):
            for entry in entries_of(name, value, walk.ranks):
                into.add(entry)
        else:
            trees.add_tree(name, value, into, partial(walk.noted, into=into), owned=True)
    if not state.entries and not state.leaves:
        into.containers[path] = "dict"
    return bool(state.leaves) and not state.entries


def _present(walk: Walk, path: str, module: nn.Module, into: Collected) -> ModuleState:
    """What a module has now; adds to ``into`` all of it but its leaves."""
    modules.check_not_lazy(path, module)
    state = modules.module_state(path, module, walk.ranks)
    into.aliases.update(state.aliases)
    into.kinds.update(kinds_of(path, module))
    into.changes.buffers |= {names.child(path, fqn) for fqn in modules.buffer_names(module)}
    return state


def hand_back(walk: Loading, path: str, module: nn.Module, put: Put) -> None:
    """Add what the module wants of the checkpoint."""
    into = walk.into
    state = _present(walk, path, module, into)
    for entry in state.entries:
        into.add(entry)
    scopes = _scopes(path, module, state)
    one = _Loading(path, walk.saved, walk.ranks, into)
    for fqn, value in state.leaves.items():
        if not any(fqn.startswith(scope.prefix) for scope in scopes) and not _is_extra(fqn):
            one.in_place(fqn, value)
    for scope in scopes:
        one.scope(scope, state.leaves)
    one.extra_states(module, [scope.prefix for scope in scopes], state.leaves)
    for prefix, call in own_methods.hooks_after(module, scopes):
        if any(walk.saved.asked(names.child(path, fqn)) for fqn in _under(state, prefix)):
            at = names.child(path, prefix.rstrip(".")) if prefix else path
            into.handback.after.append(partial(_run_hooks, at, call))
    if not state.entries and not state.leaves and not scopes:
        into.containers[path] = "dict"


def _scopes(path: str, module: nn.Module, state: ModuleState) -> list[Scope]:
    scopes = own_methods.scopes_of(module)
    if state.entries:
        if scopes:
            sub = scopes[0]
            raise Unsupported(
                f"{path}/{sub.prefix}: {type(sub.module).__qualname__} has methods of its own for loading, and FSDP1 "
                "has flattened its parameters: it cannot be loaded in shards; use FSDP2 (fully_shard)"
            )
        return []
    storages = storages_of(module)
    strange = [
        fqn
        for fqn, value in state.leaves.items()
        if not _is_extra(fqn)
        and not any(fqn.startswith(scope.prefix) for scope in scopes)
        and not (isinstance(value, torch.Tensor) and is_live(value, storages))
    ]
    # No method is seen to say so, but its state dict holds what is not its memory: then torch's way is the only one.
    return scopes if not strange else [Scope("", modules.innermost(module), True)]


def _is_extra(fqn: str) -> bool:
    return fqn.rpartition(".")[2] == EXTRA_STATE


def _under(state: ModuleState, prefix: str) -> list[str]:
    return [fqn for fqn in state.leaves if fqn.startswith(prefix)] or [prefix.rstrip(".") or "weight"]


@dataclass(frozen=True)
class _Loading:
    """One module at ``path`` and what it is loaded from."""

    path: str
    saved: Saved
    ranks: Ranks
    into: Collected

    def in_place(self, fqn: str, tensor: torch.Tensor) -> None:
        """Fill a live tensor where it lies."""
        for entry in entries_of(names.child(self.path, fqn), tensor, self.ranks):
            self.into.add(entry)

    def scope(self, scope: Scope, leaves: Mapping[str, Any]) -> None:
        """Hand all that was saved below a prefix to the methods of the submodule there.

        Its present state is that among the ``leaves`` of the whole module: what a ``state_dict`` of its own adds or
        leaves out does not always reach its parent.
        """
        present = {k.removeprefix(scope.prefix): v for k, v in leaves.items() if k.startswith(scope.prefix)}
        again = own_methods.state_of(scope)  # while the first lives: what is the same memory twice is no copy
        stored = self._stored(scope.prefix)
        taken = [key for key in dict.fromkeys([*stored, *present]) if own_methods.takes(scope, key)]
        if not stored and not present:
            return
        for key, value in present.items():
            if key not in taken:
                self._left_over(scope, key, value, again.get(key))
        at = {key: names.child(self.path, scope.prefix + key) for key in taken}
        present_by_name = dict(t for key, value in present.items() if key in at for t in bare_tensors(at[key], value))
        expects = {
            entry.name: (entry.dtype, None if own_methods.may_resize(scope, key) else entry.shape)
            for key, value in present.items()
            if key in at and isinstance(value, torch.Tensor)
            for entry in entries_of(at[key], value, self.ranks)
        }
        needs = [at[key] for key in present if key in at and not self._tied_to_saved(key, present, at)]
        self.into.handback.targets.append(
            Target(
                self.path,
                partial(_load, scope, self.path),
                Maker(self.saved, self.ranks, present=present_by_name),
                names=tuple(name for key in taken for name in stored.get(key, ())),
                needs=needs,
                expects=expects,
                undoing=partial(_undoing, scope, self.path),
                present=lambda: {at[key]: value for key, value in own_methods.state_of(scope).items() if key in at},
            )
        )

    def extra_states(self, module: nn.Module, prefixes: Collection[str], leaves: Mapping[str, Any]) -> None:
        """Hand extra state to the ``set_extra_state`` of each submodule outside of scopes."""
        for prefix, sub in named_modules(module):
            key = f"{prefix}{EXTRA_STATE}"
            if unwrapped(sub) is not sub or key not in leaves or any(prefix.startswith(scope) for scope in prefixes):
                continue
            name = names.child(self.path, key)
            if not own_methods.takes_extra_state(sub):
                continue  # stays unclaimed, and is named as such
            present = {name: leaves[key]} if isinstance(leaves[key], torch.Tensor) else {}
            maker = Maker(self.saved, self.ranks, present=present)
            # torch sets it after the module's tensors, which it may look at: so it is set again.
            target = Target(name, sub.set_extra_state, maker, undoing=partial(_undoing_extra, sub), again=True)
            self.into.handback.targets.append(target)

    def _stored(self, prefix: str) -> dict[str, list[str]]:
        """What was saved below a prefix of FQNs: by key, relative to it, the names of its leaves."""
        stored: dict[str, list[str]] = {}
        for name in self.saved.below(self.path):
            fqn = key_of(name, self.path)
            if fqn.startswith(prefix):
                stored.setdefault(fqn[len(prefix) :], []).append(name)
        return stored

    def _left_over(self, scope: Scope, key: str, value: Any, again: Any) -> None:
        """An entry that a module adds to its state dict, and that no method of it takes back."""
        name = names.child(self.path, scope.prefix + key)
        if not isinstance(value, torch.Tensor):
            return  # stays unclaimed, and is named as such
        if isinstance(again, torch.Tensor) and value.numel() and value.data_ptr() == again.data_ptr():
            self.in_place(scope.prefix + key, value)
            return
        attribute = own_methods.attribute_of(scope, key, value)
        if attribute is not None:
            maker = Maker(self.saved, self.ranks)
            self.into.handback.targets.append(Target(name, partial(_set_attribute, *attribute), maker))
            return
        for entry in entries_of(name, value, self.ranks):
            self.into.handback.must_equal[entry.name] = entry.views[0].tensor

    def _tied_to_saved(self, key: str, present: Mapping[str, Any], at: Mapping[str, str]) -> bool:
        """Whether another entry is the same memory, and was saved."""
        own = present[key]
        return isinstance(own, torch.Tensor) and any(
            other != key and isinstance(value, torch.Tensor) and _same(own, value) and self.saved.has(at[other])
            for other, value in present.items()
            if other in at
        )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return (
            one.numel() > 0 and one.data_ptr() != 0 and one.data_ptr() == other.data_ptr() and one.shape == other.shape
        )
    except (RuntimeError, NotImplementedError):
        return False


def _load(scope: Scope, path: str, tree: Mapping[str, Any]) -> None:
    own_methods.load(
        scope,
        names.child(path, scope.prefix.rstrip(".")) if scope.prefix else path,
        {fqn[len(scope.prefix) :]: value for fqn, value in tree.items()},
    )


def _undoing(scope: Scope, path: str) -> Callable[[], None]:
    present = copied(own_methods.state_of(scope))
    return lambda: own_methods.load(scope, path, present)


def _undoing_extra(module: nn.Module) -> Callable[[], None]:
    present = copied(module.get_extra_state())
    return lambda: module.set_extra_state(present)


def _run_hooks(path: str, call: Callable[[], None]) -> None:
    try:
        call()
    except HoldfastError:
        raise
    except Exception as error:  # a hook may raise anything
        raise Mismatch(
            f"{path}: a hook that the module runs after a load failed ({type(error).__name__}: {error}); what was "
            "saved had been filled in by then"
        ) from error


def _set_attribute(owner: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(owner, name, type(getattr(owner, name))(value.item()))
