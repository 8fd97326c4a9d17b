"""Parameters and buffers of modules in any wrapper: plain, DDP, compiled, FSDP1, FSDP2, tensor parallel, Fabric.

`module_leaves` and the optimizers ask it. Never gathers: FSDP1's flat parameters are read as shards where they lie.

We rejected torch's sharded state dict of FSDP1, because it gathers every parameter, and on the CPU torch 2.13 gathers
optimizer state wrongly. A flat range of a parameter is at most 2 * ndim - 1 boxes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import Unsupported
from holdfast.ondisk import names
from holdfast.ranks.ranks import Ranks
from holdfast.state.kinds import is_checkpoint_wrapper, is_compiled, is_fabric_module, is_fsdp1
from holdfast.state.leaves import Entry
from holdfast.state.tensors import flat_entry

EXTRA_STATE = "_extra_state"


@dataclass(frozen=True)
class FlatPart:
    """The elements ``start:stop`` of one flattened original parameter, at ``offset`` of this rank's flat shard."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of a wrapper that leaves no trace in names, or ``module`` itself."""
    inner: Any = module
    if isinstance(module, (DistributedDataParallel, DataParallel)):
        inner = module.module
    elif is_fsdp1(module):
        inner = module._fsdp_wrapped_module
    elif is_checkpoint_wrapper(module):
        inner = module._checkpoint_wrapped_module
    elif is_compiled(module):
        inner = module._orig_mod
    elif is_fabric_module(module):
        inner = module._forward_module
    return cast(nn.Module, inner)


def innermost(module: nn.Module) -> nn.Module:
    """The module inside of all its wrappers."""
    while unwrapped(module) is not module:
        module = unwrapped(module)
    return module


def named_modules(module: nn.Module, prefix: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Every module once with its plain prefix (``""`` or ending in a dot), wrappers and what they wrap included."""
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    yield prefix, module
    inner = unwrapped(module)
    if inner is not module:
        yield from named_modules(inner, prefix, seen)
        return
    for key, sub in module._modules.items():
        if sub is not None:
            yield from named_modules(sub, f"{prefix}{key}.", seen)


def parameter_names(module: nn.Module) -> dict[int, tuple[str, nn.Parameter]]:
    """``id(parameter)`` to (plain FQN, parameter); a tied one under its first name. FSDP1's flat ones are left out."""
    named: dict[int, tuple[str, nn.Parameter]] = {}
    flat = {id(p) for p in flat_parameters(module)}
    sharded = _sharded_parameters(module)
    for prefix, sub in named_modules(module):
        for key, parameter in sub._parameters.items():
            parameter = sharded.get((id(sub), key), parameter)
            if parameter is not None and id(parameter) not in flat:
                named.setdefault(id(parameter), (prefix + key, parameter))
    return named


def _sharded_parameters(module: nn.Module) -> dict[tuple[int, str], nn.Parameter]:
    """FSDP2: by (``id(submodule)``, key) the sharded parameter, which the optimizer has.

    After a forward pass without a backward one, as in validation, the submodules still hold the unsharded parameters.
    """
    sharded: dict[tuple[int, str], nn.Parameter] = {}
    for sub in module.modules():
        for group in _fsdp2_groups(sub):
            for parameter in group.fsdp_params:
                info = parameter._module_info
                places = zip(
                    [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names], strict=True
                )
                sharded.update({(id(owner), key): parameter.sharded_param for owner, key in places})
    return sharded


def _fsdp2_groups(module: nn.Module) -> list[Any]:
    if not hasattr(module, "_get_fsdp_state"):
        return []
    state = cast(Any, module)._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def buffer_names(module: nn.Module) -> set[str]:
    """Plain FQNs of the buffers."""
    return {prefix + key for prefix, sub in named_modules(module) for key in sub._buffers.keys()}  # noqa: SIM118 - TorchScript's has no __iter__


def flat_parameters(module: nn.Module) -> dict[Any, list[FlatPart]]:
    """FSDP1: each flat parameter with the original parameters of which this rank's shard holds elements."""
    parts_of: dict[Any, list[FlatPart]] = {}
    for prefix, sub in named_modules(module):
        handle = getattr(sub, "_handle", None) if is_fsdp1(sub) else None
        if handle is None:
            continue
        flat = handle.flat_param
        spans = _sharded_spans(flat) if handle.uses_sharded_strategy else _unsharded_spans(flat)
        parts_of[flat] = [
            FlatPart(prefix + plain_fqn(fqn), tuple(shape), *span)
            for fqn, shape, span in zip(flat._fqns, flat._shapes, spans, strict=True)
        ]
    return parts_of


def _sharded_spans(flat: Any) -> list[tuple[int, int, int]]:
    """(start, stop, offset) of each original parameter in this rank's shard."""
    return [
        (i.intra_param_start_idx, i.intra_param_end_idx + 1, i.offset_in_shard) if i.in_shard else (0, 0, 0)
        for i in flat._shard_param_infos
    ]


def _unsharded_spans(flat: Any) -> list[tuple[int, int, int]]:
    """The same under NO_SHARD, where every rank holds all and padding lies between the parameters."""
    spans, at = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            spans.append((0, numel, at))
        at += numel
    return spans


def holds_gradients_back(module: nn.Module) -> bool:
    """Whether FSDP2 is set not to reduce gradients: it then keeps their sums where no parameter shows them."""
    return any(not group.reduce_grads for _, sub in named_modules(module) for group in _fsdp2_groups(sub))


def gives_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def plain_fqn(fqn: str) -> str:
    """A name without the keys that wrappers add."""
    wrappers = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(key for key in fqn.split(".") if key not in wrappers)


def part_entry(name: str, part: FlatPart, shard: torch.Tensor, ranks: Ranks) -> Entry:
    """What this rank holds of one original parameter; ``shard`` is the rank's flat tensor."""
    memory = shard[part.offset : part.offset + part.stop - part.start]
    return flat_entry(name, memory, part.shape, part.start, ranks)


def local_flat(flat: Any) -> torch.Tensor:
    """This rank's shard of an FSDP1 flat parameter, in full precision; the unsharded one is only a cache of it."""
    shard = getattr(flat, "_local_shard", None)
    return cast(torch.Tensor, flat.data if shard is None else shard)


@dataclass(frozen=True)
class ModuleState:
    """A module's leaves by plain FQN: flat parts of FSDP1 as entries, all else as its state dict has it."""

    entries: list[Entry]
    leaves: dict[str, Any]
    aliases: dict[str, str]


def module_state(path: str, module: nn.Module, ranks: Ranks) -> ModuleState:
    """Everything a module would put into its state dict; tensors as they lie in memory, never gathered."""
    flat = flat_parameters(module)
    if not flat:
        return ModuleState([], _state_dict(module), {})
    entries = [
        part_entry(names.child(path, part.fqn), part, local_flat(parameter), ranks)
        for parameter, parts in flat.items()
        for part in parts
    ]
    leaves: dict[str, Any] = {}
    of_handles = {id(p) for parameter in flat for p in (parameter, *(parameter._params or ()))}
    for prefix, sub in named_modules(module):
        for key, tensor in [*sub._parameters.items(), *sub._buffers.items()]:
            if tensor is None or key in sub._non_persistent_buffers_set or id(tensor) in of_handles:
                continue
            if unwrapped(sub) is sub:
                leaves[prefix + key] = tensor.detach()
        if unwrapped(sub) is sub and gives_extra_state(sub):
            leaves[f"{prefix}{EXTRA_STATE}"] = sub.get_extra_state()
    return ModuleState(entries, leaves, _flat_aliases(path, module, flat))


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """A module's state dict by plain FQN. Torch finds plain names slowly, and only wrappers further in need that."""
    inner = innermost(module)
    with torch.no_grad():
        if all(unwrapped(sub) is sub for sub in inner.modules()):
            return inner.state_dict()
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(module)


def _flat_aliases(path: str, module: nn.Module, flat: dict[Any, list[FlatPart]]) -> dict[str, str]:
    """Tied parameters inside of flat ones: FSDP1 keeps the first and notes the others."""
    prefixes = {id(sub): prefix for prefix, sub in named_modules(module)}
    aliases = {}
    for parameter in flat:
        for info in parameter._shared_param_infos:
            other = prefixes[id(info.module)] + info.param_name
            first = prefixes[id(info.prim_module)] + info.prim_param_name
            aliases[names.child(path, other)] = names.child(path, first)
    return aliases


def is_live(tensor: torch.Tensor, storages: set[int]) -> bool:
    """Whether a tensor of a state dict is memory of its module, whose ``storages`` are given, and no copy of it."""
    return (
        tensor.numel() == 0 or tensor.is_meta or _address(tensor) in storages or hasattr(tensor, "__tensor_flatten__")
    )


def storages_of(module: nn.Module) -> set[int]:
    """The addresses of the parameters and buffers of a module."""
    return {_address(t) for t in [*module.parameters(), *module.buffers()]}


def _address(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper subclass without storage of its own
        return id(tensor)


def merged(
    path: str, modules: Sequence[nn.Module], saved: Callable[[str], bool] | None = None
) -> list[tuple[str, nn.Module]]:
    """Where each module of a list is kept: all at ``path`` if no name stands twice (pipeline chunks), else by position.

    When loading, ``saved(path)`` says whether the checkpoint has anything at or below a path, and decides.
    """
    by_position = [(names.child(path, str(i)), module) for i, module in enumerate(modules)]
    if saved is not None and len(modules) > 1 and any(saved(at) for at, _ in by_position):
        return by_position
    seen: set[str] = set()
    for module in modules:
        own = _keys_of(module)
        if own & seen and saved is None:
            return by_position
        seen |= own
    return [(path, module) for module in modules]


def _keys_of(module: nn.Module) -> set[str]:
    """The keys that a module puts into its state dict, as far as they are known without asking it."""
    keys = {fqn for fqn, _ in parameter_names(module).values()}
    keys |= {part.fqn for parts in flat_parameters(module).values() for part in parts}
    for prefix, sub in named_modules(module):
        keys |= {prefix + key for key in sub._buffers.keys() if key not in sub._non_persistent_buffers_set}  # noqa: SIM118
        if gives_extra_state(sub):
            keys.add(prefix + EXTRA_STATE)
    return keys


def check_not_lazy(path: str, module: nn.Module) -> None:
    """Raise Unsupported if the module has parameters that do not exist yet."""
    for fqn, parameter in parameter_names(module).values():
        if isinstance(parameter, nn.UninitializedParameter):
            raise Unsupported(f"{path}/{fqn} is an uninitialized parameter; run one forward pass first")
