"""The story of a save beside training: hold still what may change, copy and write the rest in the background.

Users and the manager own a `Saver`. Never lets a step change a tensor before it is copied, never queues without bound,
and never runs a collective.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch.distributed as dist

from holdfast import events
from holdfast.buffers.memory import no_collection
from holdfast.buffers.stable import before_change
from holdfast.commit.agree import agree
from holdfast.commit.gather import Attached, gather
from holdfast.commit.job import REHEARSAL, Base, Job, attempt, value_of
from holdfast.commit.outgoing import lay_out
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.events import log
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.points import Policies
from holdfast.policies.replicas.compare import compared_by
from holdfast.policies.signing.keys import Key, signing
from holdfast.ranks.ranks import Ranks, ranks_of
from holdfast.save import RUN, Based, base_of, label_of, step_of
from holdfast.saving import Saving
from holdfast.saving.background import BackgroundSave
from holdfast.saving.earlier import EarlierSaves, open_savers
from holdfast.saving.options import SaverOptions, takes
from holdfast.state import Recall
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline
from holdfast.write.pool import BufferPool, Lease, limit_of

LEAVE = 2.0
"""Seconds that a thread whose save is given up gets to leave the store."""


@dataclass(frozen=True, kw_only=True)
class _Options(SaverOptions):
    group: dist.ProcessGroup | Ranks | None = None


class Saver:
    """Saves in the background, so that training hardly notices; owns staging memory and a writer.

    Takes the options of `holdfast.saving.options.SaverOptions` as keywords, and ``group``, the process group (default:
    the default one). Each rank of the group makes one, all with the same arguments and calls.

        with holdfast.Saver() as saver:
            saver.prepare(state)            # optional: the first save then costs what any other costs
            for step in ...:
                train(step)
                saving = saver.save(state, f"/ckpt/{step}")     # returns in milliseconds
            saving.wait()

    Parameters and state of live optimizers, given as objects or as bare tensors, are copied while training goes on, and
    a step of these optimizers waits for it; everything else is copied before `save` returns. See docs/background.md.
    With ``check_replicas`` the sums of replicas are taken while the tensors hold still, which a step may have to wait
    for. With ``degraded`` each rank keeps copies of another one's share, beside the slots; see docs/crash-safety.md.
    """

    @takes(_Options)
    def __init__(self, options: _Options) -> None:
        worker, busy, slots = options.worker, options.busy, options.slots
        if worker not in ("process", "thread") or busy not in ("wait", "skip") or slots < 1:
            raise ValueError(f'worker={worker!r} is "process" or "thread", busy={busy!r} "wait" or "skip", slots >= 1')
        self._pool = BufferPool(worker, slots, limit_of(options.memory_limit, slots))
        self._options, self._deadline, self._sign = options, options.deadline, signing(options.sign)
        self.on_commit: Callable[[Place, Manifest], None] | None = None
        """The rank that has committed a save calls it before the other ranks hear of it. For what builds on a Saver."""
        main = ranks_of(options.group)
        # Ranks make their Savers in the same order, so the same number means the same Saver on each of them.
        number = main.remembered["savers"] = main.remembered.get("savers", 0) + 1
        # All saves are planned in one lane, so that a rank that missed a save catches up. We rejected a lane for each
        # save, named by a number that every rank counts, because one missed save put the ranks out of step for good.
        self._ranks = main.lane(f"saver/{main.calls}.{number}")
        self._earlier = EarlierSaves()
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hooks: list[Any] = []
        self._distrusted: set[str] = set()
        self._recall = Recall()
        self._closed = self._released = False
        open_savers.add(self)

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
            self._earlier.wait()  # it ends: all waits of a save for other ranks have a deadline
            job = Job(self._ranks, None, None, RUN)
            with no_collection():
                gathered = attempt(gather, job, state, {}, self._recall)

            with self._ranks.call("prepare", deadline=self._deadline) as call:
                agreed = agree(call, job, gathered)

                def reserve() -> bool:
                    if agreed is None:
                        raise HoldfastError("a rehearsal was skipped; this is a fault of holdfast")
                    own = value_of(gathered)
                    outgoing = lay_out(job, agreed, own, self._pool.lease(), Policies(job))
                    sizes = [*outgoing.sizes, *outgoing.sizes_to_come]
                    if own.state.changes.to_come and not any(sizes):
                        sizes = [1]  # small state that is to come may be this rank's to write
                    self._pool.prepare(sizes, pinned=outgoing.on_device)
                    return True

                call.settle("reserve", reserve, lambda notes: True, bool)
            self._hook(value_of(gathered).state.changes.optimizers)

    def save(
        self, state: Mapping[str, Any], path: str | os.PathLike[str] | Place, *, overwrite: bool = False,
        step: int | None = None, base: Based | Saving | None = None, files: Attached | None = None,
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
        based = Base(base.to_reuse) if isinstance(base, Saving) else base_of(base, self._deadline)
        compared = compared_by(self._options.check_replicas if check_replicas is None else check_replicas)
        job = Job(
            self._ranks, folder, step, run or RUN, overwrite, background=True, base=based, compared=compared,
            degraded=self._options.degraded, sign=self._sign if sign is None else signing(sign),
            on_commit=self.on_commit,
        )  # fmt: skip
        failure = None
        if self._options.busy == "wait":
            failure = self._earlier.wait_for_room(self._options.slots, folder, self._ranks.rank, step)
        else:
            self._earlier.forget_ended()
        saving = Saving(folder, step, base if isinstance(base, Saving) else None, self._ranks.rank)
        memory = self._pool.lease()
        # An interrupt may come at any line. What this save has taken and sent is seen to below, and the next one
        # finds all as it was.
        background: BackgroundSave | None = None
        calling = events.Opened()
        try:
            background = BackgroundSave(
                job, saving, memory, before=self._earlier.last,
                busy=failure is not None or not memory.claim(), label=label, deadline=self._deadline,
            )  # fmt: skip
            self._earlier.savings.append(saving)
            saving.begin(partial(self._run, background), self._ranks.rank)
            calling = events.begin("call", folder, self._ranks.rank, step=step)
            if failure is None:
                with no_collection():
                    optimizers = background.gather(state, files or {}, self._recall, self._distrusted)
                self._hook(optimizers)
                background.stage_loose()
            saving.start()
        except BaseException as error:
            self._break_off(background, saving, memory, error)
            if background is None or not isinstance(error, HoldfastError):
                raise  # an interrupt; the saving says what the ranks agreed on
        finally:
            calling.end()
        saving.returned()
        if failure is not None:
            raise failure
        if background.interrupt is not None:
            saving.hear()
            raise background.interrupt
        return saving

    def _run(self, background: BackgroundSave) -> None:
        """In the thread of a save. It keeps this Saver alive, which its caller may have let go."""
        background.run()

    def under_way(self, path: Place) -> Saving | None:
        """The save to ``path`` that goes on although the call of `save` that began it was interrupted, if it does."""
        last = self._earlier.last
        return last if last is not None and last.path == path and last.has_started and not last.heard else None

    def _break_off(
        self, background: BackgroundSave | None, saving: Saving, memory: Lease, error: BaseException
    ) -> None:  # fmt: skip
        """Leave everything as if `save` had not been called, but for the other ranks, which have to hear of it."""
        if saving.has_started:
            return  # it goes on
        if background is None or saving not in self._earlier.savings:
            memory.give()
            saving.hear()
            saving.finish(error)
            return
        if not isinstance(error, HoldfastError):
            saving.hear()  # it is raised by `save`
            if background.fail(error):
                with suppress(RuntimeError):  # no thread can be started
                    saving.start()
                    return
        background.end(error)  # the ranks know, or have given this one up

    def wait(self) -> None:
        """Wait until all saves so far have an outcome. Raises the first failure that nobody has heard of."""
        self._earlier.wait()
        self._earlier.raise_unheard()

    def close(self, *, timeout: float | None = None) -> None:
        """Wait for the saves under way, then let memory, writer and hooks go. Raises as `wait` does. Idempotent.

        If it is interrupted, call it again.

        After ``timeout`` seconds the saves are given up, with a warning: a writer process still finishes what it has.
        """
        if self._released:
            return
        until = None if timeout is None else time.monotonic() + timeout
        for saving in [] if self._closed else self._earlier.savings:
            if not saving.known(None if until is None else max(until - time.monotonic(), 0.0)):
                log.warning("%s is given up after %g s; a writer process may still finish it", saving.path, timeout)
                self._closed = self._released = True
                open_savers.discard(self)
                # An interpreter must not end under a thread that is inside of the store; one that waits for a disk
                # may stay where it is.
                self._ranks.give_up()
                for other in self._earlier.savings:
                    if other.known(LEAVE):
                        other.join()
                return
        self._closed = True
        # From here on all can be done twice: an interrupted call is to be made again.
        for saving in self._earlier.savings:
            saving.join()
        for hook in self._hooks:
            hook.remove()
        self._pool.close()
        self._released = True
        open_savers.discard(self)
        self._earlier.raise_unheard()

    def _check_open(self) -> None:
        if self._closed:
            raise HoldfastError("this Saver is closed; make another one")

    def _stay_behind(self) -> None:
        """In a forked child: the threads of the saves and the way to the writer are its parent's alone."""
        self._closed = self._released = True
        self._earlier.stay_behind()
        self._pool.stay_behind()

    def _hook(self, optimizers: list[Any]) -> None:
        """Make the steps of these optimizers wait for copies, once for each."""
        myself = weakref.ref(self)

        def hold() -> None:
            saver = myself()
            for saving in list(saver._earlier.savings) if saver is not None else ():
                saving.copying.hold_step()

        for optimizer in optimizers:
            if optimizer not in self._hooked:
                self._hooks.append(optimizer.register_step_pre_hook(partial(before_change, hold=hold)))
                self._hooked.add(optimizer)
