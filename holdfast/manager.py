"""The manager of a training loop: when to save, what to keep, where to go on, when to stop.

Training code owns one `CheckpointManager`. Never deletes the last whole checkpoint and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.errors import SaveFailed
from holdfast.events import log
from holdfast.load import Loaded
from holdfast.ondisk.arguments import STATE, step_number
from holdfast.ranks.ranks import ranks_of
from holdfast.run.interval import Advice
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.recent import Recent
from holdfast.run.record import Record
from holdfast.run.root import refuse_no_folder
from holdfast.run.saves import Saves
from holdfast.run.scrub import RATE, Scrubbing, sources_of
from holdfast.run.signals import Announcements, Signals
from holdfast.run.tiers.home import Durability, Home
from holdfast.run.tiers.one import OneRoot
from holdfast.run.tiers.tiers import Tiers
from holdfast.saving import Saving
from holdfast.saving.options import takes
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

SURVIVORS = 60.0
"""Seconds to wait at a restart for writer processes that outlived their trainers."""

STOPS = 10.0
"""Seconds to wait for scrubbing, or the journal, to end: a store may keep it waiting, and it ends with the process."""


class CheckpointManager:
    """Saves a training run's state under ``root`` every ``every`` steps, keeps what ``keep`` says, and restores it.

    Make one on every rank, all with the same options. Saves go on in the background, as those of a `Saver`. A save that
    fails is raised by a later `step`, the same one on all ranks; training may go on either way.

    Args:
        options: ``root``, then keywords. ``help(CheckpointManager.__init__)`` lists the fields of `ManagerOptions`.

    Attributes:
        should_stop: True once a signal has asked the run to stop, and its last step is saved: at the same step on all
            ranks.

    Raises:
        ValueError: An option that cannot be meant.
        Mismatch: The ``fast`` folder belongs to another run.
        StorageError: A file is where the folder ``root`` is to be.

    Example:
        >>> manager = holdfast.CheckpointManager("/ckpt/run1", every=500, keep=holdfast.Keep(last=2))
        >>> manager.restore(state)
        >>> for step in range(state["step"] + 1, 1001):
        ...     train(step)
        ...     state["step"] = step
        ...     manager.step(step, state)
        ...     if manager.should_stop:
        ...         break
        >>> manager.close()
    """

    @takes(ManagerOptions)
    def __init__(self, options: ManagerOptions) -> None:
        self._options = options
        self.root = with_deadline(location(options.root), options.deadline)
        refuse_no_folder(self.root)
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
            self._home = OneRoot(
                self.root, options, ranks,
                doubtful=lambda: [] if self._scrubbing is None else self._scrubbing.damaged(self.root),
            )  # fmt: skip
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

        With ``fast`` it then waits for the uploads that are due, until nothing moves for ``deadline`` seconds, or the
        grace after a SIGTERM ends. A warning names steps that are not in the store; the next start uploads them.

        Raises:
            SaveFailed: As `wait` does, but not after a signal: then the last step has had its verdict.
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
        """Take memory and start the writer before the first save, so that it stalls no more than later ones.

        Args:
            state: As for `step`. Call it once model and optimizers exist; see `Saver.prepare`.

        Raises:
            StorageError: A folder that saves go to cannot be written. The same on every rank.
        """
        self._saves.prepare(state)

    def step(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, due: bool | None = None,
        overwrite: bool = False,
    ) -> Saving | None:  # fmt: skip
        """Report that ``step`` steps are done, and begin a save if it is time.

        It does not wait for the save, but for an earlier one if no staging buffer is free. Call it on all ranks.

        Args:
            step: How many steps are done, counted over all restarts.
            state: What to save: a dict of modules, optimizers, tensors, values and objects with a ``state_dict``.
            metric: What ``Keep(best=…)`` compares.
            due: Whether to save now, in the place of ``every``; the same on all ranks.
            overwrite: Replace a step that is there already.

        Returns:
            The save that has begun; None if none has.

        Raises:
            SaveFailed: An earlier save has failed. Training may go on, and the steps before it stay.
            Mismatch: The first save of this manager, in a root that has steps as late, of which it has restored none.

        Example:
            >>> saving = manager.step(500, {"model": model, "step": 500}, metric=0.25)
            >>> manager.wait()
        """
        step = step_number(step, state)
        due = step % self.every == 0 if due is None else due
        if due and metric is None and self.keep.best and not self._warned:
            self._warned = True
            log.warning(
                "Keep(best=%d) keeps the steps with the best metric, and step %d is saved without one: pass metric= to "
                "step. Steps that are saved without a metric are never among the best", self.keep.best, step,
            )  # fmt: skip
        self._record.arrived(step, metric)
        try:
            if self._announcements.hear(step):
                if self._ranks.first and not self.should_stop:  # a run that ends early with status 0 has to say why
                    log.warning("a signal asks this run to stop: step %d is its last one", step)
                self.should_stop = True
                return self._saves.save_last(step, state, metric, self._announcements.stop, self._signals)
            if not due or (step == self._saves.step and not overwrite):
                return None
            return self._saves.begin(step, state, metric, overwrite=overwrite)
        finally:
            self._record.left(step)

    def save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, overwrite: bool = False
    ) -> Checkpoint:
        """Save ``step`` now, whatever ``every`` says, and wait for it.

        The step that this manager has saved last is not saved again, so you may end any run with it. An earlier save
        that failed does not prevent this one; it was logged when it failed.

        Args:
            step: How many steps are done.
            state: As for `step`.
            metric: What ``Keep(best=…)`` compares.
            overwrite: Replace a step that is there already.

        Returns:
            The checkpoint, opened.

        Raises:
            SaveFailed: This save has failed. Earlier checkpoints are untouched.

        Example:
            >>> manager.save(7, {"model": model, "step": 7}).step
            7
        """
        step = step_number(step, state)
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
        """Wait for the saves under way.

        Raises:
            SaveFailed: A save has failed that no `step` has raised, and ``on_failure`` is ``"raise"``.
        """
        with self._saves.raising():
            self._saves.saver.wait()

    # Restoring

    @takes(RestoreOptions)
    def restore(self, state: dict[str, Any], options: RestoreOptions) -> Loaded | None:
        """Load the newest whole step into ``state``.

        A step is whole if it is committed, it opens, and every file is there in its size. One that is not, or that
        proves damaged while it is read, is passed over for the one before, with a warning that says why. A save that
        all ranks had finished when they died is committed first, and what other dead saves left is deleted. A step that
        has lost its optimizer (see `Keep`) is passed over for an older one that has all, and loaded if there is none.

        With ``fast`` it is the newest step that is whole on the fast tier or in the store; ``Loaded.checkpoint.path``
        says which. A rank whose node lacks a file reads it from the store. If the store does not answer, the fast
        tier's newest step is taken, with a warning.

        Args:
            state: What to fill, in place: modules, optimizers and tensors keep their memory.
            options: The fields of `holdfast.run.options.RestoreOptions`, as keywords. ``step=1200`` goes back to that
                step, ``step="best"`` to the best one. No other is tried then, and with the first save after it the
                later steps no longer count.

        Returns:
            What was loaded; None if there is no step, so that training starts from scratch.

        Raises:
            Mismatch: The checkpoint does not fit ``state``. No older step is tried.
            NotACheckpoint: There is no such ``step``, or none of the steps can be restored.
            Damaged: The ``step`` that was asked for is not whole.
            Untrusted: No step is signed by a key that ``require`` names.
            StorageError: The store does not answer, and there is no fast tier that has a step.

        Example:
            >>> manager.restore({"model": model}, step=500, only="model").step
            500
        """
        STATE.check("state", state)
        self._recent.settle()
        patience = min(SURVIVORS, self._options.deadline / 2)  # the other ranks wait meanwhile
        loaded = self._home.restore(state, options, patience, self._saves.writing_to)
        if loaded is None:
            self._saves.start_afresh(options)
        else:
            self._saves.go_on_from(loaded, back=options.step is not None)
        return loaded

    def latest(self) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None. Any rank may ask. With ``fast``, of both tiers."""
        return self._home.latest()

    def steps(self) -> list[int]:
        """Return the committed steps, oldest first, without those that training left behind. Any rank may ask.

        The first rank deletes what ``keep`` lets go after a save: others may see it for a moment, even after `close`.
        """
        return self._home.steps()

    def best(self) -> Checkpoint | None:
        """Return the step with the best metric, by ``keep.mode`` or as recorded; None without one. Any rank may ask."""
        return self._home.best()

    def durability(self, step: int) -> Durability:
        """Return where a step is safe. Any rank may ask.

        It looks at the disk and asks the store once, for half a minute at most. Without ``fast`` there is ``root``
        alone.

        Args:
            step: The number of a step.
        """
        return self._home.durability(step)

    def advice(self, mtbf: float) -> Advice | None:
        """Return the best interval between saves, from the stall of saves and the length of steps measured so far.

        Args:
            mtbf: The mean time between failures, in seconds.

        Returns:
            The interval by Young (1974) and Daly (2006); None before the first save is done.
        """
        return self._record.figures.advice(mtbf)

    # Scrubbing

    def scrub(self, *, every: float | None = None, rate: float = RATE, repair: bool = False) -> Scrubbing:
        """Check every byte of the committed steps in ``root``, newest first, in a thread of the lowest priority.

        It returns at once, and reads nothing while a save is under way. A damaged step is reported in a warning that
        names its tensors, and `restore` prefers others. Any rank may call it; the first one does the work. With
        ``fast``, the steps in the store are checked. A scrubbing that is under way is stopped first.

        Args:
            every: Go on until `close`, so that each step is checked once in so many seconds. What was checked when is
                remembered beside the steps. Without it, each step is checked once.
            rate: Bytes a second to read at most.
            repair: Take what is damaged from the other steps, and from the fast tier if there is one.

        Returns:
            The scrubbing; call its ``wait()`` to wait for the end.
        """
        if self._scrubbing is not None:
            self._scrubbing.stop(timeout=STOPS)
        self._scrubbing = Scrubbing(
            self._home.store if self._ranks.first else None, every=every, rate=rate, repair=repair,
            sources=sources_of(self._home.store, self._home.fast), busy=lambda: bool(self._recent.under_way),
        )  # fmt: skip
        return self._scrubbing
