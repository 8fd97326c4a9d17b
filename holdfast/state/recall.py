"""What a state's modules and optimizers looked like at the last save, so that the next need not walk them again.

The Saver keeps one. Believes nothing that it cannot see to be unchanged: the same tensor objects, at the same memory,
of the same shape, strides and type; values are never remembered.
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

from holdfast.ondisk.containers import Note
from holdfast.state.kinds import is_dtensor
from holdfast.state.leaves import Collected, Entry
from holdfast.state.optimizers import state_of
from holdfast.state.subclasses import is_flattening

Marks = list[Any]
Owners = Sequence[tuple[str, nn.Module]]


@dataclass(frozen=True)
class _Seen:
    """What one module or list of optimizers added, and by which marks it is known again.

    The views in ``entries`` keep the memory from being used for anything else, so that an address stands for it; they
    go when the module or the optimizer goes.
    """

    path: str
    marks: Marks
    entries: dict[str, Entry]
    aliases: dict[str, str]
    buffers: set[str]
    still: set[str]
    to_come: dict[str, int]
    params: list[list[str]]
    kinds: dict[str, str]
    containers: dict[str, Note]


class Recall:
    """Memory of one owner; made empty."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Any, _Seen] = WeakKeyDictionary()
        self._marks: dict[int, Marks | None] = {}

    def begin(self) -> None:
        """A walk begins: what a module looks like is looked up once in it."""
        self._marks.clear()

    def _marks_of_module(self, module: nn.Module) -> Marks | None:
        if id(module) not in self._marks:
            self._marks[id(module)] = _marks_of_module(module)
        return self._marks[id(module)]

    def _marks_of_optimizers(self, found: Sequence[Optimizer], owners: Owners) -> Marks | None:
        # The modules give the parameters their names.
        marks = [(path, self._marks_of_module(owner)) for path, owner in owners]
        own = _marks_of_optimizers(found)
        return None if own is None or any(of_module is None for _, of_module in marks) else [*marks, *own]

    def module(self, path: str, module: nn.Module, into: Collected) -> bool:
        """Add what the module added last time, if it is still the same; False if not."""
        return self._again(path, module, partial(self._marks_of_module, module), into) is not None

    def optimizers(
        self, path: str, found: Sequence[Optimizer], owners: Owners, into: Collected
    ) -> list[list[str]] | None:
        """The same for optimizers that share a path; the names of the parameters of each group, or None.

        ``owners`` are the modules of the state, which give parameters their names, by path.
        """
        return self._again(path, found[0], partial(self._marks_of_optimizers, found, owners), into)

    def note_module(self, path: str, module: nn.Module, before: Collected, into: Collected) -> None:
        """Remember what the module added to ``before``. Its leaves must be live parameters and buffers, all of them."""
        self._marks.pop(id(module), None)  # FSDP2 shards its parameters again when it is asked for its state
        self._note(path, module, self._marks_of_module(module), before, into, [])

    def note_optimizers(
        self, path: str, found: Sequence[Optimizer], owners: Owners, before: Collected, into: Collected,
        params: list[list[str]],
    ) -> None:  # fmt: skip
        """Remember what optimizers added to ``before``."""
        self._note(path, found[0], self._marks_of_optimizers(found, owners), before, into, params)

    def _again(self, path: str, key: Any, marks: Callable[[], Marks | None], into: Collected) -> list[list[str]] | None:
        seen = self._seen.get(key)
        if seen is None or seen.path != path or seen.marks != marks():
            return None
        for entry in seen.entries.values():
            into.add(entry)
        into.aliases.update(seen.aliases)
        into.buffers |= seen.buffers
        into.still |= seen.still
        into.to_come.update(seen.to_come)
        into.kinds.update(seen.kinds)
        into.containers.update(seen.containers)
        return seen.params

    def _note(
        self, path: str, key: Any, marks: Marks | None, before: Collected, into: Collected, params: list[list[str]]
    ) -> None:
        if marks is None:
            self._seen.pop(key, None)
            return
        self._seen[key] = _Seen(
            path,
            marks,
            {name: entry for name, entry in into.entries.items() if name not in before.entries},
            {name: first for name, first in into.aliases.items() if name not in before.aliases},
            into.buffers - before.buffers,
            into.still - before.still,
            {name: count for name, count in into.to_come.items() if name not in before.to_come},
            params,
            {name: kind for name, kind in into.kinds.items() if name not in before.kinds},
            {name: kind for name, kind in into.containers.items() if name not in before.containers},
        )


def so_far(into: Collected) -> Collected:
    """A copy to tell later what was added."""
    return Collected(
        entries=dict(into.entries), aliases=dict(into.aliases), buffers=set(into.buffers), still=set(into.still),
        to_come=dict(into.to_come), kinds=dict(into.kinds), containers=dict(into.containers),
    )  # fmt: skip


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


def _marks_of_optimizers(found: Sequence[Optimizer]) -> Marks | None:
    marks: Marks = []
    for optimizer in found:
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
    """Add marks of a tensor; False if it is something else, or has no memory that tells it.

    A subclass that wraps other tensors is known by these: it has no address, and they may be exchanged inside of it.
    """
    if not isinstance(tensor, torch.Tensor):
        return False
    marks += [key, id(tensor), type(tensor), tensor.shape, tensor.dtype]
    local: Any = tensor._local_tensor if is_dtensor(tensor) else tensor
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
