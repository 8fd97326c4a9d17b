"""What the parameters of an optimizer are called, and how a tensor of their state lies over the ranks.

The collectors of optimizers ask here. Never looks at an optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from holdfast.errors import Unsupported
from holdfast.ondisk import names
from holdfast.ranks.ranks import Ranks
from holdfast.state import modules
from holdfast.state.kinds import is_dtensor, is_flat_parameter
from holdfast.state.leaves import Entry
from holdfast.state.modules import FlatPart
from holdfast.state.tensors import dtype_name, entries_of, local_views, placed


@dataclass(frozen=True)
class ParameterName:
    """What a parameter of an optimizer is called: one FQN, or the parts of an FSDP1 flat parameter."""

    fqn: str
    flat: list[FlatPart] | None = None

    @property
    def fqns(self) -> list[str]:
        return [self.fqn] if self.flat is None else [part.fqn for part in self.flat]


Known = Mapping[int, tuple[str, ParameterName]]
"""``id(parameter)`` to the path of its module (empty for a bare tensor) and what it is called."""


def names_of_parameters(
    owners: Sequence[tuple[str, nn.Module]], bare: Iterable[tuple[str, torch.Tensor]] = ()
) -> dict[int, tuple[str, ParameterName]]:
    """What each parameter of the modules of a state is called, and each tensor that lies ``bare`` in it."""
    known: dict[int, tuple[str, ParameterName]] = {}
    for path, module in owners:
        for key, (fqn, _) in modules.parameter_names(module).items():
            known.setdefault(key, (path, ParameterName(fqn)))
        for flat, parts in modules.flat_parameters(module).items():
            known[id(flat)] = (path, ParameterName("", parts))
            for original, part in zip(flat._params or (), parts, strict=False):
                known[id(original)] = (path, ParameterName(part.fqn, [part]))
    for path, tensor in bare:
        known.setdefault(id(tensor), ("", ParameterName(".".join(names.split(path)))))
    return known


def call_parameters(path: str, parameters: Sequence[torch.Tensor], known: Known) -> dict[int, ParameterName]:
    """``id(parameter)`` to its name among the parameters of one optimizer, the one at ``path``.

    Names lead with the module's path where the parameters belong to several. Parameters that the state does not hold
    are called by their number, as torch does. Raises Unsupported if it holds only some of them, or two get one name.
    """
    places = [known.get(id(p)) for p in parameters]
    if all(place is None for place in places):
        return {id(p): ParameterName(str(i)) for i, p in enumerate(parameters)}
    if any(place is None for place in places):
        index = places.index(None)
        raise Unsupported(
            f"{path}: parameter {index} (shape {list(parameters[index].shape)}) belongs to no module of this state, "
            "the others do; put the module that owns it, or the parameter itself, into the state too"
        )
    several = len({place[0] for place in places if place is not None}) > 1
    called = {
        id(p): _below(place[0].replace("/", "."), place[1]) if several else place[1]
        for p, place in zip(parameters, places, strict=True)
        if place is not None
    }
    owner: dict[str, int] = {}
    for key, named in called.items():
        for fqn in named.fqns:
            if owner.setdefault(fqn, key) != key:
                raise Unsupported(
                    f"{path}: two of its parameters are both called {fqn}; rename the modules that own them"
                )
    return called


def _below(owner: str, named: ParameterName) -> ParameterName:
    if not owner:
        return named
    flat = None if named.flat is None else [replace(part, fqn=f"{owner}.{part.fqn}") for part in named.flat]
    return ParameterName(f"{owner}.{named.fqn}", flat)


def own_shape(parameter: torch.Tensor) -> torch.Size:
    """The shape of a parameter; of a flat one that of this rank's shard."""
    return modules.local_flat(parameter).shape if is_flat_parameter(parameter) else parameter.shape


def entries_beside(
    name: str, value: torch.Tensor, parameter: torch.Tensor | None, part: FlatPart | None, ranks: Ranks
) -> list[Entry]:
    """A state tensor: sharded as its parameter is if it has the parameter's local shape, else as it says itself.

    Raises Unsupported for a plain one of another shape beside a sharded parameter: each rank may have its own.
    """
    plain = parameter is not None and type(value) is torch.Tensor and value.dim() > 0
    if plain and part is not None and value.shape != part.shape:
        # Orig parameters of FSDP1 have state for their own elements alone, flat ones for the whole local shard.
        flat = is_flat_parameter(parameter)
        local: tuple[int, ...] = (modules.local_flat(parameter).numel() if flat else part.stop - part.start,)
        if _is_number(value, local):
            return entries_of(name, value, ranks)
        _check_local(name, value, local)
        return [modules.part_entry(name, part if flat else replace(part, offset=0), value, ranks)]
    if (
        plain
        and is_dtensor(parameter)
        and parameter._local_tensor.shape != parameter.shape
        and not _is_number(value, parameter._local_tensor.shape)
    ):
        _check_local(name, value, parameter._local_tensor.shape)
        # An optimizer that works on local tensors keeps plain ones; by its looks alone it would pass for a replica.
        spread, position = placed(name, parameter, ranks)
        shape = tuple(parameter.shape)
        views = local_views(name, shape, spread, position, value.detach()) if position is not None else []
        return [Entry(name, dtype_name(name, value), shape, spread, views)]
    return entries_of(name, value, ranks)


def _is_number(value: torch.Tensor, local: Sequence[int]) -> bool:
    """Whether a tensor of one element is a number that all ranks have, not the one element of a shard."""
    return value.numel() == 1 and tuple(value.shape) != tuple(local)


def _check_local(name: str, value: torch.Tensor, local: Sequence[int]) -> None:
    if tuple(value.shape) != tuple(local):
        raise Unsupported(
            f"{name} has shape {list(value.shape)} beside a sharded parameter of local shape {list(local)}: it cannot "
            "be told how it is sharded; make it a DTensor"
        )


def device_of_number(
    name: str, group: Mapping[str, Any], parameter: torch.Tensor, shape: Sequence[int]
) -> torch.device:
    """Where torch's ``load_state_dict`` puts state of another shape: a step count may stay on the host."""
    on_host = name.endswith("/step") and not shape and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_host else parameter.device
