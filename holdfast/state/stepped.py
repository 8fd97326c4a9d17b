"""The optimizers that step in this process, and the memory that each of them owns: its parameters and its state.

A hook on every step of torch's optimizers calls `note`; a save calls `claim` to find what only a step changes. Keeps no
optimizer and no tensor alive, and never assumes that an optimizer owns what it has not stepped yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from holdfast.state.kinds import is_dtensor, is_zero
from holdfast.state.leaves import Collected, Entry
from holdfast.state.optimizers import changes_in_steps, parameters_of, state_of
from holdfast.state.tensors import PLAIN

_seen: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
"""Optimizers that began a step, and whether a step of theirs was ever captured into a CUDA graph."""


def note(optimizer: Optimizer, *, captured: bool) -> None:
    """A step of this optimizer begins; ``captured`` into a CUDA graph, of which the replays run no hook."""
    try:
        if captured or optimizer not in _seen:
            _seen[optimizer] = captured
    except TypeError:  # it cannot be hashed, or referred to weakly: then it owns nothing
        pass


def tensors_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """An optimizer's parameters and the tensors of its state, as it has them."""
    yield from parameters_of(optimizer)
    for kept in list(state_of(optimizer).values()):
        for value in kept.values() if isinstance(kept, dict) else (kept,):
            if isinstance(value, torch.Tensor):
                yield value
            else:
                yield from _tensors_in(value)


def memory_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """The plain tensors that these lie in; of DTensors their local parts."""
    return chain.from_iterable(map(plain_parts, tensors_of(optimizer)))


def claim(state: Collected) -> None:
    """Find the tensors of ``state`` that lie in the memory of live optimizers: they are stable until its next step.

    Adds their names to ``state.changes.stable`` and the optimizers to ``state.changes.optimizers``.
    """
    restless = [entry for name, entry in state.entries.items() if name not in state.changes.stable and entry.views]
    owners = [optimizer for ref in _seen.keyrefs() if (optimizer := ref()) is not None and _is_trusted(optimizer)]
    if not restless or not owners:
        return
    memory = _Memory(owners)
    known = {id(optimizer): optimizer for optimizer in state.changes.optimizers}
    for entry in restless:
        owners_here = memory.owners_of(entry)
        if owners_here:
            state.changes.stable.add(entry.name)
            known.update((id(owner), owner) for owner in owners_here)
    state.changes.optimizers = list(known.values())


def _is_trusted(optimizer: Any) -> bool:
    """Whether an optimizer changes its memory in ``step()`` alone."""
    return (
        not _seen.get(optimizer, True)
        and changes_in_steps(optimizer)
        # schedulefree exchanges the parameters when it switches to evaluation.
        and not callable(getattr(optimizer, "eval", None))
        # It changes them in the backward pass.
        and not (is_zero(optimizer) and optimizer._overlap_with_ddp)
    )


class _Span(NamedTuple):
    """Bytes from ``begin`` to ``end`` that a tensor of ``owner`` lies in, every one of them."""

    begin: int
    end: int
    owner: Any


class _Memory:
    """The memory of some optimizers, by address on each device.

    One owner of a tensor is enough: steps of others wait as soon as they are seen to have the memory.
    """

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._owners: dict[torch.device, dict[tuple[int, int], Any]] = {}
        for optimizer in optimizers:
            for tensor in memory_of(optimizer):
                begin, end = extent(tensor)
                if end - begin == tensor.nbytes > 0:  # what lies in gaps of a tensor is not its own
                    self._owners.setdefault(tensor.device, {})[begin, end] = optimizer
        self._spans: dict[torch.device, list[_Span]] = {}

    def owners_of(self, entry: Entry) -> list[Any]:
        """Owners of an entry's memory; none unless every view of it lies wholly in one tensor of one of them."""
        owners = [self._owner_of(view.tensor) for view in entry.views]
        return [] if None in owners else owners

    def _owner_of(self, tensor: torch.Tensor) -> Any:
        device, within = tensor.device, extent(tensor)
        owner = self._owners.get(device, {}).get(within)
        return self._owner_around(device, *within) if owner is None else owner

    def _owner_around(self, device: torch.device, begin: int, end: int) -> Any:
        """The owner of a larger tensor that these bytes are a part of."""
        if device not in self._spans:
            spans = sorted(
                (_Span(*within, owner) for within, owner in self._owners.get(device, {}).items()), key=lambda s: s[:2]
            )
            self._spans[device] = _outermost(spans)
        spans = self._spans[device]
        index = bisect_right(spans, begin, key=lambda span: span.begin) - 1
        return spans[index].owner if index >= 0 and end <= spans[index].end else None


def _outermost(spans: Iterable[_Span]) -> list[_Span]:
    """Those that lie in no other one, by their beginning, which is the order of their ends then."""
    kept: list[_Span] = []
    for span in spans:
        if kept and kept[-1].begin == span.begin:
            kept.pop()  # the later one is as long or longer
        if not kept or span.end > kept[-1].end:
            kept.append(span)
    return kept


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of a plain tensor's first byte and after its last one; equal if it has none."""
    begin, nbytes = tensor.data_ptr(), tensor.nbytes
    if nbytes == 0 or tensor.is_contiguous():
        return begin, begin + nbytes
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def _tensors_in(kept: Any) -> Iterator[torch.Tensor]:
    if isinstance(kept, torch.Tensor):
        yield kept
    elif isinstance(kept, dict):
        for value in kept.values():
            yield from _tensors_in(value)
    elif isinstance(kept, (list, tuple)):
        for value in kept:
            yield from _tensors_in(value)


def plain_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors with memory of their own that a tensor is made of; none for what has none."""
    local = tensor._local_tensor if is_dtensor(tensor) else tensor
    if type(local) not in PLAIN and hasattr(local, "__tensor_flatten__"):
        return [own for part in local.__tensor_flatten__()[0] for own in plain_parts(getattr(local, part))]
    if local.layout is not torch.strided or local.is_meta:
        return ()
    try:
        address = local.data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass with memory of its own kind
        return ()
    return (local,) if address else ()
