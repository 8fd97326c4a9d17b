"""What a manager records of its run: figures, lines in the log, and the journal.

The manager owns one `Record` and reports steps and saves to it. Never makes a step or a save wait, and never fails one.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial

from holdfast.errors import HoldfastError, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ranks.ranks import Ranks
from holdfast.run.interval import Figures
from holdfast.run.journal import Entry, Now
from holdfast.run.journaling import Journal
from holdfast.run.options import ManagerOptions
from holdfast.run.recent import Recent
from holdfast.run.root import refuse_read_only
from holdfast.run.tiers.home import Home
from holdfast.saving import Saving
from holdfast.storage.place import Place


class Record:
    """The record of one rank. The first rank alone writes to the log and the journal."""

    def __init__(self, root: Place, options: ManagerOptions, ranks: Ranks, home: Home, recent: Recent) -> None:
        self._options, self._ranks, self._home, self._recent = options, ranks, home, recent
        self._at: tuple[int, float | None] = (0, None)  # the newest step, and its metric
        self._has_looked = False
        self.figures = Figures()
        self.mode = options.keep.mode  # or what the run has recorded, once that is known
        self.journal = Journal(root) if options.journal and ranks.first else None

    def arrived(self, step: int, metric: float | None) -> None:
        """Training has done ``step``."""
        if self._ranks.first and not self._has_looked:
            self._has_looked = True
            self._warn_of_root()
        self.figures.arrived(step)
        self._at = (step, metric)

    def _warn_of_root(self) -> None:
        """The first save may be hours away. No error: ranks may see different disks, and a save has the last word."""
        try:
            refuse_read_only(self._home.fast.root)
        except (OSError, Unsupported) as error:
            log.warning("no step can be saved: %s", error)

    def left(self, step: int) -> None:
        """Training goes on from ``step``."""
        if self.journal is not None:
            self.journal.tell(self.now)
        self.figures.left(step)

    def begun(self, step: int, metric: float | None) -> None:
        """A save of ``step`` has begun."""
        if step != self._at[0]:  # a call of `save` without one of `step`
            self._at = (step, metric)
        if self.journal is not None:
            self.journal.tell(self.now, news=True)

    def ended(self, saving: Saving, metric: float | None) -> None:
        """The outcome of a save is known. Called in the thread of the save, before others learn of it."""
        if saving.failed is None:
            self.figures.saved(saving.timing)
        if not self._ranks.first:
            return
        entry = self._entry(saving, metric)
        if entry.outcome == "saved":
            log.info(
                "saved step %d: %d bytes in %.2f s, training waited %.3f s, %s", entry.step, entry.bytes, entry.seconds,
                entry.stall, saving.path,
            )  # fmt: skip
        if self.journal is not None:
            self.journal.add(entry)
            self.journal.tell(partial(self.now, ended=saving), news=True)
        mtbf = self._options.mtbf
        if mtbf is not None and saving.failed is None:
            log.debug("for a mean time between failures of %g s: %s", mtbf, self.figures.advice(mtbf))

    def now(self, ended: Saving | None = None) -> Now:
        """Where training is. Any thread may ask. A save that has ``ended`` may not be done yet."""
        step, metric = self._at
        saving = next((saving for saving in reversed(self._recent.under_way) if saving is not ended), None)
        return Now(
            step, time.time(), self._options.every, self._ranks.size, saving=None if saving is None else saving.step,
            since=None if saving is None else saving.began, step_seconds=self.figures.step_seconds,
            metric=as_number(metric), mode=self.mode or "min", backlog=self._home.backlog(),
        )  # fmt: skip

    def close(self, timeout: float) -> None:
        """Record that training has ended; waits up to ``timeout`` seconds until that is written."""
        if self.journal is not None:
            self.journal.close(self.now, timeout)

    def _entry(self, saving: Saving, metric: float | None) -> Entry:
        timing, failed = saving.timing, saving.failed
        nbytes = written = timing.bytes
        if failed is None:
            with suppress(HoldfastError):  # another save may have swept it already
                files = read_manifest(saving.path).data_files
                nbytes, written = sum(f.bytes for f in files), sum(f.bytes for f in files if f.save is None)
        return Entry(
            step=saving.step or 0, began=saving.began,
            committed=saving.began + timing.total if failed is None else None, seconds=timing.total,
            stall=timing.stall, bytes=nbytes, written=written, ranks=self._ranks.size, metric=as_number(metric),
            backlog=self._home.backlog(), step_seconds=self.figures.step_seconds,
            outcome="skipped" if saving.skipped else "saved" if failed is None else "failed",
            error="" if failed is None else str(failed),
            phases={"staging": timing.staging, "writing": timing.writing, "commit": timing.commit},
        )  # fmt: skip


def as_number(metric: object) -> float | None:
    """A metric as a number; None for what is not one, which is no reason to stop training."""
    try:
        return float(metric)  # type: ignore[arg-type]
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None
