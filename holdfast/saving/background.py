"""One save of a Saver from its call to its outcome: gathered in the call, planned, written and committed in a thread.

The Saver makes one for each save. Keeps nothing of the state once the outcome is known, and never runs a collective.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from logging import DEBUG, WARNING
from typing import Any

from holdfast.buffers.stable import CopyGuard, StableState, hold_still
from holdfast.commit.agree import Agreed, agree
from holdfast.commit.gather import Attached, Gathered, gather
from holdfast.commit.job import Failed, Job, attempt, value_of
from holdfast.commit.outgoing import Durable, Outgoing, lay_out
from holdfast.commit.settle import settle
from holdfast.errors import HoldfastError, SaveFailed
from holdfast.events import log
from holdfast.ondisk.names import section_of
from holdfast.policies.points import Policies
from holdfast.ranks.ranks import Call
from holdfast.saving.saving import Saving
from holdfast.state import Recall
from holdfast.write.pool import Lease


class BackgroundSave:
    """One save under way. ``before`` is the save before it, ``busy`` says that this rank has no room for it."""

    def __init__(
        self, job: Job, saving: Saving, memory: Lease, *, before: Saving | None, busy: bool, label: str, deadline: float
    ) -> None:  # fmt: skip
        self.job, self.saving, self.memory = job, saving, memory
        self._before, self._busy, self._label, self._deadline = before, busy, label, deadline
        self._policies = Policies(job)
        self._gathered: Gathered | Failed = Failed(HoldfastError("nothing was gathered; this is a fault of holdfast"))
        self._agreed: Agreed | None = None
        self._outgoing: Outgoing | Failed | None = None
        self._stable: StableState | None = None

    # In the call

    def gather(self, state: Mapping[str, Any], files: Attached, recall: Recall, distrusted: set[str]) -> list[Any]:
        """Collect the state and copy aside what may change any time; the optimizers whose steps have to wait."""
        self._gathered = gathered = attempt(gather, self.job, state, files, recall)
        if isinstance(gathered, Failed):
            return []
        stable = attempt(hold_still, gathered.state, distrusted)
        if isinstance(stable, Failed):
            self._gathered = stable
            return []
        self._stable = stable
        guard = CopyGuard(self.saving.copying, stable, distrusted)
        self._gathered = replace(gathered, moments=stable.moments, guard=guard)
        self.saving.copying.cover(stable)
        return gathered.state.changes.optimizers

    def stage_loose(self) -> None:
        """Plan, and stage here and now the sections with tensors that may change and are too large to copy aside."""
        if self._stable is None:
            return
        sections = {section_of(name) for name in self._stable.loose}
        if sections:
            self._plan()
            if isinstance(self._outgoing, Outgoing):
                staged = attempt(self._outgoing.stage_now, sections)
                if isinstance(staged, Failed):
                    self._outgoing.durable = staged
        in_call = self._stable.bytes_in_call(sections)
        self.saving.note_copies(in_call, sum(self._stable.sizes.values()) - in_call)

    def fail(self, error: BaseException) -> bool:
        """Have the other ranks hear of this when they meet next; False if they meet no more."""
        if self.saving.planned.is_set() and self._agreed is None:
            return False
        if self._agreed is None:
            if not isinstance(self._gathered, Failed):
                self._gathered = Failed(error)
        elif self._outgoing is None:  # the ranks agree already, and meet again to settle
            self._outgoing = Failed(error)
        elif isinstance(self._outgoing, Outgoing) and self._outgoing.durable is None:
            self._outgoing.durable = Failed(error)
        return True

    @property
    def interrupt(self) -> BaseException | None:
        """The user's interrupt, if it ended this save: it must not wait for the other ranks."""
        stages = [
            self._gathered,
            self._outgoing,
            self._outgoing.durable if isinstance(self._outgoing, Outgoing) else None,
        ]
        errors = [stage.error for stage in stages if isinstance(stage, Failed)]
        return next((error for error in errors if not isinstance(error, Exception)), None)

    # In the thread

    def run(self) -> None:
        """Plan, write and commit. Never raises: the outcome is the `Saving`'s to tell."""
        _step_back()
        failed: BaseException | None = None
        try:
            if isinstance(self._gathered, Gathered):
                self._gathered.moments.make_current()
            if not self.saving.planned.is_set():
                self._plan()
            if self._agreed is None or self._outgoing is None:
                raise SaveFailed(
                    f"{self.saving.path} was skipped: on some rank a save before it is still being written, or its "
                    "failure was raised instead"
                )
            ranks = self.job.ranks.lane(self._agreed.save)
            settle(
                Call(ranks, self._label, self._deadline, True), self.job, self._agreed, self._outgoing, self._policies
            )
        except BaseException as error:  # noqa: BLE001 - kept, and raised where this save is waited for
            failed = error
        self.end(failed)

    def _plan(self) -> None:
        job = self.job
        if self._before is not None:
            # What ranks remember of plans has to be the same in the same order. It ends: so do the rounds of a plan.
            self._before.planned.wait()
        skipped = False
        try:
            # One plan after the other, so that a rank which has missed one catches up; the rest in any order.
            with job.ranks.call(self._label, deadline=self._deadline, saving=True) as call:
                self._agreed = agreed = agree(call, job, self._gathered, busy=self._busy)
                if agreed is not None:
                    gathered = value_of(self._gathered)
                    self._outgoing = attempt(lay_out, job, agreed, gathered, self.memory, self._policies)
            skipped = agreed is None
        finally:
            self.saving.end_planning(skipped=skipped)

    def end(self, failed: BaseException | None) -> None:
        """Let go of memory and tensors, and make the outcome known."""
        saving, outgoing = self.saving, self._outgoing
        if failed is not None and isinstance(failed, Exception):
            log.log(DEBUG if saving.skipped else WARNING, "%s: %s", saving.path, failed)
            _forget_frames(failed)
        self.memory.give()
        if isinstance(outgoing, Outgoing):
            written_at = outgoing.durable.at if isinstance(outgoing.durable, Durable) else 0.0
            saving.note_written(outgoing.nbytes, outgoing.staged_at, written_at)
        if failed is not None and failed is self.interrupt:
            saving.hear()  # it is raised in the call
        saving.finish(failed)


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
