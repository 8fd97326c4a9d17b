"""The saves of a run: how one is begun, which run it belongs to, and what follows from its outcome.

The manager owns one `Saves`. Never decides when to save.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Literal

from holdfast.commit.job import Base
from holdfast.errors import Damaged, Mismatch, RankLost, SaveFailed, StorageError
from holdfast.events import log
from holdfast.load import Loaded
from holdfast.ondisk.manifest import NOTES
from holdfast.ranks.interrupts import interrupts_wait
from holdfast.ranks.notices import Notice
from holdfast.ranks.ranks import Ranks
from holdfast.run.bases import Bases
from holdfast.run.foreground import Foreground
from holdfast.run.going_back import WentBack
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.recent import Recent
from holdfast.run.record import Record
from holdfast.run.root import refuse_read_only
from holdfast.run.signals import Signals
from holdfast.run.tiers.home import Home
from holdfast.run.whole import note_of
from holdfast.save import RUN
from holdfast.saver import Saver
from holdfast.saving import Saving
from holdfast.saving.options import SaverOptions, values_of
from holdfast.storage.place import Place


class Saves:
    """Begins saves in the ``home`` of a run and remembers the last one."""

    def __init__(self, options: ManagerOptions, ranks: Ranks, home: Home, recent: Recent, record: Record) -> None:
        self._options, self._ranks, self._home, self._recent, self._record = options, ranks, home, recent, record
        self.saver: Saver | Foreground
        if options.worker == "none":
            self.saver = Foreground(options)
        else:
            self.saver = Saver(**values_of(options, SaverOptions), group=options.group)
        self._bases = None
        if options.incremental:
            self._bases = Bases(home.fast, 1 if options.worker == "none" else options.slots, recent)
        self.writing_to: set[Place] = set()
        """Folders of saves under way, which no sweep may touch."""
        self.newest: Saving | None = None
        """The save that was begun last, since the last restore."""
        self.restored: Place | None = None
        self._restored_step: int | None = None
        self._run: str | None = None
        self._goes_back = False
        self._knows_root = False  # it has restored, or found nothing to restore, or has saved

    @property
    def step(self) -> int | None:
        """The step that was saved or restored last."""
        return self._restored_step if self.newest is None else self.newest.step

    def start_afresh(self, options: RestoreOptions) -> None:
        """Nothing was restored: there is no step, or none of the run that was asked for."""
        self._knows_root = options.of_run is None
        if self._ranks.first:
            log.info("no checkpoint in %s yet: training starts afresh", self._home.store.root)

    def go_on_from(self, loaded: Loaded, *, back: bool) -> None:
        """A step was restored: what is saved from now on continues its run. ``back``: there may be later steps."""
        self._goes_back, self._knows_root = back, True
        path = loaded.checkpoint.path
        self._run, self.newest = loaded.checkpoint.manifest.run, None
        self.restored, self._restored_step = path, loaded.step
        if self._bases is not None:
            self._bases.start_from(path, loaded.step)
        if self._ranks.first:
            passed_over = self._home.fast.broken or self._home.store.broken  # a warning has named them
            log.log(
                logging.WARNING if passed_over else logging.INFO,
                "restored step %s from %s in %.2f s; ranks then %d, now %d", loaded.step, path, loaded.seconds,
                loaded.checkpoint.world_size, self._ranks.size,
            )  # fmt: skip

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Make sure that the folder takes saves, and do what the first save would do before it copies."""
        root = self._home.fast.root

        def look() -> bool:
            refuse_read_only(root)
            return True

        if not root.is_remote:
            label = f"prepare to save in {self._home.store.root}"
            with self._ranks.call(label, deadline=self._options.deadline) as call:
                call.exchange("root", look, lambda notes: True, bool)
        self.saver.prepare(state)

    def begin(self, step: int, state: Mapping[str, Any], metric: float | None, *, overwrite: bool = False) -> Saving:
        """Begin to save ``step``. Without a worker, the outcome is known when this returns."""
        if isinstance(state, dict) and type(state.get("step")) is int and state["step"] != step:
            log.warning("saving step %d of a state that says it is at step %d", step, state["step"])
        if self.newest is None and self._restored_step is not None and step < self._restored_step:
            log.warning(
                'saving step %d after step %d was restored: let the loop begin at state["step"] + 1', step,
                self._restored_step,
            )  # fmt: skip
        if self._goes_back:
            self._leave_behind()
        if not (self._knows_root or overwrite):
            self._refuse_earlier_run(step)
        self._knows_root = True
        path, run, fast = self._home.fast.path(step), self._run_of(step), self._home.fast
        # A step that is there, but was not restored, stands in the way of its own successor.
        overwrite = overwrite or path.name in fast.broken | fast.passed or self._was_left_behind(step, path)
        base = None if self._bases is None else self._bases.next or Base(lambda: None)
        self.writing_to.add(path)
        saving: Saving | None = None
        try:
            saving = self.saver.save(
                state, path, step=step, base=base, files={**(self._options.files or {}), NOTES: self._note_of(metric)},
                overwrite=overwrite, run=run, label=self._home.label(step),
            )  # fmt: skip
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt may come when the save goes on already
                saving = self.saver.under_way(path)
            raise
        finally:
            with interrupts_wait():
                if saving is not None:
                    self._begun(saving, step, metric)
                else:
                    self.writing_to.discard(path)
        if isinstance(self.saver, Foreground):
            if saving.failed is not None and self._options.on_failure == "warn":
                log.warning("%s: %s", saving.path, saving.failed)
            with self.raising():
                saving.wait()
        return saving

    def _refuse_earlier_run(self, step: int) -> None:
        """Raise Mismatch, on all ranks, if the root has a step as late as this one, and none of them was restored.

        The steps of two runs would be mixed, and a save would fail where the earlier run has saved. A later step may be
        one of the same run, which has loaded the newest checkpoint by itself.
        """
        root = self._home.store.root

        def look() -> bool:
            try:
                newest = self._home.latest()
                if newest is None or newest.step is None or step > newest.step:
                    return True
                steps = self._home.steps() or [newest.step]
            except (Damaged, StorageError) as error:
                log.warning("cannot tell whether an earlier run has saved in %s: %s", root, error)
                return True
            there = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} … {steps[-1]}"
            raise Mismatch(
                f"{root} holds {there} of an earlier run, and this manager restored none of them: step {step} is not "
                "saved. Call manager.restore(state) before you train, or choose another root to start afresh"
            )

        with self._ranks.call(f"first save in {root}", deadline=self._options.deadline) as call:
            call.exchange("root", lambda: True, lambda _: look(), bool)

    def _note_of(self, metric: float | None) -> bytes:
        """The metric; and with `Keep.best` the mode, by the rules or by what the run has recorded. The first rank's."""
        if not self._options.keep.best:
            return note_of(metric)
        if self._record.mode is None and self._ranks.first:
            store = self._home.store
            try:
                self._record.mode = store.metrics.mode(None, store.current())
            except (Damaged, StorageError) as error:
                log.warning("cannot tell which metric the steps of %s call the better one: %s", store.root, error)
        return note_of(metric, self._record.mode)

    def _was_left_behind(self, step: int, path: Place) -> bool:
        """On the first rank, whose word counts: whether training left this step behind, and now makes it again."""
        try:
            return self._ranks.first and self._home.fast.is_behind(step, path)
        except (Damaged, StorageError) as error:  # if the step is there the save fails, on all ranks alike
            log.warning("cannot tell whether training left %s behind: %s", path, error)
            return False

    def _leave_behind(self) -> None:
        """Training goes on from an earlier step, so the later ones no longer count. All ranks call it.

        With the first save, and not with the restore: to look at an earlier step changes nothing on disk.
        """
        step = self._restored_step or 0
        label = f"go on from step {step} of {self._home.store.root}"
        with self._ranks.call(label, deadline=self._options.deadline) as call:
            mark = call.exchange("mark", lambda: 0, lambda _: self._home.leave_behind(step), WentBack)
        self._home.went_back(mark)
        self._goes_back = False

    def save_last(
        self, step: int, state: Mapping[str, Any], metric: float | None, stop: Notice | None, signals: Signals
    ) -> Saving | None:  # fmt: skip
        """Have one last step on disk: the save that was under way at the signal, or else this step."""
        for saving in reversed(self._recent):
            outcome = self._finish(saving, signals)
            if outcome == "late" or (
                outcome == "saved" and (saving.step == step or (stop is not None and stop.flying))
            ):
                return saving
            if not saving.skipped:
                break
        if self.newest is None and step == self.step:
            return None
        self._recent.hear()  # what failed before was logged; now this step counts
        last = self.begin(step, state, metric)
        if self._finish(last, signals) == "failed":
            with self.raising():
                last.wait()
        return last

    def _finish(self, saving: Saving, signals: Signals) -> Literal["saved", "failed", "late"]:
        """Wait for a save, no longer than the grace lasts."""
        try:
            if saving.settled(signals.left):
                return "saved"
            # Whichever rank's grace ends first declares a rank lost that is not done: then that is what happened here.
            if signals.left is None or not isinstance(saving.failed, RankLost):
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

    @contextmanager
    def raising(self, *, quiet: bool = False) -> Iterator[None]:
        """Around what raises the failure of a save: with ``on_failure="warn"``, or ``quiet``, it goes no further."""
        try:
            yield
        except SaveFailed:
            if self._options.on_failure == "raise" and not quiet:
                raise

    def _begun(self, saving: Saving, step: int, metric: float | None) -> None:
        self.newest = saving
        number = self._recent.add(saving)
        if self._bases is not None:
            self._bases.begun(saving)
        self._record.begun(step, metric)
        saving.add_done_callback(partial(self._ended, number, step, metric))

    def _ended(self, number: int, step: int, metric: float | None, saving: Saving) -> None:
        """In the thread of a save, once its outcome is known."""
        if self._bases is not None:
            self._bases.let_go()
        self._record.ended(saving, metric)
        if saving.failed is None:
            self._home.committed(number, step, self.writing_to)
            return
        self.writing_to.discard(saving.path)
        if self._options.on_failure == "warn":
            saving.hear()  # it was logged, and that is all

    def _run_of(self, step: int) -> str | None:
        """The id of the run that ``step`` belongs to. The first rank's counts."""
        if self._run is not None or not self._ranks.first:
            return self._run
        try:
            newest = self._home.newest_fast()
            if newest is None:
                self._run = RUN
            elif newest.step is None or step > newest.step:
                self._run = newest.run
            else:
                # A run that starts from scratch beside old steps is another run, and so is one that goes back behind
                # them without having restored them here.
                log.warning(
                    "%s holds steps up to %s, and this run goes on at step %d without having restored them: it is "
                    "another run from now on, and cannot save a step that is there. Give each run its own folder",
                    self._home.store.root, newest.step, step,
                )  # fmt: skip
                self._run = secrets.token_hex(8)
        except Damaged as error:  # of the mark: which of the steps count is not known
            log.warning("this is another run than the one in %s from now on: %s", self._home.store.root, error)
            self._run = secrets.token_hex(8)
        except StorageError as error:  # then the save fails too, on all ranks
            log.warning("cannot tell which run %s belongs to: %s", self._home.store.root, error)
        return self._run
