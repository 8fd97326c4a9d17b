"""The manager of a training loop: when to save, what to keep, where to go on, when to stop.

Training code owns one `CheckpointManager`. Never deletes the last whole checkpoint and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from operator import index
from typing import Any, Literal

import torch.distributed as dist

from holdfast.bases import Bases
from holdfast.checkpoint import Checkpoint, Patterns
from holdfast.engine.board import Board, Notice
from holdfast.engine.borrow import Previous
from holdfast.engine.commit import Attached
from holdfast.engine.ranks import DEADLINE, ranks_of
from holdfast.engine.storage import is_file
from holdfast.engine.stores.around import patiently
from holdfast.engine.stores.place import Location, Place
from holdfast.engine.stores.urls import location
from holdfast.errors import Damaged, NotACheckpoint, RankLost, SaveFailed, StorageError, Untrusted
from holdfast.events import log
from holdfast.figures import Figures
from holdfast.interval import Advice, check_mtbf
from holdfast.journal import Now
from holdfast.journaling import Journal, as_number, entry_of
from holdfast.keep import Keep, Upload
from holdfast.keys import Key, Keys
from holdfast.load import Loaded, load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.save import RUN, save, signing
from holdfast.saver import Saver
from holdfast.saving import Saving
from holdfast.scrub import RATE, Scrubbing
from holdfast.signals import Signals
from holdfast.steps import NOTES, Steps, note_of
from holdfast.tiers.tiers import Durability, Tiers

SURVIVORS = 60.0
"""Seconds to wait at a restart for writer processes that outlived their trainers."""

STOPS = 10.0
"""Seconds to wait for scrubbing, or the journal, to end: a store may keep it waiting, and it ends with the process."""


class CheckpointManager:
    """Saves a training run's state under ``root`` every ``every`` steps, keeps what ``keep`` says, and restores it.

    One on every rank of ``group``, all with the same arguments. ``name`` formats a step's folder. ``deadline`` is
    what each phase of a save or load may take, in seconds.

    Saves go on in the background, as of a `Saver` with these ``worker``, ``slots``, ``busy`` and ``memory_limit``;
    ``worker="none"`` makes `step` wait for each. One that fails is raised by a later `step`, the same one on all ranks
    (``on_failure="raise"``), or only logged (``"warn"``); training may go on either way.

    ``signals`` ask for one last save: the first rank to get one tells the others, all end with the same step on disk,
    and `should_stop` turns true everywhere; ranks look for it every ``poll`` steps. A save that was under way at the
    signal is that last one. After a SIGTERM no wait lasts longer than ``grace`` seconds, so that a save which cannot
    finish says so before the launcher kills (torchrun and Kubernetes: after 30); the step before it stays.

    With ``fast``, a folder on local disk (of each node, or shared by all), every save is committed there, and a
    thread beside training brings to ``root`` what ``upload`` says; there ``keep`` counts, and ``keep_fast`` in the
    folder. `restore` takes the newest whole step of both, `durability` tells where a step is safe; see docs/tiers.md.

    With ``incremental``, a save writes what has changed since the last one, or since the step that was restored, and
    cites the rest; each step stays a whole checkpoint, and any may be deleted. See docs/incremental.md.

    With ``degraded``, a save commits although ranks are lost while they write, if others hold what those were to write.
    Not with ``fast``. See docs/degraded.md.
    With ``check_replicas`` each save compares what several ranks hold before it commits; see docs/replicas.md.
    With ``sign``, a private key, each is signed, and `restore` can require that; see docs/signing.md.

    With a mean time between failures ``mtbf``, in seconds, the best interval is logged at debug level; see `advice`.

    The first rank keeps a journal of the saves beside them, in ``root/.journal``, unless ``journal`` is False: what
    `holdfast watch` and the page of a run show. A save never waits for it, nor fails; see docs/watch.md.

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

    def __init__(
        self, root: str | os.PathLike[str] | Place, *, every: int, keep: Keep = Keep(), name: str = "step-{step:09d}",
        fast: str | os.PathLike[str] | None = None, upload: Upload = Upload(), keep_fast: Keep = Keep(last=2),
        incremental: bool = False,
        files: Mapping[str, str | os.PathLike[str] | bytes] | None = None, group: dist.ProcessGroup | None = None,
        deadline: float = DEADLINE, worker: Literal["process", "thread", "none"] = "process", slots: int = 1,
        busy: Literal["wait", "skip"] = "wait", memory_limit: int | None = None,
        on_failure: Literal["raise", "warn"] = "raise", grace: float = 25.0,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1), poll: int = 1,
        mtbf: float | None = None, degraded: bool = False, check_replicas: bool | Patterns = False,
        sign: Key | Literal[True] | None = None, journal: bool = True,
    ) -> None:  # fmt: skip
        if degraded and fast is not None:
            raise ValueError("degraded=True is for saves that go straight to root: leave out fast=")
        if every < 1 or poll < 1:
            raise ValueError(f"every={every} and poll={poll} must be at least 1")
        if on_failure not in ("raise", "warn"):
            raise ValueError(f'on_failure is "raise" or "warn", not {on_failure!r}')
        if incremental and sign is not None:
            raise ValueError(
                "an incremental save cannot be signed: what it borrows is not of this save (docs/signing.md)"
            )
        if mtbf is not None:
            check_mtbf(mtbf)
        self.root, self.every, self.keep = patiently(location(root), deadline), every, keep
        self._files, self._group, self._deadline = dict(files or {}), group, deadline
        self._on_failure, self._grace, self._mtbf, self._degraded = on_failure, grace, mtbf, degraded
        self._check_replicas, self._sign = check_replicas, sign
        self._ranks = ranks_of(group)
        # Ranks make their managers in the same order, so the same number means the same manager on each of them.
        made = self._ranks.remembered["managers"] = self._ranks.remembered.get("managers", 0) + 1
        key = f"manager/{self._ranks.calls}.{made}"
        self._tiers = None
        if fast is not None:
            self._tiers = Tiers(
                fast, self.root, name, upload=upload, keep=keep, keep_fast=keep_fast, ranks=self._ranks, key=key,
                deadline=deadline,
            )  # fmt: skip
        self._steps = self._tiers.fast if self._tiers is not None else Steps(self.root, name)
        for steps in [self._steps] if self._tiers is None else [self._tiers.fast, self._tiers.store]:
            steps.sign = signing(sign)
        self._saver = None
        if worker != "none":
            self._saver = Saver(
                worker=worker, slots=slots, busy=busy, memory_limit=memory_limit, group=group, deadline=deadline,
                degraded=degraded, check_replicas=check_replicas, sign=sign,
            )  # fmt: skip
        self._run: str | None = None
        self._newest: Saving | None = None
        self._restored: tuple[int | None, Location] | None = None
        self._bases = None
        if incremental:
            self._bases = Bases(self._steps, slots if worker != "none" else 1, lambda: self._recent.values())
        self._begun = 0
        self._recent: dict[int, Saving] = {}  # by number: under way, failed and not heard of, and the last one
        self._writing_to: set[Location] = set()
        self._board = Board(self._ranks.store, key, poll, rank=self._ranks.rank, size=self._ranks.size)
        self._scrubbing: Scrubbing | None = None
        self._calls = 0  # of `step`: ranks make them alike, whatever the steps are called
        self._spared = (-1, -1)  # number and step of the last save that has ended well
        self._stop: Notice | None = None
        self._to_raise: list[int] = []
        self._figures = Figures()
        self._journal = Journal(self.root) if journal and self._ranks.first else None
        self._at: tuple[int, float | None] = (0, None)  # the last step that was told, and its metric
        self.should_stop = False
        self._signals = Signals(signals, self._ranks, grace)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._tiers is not None:
            self._tiers.leave()  # training that failed is to start again soon, and uploads go on then
        try:
            self.close()
        except SaveFailed as error:
            if kind is None:
                raise
            log.error("%s", error)  # what ended the block is the cause to be seen

    def close(self) -> None:
        """Wait for the saves under way, give the signals back to whoever handled them before. Idempotent.

        With ``fast`` it then waits for the uploads of the newest step and of those that are due: after a SIGTERM no
        longer than the grace that is left, and never if nothing moves for ``deadline`` seconds. Steps that are not in
        the store then are named in a warning; the next start uploads them.

        Raises a failure that no `step` has raised, if ``on_failure`` says so; not after a signal, when the last step
        has had its verdict.
        """
        try:
            if self._scrubbing is not None:
                self._scrubbing.stop(timeout=STOPS)
            if self._saver is not None:
                with self._failures_heard(quiet=self.should_stop):
                    self._saver.close(timeout=self._signals.left)
        finally:
            if self._tiers is not None:
                self._tiers.close(self._signals.left)
            if self._journal is not None and (self._calls or self._begun):  # else this one has only looked
                left = self._signals.left
                self._journal.close(self._now, STOPS if left is None else min(left, STOPS))
            self._signals.give_back()
            self._ranks.at_leisure()

    # Saving

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do now what the first save would have to, best once model and optimizers exist; see `Saver.prepare`."""
        if self._saver is not None:
            self._saver.prepare(state)

    def step(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, due: bool | None = None
    ) -> Saving | None:
        """Tell that ``step`` steps are done; begins to save if it is time, and returns the save if it did.

        Does not wait for the save, but for the one before it if no slot is free. ``metric`` is what ``Keep(best=…)``
        compares. ``due``, alike on all ranks, says that it is time, or is not, in place of ``every``. Raises SaveFailed
        for an earlier save that failed; training may go on, and the steps before stay.
        """
        step = index(step)
        due = step % self.every == 0 if due is None else due
        self._figures.arrived(step)
        self._at = (step, metric)
        self._calls += 1
        try:
            if self._hear(step):
                return self._save_last(step, state, metric)
            if not due or step == self._saved:
                return None
            return self._begin(step, state, metric)
        finally:
            if self._journal is not None:
                self._journal.tell(self._now)
            self._figures.left(step)

    def save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, overwrite: bool = False
    ) -> Checkpoint:
        """Save ``step`` now, whatever the rhythm, and wait for it.

        A step that this manager has saved last is not saved again, so this may end a run of any length. An earlier
        save that failed does not keep this one from being made; it was logged when it failed.
        """
        step = index(step)
        self._settle_quietly()
        if step == self._saved and not overwrite:
            if self._newest is None and self._restored is not None:
                return Checkpoint(self._restored[1])
            if self._newest is not None and self._newest.failed is None:
                return self._newest.wait()
        return self._begin(step, state, metric, overwrite=overwrite).wait()

    def _settle_quietly(self) -> None:
        """Wait for the saves under way; what has failed of them will not be raised any more."""
        for saving in self._recent.values():
            saving.settled()
            saving.hear()

    def wait(self) -> None:
        """Wait for the saves under way. Raises a failure that no `step` has raised, if ``on_failure`` says so."""
        if self._saver is not None:
            with self._failures_heard():
                self._saver.wait()

    @property
    def _saved(self) -> int | None:
        if self._newest is None:
            return self._restored[0] if self._restored is not None else None
        return self._newest.step

    def _begin(self, step: int, state: Mapping[str, Any], metric: float | None, *, overwrite: bool = False) -> Saving:
        if isinstance(state, dict) and type(state.get("step")) is int and state["step"] != step:
            log.warning("saving step %d of a state that says it is at step %d", step, state["step"])
        files = {**self._files, NOTES: note_of(metric)}
        path, run = self._steps.path(step), self._run_id(step)
        # A step that was not restored, although it is there, stands in the way of its own successor.
        overwrite = overwrite or path.name in self._steps.broken | self._steps.passed
        self._writing_to.add(path)
        try:
            saving = self._start(state, path, step, files, overwrite, run)
        except BaseException:
            self._writing_to.discard(path)
            raise
        self._newest = saving
        self._begun += 1
        self._recent = {**self._recent_that_count(), self._begun: saving}
        if self._bases is not None:
            self._bases.begun(saving)
        if self._journal is not None:
            self._journal.tell(self._now, news=True)
        saving.add_done_callback(partial(self._ended, self._begun, metric))
        if self._saver is None:
            if saving.failed is not None and self._on_failure == "warn":
                log.warning("%s: %s", saving.path, saving.failed)
            with self._failures_heard():
                saving.wait()
        return saving

    def _recent_that_count(self) -> dict[int, Saving]:
        """Saves under way, those whose failure somebody has yet to hear of, and the last one that took place."""
        last = max((number for number, s in self._recent.items() if s.done and not s.skipped), default=None)
        return {
            number: saving
            for number, saving in self._recent.items()
            if number == last or not saving.done or (self._on_failure == "raise" and self._unheard(saving))
        }

    @staticmethod
    def _unheard(saving: Saving) -> bool:
        return saving.failed is not None and not saving.heard and not saving.skipped

    def _start(
        self, state: Mapping[str, Any], path: Location, step: int, files: Attached, overwrite: bool, run: str | None
    ) -> Saving:
        # With tiers the folder may be called another way on each node.
        label = None if self._tiers is None else f"save step {step} of {self.root}"
        base = self._bases.next if self._bases is not None else None
        previous = None
        if self._bases is not None:
            previous = Previous(base.to_cite if base is not None else lambda: None)
        if self._saver is not None:
            return self._saver.save(
                state, path, step=step, base=base or previous, files=files, overwrite=overwrite, run=run, label=label
            )
        saving = Saving(path, step, base)
        saving.follow(
            lambda: save(
                state, path, step=step, base=previous, files=files, overwrite=overwrite, group=self._group,
                deadline=self._deadline, run=run, label=label, degraded=self._degraded,
                check_replicas=self._check_replicas, sign=self._sign,
            )
        )  # fmt: skip
        return saving

    def _ended(self, number: int, metric: float | None, saving: Saving) -> None:
        """In the thread of a save, once its outcome is known."""
        if self._bases is not None:
            self._bases.let_go()
        if self._tiers is None or saving.failed is not None or saving.step is None:
            self._writing_to.discard(saving.path)
        self._write_down(metric, saving)
        if saving.failed is not None:
            if self._on_failure == "warn":
                saving.hear()  # it was logged, and that is all
            return
        self._figures.saved(saving.timing)
        if self._ranks.first and saving.step is not None:
            if self._mtbf is not None:
                log.debug("for a mean time between failures of %g s: %s", self._mtbf, self.advice(self._mtbf))
            if self._tiers is None:
                self._steps.renewed(saving.step)
                # Saves may end in another order than they were begun: what is spared is the last one, not this one.
                self._spared = max(self._spared, (number, saving.step))
                self._steps.sweep(self.keep, self._spared[1], self._writing_to)
        if self._tiers is not None and saving.step is not None:
            self._tiers.committed(number, saving.step, self._writing_to)
            self._writing_to.discard(saving.path)

    def _write_down(self, metric: float | None, saving: Saving) -> None:
        """What became of a save: in the log, and in the journal."""
        if not self._ranks.first:
            return
        entry = entry_of(
            saving, metric=metric, ranks=self._ranks.size, step_seconds=self._figures.step_seconds,
            backlog=self._tiers.backlog() if self._tiers is not None else None,
        )  # fmt: skip
        if entry.outcome == "saved":
            log.info(
                "saved step %d: %d bytes in %.2f s, training waited %.3f s, %s", entry.step, entry.bytes, entry.seconds,
                entry.stall, saving.path,
            )  # fmt: skip
        if self._journal is not None:
            self._journal.add(entry)
            self._journal.tell(partial(self._now, ended=saving), news=True)

    def _now(self, ended: Saving | None = None) -> Now:
        """Where training is; from any thread. A save that has ``ended`` may still have to tell others so."""
        step, metric = self._at
        flying = next((s for s in reversed([*self._recent.values()]) if s is not ended and not s.done), None)
        return Now(
            step, time.time(), self.every, self._ranks.size, saving=None if flying is None else flying.step,
            since=None if flying is None else flying.began,
            step_seconds=self._figures.step_seconds, metric=as_number(metric), mode=self.keep.mode,
            backlog=self._tiers.backlog() if self._tiers is not None else None,
        )  # fmt: skip

    def _run_id(self, step: int) -> str | None:
        if self._run is None and self._ranks.first:
            try:
                newest = self._at_hand()
                # A run that is resumed is the same run; one that begins afresh beside old steps is not, nor is one that
                # goes back behind them without having restored them here.
                resumed = newest is not None and (newest.step is None or step > newest.step)
                fresh = RUN if newest is None else secrets.token_hex(8)
                self._run = newest.run if newest is not None and resumed else fresh
            except StorageError as error:  # then the save fails too, and on all ranks
                log.warning("which run %s is of is not known: %s", self.root, error)
        return self._run

    # Failures

    @contextmanager
    def _failures_heard(self, *, quiet: bool = False) -> Iterator[None]:
        """Around what raises an earlier failure: it passes, or, as it was logged when it happened, goes no further."""
        try:
            yield
        except SaveFailed:
            if self._on_failure == "raise" and not quiet:
                raise

    def _raise(self, number: int) -> None:
        """Raise the failure of a save, unless that was done."""
        saving = self._recent.get(number)
        if saving is not None and not saving.settled() and not saving.heard:
            saving.wait()

    # Restoring

    def restore(
        self, state: dict[str, Any], *, only: Patterns = "*", require: Keys | None = None,
        run: str | None = None, other_model: bool = False,
    ) -> Loaded | None:  # fmt: skip
        """Load the newest whole checkpoint into ``state``; None if there is none, so that training starts afresh.

        Whole means: committed, it opens, and every file is there in its size. One that is not, or that proves
        damaged while it is read, is passed over for the one before, with a warning that says why. A save that all
        ranks had finished when they died is committed first; what other dead saves left is swept. Raises Mismatch if
        the checkpoint does not fit ``state``.

        A step that has lost its optimizer (see `Keep`) is passed over for an older one that has all, and loaded if
        there is none. With ``only``, patterns as of `load`, the newest step is taken, and so much of it.

        With ``require``, public keys, only a step that one of them has signed is loaded. One that is not is passed over
        like a damaged one; if there is no other, Untrusted is raised.

        A root folder belongs to one run, and who restores a step goes on as its run. If a step of another run was saved
        after the one that is newest by its number, Mismatch is raised: ``run`` says of which run the step has to be, or
        ``"any"``. ``other_model`` as of `load`. See docs/never-mix.md.

        With ``fast`` the newest step that is whole on the fast tier or in the store; ``Loaded.checkpoint.path`` tells
        where it came from. A rank whose node lacks a file reads it from the store. If the store does not answer, the
        fast tier's newest is taken, with a warning, and StorageError raised if it has none.
        """
        for saving in self._recent.values():
            saving.settled()
        patience = min(SURVIVORS, self._deadline / 2)  # the other ranks wait meanwhile
        if self._tiers is not None:
            loaded = self._tiers.restore(
                state, patience, self._writing_to, only, require, None if run == "any" else run, other_model
            )
        else:
            loaded = self._restore(state, patience, only, require, run, other_model)
        if loaded is not None:
            self._run, self._newest = loaded.checkpoint.manifest.run, None
            self._restored = loaded.step, loaded.checkpoint.path
            if self._bases is not None:
                self._bases.start_from(loaded.checkpoint.path, loaded.step)
        if self._ranks.first and loaded is None:
            log.info("no checkpoint in %s yet: training starts afresh", self.root)
        elif self._ranks.first and loaded is not None:
            log.info(
                "restored step %s from %s in %.2f s; ranks then %d, now %d", loaded.step, loaded.checkpoint.path,
                loaded.seconds, loaded.checkpoint.world_size, self._ranks.size,
            )  # fmt: skip
        return loaded

    def _restore(
        self, state: dict[str, Any], patience: float, only: Patterns, require: Keys | None, run: str | None,
        other_model: bool,
    ) -> Loaded | None:  # fmt: skip
        refused: list[str] = []
        untrusted: Untrusted | None = None
        while True:
            with self._ranks.call(f"restore {self.root}", deadline=self._deadline) as call:
                choose = partial(self._choose, refused, patience, run, complete=only == "*")
                name = call.exchange("choose", lambda: True, lambda notes: choose(), str)
            if not name:
                if untrusted is not None:
                    raise untrusted
                if refused:
                    raise NotACheckpoint(f"no checkpoint of {self.root} can be restored: " + "; ".join(refused))
                return None
            try:
                return load(
                    self.root / name, state, only=only, group=self._group, deadline=self._deadline, require=require,
                    run=None if run == "any" else run, other_model=other_model,
                )  # fmt: skip
            except (Damaged, NotACheckpoint, Untrusted) as error:
                untrusted = error if isinstance(error, Untrusted) else untrusted
                log.warning("%s cannot be restored, trying the one before: %s", name, error)
                refused.append(name)
                self._steps.broken.add(name)

    def _choose(self, refused: list[str], patience: float, run: str | None, *, complete: bool) -> str:
        if not refused:
            self._steps.commit_late(patience)
            self._steps.sweep(self.keep, None, self._writing_to)
        doubtful = self._scrubbing.damaged(self.root) if self._scrubbing is not None else []
        of_run = None if run == "any" else run
        newest = self._steps.newest([*refused, *doubtful], complete=complete, run=of_run)
        if newest is None and doubtful:  # what is damaged may not be what is asked for: loading tells
            newest = self._steps.newest(refused, complete=complete, run=of_run)
        if newest is not None and run is None:
            self._steps.refuse_another_run(newest, refused)
        if newest is None:
            self._steps.refuse_a_checkpoint()
        return newest.name if newest is not None else ""

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, opened, or None; with ``fast``, of both tiers. Local: any rank may ask."""
        return self._tiers.latest() if self._tiers is not None else self._at_hand()

    def _at_hand(self) -> Checkpoint | None:
        """The newest whole checkpoint where saves go to."""
        if self._tiers is not None:
            return self._tiers.newest_fast()
        newest = self._steps.newest()
        return Checkpoint(newest) if newest is not None else None

    def steps(self) -> list[int]:
        """The committed steps, oldest first; with ``fast``, of both tiers."""
        return self._tiers.steps() if self._tiers is not None else list(self._steps.committed())

    def durability(self, step: int) -> Durability:
        """Where a step is safe. Any rank may ask: one look at the disk and one question to the store, which may wait
        for its answer up to half a minute. Without ``fast``, what is committed is safe in ``root`` alone.
        """
        if self._tiers is not None:
            return self._tiers.durability(step)
        return Durability(step, False, is_file(self._steps.path(step) / FILE_NAME), False)

    # Scrubbing

    def scrub(self, *, every: float | None = None, rate: float = RATE, repair: bool = False) -> Scrubbing:
        """Check every byte of the committed steps in ``root``, newest first, in a thread of the lowest priority.

        Returns at once; ``wait()`` of what is returned waits for the end. ``every``: go on until `close`, so that each
        step is checked once in so many seconds; what was checked when is remembered beside the steps, and steps that
        were found whole of late are passed over. Reads at most ``rate`` bytes a second, and nothing while a save is
        under way. A step that is damaged is told in a warning that names the tensors, and `restore` prefers others.
        ``repair``: take what is damaged from the other steps, and from the fast tier if there is one (see `repair`).

        Any rank may call it; the first one does the work. With ``fast``, what is checked is in the store. A scrubbing
        that is under way is stopped first.
        """
        if self._scrubbing is not None:
            self._scrubbing.stop(timeout=STOPS)
        steps = self._tiers.store if self._tiers is not None else self._steps
        others = [] if self._tiers is None else [self._tiers.fast]

        def sources(name: str) -> list[Location]:
            near = [tier.root / name for tier in others if is_file(tier.root / name / FILE_NAME)]
            return [*near, steps.root]

        self._scrubbing = Scrubbing(
            steps if self._ranks.first else None, every=every, rate=rate, repair=repair, sources=sources,
            busy=lambda: any(not saving.done for saving in [*self._recent.values()]),
        )  # fmt: skip
        return self._scrubbing

    # The end: signals, and what the ranks tell each other

    def _hear(self, step: int) -> bool:
        """Tell the other ranks what this one knows, and act on what all know. True if this step is the last one."""
        now = self._calls
        if self._signals.arrived and self._stop is None:
            flying = any(not saving.done for saving in self._recent.values())
            self._board.put(Notice("stop", step, now, flying, self._signals.hurries))
        for number, saving in self._recent.items() if self._on_failure == "raise" else ():
            if self._unheard(saving):
                self._board.put(Notice("failed", number, now))
        due = self._board.due(now)
        for notice in [*self._board.pending, *due]:
            if notice.kind == "stop" and notice.hurry and not self._signals.hurries:
                self._signals.hurry()
        self._stop = next((notice for notice in due if notice.kind == "stop"), self._stop)
        self._to_raise += [notice.of for notice in due if notice.kind == "failed"]
        while self._to_raise and self._stop is None:
            self._raise(self._to_raise.pop(0))
        return self._stop is not None

    def _save_last(self, step: int, state: Mapping[str, Any], metric: float | None) -> Saving | None:
        """Have one last step on disk: the save that was under way at the signal, or else this step."""
        if self._ranks.first and not self.should_stop:  # a run that ends early with status 0 has to say why
            log.warning("a signal asks this run to stop: step %d is its last one", step)
        self.should_stop = True
        flying = self._stop is not None and self._stop.flying
        for saving in reversed(self._recent.values()):
            ended = self._finish(saving)
            if ended == "late" or (ended == "saved" and (flying or saving.step == step)):
                return saving
            if not saving.skipped:
                break
        if self._newest is None and step == self._saved:
            return None
        for saving in self._recent.values():
            saving.hear()  # what failed before was logged; now this step counts
        last = self._begin(step, state, metric)
        if self._finish(last) == "failed":
            with self._failures_heard():
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
            newest = self._at_hand()
        log.error(
            "step %s cannot be saved within the grace of %g s; the newest checkpoint is %s", saving.step, self._grace,
            newest.path if newest is not None else "none",
        )  # fmt: skip
        return "late"

    # Figures

    def advice(self, mtbf: float) -> Advice | None:
        """The best interval between saves for a mean time between failures of ``mtbf`` seconds (Young, Daly).

        From what this rank has measured so far: the stall of its saves and the length of its steps. None before the
        first save is done. Raises ValueError if ``mtbf`` is not positive.
        """
        return self._figures.advice(mtbf)
