"""The one root of a run without a fast tier: what of its steps is restored, and what goes after a save.

The manager owns one if it has no ``fast=``. Never deletes the last whole checkpoint, and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch.distributed as dist

from holdfast.checkpoint import Checkpoint
from holdfast.errors import Damaged, NotACheckpoint, Untrusted
from holdfast.events import log
from holdfast.load import Loaded, load
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.policies.signing.keys import Signer
from holdfast.ranks.ranks import ranks_of
from holdfast.run.keep import Keep
from holdfast.run.steps import Steps
from holdfast.run.tiers.home import Asked, Durability
from holdfast.storage.place import Place


class OneRoot:
    """A run's steps in ``root``. ``doubtful`` tells names of steps that were found damaged, to be taken last."""

    def __init__(
        self, root: Place, name: str, *, keep: Keep, sign: Callable[[], Signer] | None,
        doubtful: Callable[[], Collection[str]], group: dist.ProcessGroup | None, deadline: float,
    ) -> None:  # fmt: skip
        self.root = root
        self.fast = self.store = Steps(root, name, sign=sign)
        self._keep, self._doubtful = keep, doubtful
        self._group, self._deadline, self._ranks = group, deadline, ranks_of(group)
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
            self.fast.sweep(self._keep, self._spared[1], writing_to)

    def restore(
        self, state: dict[str, Any], asked: Asked, patience: float, spare: Collection[Place]
    ) -> Loaded | None:  # fmt: skip
        """Load the newest whole step, and sweep first; see `Home.restore`."""
        refused: list[str] = []
        untrusted: Untrusted | None = None
        while True:
            with self._ranks.call(f"restore {self.root}", deadline=self._deadline) as call:
                choose = partial(self._choose, asked, refused, patience, spare)
                name = call.exchange("choose", asked.check, lambda notes: choose(), str)
            if not name:
                if untrusted is not None:
                    raise untrusted
                if refused:
                    raise NotACheckpoint(f"no checkpoint of {self.root} can be restored: " + "; ".join(refused))
                return None
            try:
                return load(
                    self.root / name, state, only=asked.only, group=self._group, deadline=self._deadline,
                    require=asked.require, run=asked.of_run, other_model=asked.other_model,
                )  # fmt: skip
            except (Damaged, NotACheckpoint, Untrusted) as error:
                untrusted = error if isinstance(error, Untrusted) else untrusted
                log.warning("%s cannot be restored, trying the one before: %s", name, error)
                refused.append(name)
                self.fast.broken.add(name)

    def _choose(self, asked: Asked, refused: list[str], patience: float, spare: Collection[Place]) -> str:
        """On the first rank: the name of the step to load; empty if there is none."""
        steps = self.fast
        if not refused:
            steps.commit_late(patience)
            steps.sweep(self._keep, None, spare)
        doubtful = self._doubtful()
        newest = steps.newest([*refused, *doubtful], complete=asked.complete, run=asked.of_run)
        if newest is None and doubtful:  # what is damaged may not be what is asked for: loading tells
            newest = steps.newest(refused, complete=asked.complete, run=asked.of_run)
        if newest is not None and asked.run is None:
            steps.refuse_another_run(newest, refused)
        if newest is None:
            steps.refuse_a_checkpoint()
        return newest.name if newest is not None else ""

    def newest_fast(self) -> Checkpoint | None:
        """The newest whole checkpoint."""
        newest = self.fast.newest()
        return Checkpoint(newest) if newest is not None else None

    latest = newest_fast

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return list(self.fast.committed())

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
