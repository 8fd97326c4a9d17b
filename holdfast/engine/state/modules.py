"""Parameters and buffers of modules, whatever wraps them: plain, DDP, compiled, FSDP1, FSDP2, tensor parallel.

Called by the walk for modules and by the optimizers for the names of their parameters.
Never gathers: FSDP1's flat parameters are read as flat shards where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.engine.ranks import Ranks
from holdfast.engine.state.kinds import is_checkpoint_wrapper, is_compiled, is_fsdp1
from holdfast.engine.state.leaves import Entry, View
from holdfast.engine.state.tensors import boxed, dtype_name
from holdfast.errors import Unsupported
from holdfast.ondisk import names
from holdfast.ondisk.box import flat_boxes

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
    return cast(nn.Module, inner)


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
    found: dict[int, tuple[str, nn.Parameter]] = {}
    flat = {id(p) for p in flat_parameters(module)}
    for prefix, sub in named_modules(module):
        for key, parameter in sub._parameters.items():
            if parameter is not None and id(parameter) not in flat:
                found.setdefault(id(parameter), (prefix + key, parameter))
    return found


def buffer_names(module: nn.Module) -> set[str]:
    """Plain FQNs of the buffers."""
    return {prefix + key for prefix, sub in named_modules(module) for key in sub._buffers}


def flat_parameters(module: nn.Module) -> dict[Any, list[FlatPart]]:
    """FSDP1: each flat parameter with the original parameters of which this rank's shard holds elements."""
    found: dict[Any, list[FlatPart]] = {}
    for prefix, sub in named_modules(module):
        handle = getattr(sub, "_handle", None) if is_fsdp1(sub) else None
        if handle is None:
            continue
        flat = handle.flat_param
        spans = _sharded_spans(flat) if handle.uses_sharded_strategy else _unsharded_spans(flat)
        found[flat] = [
            FlatPart(prefix + _plain_fqn(fqn), tuple(shape), *span)
            for fqn, shape, span in zip(flat._fqns, flat._shapes, spans, strict=True)
        ]
    return found


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


def _plain_fqn(fqn: str) -> str:
    wrappers = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
    return ".".join(key for key in fqn.split(".") if key not in wrappers)


def flat_entry(name: str, part: FlatPart, shard: torch.Tensor, ranks: Ranks) -> Entry:
    """What this rank holds of one original parameter, as boxes; ``shard`` is the rank's flat tensor."""
    views, at = [], part.offset
    for box in flat_boxes(part.shape, part.start, part.stop):
        views.append(View(box, shard.detach()[at : at + box.size].view(box.lengths)))
        at += box.size
    return boxed(name, dtype_name(name, shard), part.shape, views, ranks)


def local_flat(flat: Any) -> torch.Tensor:
    """This rank's shard of an FSDP1 flat parameter, in full precision; the unsharded one is only a cache of it."""
    shard = getattr(flat, "_local_shard", None)
    return cast(torch.Tensor, flat.data if shard is None else shard)


@dataclass(frozen=True)
class ModuleState:
    """A module's leaves by plain FQN. ``loose`` are those that must go back through ``load_state_dict``."""

    entries: list[Entry]
    tensors: dict[str, Any]
    loose: dict[str, Any]
    aliases: dict[str, str]


def module_state(path: str, module: nn.Module, ranks: Ranks) -> ModuleState:
    """Everything a module would put into its state dict; tensors as they lie in memory, never gathered."""
    flat = flat_parameters(module)
    if not flat:
        state = _state_dict(module)
        own = _storages(module)
        tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor)}
        loose = {k: v for k, v in state.items() if k not in tensors or not _live(tensors[k], own)}
        return ModuleState([], tensors, loose, {})
    entries = [
        flat_entry(names.child(path, part.fqn), part, local_flat(parameter), ranks)
        for parameter, parts in flat.items()
        for part in parts
    ]
    tensors, loose = {}, {}
    of_handles = {id(p) for parameter in flat for p in (parameter, *(parameter._params or ()))}
    for prefix, sub in named_modules(module):
        for key, tensor in [*sub._parameters.items(), *sub._buffers.items()]:
            if tensor is None or key in sub._non_persistent_buffers_set or id(tensor) in of_handles:
                continue
            if unwrapped(sub) is sub:
                tensors[prefix + key] = tensor.detach()
        if type(sub).get_extra_state is not nn.Module.get_extra_state:
            loose[f"{prefix}{EXTRA_STATE}"] = sub.get_extra_state()
    return ModuleState(entries, tensors, loose, _flat_aliases(path, module, flat))


def _state_dict(module: nn.Module) -> dict[str, Any]:
    """A module's state dict by plain FQN. Torch finds plain names slowly, and only wrappers further in need that."""
    inner = module
    while unwrapped(inner) is not inner:
        inner = unwrapped(inner)
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


def _storages(module: nn.Module) -> set[int]:
    return {_address(t) for t in [*module.parameters(), *module.buffers()]}


def _address(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return local.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # a wrapper subclass without storage of its own
        return id(tensor)


def _live(tensor: torch.Tensor, own: set[int]) -> bool:
    return tensor.numel() == 0 or tensor.is_meta or _address(tensor) in own or hasattr(tensor, "__tensor_flatten__")


def put_loose(module: nn.Module, key: str, value: Any) -> None:
    """Hand one leaf back to the module through its own ``load_state_dict`` hooks."""
    if key.rpartition(".")[2] == EXTRA_STATE:
        for prefix, sub in named_modules(module):
            if f"{prefix}{EXTRA_STATE}" == key and unwrapped(sub) is sub:
                sub.set_extra_state(value)
                return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, {key: value}, options=StateDictOptions(strict=False))


def merged(path: str, modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Where each module of a list is kept: all at ``path`` if no name stands twice (pipeline chunks), else by index."""
    seen: set[str] = set()
    for module in modules:
        own = {fqn for fqn, _ in parameter_names(module).values()}
        own |= {part.fqn for parts in flat_parameters(module).values() for part in parts}
        if own & seen:
            return [(names.child(path, str(i)), m) for i, m in enumerate(modules)]
        seen |= own
    return [(path, m) for m in modules]


def check_not_lazy(path: str, module: nn.Module) -> None:
    """Raise Unsupported if the module has parameters that do not exist yet."""
    for fqn, parameter in parameter_names(module).values():
        if isinstance(parameter, nn.UninitializedParameter):
            raise Unsupported(f"{path}/{fqn} is an uninitialized parameter; run one forward pass first")
