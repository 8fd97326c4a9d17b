"""The manager of a training loop: when to save, what to keep, where to go on, when to stop.

Training code owns one `CheckpointManager`. Never deletes the last whole checkpoint and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from operator import index
from typing import Any, Literal

from holdfast.checkpoint import Checkpoint
from holdfast.errors import RankLost, SaveFailed, StorageError
from holdfast.events import log
from holdfast.load import Loaded
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import ranks_of
from holdfast.run.interval import Advice
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.recent import Recent
from holdfast.run.record import Record
from holdfast.run.saves import Saves
from holdfast.run.scrub import RATE, Scrubbing
from holdfast.run.signals import Announcements, Signals
from holdfast.run.tiers.home import Durability, Home
from holdfast.run.tiers.one import OneRoot
from holdfast.run.tiers.tiers import Tiers
from holdfast.saving import Saving
from holdfast.saving.options import takes
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

SURVIVORS = 60.0
"""Seconds to wait at a restart for writer processes that outlived their trainers."""

STOPS = 10.0
"""Seconds to wait for scrubbing, or the journal, to end: a store may keep it waiting, and it ends with the process."""


class CheckpointManager:
    """Saves a training run's state under ``root`` every ``every`` steps, keeps what ``keep`` says, and restores it.

    One on every rank, all with the same options: those of `ManagerOptions`, as keywords. Saves go on in the background,
    as of a `Saver`. One that fails is raised by a later `step`, the same one on all ranks; training may go on either
    way.

        manager = holdfast.CheckpointManager("/ckpt/run1", every=500)
        manager.restore(state)
        for step in range(state["step"], steps):
            ...
            state["step"] = step + 1
            manager.step(step + 1, state)
            if manager.should_stop:
                break
        manager.close()
    """

    @takes(ManagerOptions)
    def __init__(self, options: ManagerOptions) -> None:
        self._options = options
        self.root = with_deadline(location(options.root), options.deadline)
        self.every, self.keep = options.every, options.keep
        self.should_stop = False
        self._warned = False
        self._ranks = ranks = ranks_of(options.group)
        # Ranks make their managers in the same order, so the same number means the same manager on each of them.
        number = ranks.remembered["managers"] = ranks.remembered.get("managers", 0) + 1
        key = f"manager/{ranks.calls}.{number}"
        self._home: Home
        if options.fast is not None:
            self._home = Tiers(self.root, options, ranks, f"{key}/tiers")
        else:
            self._home = OneRoot(self.root, options, ranks, doubtful=self._damaged)
        self._recent = Recent(raises=options.on_failure == "raise")
        self._record = Record(self.root, options, ranks, self._home, self._recent)
        self._saves = Saves(options, ranks, self._home, self._recent, self._record)
        self._scrubbing: Scrubbing | None = None
        self._signals = Signals(options.signals, ranks, options.grace)
        self._announcements = Announcements(ranks, key, options.poll, signals=self._signals, recent=self._recent)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._home.leave()  # training that failed is to start again soon, and uploads go on then
        try:
            self.close()
        except SaveFailed as error:
            if kind is None:
                raise
            log.error("%s", error)  # what ended the block is the cause to be seen

    def close(self) -> None:
        """Wait for the saves under way, and restore the signal handlers. Idempotent.

        With ``fast`` it then waits for the uploads of the newest step and of those that are due: after a SIGTERM no
        longer than the grace that is left, and never if nothing moves for ``deadline`` seconds. Steps that are not in
        the store then are named in a warning; the next start uploads them.

        Raises a failure that no `step` has raised, if ``on_failure`` says so; not after a signal, when the last step
        has had its verdict.
        """
        try:
            if self._scrubbing is not None:
                self._scrubbing.stop(timeout=STOPS)
            with self._saves.raising(quiet=self.should_stop):
                self._saves.saver.close(timeout=self._signals.left)
        finally:
            self._home.close(self._signals.left)
            if self._announcements.heard or self._recent.begun:  # else it has only looked
                left = self._signals.left
                self._record.close(STOPS if left is None else min(left, STOPS))
            self._signals.give_back()
            self._ranks.at_leisure()

    # Saving

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do now what the first save would have to, best once model and optimizers exist; see `Saver.prepare`."""
        self._saves.saver.prepare(state)

    def step(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, due: bool | None = None,
        overwrite: bool = False,
    ) -> Saving | None:  # fmt: skip
        """Report that ``step`` steps are done. Begins a save if it is time, and returns it.

        Does not wait for the save, but for the one before it if no slot is free. ``metric`` is what ``Keep(best=…)``
        compares. ``due``, alike on all ranks, says that it is time, or is not, in place of ``every``. ``overwrite``
        lets the save replace a step that is there. Raises SaveFailed for an earlier save that failed; training may go
        on, and the steps before stay.
        """
        step = index(step)
        if metric is None and self.keep.best and not self._warned:
            self._warned = True
            log.warning(
                "Keep(best=%d) keeps the steps with the best metric, and step %d has come without one: pass metric= to "
                "step. Steps that are saved without a metric are never among the best", self.keep.best, step,
            )  # fmt: skip
        due = step % self.every == 0 if due is None else due
        self._record.arrived(step, metric)
        try:
            if self._announcements.hear(step):
                return self._save_last(step, state, metric)
            if not due or (step == self._saves.step and not overwrite):
                return None
            return self._saves.begin(step, state, metric, overwrite=overwrite)
        finally:
            self._record.left(step)

    def save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, overwrite: bool = False
    ) -> Checkpoint:
        """Save ``step`` now, whatever ``every`` says, and wait for it.

        A step that this manager has saved last is not saved again, so this may end a run of any length. An earlier
        save that failed does not keep this one from being made; it was logged when it failed.
        """
        step = index(step)
        self._recent.settle()
        self._recent.hear()  # what has failed of the saves under way will not be raised any more
        saves = self._saves
        if step == saves.step and not overwrite:
            if saves.newest is None and saves.restored is not None:
                return Checkpoint(saves.restored)
            if saves.newest is not None and saves.newest.failed is None:
                return saves.newest.wait()
        return saves.begin(step, state, metric, overwrite=overwrite).wait()

    def wait(self) -> None:
        """Wait for the saves under way. Raises a failure that no `step` has raised, if ``on_failure`` says so."""
        with self._saves.raising():
            self._saves.saver.wait()

    # Restoring

    @takes(RestoreOptions)
    def restore(self, state: dict[str, Any], options: RestoreOptions) -> Loaded | None:
        """Load the newest whole step into ``state``; None if there is none, so that training starts from scratch.

        Takes the options of `RestoreOptions` as keywords. ``step=1200`` goes back to that step, ``step="best"`` to the
        best one; no other is tried then, and with the first save after it the later steps no longer count.

        A step is whole if it is committed, it opens, and every file is there in its size. One that is not, or that
        proves damaged while it is read, is passed over for the one before, with a warning that says why. A save that
        all ranks had finished when they died is committed first, and what other dead saves left is deleted. A step that
        has lost its optimizer (see `Keep`) is passed over for an older one that has all, and loaded if there is none.

        Raises Mismatch if the checkpoint does not fit ``state``; no older step is tried then.

        With ``fast`` it is the newest step that is whole on the fast tier or in the store; ``Loaded.checkpoint.path``
        says which. A rank whose node lacks a file reads it from the store. If the store does not answer, the fast
        tier's newest step is taken, with a warning; StorageError is raised if it has none.
        """
        self._recent.settle()
        patience = min(SURVIVORS, self._options.deadline / 2)  # the other ranks wait meanwhile
        loaded = self._home.restore(state, options, patience, self._saves.writing_to)
        if loaded is not None:
            self._saves.go_on_from(loaded, back=options.step is not None)
        if self._ranks.first and loaded is None:
            log.info("no checkpoint in %s yet: training starts afresh", self.root)
        elif self._ranks.first and loaded is not None:
            log.info(
                "restored step %s from %s in %.2f s; ranks then %d, now %d", loaded.step, loaded.checkpoint.path,
                loaded.seconds, loaded.checkpoint.world_size, self._ranks.size,
            )  # fmt: skip
        return loaded

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, opened, or None; with ``fast``, of both tiers. Local: any rank may ask."""
        return self._home.latest()

    def steps(self) -> list[int]:
        """The committed steps, oldest first; with ``fast``, of both tiers. Not those that training left behind."""
        return self._home.steps()

    def best(self) -> Checkpoint | None:
        """The step with the best metric, as ``keep.mode`` says; None if none was saved with one. Any rank may ask."""
        return self._home.best()

    def durability(self, step: int) -> Durability:
        """Where a step is safe. Any rank may ask: one look at the disk and one question to the store, which may wait
        for its answer up to half a minute. Without ``fast``, what is committed is safe in ``root`` alone.
        """
        return self._home.durability(step)

    def advice(self, mtbf: float) -> Advice | None:
        """The best interval between saves for a mean time between failures of ``mtbf`` seconds (Young, Daly).

        From what this rank has measured so far: the stall of its saves and the length of its steps. None before the
        first save is done. Raises ValueError if ``mtbf`` is not positive.
        """
        return self._record.figures.advice(mtbf)

    # Scrubbing

    def scrub(self, *, every: float | None = None, rate: float = RATE, repair: bool = False) -> Scrubbing:
        """Check every byte of the committed steps in ``root``, newest first, in a thread of the lowest priority.

        Returns at once; call ``wait()`` of the result to wait for the end. ``every``: go on until `close`, so that
        each step is checked once in so many seconds; what was checked when is remembered beside the steps, and steps
        that were found whole recently are passed over. Reads at most ``rate`` bytes a second, and nothing while a save
        is under way. A damaged step is reported in a warning that names the tensors, and `restore` prefers others.
        ``repair``: take what is damaged from the other steps, and from the fast tier if there is one (see `repair`).

        Any rank may call it; the first one does the work. With ``fast``, what is checked is in the store. A scrubbing
        that is under way is stopped first.
        """
        if self._scrubbing is not None:
            self._scrubbing.stop(timeout=STOPS)
        steps, fast = self._home.store, self._home.fast

        def sources(name: str) -> list[Place]:
            near = fast is not steps and (fast.root / name / FILE_NAME).is_file()
            return [fast.root / name, steps.root] if near else [steps.root]

        self._scrubbing = Scrubbing(
            steps if self._ranks.first else None, every=every, rate=rate, repair=repair, sources=sources,
            busy=lambda: bool(self._recent.under_way),
        )  # fmt: skip
        return self._scrubbing

    def _damaged(self) -> list[str]:
        """Names of steps that scrubbing has found damaged."""
        return self._scrubbing.damaged(self.root) if self._scrubbing is not None else []

    # The end

    def _save_last(self, step: int, state: Mapping[str, Any], metric: float | None) -> Saving | None:
        """Have one last step on disk: the save that was under way at the signal, or else this step."""
        if self._ranks.first and not self.should_stop:  # a run that ends early with status 0 has to say why
            log.warning("a signal asks this run to stop: step %d is its last one", step)
        self.should_stop = True
        stop, saves = self._announcements.stop, self._saves
        for saving in reversed(self._recent):
            outcome = self._finish(saving)
            if outcome == "late" or (
                outcome == "saved" and (saving.step == step or (stop is not None and stop.flying))
            ):
                return saving
            if not saving.skipped:
                break
        if saves.newest is None and step == saves.step:
            return None
        self._recent.hear()  # what failed before was logged; now this step counts
        last = saves.begin(step, state, metric)
        if self._finish(last) == "failed":
            with saves.raising():
                last.wait()
        return last

    def _finish(self, saving: Saving) -> Literal["saved", "failed", "late"]:
        """Wait for a save, no longer than the grace lasts."""
        try:
            if saving.settled(self._signals.left):
                return "saved"
            # Whichever rank's grace ends first declares a rank lost that is not done: then that is what happened here.
            if self._signals.left is None or not isinstance(saving.failed, RankLost):
                return "failed"
        except TimeoutError:
            pass
        newest = None
        with suppress(StorageError):
            newest = self._home.newest_fast()
        log.error(
            "step %s cannot be saved within the grace of %g s; the newest checkpoint is %s", saving.step,
            self._options.grace, newest.path if newest is not None else "none",
        )  # fmt: skip
        return "late"
