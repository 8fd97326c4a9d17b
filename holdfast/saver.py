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
from holdfast.commit.gather import Attached
from holdfast.commit.job import REHEARSAL, Base, Job
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.events import log
from holdfast.ondisk.arguments import PATH, one_of
from holdfast.ondisk.manifest import Manifest
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.replicas.compare import compared_by
from holdfast.policies.signing.keys import Key, signing
from holdfast.ranks.ranks import Ranks, ranks_of
from holdfast.save import RUN, Based, base_of, label_of, step_of
from holdfast.saving import Saving
from holdfast.saving.background import BackgroundSave
from holdfast.saving.earlier import EarlierSaves, open_savers
from holdfast.saving.options import SaverOptions, takes
from holdfast.saving.rehearsal import rehearse
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

    def __post_init__(self) -> None:
        one_of("process", "thread").check("worker", self.worker)
        super().__post_init__()


class Saver:
    """Saves in the background, next to training. Owns staging memory and a writer.

    Each rank of the group makes one, all with the same arguments and calls. Parameters and state of live optimizers are
    copied while training goes on, and a step of these optimizers waits for it. Everything else is copied before `save`
    returns. See docs/background.md.

    Args:
        options: The fields of `SaverOptions`, as keywords, and ``group``, the ranks that save.

    Example:
        >>> with holdfast.Saver() as saver:
        ...     saver.prepare(state)  # optional: the first save then stalls no more than others
        ...     saving = saver.save(state, "/ckpt/step-9")  # returns in milliseconds
        ...     saving.wait().nbytes > 0
        True
    """

    @takes(_Options)
    def __init__(self, options: _Options) -> None:
        worker, slots = options.worker, options.slots
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
        """Do what the first save would do before it copies: agree on the plan, take memory, start the writer.

        All ranks call it, best when model and optimizers exist. Optimizers that have not stepped count as they will be.

        Args:
            state: As for `save`.

        Raises:
            HoldfastError: The state cannot be saved, or memory cannot be had. The same on every rank.
        """
        self._check_open()
        with events.span("prepare", REHEARSAL, self._ranks.rank, whole=True):
            self._earlier.wait()  # it ends: all waits of a save for other ranks have a deadline
            job = Job(self._ranks, None, None, RUN)
            self._hook(rehearse(job, state, self._recall, self._pool, deadline=self._deadline))

    def save(
        self, state: Mapping[str, Any], path: str | os.PathLike[str] | Place, *, overwrite: bool = False,
        step: int | None = None, base: Based | Saving | None = None, files: Attached | None = None,
        run: str | None = None, label: str | None = None, check_replicas: bool | Patterns | None = None,
        sign: Key | Literal[True] | None = None,
    ) -> Saving:  # fmt: skip
        """Begin to save ``state`` as it is at this moment, bit for bit.

        All ranks call it. It returns once everything is copied that no step of an optimizer waits for.

        Args:
            state: As for `holdfast.save`.
            path: A folder, a URL, or a place in a store.
            overwrite: As for `holdfast.save`.
            step: As for `holdfast.save`.
            base: As for `holdfast.save`, or what an earlier call returned: that save or, if it fails, the one that it
                was based on.
            files: As for `holdfast.save`.
            run: As for `holdfast.save`.
            label: As for `holdfast.save`.
            check_replicas: In the place of the Saver's own option.
            sign: In the place of the Saver's own option.

        Returns:
            The save under way.

        Raises:
            SaveFailed: An earlier save has failed, and nobody has heard of it; the same on every rank.
            HoldfastError: The Saver is closed.
        """
        self._check_open()
        PATH.check("path", path)
        folder = with_deadline(location(path), self._deadline)
        label, step = label or label_of(folder, step), step_of(state, step)
        based = Base(base.to_reuse) if isinstance(base, Saving) else base_of(base, self._deadline)
        compared = compared_by(self._options.check_replicas if check_replicas is None else check_replicas)
        job = Job(
            self._ranks, folder, step, run or RUN, overwrite, background=True, base=based, compared=compared,
            degraded=self._options.degraded, sign=self._sign if sign is None else signing(sign),
            on_commit=self.on_commit,
        )  # fmt: skip
        failure, busy = None, False
        if self._options.busy == "wait":
            failure = self._earlier.wait_for_room(self._options.slots, folder, self._ranks.rank, step)
        else:
            self._earlier.forget_ended()
            busy = self._earlier.is_under_way(folder)
        saving = Saving(folder, step, base if isinstance(base, Saving) else None, self._ranks.rank)
        memory = self._pool.lease()
        # An interrupt may come at any line. What this save has taken and sent is seen to below, and the next one
        # finds all as it was.
        background: BackgroundSave | None = None
        calling = events.Opened()
        try:
            background = BackgroundSave(
                job, saving, memory, before=self._earlier.last,
                busy=failure is not None or busy or not memory.claim(), label=label, deadline=self._deadline,
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
        """Return the save to ``path`` that goes on although the call of `save` that began it was interrupted, if it
        does.

        Args:
            path: As given to `save`.
        """
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
        """Wait for the saves under way, then free memory, writer and hooks. Idempotent; if it is interrupted, call it
        again.

        Args:
            timeout: Seconds after which the saves are given up, with a warning. A writer process still finishes what it
                has.

        Raises:
            SaveFailed: As `wait` does.
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
            raise HoldfastError("this Saver or CheckpointManager is closed; make another one")

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
