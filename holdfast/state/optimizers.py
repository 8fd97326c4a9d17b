"""Optimizers that keep torch's own ``state_dict``: state by parameter name, read and written where it lies.

The walk calls `collect_optimizers`. No fake step, no gather, no integer ids: what was saved of a parameter finds it by
its name. Never changes an optimizer before a load has read everything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.errors import Unsupported
from holdfast.ondisk import dtypes, names, packing
from holdfast.ranks.ranks import Ranks
from holdfast.state import groups, trees
from holdfast.state.fresh import Maker, key_of
from holdfast.state.kinds import is_flat_parameter, is_zero
from holdfast.state.leaves import Collected, Group, Saved, Target
from holdfast.state.modules import local_flat
from holdfast.state.parameters import Known, ParameterName, call_parameters, device_of_number, entries_beside, own_shape
from holdfast.state.trees import is_container


def is_plain(node: object) -> bool:
    """Whether an optimizer's state is what torch's own ``state_dict`` says, nothing of its class or hooks between."""
    if is_zero(node):
        return True
    return (
        isinstance(node, Optimizer)
        and isinstance(getattr(node, "state", None), dict)
        and isinstance(getattr(node, "param_groups", None), list)
        and type(node).state_dict is Optimizer.state_dict
        and type(node).load_state_dict is Optimizer.load_state_dict
        and not (
            node._optimizer_state_dict_pre_hooks
            or node._optimizer_state_dict_post_hooks
            or node._optimizer_load_state_dict_pre_hooks
        )
    )


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    """The parameters of an optimizer, group after group, in torch's order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def parameter_fqns(path: str, optimizer: Any, known: Known) -> list[list[str]]:
    called = call_parameters(path, parameters_of(optimizer), known)
    return [[fqn for p in group["params"] for fqn in called[id(p)].fqns] for group in optimizer.param_groups]


def share_a_path(optimizers: Sequence[Optimizer], known: Known, saved: Callable[[str], bool] | None, path: str) -> bool:
    """Whether optimizers of a list are saved as one: each parameter is named, and is in one of them.

    So pipeline chunks fit into any other pipeline. When loading, what the checkpoint has decides.
    """
    if saved is not None and saved(names.child(path, "param_groups")):
        return True
    if saved is not None and any(saved(names.child(path, str(i))) for i in range(len(optimizers))):
        return False
    owners = [known.get(id(p)) for optimizer in optimizers for p in parameters_of(optimizer)]
    if not all(is_plain(optimizer) for optimizer in optimizers) or any(owner is None for owner in owners):
        return len(optimizers) == 1
    fqns = [fqn for owner in owners if owner is not None for fqn in owner[1].fqns]
    keys = [key for o in optimizers for key in state_of(o) if not isinstance(key, torch.Tensor)]
    alone = all(len({known[id(p)][0] for p in parameters_of(o)}) <= 1 for o in optimizers)
    return alone and len(set(fqns)) == len(fqns) and len(set(keys)) == len(keys)


def state_of(optimizer: Any) -> Any:
    """Where the state of an optimizer's parameters is on this rank."""
    return optimizer.optim.state if is_zero(optimizer) else optimizer.state


def collect_optimizers(
    path: str, optimizers: Sequence[Optimizer], known: Known, ranks: Ranks, into: Collected, saved: Saved | None
) -> None:  # fmt: skip
    """Add the state and groups of ``optimizers`` under ``path`` (several share it: one for each pipeline chunk)."""
    saved_groups: list[Group] = []
    live: groups.Live = []
    listed = groups.saved_parameters(path, saved) if saved is not None else set()
    optimizer: Any
    for optimizer in optimizers:
        into.changes.optimizers.append(optimizer)
        called = call_parameters(path, parameters_of(optimizer), known)
        here = {id(p) for p in parameters_of(optimizer.optim)} if is_zero(optimizer) else None
        for group in optimizer.param_groups:
            fqns: list[str] = []
            for parameter in group["params"]:
                named = called[id(parameter)]
                _note_still(optimizer, group, parameter, known, into)
                fqns += named.fqns
                own_names = _own_names(parameter, known)
                at = _State(path, state_of(optimizer), group, parameter, named, own_names, ranks, into, saved)
                if saved is None or (here is not None and id(parameter) not in here):
                    at.save()
                else:
                    at.load(saved, listed)
            saved_groups.append(Group(groups.settings(path, len(saved_groups), group), fqns))
            live.append((optimizer, group, fqns))
        fqns_here = [fqn for named in called.values() for fqn in named.fqns]
        _collect_shared(path, optimizer, fqns_here, listed, ranks, into, saved)
    into.groups[path] = saved_groups
    at_groups = names.child(path, "param_groups")
    if saved is not None:
        check = partial(groups.match, path, [fqns for _, _, fqns in live])
        into.handback.targets.append(Target(at_groups, partial(groups.put, path, live), check=check))


def collect_settings(path: str, optimizers: Sequence[Optimizer], params: list[list[str]], into: Collected) -> None:
    """The groups of ``optimizers`` alone, where all tensors and the names of the parameters are known already."""
    live = [group for optimizer in optimizers for group in optimizer.param_groups]
    into.changes.optimizers.extend(optimizers)
    into.groups[path] = [
        Group(groups.settings(path, index, group), fqns)
        for index, (group, fqns) in enumerate(zip(live, params, strict=True))
    ]


def changes_in_steps(optimizer: Optimizer) -> bool:
    """Whether the optimizer has a step that changes its parameters; some do it in the backward pass instead."""
    return inspect.unwrap(type(optimizer).step) is not inspect.unwrap(Optimizer.step)


def _note_still(
    optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, known: Known, into: Collected
) -> None:
    own_names = _own_names(parameter, known)
    if own_names and changes_in_steps(optimizer):
        into.changes.stable.update(own_names)
        if parameter.requires_grad and not state_of(optimizer).get(parameter):
            into.changes.to_come.update(dict.fromkeys(own_names, _tensors_to_come(optimizer, group)))


def _own_names(parameter: torch.Tensor, known: Known) -> list[str]:
    """The names under which a state has the parameter itself; none if it does not."""
    owner, own = known.get(id(parameter), ("", None))
    return [] if own is None else [names.child(owner, fqn) for fqn in own.fqns]


def _tensors_to_come(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer keeps for it: an estimate, to have memory ready."""
    momentum = bool(group.get("momentum"))
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        return int(momentum)
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + momentum + bool(group.get("centered"))
    return 2 + bool(group.get("amsgrad"))


@dataclass(frozen=True)
class _State:
    """The state of one parameter, on its way into or out of the checkpoint. ``own_names``: of the parameter itself.

    What ``into`` is to call later never refers to it: else the model stays in memory until Python's collector looks.
    """

    path: str
    state: Any
    group: dict[str, Any]
    parameter: torch.Tensor
    named: ParameterName
    own_names: list[str]
    ranks: Ranks
    into: Collected
    saved: Saved | None

    def save(self) -> None:
        if self.parameter in self.state and not self.state[self.parameter] and self.named.flat is None:
            self.into.containers[self._prefix(self.named.fqn)] = "dict"  # stepped, and nothing to keep
        for key, value in self.state.get(self.parameter, {}).items():
            self._add(key, value)

    def load(self, saved: Saved, listed: set[str]) -> None:
        """Fill what there is in place, make what there is not, and clear what the checkpoint says there was not.

        ``listed`` are the parameters that the saved groups name: of one without saved state there was none.
        """
        present = self.state.get(self.parameter, {})
        if self.named.flat is not None:
            self._load_flat(self.named.flat, saved, present, listed)
            return
        prefix = self._prefix(self.named.fqn)
        keys: dict[str, None] = dict.fromkeys(key_of(name, prefix) for name in saved.below(prefix))
        if not keys and self.named.fqn not in listed:
            self.save()  # it is missing
            return
        own = {str(key): key for key in present}
        if not keys and prefix in saved.containers:
            self.into.handback.after.append(partial(self.state.setdefault, self.parameter, {}))
        for text in keys:
            name, key = names.child(prefix, text), own.get(text, text)
            if text in own and self._fits(saved, name, present[key]):
                self._add(key, present[key])
            else:
                put = partial(_set, self.state, self.parameter, key)
                self.into.handback.targets.append(self._whole(saved, name, put))
        for text, key in own.items():
            if text not in keys:
                self.into.handback.clears[names.child(prefix, text)] = partial(_clear, self.state, self.parameter, key)

    def _prefix(self, fqn: str) -> str:
        return names.join([*names.split(self.path), "state", fqn])

    def _add(self, key: Any, value: Any) -> None:
        """A value of the state as a leaf, or as leaves that lie below its key."""
        for i, fqn in enumerate(self.named.fqns):
            name = names.child(self._prefix(fqn), str(key))
            if isinstance(value, torch.Tensor):
                part = self.named.flat[i] if self.named.flat is not None else None
                self.into.add_stable(entries_beside(name, value, self.parameter, part, self.ranks))
                if self.saved is None:
                    trees.note_tensor(name, value, self.parameter, self.into)
            elif self.named.flat is not None and is_container(value):
                raise Unsupported(
                    f"{name} is a {type(value).__name__}: under FSDP1 the state of an optimizer can hold tensors and "
                    "numbers alone; use FSDP2 (fully_shard) for this optimizer"
                )
            else:
                trees.add_tree(name, value, self.into, self._add_nested, owned=True)
                if self.saved is not None:
                    self.into.handback.targets.append(Target(name, partial(_set, self.state, self.parameter, key)))

    def _add_nested(self, name: str, tensor: torch.Tensor) -> None:
        self.into.add_stable(entries_beside(name, tensor, self.parameter, None, self.ranks))
        trees.note_tensor(name, tensor, self.parameter, self.into)

    def _fits(self, saved: Saved, name: str, value: Any) -> bool:
        """Whether a present value can take the saved one in place."""
        if isinstance(value, torch.Tensor):
            own = {e.name: e.shape for e in entries_beside(name, value, self.parameter, None, self.ranks)}
            stored = {n: saved.tensors[n][1] for n in (name, *saved.below(name)) if n in saved.tensors}
            return own == stored or (own.keys() == stored.keys() and value.shape == own_shape(self.parameter))
        return name in saved.values and not is_container(value)

    def _whole(self, saved: Saved, name: str, put: Callable[[Any], None]) -> Target:
        """Return a target that makes a new value for ``name``.

        The value has its saved shape. If that was the parameter's saved shape, it has to be the parameter's shape here.
        """
        dtype, shape = saved.tensors.get(name, ("", ()))
        group, parameter = self.group, self.parameter
        expects = {name: (dtype, tuple(parameter.shape))} if self._is_like_parameter(saved, shape) else {}
        maker = Maker(
            saved, self.ranks, parameter_of=lambda name: parameter,
            device_of=lambda name: device_of_number(name, group, parameter, shape),
        )  # fmt: skip
        return Target(name, put, maker, expects=expects)

    def _is_like_parameter(self, saved: Saved, shape: tuple[int, ...], part: int = 0) -> bool:
        """Whether state of this shape is as large as its parameter was: then it has to be as large as that is here."""
        return bool(shape and self.own_names) and saved.shape_of(self.own_names[part]) == shape

    def _load_flat(self, parts: list[Any], saved: Saved, present: Any, listed: set[str]) -> None:
        """The state of a parameter of FSDP1, whose elements belong to several names or are a part of one."""
        by_key: dict[str, list[tuple[str, int, tuple[int, ...]]]] = {}
        for i, part in enumerate(parts):
            prefix = self._prefix(part.fqn)
            for name in saved.below(prefix):
                by_key.setdefault(key_of(name, prefix), []).append((name, i, part.shape))
        if present and not by_key and all(part.fqn in listed for part in parts):
            for key in present:
                clear = partial(_clear, self.state, self.parameter, key)
                self.into.handback.clears[names.child(self._prefix(parts[0].fqn), str(key))] = clear
            return
        self.save()
        if present or (not is_flat_parameter(self.parameter) and not self.parameter.numel()):
            # FSDP1 has left this rank nothing of it, so that it is never stepped here: state made here would grow
            # stale, and might be what the next save takes.
            return
        for key, stored in by_key.items():
            value = self._flat_value(stored, saved)
            if isinstance(value, torch.Tensor):
                self.into.handback.before.append(partial(_set, self.state, self.parameter, key, value))
                alike = value.shape == own_shape(self.parameter)
                for part in parts:
                    name = names.child(self._prefix(part.fqn), key)
                    self.into.add_stable(
                        entries_beside(name, value, self.parameter if alike else None, part, self.ranks)
                    )
            else:
                self._add(key, value)

    def _flat_value(self, stored: list[tuple[str, int, tuple[int, ...]]], saved: Saved) -> torch.Tensor | None:
        """Memory for state of each of these names: the number of its part, and that part's shape here."""
        for name, i, part_shape in stored:
            if name in saved.tensors:
                dtype, shape = saved.tensors[name]
                kind = dtypes.torch_dtype(dtype)
                if shape and (shape == part_shape or self._is_like_parameter(saved, shape, i)):
                    data = local_flat(self.parameter) if is_flat_parameter(self.parameter) else self.parameter
                    return torch.zeros_like(data.detach(), dtype=kind)
                device = device_of_number(name, self.group, self.parameter, shape)
                return torch.zeros(shape, dtype=kind, device=device)
        return None


def _set(state: Any, parameter: torch.Tensor, key: Any, value: Any) -> None:
    state[parameter][key] = value


def _clear(state: Any, parameter: torch.Tensor, key: Any) -> None:
    state[parameter].pop(key, None)
    if not state[parameter]:
        state.pop(parameter)


def _collect_shared(
    path: str, optimizer: Any, fqns: Sequence[str], listed: set[str], ranks: Ranks, into: Collected,
    saved: Saved | None,
) -> None:  # fmt: skip
    """State under keys that are no parameter, as MADGRAD keeps it: beside that of the parameters, as torch does."""
    state, prefix = state_of(optimizer), names.child(path, "state")
    present = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}

    def add_tensor(name: str, tensor: torch.Tensor) -> None:
        into.add_stable(entries_beside(name, tensor, None, None, ranks))

    if saved is None:
        for key, value in present.items():
            if type(key) is not str or key in fqns:
                raise Unsupported(
                    f"{prefix} has the key {key!r}, which is no parameter and cannot be told from their names"
                )
            name = names.child(prefix, key)
            trees.add_tree(name, value, into, add_tensor, owned=True)
            if is_container(value) and not packing.is_long(value):
                into.containers.setdefault(name, "dict")  # else it looks like another rank's parameter
        return
    below = saved.below(prefix)
    keys = dict.fromkeys(key_of(name, prefix) for name in below)
    for key in keys:
        name = names.child(prefix, key)
        leaf = name in saved.tensors or name in saved.values or saved.containers.get(name) is not None
        if key not in fqns and key not in listed and leaf:
            value = present.get(key)
            maker = Maker(saved, ranks, present={name: value} if isinstance(value, torch.Tensor) else {})
            into.handback.targets.append(Target(name, partial(state.__setitem__, key), maker))
    for key in present:
        if str(key) not in keys and listed:
            into.handback.clears[names.child(prefix, str(key))] = partial(state.pop, key, None)
