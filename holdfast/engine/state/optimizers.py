"""Optimizer state by parameter name, read and written where it lies: no fake step, no gather, no integer ids.

Called by the walk once all modules are known. Never steps an optimizer and never changes one before a load succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.engine.ranks import Ranks
from holdfast.engine.state import modules
from holdfast.engine.state.kinds import is_dtensor, is_flat_parameter
from holdfast.engine.state.leaves import Collected, Entry, Group, Saved, Slot
from holdfast.engine.state.modules import FlatPart
from holdfast.engine.state.tensors import dtype_name, entries_of, local_views, placed
from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import dtypes, names, values

# Derivable from the live optimizer, and different on every pipeline stage.
_NOT_SETTINGS = ("params", "param_names")


@dataclass(frozen=True)
class Named:
    """What a parameter of an optimizer is called: one FQN, or the parts of an FSDP1 flat parameter."""

    fqn: str
    flat: list[FlatPart] | None = None

    @property
    def fqns(self) -> list[str]:
        return [self.fqn] if self.flat is None else [part.fqn for part in self.flat]


def names_of_parameters(found: Sequence[tuple[str, nn.Module]]) -> dict[int, tuple[str, Named]]:
    """``id(parameter)`` to (path of its module, what it is called) over all modules of a state."""
    known: dict[int, tuple[str, Named]] = {}
    for path, module in found:
        for key, (fqn, _) in modules.parameter_names(module).items():
            known.setdefault(key, (path, Named(fqn)))
        for flat, parts in modules.flat_parameters(module).items():
            known[id(flat)] = (path, Named("", parts))
            for original, part in zip(flat._params or (), parts, strict=False):
                known[id(original)] = (path, Named(part.fqn, [part]))
    return known


def collect_optimizers(
    path: str, optimizers: Sequence[Optimizer], known: dict[int, tuple[str, Named]], ranks: Ranks, into: Collected,
    saved: Saved | None,
) -> None:  # fmt: skip
    """Add the state and groups of ``optimizers`` under ``path`` (several share it: one for each pipeline chunk)."""
    groups: list[Group] = []
    live: list[tuple[dict[str, Any], list[str]]] = []
    for optimizer in optimizers:
        into.optimizers.append(optimizer)
        called = _call_parameters(path, optimizer, known)
        for group in optimizer.param_groups:
            fqns: list[str] = []
            for parameter in group["params"]:
                named = called[id(parameter)]
                if id(parameter) in known:
                    owner, own = known[id(parameter)]
                    own_names = [names.child(owner, fqn) for fqn in own.fqns]
                    into.still.update(own_names)
                    if parameter.requires_grad and not optimizer.state.get(parameter):
                        into.to_come.update(dict.fromkeys(own_names, _tensors_to_come(optimizer, group)))
                fqns += named.fqns
                _collect_parameter(path, optimizer, group, parameter, named, ranks, into, saved)
            groups.append(Group(_settings(path, len(groups), group), fqns))
            live.append((group, fqns))
    into.groups[path] = groups
    at = names.child(path, "param_groups")
    into.slots.append(Slot(at, partial(_put_groups, path, live), check=partial(_match_groups, path, live)))


def collect_settings(path: str, optimizers: Sequence[Optimizer], params: list[list[str]], into: Collected) -> None:
    """The groups of ``optimizers`` alone, where all tensors and the names of the parameters are known already."""
    found = [group for optimizer in optimizers for group in optimizer.param_groups]
    into.optimizers.extend(optimizers)
    into.groups[path] = [
        Group(_settings(path, index, group), fqns)
        for index, (group, fqns) in enumerate(zip(found, params, strict=True))
    ]


def _call_parameters(path: str, optimizer: Optimizer, known: dict[int, tuple[str, Named]]) -> dict[int, Named]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [known.get(id(p)) for p in parameters]
    if all(f is None for f in found):
        # No module of the state owns them: torch's own integer ids are all there is to go by.
        return {id(p): Named(str(i)) for i, p in enumerate(parameters)}
    if any(f is None for f in found):
        index = found.index(None)
        raise Unsupported(
            f"{path}: parameter {index} (shape {list(parameters[index].shape)}) belongs to no module of this state, "
            "the others do; put the module that owns it into the state too"
        )
    owners = {f[0] for f in found if f is not None}
    if len(owners) == 1:
        return {id(p): f[1] for p, f in zip(parameters, found, strict=True) if f is not None}
    called = {}
    for p, f in zip(parameters, found, strict=True):
        if f is None:
            continue
        owner, named = f[0].replace("/", "."), f[1]
        flat = None if named.flat is None else [_renamed(part, f"{owner}.{part.fqn}") for part in named.flat]
        called[id(p)] = Named(f"{owner}.{named.fqn}", flat)
    return called


def parameter_fqns(path: str, optimizer: Optimizer, known: dict[int, tuple[str, Named]]) -> list[list[str]]:
    """The FQNs of an optimizer's parameters, group by group, in torch's order."""
    called = _call_parameters(path, optimizer, known)
    return [[fqn for p in group["params"] for fqn in called[id(p)].fqns] for group in optimizer.param_groups]


def _renamed(part: FlatPart, fqn: str) -> FlatPart:
    return FlatPart(fqn, part.shape, part.start, part.stop, part.offset)


def _collect_parameter(
    path: str, optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor, named: Named, ranks: Ranks,
    into: Collected, saved: Saved | None,
) -> None:  # fmt: skip
    has = optimizer.state.get(parameter, {})
    for key, value in has.items():
        _collect_leaf(path, named, str(key), value, parameter, ranks, into, _setter(optimizer, parameter, key))
    if saved is None or has:
        return
    if named.flat is not None and not is_flat_parameter(parameter) and not parameter.numel():
        # FSDP1 has left this rank nothing of it, so that it is never stepped here: state made here would grow stale,
        # and might be what the next save takes.
        return
    for key, value in _from_saved(path, group, parameter, named, saved).items():
        put = _setter(optimizer, parameter, key)
        if isinstance(value, torch.Tensor):
            into.then.append(partial(put, value))
        # What was made with a shape of its own is whole on every rank; only a like of the parameter is sharded.
        alike = isinstance(value, torch.Tensor) and value.shape == _own_shape(parameter)
        _collect_leaf(path, named, key, value, parameter if alike else None, ranks, into, put)


def _tensors_to_come(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """How many tensors of a parameter's size an optimizer keeps for it: an estimate, to have memory ready."""
    momentum = bool(group.get("momentum"))
    if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
        return int(momentum)
    if isinstance(optimizer, torch.optim.RMSprop):
        return 1 + momentum + bool(group.get("centered"))
    return 2 + bool(group.get("amsgrad"))


def _own_shape(parameter: torch.Tensor) -> torch.Size:
    return modules.local_flat(parameter).shape if is_flat_parameter(parameter) else parameter.shape


def _setter(optimizer: Optimizer, parameter: torch.Tensor, key: Any) -> Callable[[Any], None]:
    def put(value: Any) -> None:
        optimizer.state[parameter][key] = value

    return put


def _collect_leaf(
    path: str, named: Named, key: str, value: Any, parameter: torch.Tensor | None, ranks: Ranks, into: Collected,
    put: Callable[[Any], None],
) -> None:  # fmt: skip
    for i, fqn in enumerate(named.fqns):
        name = names.join([*names.split(path), "state", fqn, key])
        if isinstance(value, torch.Tensor):
            part = named.flat[i] if named.flat is not None else None
            for entry in _entries(name, value, parameter, part, ranks):
                into.entries[entry.name] = entry
                into.still.add(entry.name)
        elif isinstance(value, dict):
            for inner, leaf in value.items():
                _collect_nested(name, str(inner), leaf, ranks, into, partial(value.__setitem__, inner))
        else:
            _collect_value(name, value, into, put)


def _collect_nested(
    prefix: str, key: str, value: Any, ranks: Ranks, into: Collected, put: Callable[[Any], None]
) -> None:
    """State inside of state, as Shampoo keeps it: dicts of tensors that are no shape of the parameter's."""
    name = names.child(prefix, key)
    if isinstance(value, dict):
        for inner, leaf in value.items():
            _collect_nested(name, str(inner), leaf, ranks, into, partial(value.__setitem__, inner))
    elif isinstance(value, torch.Tensor):
        for entry in entries_of(name, value, ranks):
            into.entries[entry.name] = entry
            into.still.add(entry.name)
    else:
        _collect_value(name, value, into, put)


def _collect_value(name: str, value: Any, into: Collected, put: Callable[[Any], None]) -> None:
    try:
        into.owned[name] = values.encode(value)
    except values.Refused as error:
        raise Unsupported(f"{name}: {error.reason}") from None
    into.slots.append(Slot(name, put))


def _entries(
    name: str, value: torch.Tensor, parameter: torch.Tensor | None, part: FlatPart | None, ranks: Ranks
) -> list[Entry]:
    """A state tensor: sharded as its parameter is if it has the parameter's local shape, else as it says itself."""
    plain = parameter is not None and type(value) is torch.Tensor and value.dim() > 0
    if plain and part is not None and value.shape != part.shape:
        # Orig parameters of FSDP1 have state for their own elements alone, flat ones for the whole local shard.
        flat = is_flat_parameter(parameter)
        _check_local(name, value, (modules.local_flat(parameter).numel() if flat else part.stop - part.start,))
        return [modules.flat_entry(name, part if flat else _at_start(part), value, ranks)]
    if plain and is_dtensor(parameter) and parameter._local_tensor.shape != parameter.shape:
        _check_local(name, value, parameter._local_tensor.shape)
        # An optimizer that works on local tensors keeps plain ones; by its looks alone it would pass for a replica.
        spread, position = placed(name, parameter, ranks)
        shape = tuple(parameter.shape)
        views = local_views(name, shape, spread, position, value.detach()) if position is not None else []
        return [Entry(name, dtype_name(name, value), shape, spread, views)]
    return list(entries_of(name, value, ranks))


def _check_local(name: str, value: torch.Tensor, local: Sequence[int]) -> None:
    if tuple(value.shape) != tuple(local):
        raise Unsupported(
            f"{name} has shape {list(value.shape)} beside a sharded parameter of local shape {list(local)}: it cannot "
            "be told how it is sharded; make it a DTensor"
        )


def _at_start(part: FlatPart) -> FlatPart:
    return FlatPart(part.fqn, part.shape, part.start, part.stop, 0)


def _from_saved(
    path: str, group: dict[str, Any], parameter: torch.Tensor, named: Named, saved: Saved
) -> dict[str, Any]:
    """Fresh state for a parameter that has none yet, shaped after what the checkpoint holds for it."""
    found: dict[str, Any] = {}
    for fqn in named.fqns:
        prefix = names.join([*names.split(path), "state", fqn])
        for name in saved.below(prefix):
            key = names.split(name)[-1]
            if name not in saved.tensors:
                found.setdefault(key, None)
                continue
            dtype, shape = saved.tensors[name]
            global_shape = tuple(parameter.shape) if named.flat is None else _flat_shape(named, fqn)
            if shape == global_shape and (shape or not isinstance(found.get(key), torch.Tensor)):
                data = modules.local_flat(parameter) if is_flat_parameter(parameter) else parameter
                found.setdefault(key, torch.zeros_like(data.detach(), dtype=dtypes.torch_dtype(dtype)))
            else:
                beside = bool(group.get("capturable") or group.get("fused"))
                device = parameter.device if beside or shape else torch.device("cpu")
                found.setdefault(key, torch.zeros(shape, dtype=dtypes.torch_dtype(dtype), device=device))
    return found


def _flat_shape(named: Named, fqn: str) -> tuple[int, ...]:
    return next(part.shape for part in named.flat or () if part.fqn == fqn)


def _settings(path: str, index: int, group: dict[str, Any]) -> dict[str, Any]:
    encoded = {}
    for key, value in group.items():
        if key in _NOT_SETTINGS:
            continue
        if isinstance(value, torch.Tensor):
            if value.numel() != 1:
                raise Unsupported(f"{path}/param_groups/{index}/{key} is a tensor of {value.numel()} elements")
            value = value.item()  # a tensor learning rate: the live group decides what it is, the number is the same
        try:
            encoded[str(key)] = values.encode_tree(value, _no_tensor)
        except values.Refused as error:
            raise Unsupported(f"{path}/param_groups/{index}/{key}{error.path}: {error.reason}") from None
    return encoded


def _no_tensor(tensor: torch.Tensor) -> str:
    raise values.Refused("", "a tensor inside of a list is no setting of a parameter group")


Live = list[tuple[dict[str, Any], list[str]]]
"""The groups of the live optimizers, each with the names of its parameters."""


def _match_groups(path: str, live: Live, tree: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each live group the settings of the saved group that held its parameters. Raises Mismatch if unclear."""
    if not any("params" in group for group in tree):
        # A format that does not keep which parameters a group has (Megatron's): then only the order can tell.
        if len(tree) != len(live):
            raise Mismatch(
                f"{path}: {len(tree)} groups were saved without the names of their parameters, here there are "
                f"{len(live)}; build the optimizer with as many groups, or leave param_groups out by only="
            )
        return [{k: v for k, v in group.items() if k not in _NOT_SETTINGS} for group in tree]
    saved_of = {fqn: group for group in tree for fqn in group.get("params", ())}
    matched = []
    for index, (_, fqns) in enumerate(live):
        sources = {id(saved_of[f]): saved_of[f] for f in fqns if f in saved_of}
        if not fqns and index < len(tree):
            sources = {0: tree[index]}
        found = [{k: v for k, v in s.items() if k not in _NOT_SETTINGS} for s in sources.values()]
        for other in found[1:]:
            odd = sorted(k for k in {*found[0], *other} if found[0].get(k) != other.get(k))
            if odd:
                told = ", ".join(f"{k} {found[0].get(k)} and {other.get(k)}" for k in odd)
                raise Mismatch(
                    f"{path}: the parameters of group {index} were saved in groups that differ ({told}); build the "
                    "optimizer with the same grouping, or leave param_groups out by only="
                )
        matched.append(found[0] if found else {})
    return matched


def _put_groups(path: str, live: Live, tree: list[dict[str, Any]]) -> None:
    for (group, _), settings in zip(live, _match_groups(path, live, tree), strict=True):
        for key, value in settings.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
