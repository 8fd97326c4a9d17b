"""The one root of a run without a fast tier: what of its steps is restored, and what goes after a save.

The manager owns one if it has no ``fast=``. Never deletes the last whole checkpoint, and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Damaged, NotACheckpoint, Untrusted
from holdfast.events import log
from holdfast.load import Loaded, load_from
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.policies.signing.keys import signing
from holdfast.ranks.ranks import Ranks
from holdfast.run import going_back
from holdfast.run.attempts import Attempts
from holdfast.run.going_back import WentBack
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.retention import KeptSteps
from holdfast.run.tiers.home import Durability
from holdfast.storage.place import Place


class OneRoot:
    """A run's steps in ``root``. ``doubtful`` tells names of steps that were found damaged, to be taken last."""

    def __init__(
        self, root: Place, options: ManagerOptions, ranks: Ranks, *, doubtful: Callable[[], Collection[str]]
    ) -> None:
        self.root = root
        self.fast = self.store = KeptSteps(root, options.name, sign=signing(options.sign))
        self._options, self._ranks, self._doubtful = options, ranks, doubtful
        self._spared = (-1, -1)  # number and step of the last save that has ended well

    def label(self, step: int) -> str | None:
        """None: the path is the same on all ranks."""
        return None

    def committed(self, number: int, step: int, writing_to: set[Place]) -> None:
        """Sweep after a save; see `Home.committed`."""
        writing_to.discard(self.fast.path(step))
        if self._ranks.first:
            self.fast.renewed(step)
            # Saves may end in another order than they were begun: what is spared is the last one, not this one.
            self._spared = max(self._spared, (number, step))
            self.fast.sweep(self._options.keep, self._spared[1], writing_to)

    def restore(
        self, state: dict[str, Any], options: RestoreOptions, patience: float, spare: Collection[Place]
    ) -> Loaded | None:  # fmt: skip
        """Load the newest whole step, and sweep first; see `Home.restore`."""
        refused: list[str] = []
        untrusted: Untrusted | None = None
        with Attempts() as attempts:
            while True:
                with self._ranks.call(f"restore {self.root}", deadline=self._options.deadline) as call:
                    choose = partial(self._choose, options, refused, patience, spare)
                    name = call.exchange("choose", options.check, lambda notes: choose(), str)
                if not name:
                    if untrusted is not None:
                        raise untrusted
                    if refused:
                        raise NotACheckpoint(f"no checkpoint of {self.root} can be restored: " + "; ".join(refused))
                    return None
                try:
                    return load_from(
                        self.root / name, state, options.of_load, group=self._options.group,
                        deadline=self._options.deadline, require=options.require,
                    )  # fmt: skip
                except (Damaged, NotACheckpoint, Untrusted) as error:
                    if options.step is not None:
                        raise
                    untrusted = error if isinstance(error, Untrusted) else untrusted
                    log.warning("%s cannot be restored, trying the one before: %s", name, attempts.failed(error))
                    refused.append(name)
                    self.fast.broken.add(name)

    def _choose(self, options: RestoreOptions, refused: list[str], patience: float, spare: Collection[Place]) -> str:
        """On the first rank: the name of the step to load; empty if there is none."""
        steps = self.fast
        if not refused:
            steps.commit_late(patience)
        # A step that is named is looked for before anything goes: what lacks a manifest may be what is asked for.
        chosen = None if options.step is None else steps.chosen(options.step, self._options.keep.mode)
        if not refused:
            steps.sweep(self._options.keep, None, spare)
        if chosen is not None:
            return chosen.name
        doubtful = self._doubtful()
        newest = steps.newest([*refused, *doubtful], complete=options.complete, run=options.of_run)
        if newest is None and doubtful:  # what is damaged may not be what is asked for: loading tells
            newest = steps.newest(refused, complete=options.complete, run=options.of_run)
        if newest is not None and options.run is None:
            steps.refuse_another_run(newest, refused)
        if newest is None:
            steps.refuse_a_checkpoint()
            if not refused:
                steps.refuse_damaged()
        return newest.name if newest is not None else ""

    def leave_behind(self, step: int) -> WentBack:
        """Note it beside the steps, if there are later ones; see `Home.leave_behind`."""
        mark = WentBack(step, frozenset(self.fast.later_saves(step)))
        if mark.saves or self.fast.mark is not None:
            going_back.write(self.root, mark)
        return mark

    def went_back(self, mark: WentBack) -> None:
        """See `Home.went_back`."""
        self.fast.leave_behind(mark)

    def best(self) -> Checkpoint | None:
        """The step with the best metric."""
        best = self.fast.best(self._options.keep.mode)
        return Checkpoint(best) if best is not None else None

    def newest_fast(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        newest = self.fast.newest()
        return Checkpoint(newest) if newest is not None else None

    latest = newest_fast

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return list(self.fast.current())

    def durability(self, step: int) -> Durability:
        """What is committed is safe in the root alone."""
        return Durability(step, False, (self.fast.path(step) / FILE_NAME).is_file(), False)

    def backlog(self) -> int | None:
        """None: nothing goes anywhere else."""
        return None

    def close(self, timeout: float | None) -> None:
        """Nothing is under way."""

    def leave(self) -> None:
        """Nothing is under way."""
