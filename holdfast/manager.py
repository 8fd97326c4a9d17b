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

from holdfast.checkpoint import Checkpoint
from holdfast.errors import RankLost, SaveFailed, StorageError
from holdfast.events import log
from holdfast.journal import Now
from holdfast.load import Loaded
from holdfast.ondisk.manifest import FILE_NAME, NOTES
from holdfast.ondisk.patterns import Patterns
from holdfast.policies.incremental.borrow import Previous
from holdfast.policies.signing.keys import Key, Keys
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.ranks.ranks import DEADLINE, ranks_of
from holdfast.run.announcements import Announcements
from holdfast.run.bases import Bases
from holdfast.run.figures import Figures
from holdfast.run.foreground import Foreground
from holdfast.run.interval import Advice, check_mtbf
from holdfast.run.journaling import Journal, as_number, entry_of
from holdfast.run.keep import Keep, Upload
from holdfast.run.recent import Recent
from holdfast.run.scrub import RATE, Scrubbing
from holdfast.run.signals import Signals
from holdfast.run.steps import note_of
from holdfast.run.tiers.home import Asked, Durability, Home
from holdfast.run.tiers.one import OneRoot
from holdfast.run.tiers.tiers import Tiers
from holdfast.save import RUN, signing
from holdfast.saver import Saver
from holdfast.saving import Saving
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.around import patiently

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
        self._files, self._deadline, self._on_failure = dict(files or {}), deadline, on_failure
        self._grace, self._mtbf = grace, mtbf
        self._ranks = ranks_of(group)
        # Ranks make their managers in the same order, so the same number means the same manager on each of them.
        made = self._ranks.remembered["managers"] = self._ranks.remembered.get("managers", 0) + 1
        key = f"manager/{self._ranks.calls}.{made}"
        self._home: Home
        if fast is not None:
            self._home = Tiers(
                fast, self.root, name, upload=upload, keep=keep, keep_fast=keep_fast, sign=signing(sign),
                ranks=self._ranks, key=key, deadline=deadline,
            )  # fmt: skip
        else:
            self._home = OneRoot(
                self.root, name, keep=keep, sign=signing(sign), doubtful=self._damaged, group=group, deadline=deadline,
            )  # fmt: skip
        self._saver: Saver | Foreground
        if worker != "none":
            self._saver = Saver(
                worker=worker, slots=slots, busy=busy, memory_limit=memory_limit, group=group, deadline=deadline,
                degraded=degraded, check_replicas=check_replicas, sign=sign,
            )  # fmt: skip
        else:
            self._saver = Foreground(
                group=group, deadline=deadline, degraded=degraded, check_replicas=check_replicas, sign=sign,
            )  # fmt: skip
        self._run: str | None = None
        self._newest: Saving | None = None
        self._restored: tuple[int | None, Place] | None = None
        self._recent = Recent(raises=on_failure == "raise")
        self._bases = None
        if incremental:
            self._bases = Bases(self._home.fast, slots if worker != "none" else 1, lambda: self._recent)
        self._writing_to: set[Place] = set()
        self._scrubbing: Scrubbing | None = None
        self._figures = Figures()
        self._journal = Journal(self.root) if journal and self._ranks.first else None
        self._at: tuple[int, float | None] = (0, None)  # the last step that was told, and its metric
        self.should_stop = False
        self._signals = Signals(signals, self._ranks, grace)
        self._announcements = Announcements(self._ranks, key, poll, signals=self._signals, recent=self._recent)

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
            with self._failures_heard(quiet=self.should_stop):
                self._saver.close(timeout=self._signals.left)
        finally:
            self._home.close(self._signals.left)
            only_looked = not self._announcements.heard and not self._recent.begun
            if self._journal is not None and not only_looked:
                left = self._signals.left
                self._journal.close(self._now, STOPS if left is None else min(left, STOPS))
            self._signals.give_back()
            self._ranks.at_leisure()

    # Saving

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Do now what the first save would have to, best once model and optimizers exist; see `Saver.prepare`."""
        self._saver.prepare(state)

    def step(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, due: bool | None = None,
        overwrite: bool = False,
    ) -> Saving | None:  # fmt: skip
        """Tell that ``step`` steps are done; begins to save if it is time, and returns the save if it did.

        Does not wait for the save, but for the one before it if no slot is free. ``metric`` is what ``Keep(best=…)``
        compares. ``due``, alike on all ranks, says that it is time, or is not, in place of ``every``. ``overwrite``
        lets the save replace a step that is there. Raises SaveFailed for an earlier save that failed; training may go
        on, and the steps before stay.
        """
        step = index(step)
        due = step % self.every == 0 if due is None else due
        self._figures.arrived(step)
        self._at = (step, metric)
        try:
            if self._announcements.hear(step):
                return self._save_last(step, state, metric)
            if not due or (step == self._saved and not overwrite):
                return None
            return self._begin(step, state, metric, overwrite=overwrite)
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
        self._recent.settle()
        self._recent.hear()  # what has failed of the saves under way will not be raised any more
        if step == self._saved and not overwrite:
            if self._newest is None and self._restored is not None:
                return Checkpoint(self._restored[1])
            if self._newest is not None and self._newest.failed is None:
                return self._newest.wait()
        return self._begin(step, state, metric, overwrite=overwrite).wait()

    def wait(self) -> None:
        """Wait for the saves under way. Raises a failure that no `step` has raised, if ``on_failure`` says so."""
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
        path, run = self._home.fast.path(step), self._run_id(step)
        # A step that was not restored, although it is there, stands in the way of its own successor.
        overwrite = overwrite or path.name in self._home.fast.broken | self._home.fast.passed
        base = None if self._bases is None else self._bases.next or Previous(lambda: None)
        self._writing_to.add(path)
        saving: Saving | None = None
        try:
            saving = self._saver.save(
                state, path, step=step, base=base, files=files, overwrite=overwrite, run=run,
                label=self._home.label(step),
            )  # fmt: skip
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt may come when the save goes on already
                saving = self._saver.under_way(path)
            raise
        finally:
            with interrupts_wait():
                if saving is not None:
                    self._note(saving, step, metric)
                else:
                    self._writing_to.discard(path)
        if isinstance(self._saver, Foreground):
            if saving.failed is not None and self._on_failure == "warn":
                log.warning("%s: %s", saving.path, saving.failed)
            with self._failures_heard():
                saving.wait()
        return saving

    def _note(self, saving: Saving, step: int, metric: float | None) -> None:
        """A save has begun."""
        self._newest = saving
        if step != self._at[0]:  # saved without having been told of by `step`
            self._at = (step, metric)
        number = self._recent.add(saving)
        if self._bases is not None:
            self._bases.begun(saving)
        if self._journal is not None:
            self._journal.tell(self._now, news=True)
        saving.add_done_callback(partial(self._ended, number, step, metric))

    def _ended(self, number: int, step: int, metric: float | None, saving: Saving) -> None:
        """In the thread of a save, once its outcome is known."""
        if self._bases is not None:
            self._bases.let_go()
        self._write_down(metric, saving)
        if saving.failed is not None:
            self._writing_to.discard(saving.path)
            if self._on_failure == "warn":
                saving.hear()  # it was logged, and that is all
            return
        self._figures.saved(saving.timing)
        if self._ranks.first and self._mtbf is not None:
            log.debug("for a mean time between failures of %g s: %s", self._mtbf, self.advice(self._mtbf))
        self._home.committed(number, step, self._writing_to)

    def _write_down(self, metric: float | None, saving: Saving) -> None:
        """What became of a save: in the log, and in the journal."""
        if not self._ranks.first:
            return
        entry = entry_of(
            saving, metric=metric, ranks=self._ranks.size, step_seconds=self._figures.step_seconds,
            backlog=self._home.backlog(),
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
        flying = next((saving for saving in reversed(self._recent.flying) if saving is not ended), None)
        return Now(
            step, time.time(), self.every, self._ranks.size, saving=None if flying is None else flying.step,
            since=None if flying is None else flying.began,
            step_seconds=self._figures.step_seconds, metric=as_number(metric), mode=self.keep.mode,
            backlog=self._home.backlog(),
        )  # fmt: skip

    def _run_id(self, step: int) -> str | None:
        if self._run is None and self._ranks.first:
            try:
                newest = self._home.newest_fast()
                # A run that is resumed is the same run; one that begins afresh beside old steps is not, nor is one that
                # goes back behind them without having restored them here.
                resumed = newest is not None and (newest.step is None or step > newest.step)
                fresh = RUN if newest is None else secrets.token_hex(8)
                if newest is not None and not resumed:
                    log.warning(
                        "%s holds steps up to %s, and this run goes on at step %d without having restored them: it is "
                        "another run from now on, and cannot save a step that is there. Give each run its own folder",
                        self.root, newest.step, step,
                    )  # fmt: skip
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
        there is none. With ``only``, as of `load`, the newest step is taken, and so much of it; if something in
        ``only`` fits nothing there, Mismatch is raised, and no older step is looked at.

        With ``require``, public keys, only a step that one of them has signed is loaded. One that is not is passed over
        like a damaged one; if there is no other, Untrusted is raised.

        A root folder belongs to one run, and who restores a step goes on as its run. If a step of another run was saved
        after the one that is newest by its number, Mismatch is raised: ``run`` says of which run the step has to be, or
        ``"any"``. ``other_model`` as of `load`. See docs/never-mix.md.

        With ``fast`` the newest step that is whole on the fast tier or in the store; ``Loaded.checkpoint.path`` tells
        where it came from. A rank whose node lacks a file reads it from the store. If the store does not answer, the
        fast tier's newest is taken, with a warning, and StorageError raised if it has none.
        """
        self._recent.settle()
        patience = min(SURVIVORS, self._deadline / 2)  # the other ranks wait meanwhile
        loaded = self._home.restore(state, Asked(only, require, run, other_model), patience, self._writing_to)
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

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint, opened, or None; with ``fast``, of both tiers. Local: any rank may ask."""
        return self._home.latest()

    def steps(self) -> list[int]:
        """The committed steps, oldest first; with ``fast``, of both tiers."""
        return self._home.steps()

    def durability(self, step: int) -> Durability:
        """Where a step is safe. Any rank may ask: one look at the disk and one question to the store, which may wait
        for its answer up to half a minute. Without ``fast``, what is committed is safe in ``root`` alone.
        """
        return self._home.durability(step)

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
        steps, fast = self._home.store, self._home.fast

        def sources(name: str) -> list[Place]:
            near = fast is not steps and (fast.root / name / FILE_NAME).is_file()
            return [fast.root / name, steps.root] if near else [steps.root]

        self._scrubbing = Scrubbing(
            steps if self._ranks.first else None, every=every, rate=rate, repair=repair, sources=sources,
            busy=lambda: bool(self._recent.flying),
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
        stop = self._announcements.stop
        flying = stop is not None and stop.flying
        for saving in reversed(self._recent):
            ended = self._finish(saving)
            if ended == "late" or (ended == "saved" and (flying or saving.step == step)):
                return saving
            if not saving.skipped:
                break
        if self._newest is None and step == self._saved:
            return None
        self._recent.hear()  # what failed before was logged; now this step counts
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
            newest = self._home.newest_fast()
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
