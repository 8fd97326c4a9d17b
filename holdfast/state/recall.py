"""What a state's modules and optimizers looked like at the last save, so that the next one need not walk them again.

The Saver keeps one. It trusts only what it can see to be unchanged: the same tensor objects, at the same memory, of the
same shape, strides and type. Values are never remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.state.kinds import is_dtensor
from holdfast.state.leaves import Collected
from holdfast.state.optimizers import state_of
from holdfast.state.subclasses import is_flattening
from holdfast.state.tensors import PLAIN

Marks = list[Any]
Owners = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class _Seen:
    """What one module or list of optimizers ``added`` to a state, and the marks by which it is known again.

    The views in ``added`` keep the memory from being used for anything else, so that an address stands for it; they go
    when the module or the optimizer goes.
    """

    path: str
    marks: Marks
    added: Collected
    params: list[list[str]]


class Recall:
    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
        self._marks: dict[int, Marks | None] = {}

    def begin(self) -> None:
        """A walk begins: each module is looked at once in it."""
        self._marks.clear()

    def module(self, path: str, module: nn.Module, into: Collected) -> bool:
        """Add what the module added last time, if it is still the same; False if not."""
        return self._again(path, module, partial(self._marks_of_module, module), into) is not None

    def optimizers(
        self, path: str, optimizers: Sequence[Optimizer], owners: Owners, into: Collected
    ) -> list[list[str]] | None:
        """The same for optimizers that share a path; the names of the parameters of each group, or None.

        ``owners`` are the modules of the state by path. They give parameters their names.
        """
        return self._again(path, optimizers[0], partial(self._marks_of_optimizers, optimizers, owners), into)

    def note_module(self, path: str, module: nn.Module, added: Collected) -> None:
        """Remember what the module ``added``. Its leaves must be live parameters and buffers, all of them."""
        self._marks.pop(id(module), None)  # FSDP2 shards its parameters again when it is asked for its state
        self._note(path, module, self._marks_of_module(module), added)

    def note_optimizers(self, path: str, optimizers: Sequence[Optimizer], owners: Owners, added: Collected) -> None:
        """Remember what optimizers ``added``, but for the settings of their groups."""
        self._note(path, optimizers[0], self._marks_of_optimizers(optimizers, owners), added)

    def _again(self, path: str, key: Any, marks: Callable[[], Marks | None], into: Collected) -> list[list[str]] | None:
        seen = self._seen.get(key)
        if seen is None or seen.path != path or seen.marks != marks():
            return None
        into.merge(seen.added)
        return seen.params

    def _note(self, path: str, key: Any, marks: Marks | None, added: Collected) -> None:
        if marks is None:
            self._seen.pop(key, None)
            return
        params = [group.params for group in added.groups.pop(path, ())]
        added.changes.optimizers.clear()  # must not be kept alive from here
        self._seen[key] = _Seen(path, marks, added, params)

    def _marks_of_module(self, module: nn.Module) -> Marks | None:
        if id(module) not in self._marks:
            self._marks[id(module)] = _marks_of_module(module)
        return self._marks[id(module)]

    def _marks_of_optimizers(self, optimizers: Sequence[Optimizer], owners: Owners) -> Marks | None:
        # The modules give the parameters their names.
        marks = [(path, self._marks_of_module(owner)) for path, owner in owners]
        own = _marks_of_optimizers(optimizers)
        return None if own is None or any(of_module is None for _, of_module in marks) else [*marks, *own]


def _marks_of_module(module: nn.Module) -> Marks | None:
    marks: Marks = []
    for sub in module.modules():
        marks.append(id(sub))
        marks.append(sorted(sub._non_persistent_buffers_set))
        tensors = [*sub._parameters.items(), *sub._buffers.items()]
        marks += [key for key, tensor in tensors if tensor is None]
        if not all(_mark(key, tensor, marks) for key, tensor in tensors if tensor is not None):
            return None
    return marks


def _marks_of_optimizers(optimizers: Sequence[Optimizer]) -> Marks | None:
    marks: Marks = []
    for optimizer in optimizers:
        marks.append(id(optimizer))
        state = state_of(optimizer)
        if any(not isinstance(key, torch.Tensor) for key in state):
            return None
        for group in optimizer.param_groups:
            marks.append(len(group["params"]))
            for parameter in group["params"]:
                marks += [id(parameter), parameter.requires_grad, parameter in state]
                if not all(_mark(key, value, marks) for key, value in state.get(parameter, {}).items()):
                    return None
    return marks


def _mark(key: Any, tensor: Any, marks: Marks) -> bool:
    """Add marks of a tensor; False if it is something else, or has no memory to know it by.

    A subclass that wraps other tensors is known by these: it has no address, and they may be exchanged inside of it.
    """
    if not isinstance(tensor, torch.Tensor):
        return False
    marks += [key, id(tensor), type(tensor), tensor.shape, tensor.dtype]
    local: Any = tensor
    if type(tensor) not in PLAIN:
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        if is_flattening(local):
            parts, context = local.__tensor_flatten__()
            marks.append(repr(context))
            return all(_mark(part, getattr(local, part), marks) for part in parts)
    try:
        address = local.data_ptr()
    except (RuntimeError, NotImplementedError):
        return False
    marks += [address, local.stride()]
    return bool(address != 0 or local.numel() == 0)
