"""The story of a save beside training: hold still what may change, copy and write the rest in the background.

Users and the manager own a `Saver`. Never lets a step change a tensor before it is copied, never queues without bound,
and never runs a collective.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from logging import DEBUG, WARNING
from typing import Any, Literal

import torch.distributed as dist

from holdfast import events
from holdfast.buffers.device import Moments
from holdfast.buffers.memory import no_collection
from holdfast.buffers.still import Held, before_change, check_still, hold_still
from holdfast.commit.commit import Attached
from holdfast.commit.order import REHEARSAL, Order
from holdfast.commit.save_work import SaveWork
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.events import BACKGROUND, log
from holdfast.ondisk import names
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.incremental.borrow import Previous
from holdfast.policies.signing.keys import Key
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.ranks.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.save import RUN, Base, compared_by, label_of, previous_of, signing, step_of
from holdfast.saving import Saving
from holdfast.state import Recall
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline
from holdfast.write.arena import WINDOW, Slot, room_for
from holdfast.write.jobs import Worker
from holdfast.write.worker import start

GRAIN = 1 << 20
"""Bytes of which a slot below a window takes a multiple."""

LEAVE = 2.0
"""Seconds that a thread whose save is given up gets to leave the store."""


class Saver:
    """Saves in the background, so that training hardly notices; owns staging memory and a writer.

    One on every rank of ``group``, all with the same arguments and calls. ``worker`` says who writes: a ``"process"``
    of its own, which finishes what is staged even if this one is killed, or ``"thread"``s of this one. ``slots`` saves
    may be in memory at once, each needs as much host memory as this rank writes, or its share of ``memory_limit``
    bytes: a larger state goes through in waves. When no slot is free, ``busy="wait"`` makes `save` wait and
    ``busy="skip"`` skips the save, on all ranks alike. Each phase of a save may take ``deadline`` seconds.

    With ``degraded`` a save commits although ranks are lost while they write, if others hold what those were to write.
    Till then each rank keeps copies of another one's share, beside the slots; see docs/degraded.md.

        with holdfast.Saver() as saver:
            saver.prepare(state)            # optional: the first save then costs what any other costs
            for step in ...:
                train(step)
                saving = saver.save(state, f"/ckpt/{step}")     # returns in milliseconds
            saving.wait()

    ``check_replicas`` and ``sign`` as of `holdfast.save`, for every save that says nothing else. The sums of replicas
    are taken while the tensors hold still, which is what a step may have to wait for.

    What may change when: see docs/background.md. Parameters and state of live optimizers, given as objects or as bare
    tensors, are copied while training goes on, and a step of these optimizers waits for it; everything else is copied
    before `save` returns.
    """

    def __init__(
        self, *, worker: Literal["process", "thread"] = "process", slots: int = 1,
        busy: Literal["wait", "skip"] = "wait", memory_limit: int | None = None,
        group: dist.ProcessGroup | Ranks | None = None, deadline: float = DEADLINE, degraded: bool = False,
        check_replicas: bool | Patterns = False, sign: Key | Literal[True] | None = None,
    ) -> None:  # fmt: skip
        if worker not in ("process", "thread") or busy not in ("wait", "skip") or slots < 1:
            raise ValueError(f'worker={worker!r} is "process" or "thread", busy={busy!r} "wait" or "skip", slots >= 1')
        if memory_limit is not None and memory_limit < 2 * slots * WINDOW:
            raise ValueError(f"memory_limit={memory_limit} must be at least {2 * slots * WINDOW}: two windows a slot")
        self._kind, self._busy, self._deadline, self._degraded = worker, busy, deadline, degraded
        self._check_replicas, self._sign = check_replicas, signing(sign)
        self._committed: Callable[[Place, Manifest], None] | None = None  # for whoever builds on it
        self._limit = None if memory_limit is None else memory_limit // slots // WINDOW * WINDOW
        main = ranks_of(group)
        # Ranks make their Savers in the same order, so the same number means the same Saver on each of them.
        made = main.remembered["savers"] = main.remembered.get("savers", 0) + 1
        self._ranks = main.lane(f"saver/{main.calls}.{made}")
        self._worker: Worker | None = None
        self._last_will: weakref.finalize[..., Saver] | None = None
        self._slots: dict[int, Slot] = {}
        self._count = slots
        self._holders: list[_Taken | None] = [None] * slots  # which save has the slot of that number
        self._claiming = threading.Lock()
        self._savings: list[Saving] = []  # the last one, and those whose outcome somebody may still have to wait for
        self._unheard: list[Saving] = []
        self._equipping = threading.Lock()
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._distrusted: set[str] = set()
        self._recall = Recall()
        self._closed = self._released = False
        _open.add(self)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except SaveFailed as error:
            if kind is None:
                raise
            log.error("%s", error)  # what ended the block is the cause to be seen

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do now what the first save would have to: agree on the plan, allocate and touch memory, start the writer.

        Called by all ranks, best when the model and the optimizers exist. Optimizers that have not stepped are counted
        as they will be. Raises HoldfastError, the same on every rank.
        """
        self._check_open()
        with events.span("prepare", REHEARSAL, self._ranks.rank, whole=True):
            self._prepare(state)

    def _prepare(self, state: Mapping[str, Any]) -> None:
        for saving in self._savings:
            saving._done.wait()  # it ends, here and below: all waits of a save for other ranks have a deadline
        work = SaveWork(Order(self._ranks, None, None, False, RUN, _Taken(self), recall=self._recall))
        with no_collection():
            work.gather(state, {})

        def reserve() -> bool:
            sizes = [*work.outgoing.sizes, *work.outgoing.sizes_to_come]
            if work.collected.changes.to_come and not any(sizes):
                sizes = [1]  # small state that is to come may be this rank's to write
            for number in range(self._count):
                self._equip(number, sizes, pinned=work.outgoing.on_device, touch=True)
            return True

        with self._ranks.call("prepare", deadline=self._deadline) as call:
            work.plan(call)
            call.settle("reserve", reserve, lambda notes: True, bool)
        self._hook(work.collected.changes.optimizers)

    def save(
        self, state: Mapping[str, Any], path: str | os.PathLike[str] | Place, *, overwrite: bool = False,
        step: int | None = None, base: Base | Saving | Previous | None = None, files: Attached | None = None,
        run: str | None = None, label: str | None = None, check_replicas: bool | Patterns | None = None,
        sign: Key | Literal[True] | None = None,
    ) -> Saving:  # fmt: skip
        """Begin to save ``state`` to ``path``, a folder or a URL: the state at this moment, bit for bit, is saved.

        Called by all ranks, with the arguments of `holdfast.save`. Returns once everything is copied that may change
        before a step of the optimizer that has it. With ``busy="wait"`` it first waits until a slot is free, and raises
        the failure of the save that had it if nobody has heard of it: SaveFailed, the same on every rank.

        ``base`` is also what an earlier `save` returned: then that save, or if it fails the one that it was based on,
        once its outcome is known. So ``saving = saver.save(state, path, base=saving)`` writes what changes.
        """
        self._check_open()
        folder = with_deadline(location(path), self._deadline)
        label, step = label or label_of(folder, step), step_of(state, step)
        rank = self._ranks.rank
        previous = previous_of(Previous(base.to_cite) if isinstance(base, Saving) else base, self._deadline)
        compared = compared_by(self._check_replicas if check_replicas is None else check_replicas)
        signed = self._sign if sign is None else signing(sign)
        earlier = self._wait_for_slot(folder, step)
        saving, taken = Saving(folder, step, base if isinstance(base, Saving) else None, rank), _Taken(self)
        saving._label = label
        # An interrupt may come at any line. Whatever this save has taken and told is seen to below, and the next one
        # finds all as it was.
        work: SaveWork | None = None
        calling = events.Opened()
        try:
            before = self._savings[-1] if self._savings else None
            order = Order(
                self._ranks, folder, step, overwrite, run or RUN, taken, name=BACKGROUND, leaves_part=True,
                busy=earlier is not None or not taken.claim(), recall=self._recall, previous=previous,
                degraded=self._degraded, compared=compared, sign=signed, committed=self._committed,
            )  # fmt: skip
            work = SaveWork(order)
            held: list[Held] = []
            saving._run = partial(self._run, work, saving, before)
            self._savings.append(saving)
            saving._copying.begin()
            saving._span = events.begin(BACKGROUND, folder, rank, whole=True, step=step, lane="saves")
            calling = events.begin("call", folder, rank, step=step)
            if earlier is None:
                with no_collection():
                    work.gather(state, files or {}, lambda: held.append(hold_still(work.collected, self._distrusted)))
                self._hook(work.collected.changes.optimizers)
            if held:
                work.after, work.staged = held[0].moments, lambda moments: self._staged(saving, held[0], moments)
                work.landed = lambda: self._check_still(saving._copying.torn())
                saving._copying.cover(held[0])
                sections = {names.section_of(name) for name in held[0].loose}
                if sections:
                    # Too much may change any moment to be copied aside: plan, and copy these sections, here and now.
                    self._plan(work, saving, before)
                    if not saving.skipped:
                        work.stage(sections)
                saving._bytes_in_call = held[0].bytes_in_call(sections)
                saving._bytes_beside = sum(held[0].sizes.values()) - saving._bytes_in_call
            saving._start()
        except BaseException as error:
            self._break_off(work, saving, taken, error)
            if work is None or not isinstance(error, HoldfastError):
                raise  # an interrupt; what the ranks agreed on is told by the saving
        finally:
            calling.end()
        saving._call = time.monotonic() - saving._began
        if earlier is not None:
            raise earlier
        if work.interrupted is not None:
            saving._told = True
            raise work.interrupted
        return saving

    def under_way(self, path: Place) -> Saving | None:
        """The save to ``path`` that goes on although the call of `save` that began it was interrupted, if it does."""
        last = self._savings[-1] if self._savings else None
        return last if last is not None and last.path == path and last._thread is not None and not last._told else None

    def _break_off(self, work: SaveWork | None, saving: Saving, taken: _Taken, error: BaseException) -> None:
        """Leave everything as if `save` had not been called, but for the other ranks, which have to hear of it."""
        if saving._thread is not None:
            return  # it has begun, and goes on
        if work is None or saving not in self._savings:
            taken.give()
            saving._told = True
            saving._interrupt(error)
            return
        if not isinstance(error, HoldfastError):
            saving._told = True  # it is raised by `save`
            if work.is_planned or not saving._planned.is_set():
                work.fail(error)
                with suppress(RuntimeError):  # no thread can be started
                    saving._start()
                    return
        self._end(work, saving, error)  # the ranks know, or have given this one up

    def wait(self) -> None:
        """Wait until all saves so far have an outcome. Raises the first failure that nobody has heard of."""
        for saving in list(self._savings):
            saving._done.wait()
        self._tell(self._savings)

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the saves under way, then let memory, writer and hooks go. Raises as `wait` does. Idempotent.

        If it is interrupted, call it again.

        After ``timeout`` seconds the saves are given up, with a warning: a writer process still finishes what it has.
        """
        if self._released:
            return
        until = None if timeout is None else time.monotonic() + timeout
        for saving in [] if self._closed else self._savings:
            if not saving._done.wait(None if until is None else max(until - time.monotonic(), 0.0)):
                log.warning("%s is given up after %g s; a writer process may still finish it", saving.path, timeout)
                self._closed = self._released = True
                _open.discard(self)
                # An interpreter must not end under a thread that is inside of the store; one that waits for a disk
                # may stay where it is.
                self._ranks.give_up()
                for other in self._savings:
                    if other._done.wait(LEAVE):
                        _join(other)
                return
        self._closed = True
        for saving in self._savings:  # from here on all can be done twice: an interrupted call is to be made again
            _join(saving)
        for hook in self._hooks:
            hook.remove()
        if self._worker is not None:
            _let_go(self._worker, self._slots)
        self._released = True
        _open.discard(self)
        self._tell(self._savings)

    def _check_open(self) -> None:
        if self._closed:
            raise HoldfastError("this Saver is closed; make another one")

    def _stay_behind(self) -> None:
        """In a forked child: the threads of the saves and the way to the writer are its parent's alone."""
        self._closed = self._released = True
        for saving in self._savings:
            saving._stay_behind()
        self._savings, self._unheard = [], []
        if self._last_will is not None:
            self._last_will.detach()

    # The calling thread

    def _wait_for_slot(self, folder: Place, step: int | None) -> BaseException | None:
        """Until a slot is free, if the save is to have one; the earlier failure to raise, if there is one.

        The save is then skipped on every rank, also on one whose user has heard of the failure: so ranks stay in step.
        """
        if self._busy == "wait":
            # For the outcome of the save that had it, not just for its memory: then all ranks raise its failure, or go
            # on, at the same call. By then the slot is free.
            ended = self._savings[: max(len(self._savings) - self._count + 1, 0)]
            waits = [saving for saving in ended if not saving.done]
            waiting = events.begin("slot wait", folder, self._ranks.rank, step=step) if waits else events.Opened()
            for saving in waits:
                saving._done.wait()
            waiting.end()
            with interrupts_wait():
                self._savings = self._savings[len(ended) :] or ended[-1:]
                return self._hear(ended)
        with interrupts_wait():
            ended = [saving for saving in self._savings if saving.done]
            self._savings = [saving for saving in self._savings if saving not in ended] or ended[-1:]
            failed = [s for s in [*self._unheard, *ended] if s._error is not None and not s._told and not s.skipped]
            self._unheard = failed[:1]
        return None

    def _hear(self, savings: list[Saving]) -> BaseException | None:
        """The first failure that nobody has heard of; with this all of them are heard of."""
        unheard: BaseException | None = None
        earlier, self._unheard = self._unheard, []
        for saving in [*earlier, *savings]:
            if saving._error is not None and not saving._told and not saving.skipped:
                saving._told = True
                unheard = unheard or saving._error
        return unheard

    def _tell(self, savings: list[Saving]) -> None:
        unheard = self._hear(savings)
        if unheard is not None:
            raise unheard

    def _hook(self, optimizers: list[Any]) -> None:
        """Make the steps of these optimizers wait for copies, once for each."""
        myself = weakref.ref(self)

        def hold() -> None:
            saver = myself()
            for saving in list(saver._savings) if saver is not None else ():
                saving._copying.hold_step()

        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooks.append(optimizer.register_step_pre_hook(partial(before_change, hold=hold)))
                self._hooked.add(optimizer)

    # The thread of a save

    def _run(self, work: SaveWork, saving: Saving, before: Saving | None) -> None:
        _step_back()
        failed: BaseException | None = None
        try:
            work.after.make_current()
            if not saving._planned.is_set():
                self._plan(work, saving, before)
            if saving.skipped:
                raise SaveFailed(
                    f"{saving.path} was skipped: on some rank a save before it is still being written, or its failure "
                    "was raised instead"
                )
            work.settle(Call(self._ranks.lane(work.save_id), saving._label, self._deadline, True))
        except BaseException as error:  # noqa: BLE001 - kept, and raised by whoever waits for this save
            failed = error
        self._end(work, saving, failed)

    def _end(self, work: SaveWork, saving: Saving, failed: BaseException | None) -> None:
        if failed is not None and isinstance(failed, Exception):
            log.log(DEBUG if saving.skipped else WARNING, "%s: %s", saving.path, failed)
            _forget_frames(failed)
        work.order.slots.give()
        saving._staged_at, saving._written_at, saving._bytes = work.staged_at, work.written_at, work.nbytes
        saving._span.nbytes = work.nbytes
        saving._span.end(None if saving.skipped else failed)
        if failed is None or isinstance(failed, Exception):
            saving._end(failed)
        else:
            saving._told = saving._told or failed is work.interrupted
            saving._interrupt(failed)

    def _plan(self, work: SaveWork, saving: Saving, before: Saving | None) -> None:
        if before is not None:
            # What ranks remember of plans has to be the same in the same order. It ends: so do the rounds of a plan.
            before._planned.wait()
        try:
            # One plan after the other, so that a rank which has missed one catches up; the rest in any order.
            with self._ranks.call(saving._label, deadline=self._deadline, saving=True) as call:
                saving._skipped = not work.plan(call)
        finally:
            saving._planned.set()

    def _staged(self, saving: Saving, held: Held, moments: Moments) -> None:
        self._check_still(held.changed())
        saving._copying.release(moments, held)

    def _check_still(self, changed: list[str]) -> None:
        self._distrusted.update(changed)
        check_still(changed)

    # Memory and the writer

    def _equip(self, number: int, sizes: list[int], *, pinned: bool, touch: bool) -> Slot:
        """A slot with windows for files of these sizes, or as many as the limit allows, known to a living worker."""
        with self._equipping:
            if self._worker is None or self._worker.dead:
                if self._worker is not None:
                    self._worker.close()
                self._worker = start(self._kind)
                # At exit saves are waited for, below.
                self._last_will = weakref.finalize(self, _let_go, self._worker, self._slots)
                self._last_will.atexit = False
            worker = self._worker
        slot = self._slots.setdefault(number, Slot(number, worker))
        if slot.worker is not worker:
            slot.attach(worker)
        room = room_for(sizes, slot.window)
        # Some more than is needed: a state that grows a little from save to save does not need new memory each time.
        grain = slot.window if room > slot.window else min(GRAIN, slot.window)
        room = -(-room // grain) * grain
        slot.reserve(room if self._limit is None else min(room, self._limit), pinned=pinned, touch=touch)
        return slot


class _Taken:
    """The slot that a save has, from `claim` to `give`."""

    def __init__(self, saver: Saver) -> None:
        self._saver = saver

    def claim(self) -> bool:
        """Take a free slot; False if there is none."""
        holders = self._saver._holders
        with self._saver._claiming:
            for number, holder in enumerate(holders):
                if holder is None:
                    holders[number] = self  # in one step, whatever interrupts this
                    return True
        return False

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """The slot, large enough."""
        if self not in self._saver._holders:
            raise HoldfastError("a save without a slot was to write; this is a fault of holdfast")
        return self._saver._equip(self._saver._holders.index(self), sizes, pinned=pinned, touch=False)

    def give(self) -> None:
        """Free it for the next save. Idempotent."""
        holders = self._saver._holders
        for number, holder in enumerate(holders):
            if holder is self:
                holders[number] = None


def _join(saving: Saving) -> None:
    """Wait until the thread of a save whose outcome is known has let go of everything."""
    if saving._thread is not None and saving._thread is not threading.current_thread() and saving._thread.is_alive():
        saving._thread.join()  # it ends: it does nothing any more but let go


def _let_go(worker: Worker, slots: dict[int, Slot]) -> None:
    worker.close()
    for slot in slots.values():
        slot.close()


def _step_back() -> None:
    """Let the threads of training have the processor first; while they wait for this one, it has it anyway."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _forget_frames(error: BaseException) -> None:
    """An error that is kept must not keep the state: its frames hold the tensors of the save."""
    log.debug("a save failed", exc_info=error)
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # a chain may lead back into itself
        seen.add(id(at))
        at.__traceback__ = None
        at = at.__cause__ or at.__context__


_open: weakref.WeakSet[Saver] = weakref.WeakSet()


@atexit.register
def _finish_last_saves() -> None:
    """An interpreter that ends waits for the saves that it has begun."""
    for saver in list(_open):
        try:
            saver.close()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            log.error("the last save failed: %s", error)


def _after_fork() -> None:
    for saver in list(_open):
        saver._stay_behind()
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
