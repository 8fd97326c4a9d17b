"""Where the steps of a run are at home, as a manager sees it: one root, or a fast tier before it.

The manager owns one; `OneRoot` and `Tiers` are such homes. Nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.checkpoint import Checkpoint
from holdfast.load import Loaded
from holdfast.run.going_back import WentBack
from holdfast.run.options import RestoreOptions
from holdfast.run.retention import KeptSteps
from holdfast.storage.place import Place


@dataclass(frozen=True)
class Durability:
    """Where a step is safe: ``fast``: committed on the fast tier, as this rank's node sees it; ``store``: committed in
    the store, None if the store does not answer; ``uploading``: on its way there right now.
    """

    step: int
    fast: bool
    store: bool | None
    uploading: bool


class Home(Protocol):
    """Saves go to ``fast``, what lasts is in ``store``; a run with one root has both in one."""

    fast: KeptSteps
    store: KeptSteps

    def label(self, step: int) -> str | None:
        """What errors call a save of this step; None for its path."""

    def committed(self, number: int, step: int, writing_to: set[Place]) -> None:
        """A save has committed: take its folder out of ``writing_to``, and delete what no rule keeps.

        Called on all ranks, in the thread of the save, which has the same ``number`` on each of them.
        """

    def restore(
        self, state: dict[str, Any], options: RestoreOptions, patience: float, spare: Collection[Place]
    ) -> Loaded | None:  # fmt: skip
        """Load the newest whole step; None if there is none. Called by all ranks.

        With ``options.step`` that step alone is tried. Commits first what dead saves had finished, and waits up to
        ``patience`` seconds for writers that live on.
        """

    def leave_behind(self, step: int) -> WentBack:
        """Note that training goes on from ``step``, so that later steps no longer count. Called on the first rank."""

    def went_back(self, mark: WentBack) -> None:
        """What the first rank has noted, told to every rank."""

    def best(self) -> Checkpoint | None:
        """The step with the best metric."""

    def newest_fast(self) -> Checkpoint | None:
        """The newest whole checkpoint where saves go to."""

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint."""

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""

    def durability(self, step: int) -> Durability:
        """Where a step is safe."""

    def backlog(self) -> int | None:
        """How many steps are still to go to the store; None if that is not known, or there is no such thing."""

    def close(self, timeout: float | None) -> None:
        """Wait for uploads, no longer than ``timeout`` seconds. Idempotent."""

    def leave(self) -> None:
        """Stop uploading without waiting."""
