"""Which tensors hold still while a save copies them in the background, and who waits for whom.

The Saver calls `hold_still` before it returns to training, and `load` waits here before it changes anything.
Never trusts a tensor that no optimizer owns: only what nothing but a step changes may be copied later.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast import events
from holdfast.buffers.device import Moments, devices_of, is_capturing
from holdfast.buffers.stage import Samples, as_integers, differing, samples_of
from holdfast.errors import HoldfastError
from holdfast.ondisk.names import section_of
from holdfast.state import Collected, claim, extent, memory_of, note, plain_parts, tensors_of
from holdfast.state.leaves import Entry, View

HOLD = 64 << 20
"""Bytes of restless tensors that are copied aside at once, a few milliseconds; what is larger is staged at once.

We rejected planning every save before the call returns, because the plan costs a round over the store. A copy needs no
other rank."""

SMALL = 1 << 20
"""Of more than that, only tensors up to this size are copied aside."""

_COMMON = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8}
"""Types that torch copies as they are."""

Watched = list[tuple[str, torch.Tensor, int]]
"""Names and tensors, each with the number of times that it had been changed."""


class Copying:
    """The copies of one save: a change of a tensor that should hold still waits until they are made.

    Copies that are only queued on a device can still be torn by a change that waits for nothing. So the tensors are
    looked at once more: before the first change that did wait, or when the copies have landed.
    """

    def __init__(self, path: object = "", rank: int = 0, step: int | None = None) -> None:
        self._path, self._rank, self._step = path, rank, step  # of the save, for observers of waits
        self._released = threading.Event()
        self._moments = Moments()
        self._queued: StableState | None = None
        self._torn: list[str] = []
        self._covered: Watched = []
        self.waited = 0.0

    def begin(self) -> Copying:
        """From now on others wait. What has begun is to be released, whatever happens."""
        with _lock:
            _under_way.add(self)
        return self

    def cover(self, stable: StableState) -> None:
        """Note which memory is to be copied, so that any optimizer that is about to change it waits."""
        self._covered = stable.watched

    def covers(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a step of this optimizer may change what is to be copied."""
        if not self._covered:
            return False
        storages = {_storage_of(tensor) for _, tensor, _ in self._covered if tensor.numel()}
        return any(_storage_of(tensor) in storages for tensor in memory_of(optimizer))

    def release(self, moments: Moments | None = None, stable: StableState | None = None) -> None:
        """All copies are made, or those of ``stable`` queued on devices until ``moments``. The first call counts."""
        if not self._released.is_set():
            self._moments = moments or Moments()
            self._queued = stable if self._moments.events else None
            self._released.set()
            if not self._moments.events:
                self._leave()

    def _leave(self) -> None:
        self._covered = []
        with _lock:
            _under_way.discard(self)

    def torn(self) -> list[str]:
        """Names of tensors that were changed after their copies were queued, by something that did not wait."""
        with _lock:
            if self._queued is not None:
                self._torn, self._queued = self._queued.changed(), None
            return self._torn

    def hold_step(self) -> None:
        """Make a step wait: the host until all copies are queued, each device until they are made.

        Not one that is captured into a CUDA graph: it changes nothing now, and its replays run no hook.
        """
        if is_capturing():
            return
        if not self._released.is_set():
            began = time.monotonic()
            with events.span("hook wait", self._path, self._rank, step=self._step):
                self._released.wait()  # it ends: whatever becomes of a save, it releases its tensors
            self.waited += time.monotonic() - began
        self.torn()
        self._moments.hold_streams()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all copies are made; False if they are not after ``timeout`` seconds."""
        if not self._released.wait(timeout):
            return False
        self._moments.wait()
        self.torn()
        self._leave()
        return True


def before_change(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any], hold: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-hook of an optimizer's step: call ``hold`` before the step changes anything, and as late as that may be.

    A closure runs forward and backward, as under Lightning. The optimizers of torch call it before all else, so they
    hold at its end. Of others nothing is known: they hold before they begin.
    """
    positional = len(args) > 1  # args[0] is the optimizer
    closure = args[1] if positional else kwargs.get("closure")
    if closure is None or not type(optimizer).step.__module__.startswith("torch.optim."):
        hold()
        return None

    def closure_and_hold() -> Any:
        loss = closure()
        hold()
        return loss

    if positional:
        return (args[0], closure_and_hold, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_and_hold}


def _before_any_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A pre-hook of every step in this process: note the optimizer, and wait for copies of what it may change.

    It sees what the hooks on the optimizers of a save cannot: one that is new, or has taken parameters over since.
    """
    if torch.compiler.is_compiling():
        return None
    note(optimizer, captured=is_capturing())
    if not _under_way:
        return None
    copying = [one for one in _all_under_way() if one.covers(optimizer)]

    def hold() -> None:
        for one in copying:
            one.hold_step()

    return before_change(optimizer, args, kwargs, hold) if copying else None


register_optimizer_step_pre_hook(_before_any_step)


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_under_way: weakref.WeakSet[Copying] = weakref.WeakSet()
_lock = threading.Lock()  # over it


def _all_under_way() -> list[Copying]:
    with _lock:
        return list(_under_way)


def _after_fork() -> None:
    """A forked child has memory of its own, and none of the threads that copy: nobody there waits for them."""
    global _lock
    _lock = threading.Lock()
    for copying in list(_under_way):
        copying._released, copying._moments = threading.Event(), Moments()
        copying.release()


os.register_at_fork(after_in_child=_after_fork)


def wait_for_copies() -> None:
    """Wait until no save of this process copies any more; for callers that change tensors in place."""
    for copying in _all_under_way():
        copying.wait()


@dataclass(frozen=True)
class StableState:
    """How the tensors of one save are kept from changing under it.

    ``loose``: names that may change any time and are too large to be copied aside; they must be staged at once.
    ``watched``: (name, tensor, version) of those that hold still. ``theirs``: the tensors as optimizers and DTensors of
    the state have them, with their versions: what is changed through one of these may be counted there alone.
    ``samples``: bytes of those in host memory, since torch does not count every change. ``moments``: when the save was
    called, by devices. ``sizes``: bytes of each tensor of this rank, by name, and ``aside`` the names of those that
    were copied aside.
    """

    loose: set[str]
    watched: Watched
    theirs: list[tuple[torch.Tensor, int]]
    samples: Samples
    moments: Moments
    sizes: dict[str, int]
    aside: set[str]

    def bytes_in_call(self, sections: set[str]) -> int:
        """Bytes of tensors that are copied before the call of a save returns, if it stages these sections at once."""
        return sum(n for name, n in self.sizes.items() if name in self.aside or section_of(name) in sections)

    def changed(self) -> list[str]:
        """Names of tensors that should have held still and were changed."""
        names = dict.fromkeys([*changed(self.watched), *differing(self.samples)])
        for theirs, version in self.theirs:
            if theirs._version != version:
                spans = [extent(part) for part in plain_parts(theirs)]
                names.update(dict.fromkeys(name for name, tensor, _ in self.watched if _overlaps(tensor, spans)))
        return list(names)


def watch(tensors: Iterable[tuple[str, torch.Tensor]]) -> Watched:
    """Note how often these tensors have been changed by now. Torch counts that, but for inference tensors.

    We rejected copies on write: protecting pages or hooking every operation finds each change, but costs every step.
    """
    return [(name, tensor, tensor._version) for name, tensor in tensors if not tensor.is_inference()]


def watch_all(state: Collected) -> Watched:
    inner = ((path, tensor) for path, leaf in state.per_rank.items() for tensor in leaf.tensors.values())
    return watch([*((name, view.tensor) for name, view in _views(state)), *inner])


def changed(watched: Watched) -> list[str]:
    """Names of tensors that were changed since `watch`."""
    return [name for name, tensor, version in watched if tensor._version != version]


def _views(state: Collected) -> Iterator[tuple[str, View]]:
    return ((name, view) for name, entry in state.entries.items() for view in entry.views)


def hold_still(state: Collected, distrusted: set[str]) -> StableState:
    """Copy aside what may change before it is staged, in place of the views in ``state``.

    What live optimizers own holds still until their next step; they are added to those of the state. ``distrusted``
    are names that did not hold still once.
    """
    claim(state)
    changes, entries = state.changes, state.entries
    sizes = {name: sum([view.tensor.nbytes for view in entry.views]) for name, entry in entries.items()}
    still = changes.stable.union(alias for alias, name in state.aliases.items() if name in changes.stable)
    restless = sizes.keys() - (still - distrusted)
    for leaf in state.per_rank.values():
        for reference, tensor in leaf.tensors.items():
            leaf.tensors[reference] = _copied(tensor)
    loose, left = set(), HOLD
    all_fit = sum(sizes[name] for name in restless) <= HOLD
    for name in [name for name in sizes if name in restless]:
        if not all_fit and sizes[name] > min(SMALL, left):
            loose.add(name)
            continue
        left -= sizes[name]
        entry = entries[name]
        views = [View(view.box, _copied(view.tensor)) for view in entry.views]
        entries[name] = Entry(name, entry.dtype, entry.shape, entry.spread, views)
    watched = watch((n, view.tensor) for n, entry in entries.items() if n not in restless for view in entry.views)
    theirs = [*changes.dtensors, *(tensor for optimizer in changes.optimizers for tensor in tensors_of(optimizer))]
    versions = [(tensor, tensor._version) for tensor in theirs if not tensor.is_inference()]
    # Of bare tensors alone: where objects are given, it would be half of what the call costs.
    bare = {*changes.plain} - restless
    samples = samples_of((name, view.tensor) for name in bare for view in entries[name].views)
    moments = Moments.now(devices_of(state.tensors()))
    return StableState(loose, watched, versions, samples, moments, sizes, restless - loose)


def _overlaps(tensor: torch.Tensor, spans: list[tuple[int, int]]) -> bool:
    begin, end = extent(tensor)
    return any(begin < other_end and other_begin < end for other_begin, other_end in spans)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype in _COMMON:
        return tensor.clone(memory_format=torch.contiguous_format)
    # As integers: torch cannot copy elements of every type.
    return as_integers(tensor).clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def check_still(names: list[str]) -> None:
    """Raise HoldfastError if tensors of these names changed while they were copied: then the copy may be torn."""
    if names:
        raise HoldfastError(
            f"{_first_of(names)} changed while it was being copied, by something other than a step of the optimizer "
            "that has it: call saving.wait_staged() before you change it, or give holdfast.dcp.async_save "
            "async_stager=BlockingAsyncStager(). Later saves copy it before they return"
        )


class CopyGuard:
    """Guards the tensors of one background save until they are copied. Adds names that changed to ``distrusted``."""

    def __init__(self, copying: Copying, stable: StableState, distrusted: set[str]) -> None:
        self._copying, self._stable, self._distrusted = copying, stable, distrusted

    def copied(self, moments: Moments) -> None:
        """Every tensor is copied, or queued to be until ``moments``: steps may go on. Raises HoldfastError if not."""
        self._check(self._stable.changed())
        self._copying.release(moments, self._stable)

    def landed(self) -> None:
        """All copies have arrived. Raises HoldfastError if a tensor has changed since they were queued."""
        self._check(self._copying.torn())

    def _check(self, names: list[str]) -> None:
        self._distrusted.update(names)
        check_still(names)


def check_sent(watched: Watched) -> None:
    """Raise HoldfastError if a tensor changed while it was uploaded from where it lies: its sums may not be its own."""
    names = changed(watched)
    if names:
        raise HoldfastError(
            f"{_first_of(names)} changed during a save that training was to wait for: let no other thread train or "
            "load until save() returns, or save beside training, with a Saver"
        )


def _first_of(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
