"""torch's nested state dicts as holdfast's states: plain on the way out, with a place for each value on the way in."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Unsupported
from holdfast.ondisk import names
from holdfast.state.modules import unwrapped
from holdfast.state.per_rank import RNG, PerRank, is_stateful
from holdfast.state.tensors import is_tensor_leaf


def state_to_save(state_dict: Any) -> Any:
    """The state with every object that has a ``state_dict()`` replaced by it, but for what holdfast saves better.

    Modules and optimizers of torch stay: they are read by parameter name, as torch's ``get_state_dict`` has them. If a
    ``state_dict()`` raises, the failure becomes part of the state, so that it is raised on every rank by the save.
    """
    try:
        state = _plain_items(state_dict)
        return {str(key): value for key, value in state.items()} if isinstance(state, dict) else state
    except Exception as error:  # noqa: BLE001 - the save raises it on every rank
        return {"state_dict": _Failed(error)}


@dataclass(frozen=True)
class _Failed:
    """A leaf that fails as the state did."""

    error: Exception

    def state_dict(self) -> Any:
        raise self.error

    def load_state_dict(self, state: Any) -> None:
        raise self.error


def _plain(node: Any) -> Any:
    if is_tensor_leaf(node) or isinstance(node, (PerRank, RNG)) or _is_native(node):
        return node
    return _plain_items(node.state_dict() if is_stateful(node) else node)


def without_files(value: Any) -> Any:
    """A file in memory as its bytes: torch's programs keep what they have packed themselves in one."""
    return value.getvalue() if isinstance(value, io.BytesIO) else value


def like(present: Any, value: Any) -> Any:
    """Bytes as a file in memory where there is one now; anything else as it is."""
    return io.BytesIO(value) if isinstance(present, io.BytesIO) and isinstance(value, bytes) else value


def _plain_items(node: Any) -> Any:
    if isinstance(node, Mapping):
        kind: Callable[..., Any] = type(node) if type(node) in (Counter, OrderedDict) else dict
        return kind({key: _plain(value) for key, value in node.items()})
    return type(node)(map(_plain, node)) if type(node) in (list, tuple) else without_files(node)


def _is_native(node: Any) -> bool:
    """A module or optimizer that saves and loads as torch made it, so that holdfast may do it by parameter name."""
    for kind in (nn.Module, Optimizer):
        if isinstance(node, kind):
            own = {"state_dict", "load_state_dict"} & vars(node).keys()
            same = type(node).state_dict is kind.state_dict and type(node).load_state_dict is kind.load_state_dict
            return same and not own
    return False


@dataclass(frozen=True)
class _Place:
    """Where one value of a target goes, as an object that takes it."""

    container: MutableMapping[Any, Any] | MutableSequence[Any]
    key: Any

    def state_dict(self) -> None:
        """Nothing: what stands there now does not matter."""

    def load_state_dict(self, value: Any) -> None:
        self.container[self.key] = like(self.container[self.key], value)


@dataclass
class Target:
    """What a state dict asks of a checkpoint, in torch's way: ``tree`` is a state that holdfast's walk understands.

    ``then`` hands the objects their state dicts once they are filled. ``optimizers`` are paths of optimizers,
    ``misfits`` lines of what cannot fit. Tensors are filled in place; each value has a place of its own, so that nested
    dicts stay the same objects; what torch would not have saved is not asked for.
    """

    checkpoint: Checkpoint
    tree: dict[str, Any] = field(default_factory=dict)
    then: list[Callable[[], None]] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    _wrapped: list[tuple[str, str]] = field(default_factory=list)

    def fill(self, state_dict: MutableMapping[str, Any]) -> Target:
        """Lay out ``state_dict``; keys in sorted order, as torch does: a ``state_dict()`` may be a collective."""
        for key in sorted(state_dict, key=str):
            value = state_dict[key]
            self._add(self.tree, "", key, value, state_dict)
            if not (is_stateful(value) or is_tensor_leaf(value)):
                self.then.append(partial(_set_again, state_dict, key))
        return self

    def name_here(self, saved: str) -> str:
        """What a saved name is called here: modules are asked by their parameters' names, whatever wraps them."""
        for begin, instead in self._wrapped:
            if saved.startswith(begin):
                return instead + saved[len(begin) :]
        return saved

    def _add(self, into: dict[str, Any], path: str, key: Any, value: Any, container: Any) -> None:
        called = self._called(path, str(key)) if is_tensor_leaf(value) else str(key)
        node = self._node(names.child(path, called), value, container, key)
        if isinstance(node, dict) and not node:  # nothing is asked for
            return
        if called in into:
            raise Unsupported(f"two keys of {path or 'the state dict'} are called {called!r}; rename one")
        into[called] = node

    def _node(self, path: str, value: Any, container: Any, key: Any) -> Any:
        if is_tensor_leaf(value):
            return self._tensor(path, value, container, key)
        if isinstance(value, (PerRank, RNG)) or _is_native(value):
            return self._native(path, value)
        if type(value) in (list, tuple) and value and all(map(_is_native, value)):
            return value  # the chunks of a pipeline stage
        if is_stateful(value):
            return self._object(path, value)
        if isinstance(value, Mapping):
            return self._items(path, value, value.items())
        if isinstance(value, list) and not _is_value(value):
            return self._items(path, value, enumerate(value))
        if type(value) is tuple and _holds_tensor(value):
            members = list(value)
            node = self._items(path, members, enumerate(value))
            self.then.append(lambda: container.__setitem__(key, tuple(members)))
            return node
        if path in self.checkpoint.records:
            self.misfits.append(f"{path}: saved as a tensor, here a value")
        return _Place(container, key)

    def _items(self, path: str, container: Any, items: Any) -> dict[str, Any]:
        nodes: dict[str, Any] = {}
        for key, value in items:
            self._add(nodes, path, key, value, container)
        return nodes

    def _object(self, path: str, value: Any) -> dict[str, Any]:
        state = value.state_dict()
        if not isinstance(state, MutableMapping):
            raise Unsupported(f"{path}: its state_dict() is a {type(state).__qualname__}; it must be a dict")
        node = self._items(path, state, state.items())
        self.then.append(lambda: value.load_state_dict(state))
        return node

    def _native(self, path: str, value: Any) -> Any:
        if isinstance(value, Optimizer):
            self.optimizers.append(path)
        if isinstance(value, nn.Module) and (prefix := _prefix(value)):
            self._wrapped.append((names.child(path, prefix), names.child(path, "")))
        return value

    def _tensor(self, path: str, value: Any, container: Any, key: Any) -> Any:
        if path not in self.checkpoint.records and path in self.checkpoint.manifest.values:
            return _Place(container, key)  # a number then, a tensor now: torch gives back what was saved
        if isinstance(value, torch.Tensor) and not isinstance(value, ShardedTensor) and value.is_meta:
            memory = _materialized(value)
            self.then.append(lambda: container.__setitem__(key, memory))
            return memory
        return value

    def _called(self, path: str, key: str) -> str:
        """The key under which the checkpoint has a tensor: as it is, or without what wrappers put into it."""
        plain = key.removeprefix("module.")
        for wrapper in _WRAPPERS:
            plain = plain.replace(wrapper, "")
        saved = self.checkpoint.records
        return plain if names.child(path, key) not in saved and names.child(path, plain) in saved else key


_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def _prefix(module: nn.Module) -> str:
    """What the wrappers around a module put before the names of its own ``state_dict()``."""
    inner = unwrapped(module)
    if inner is module:
        return ""
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return "module." + _prefix(inner)
    compiled = isinstance(module, torch._dynamo.eval_frame.OptimizedModule)
    return ("_orig_mod." if compiled else "") + _prefix(inner)


def _set_again(state_dict: MutableMapping[str, Any], key: str) -> None:
    """As torch does: a mapping of one's own learns of what has come."""
    state_dict[key] = state_dict[key]


def _is_value(node: list[Any]) -> bool:
    """Whether torch takes a list for one value: no tensor and no mapping in it."""
    return not any(
        is_tensor_leaf(v)
        or isinstance(v, (Mapping, PerRank, RNG))
        or is_stateful(v)
        or (isinstance(v, list) and not _is_value(v))
        for v in node
    )


def _holds_tensor(node: Any) -> bool:
    if isinstance(node, Mapping):
        return any(map(_holds_tensor, node.values()))
    return any(map(_holds_tensor, node)) if isinstance(node, (list, tuple)) else is_tensor_leaf(node)


def _materialized(tensor: torch.Tensor) -> torch.Tensor:
    """Memory for a tensor on the meta device, where its mesh or the accelerator of this process is."""
    if isinstance(tensor, DTensor):
        local = torch.empty_like(tensor._local_tensor, device=tensor.device_mesh.device_type)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
    return torch.empty_like(tensor, device=device)
