"""What the next save of a run may reuse: earlier saves, and the steps that stay on disk for it.

The manager of an incremental run owns one. Never lets a step be deleted that a save, under way or to come, may reuse.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from holdfast.run.retention import KeptSteps
from holdfast.saving import Saving
from holdfast.storage.place import Place


class Bases:
    """The bases of coming saves among ``steps``, with so many ``slots`` for saves at once.

    With more slots than one a save may begin before the one before it has an outcome: it takes an older one for its
    base, about which every rank knows the same.
    """

    def __init__(self, steps: KeptSteps, slots: int, recent: Iterable[Saving]) -> None:
        self._steps, self._slots, self._recent = steps, slots, recent
        self._bases: tuple[Saving, ...] = ()  # what coming saves may reuse, the first one next
        self._held: set[Place] = set()  # steps that must stay for it
        self._holding = threading.Lock()

    @property
    def next(self) -> Saving | None:
        """What the next save may reuse."""
        return self._bases[0] if self._bases else None

    def begun(self, saving: Saving) -> None:
        """A save has begun; a later one may reuse it."""
        self._bases = (*self._bases, saving)[-self._slots :]
        self._hold(saving.path)

    def start_from(self, path: Place, step: int | None) -> None:
        """The step that was restored is the first base. With tiers it may lie in the store: then there is none."""
        self._bases = ()
        if path.parent == self._steps.root and self._hold(path):
            self._bases = (Saving.committed(path, step),)
        self.let_go()

    def let_go(self) -> None:
        """Free the steps that no save under way, and none to come, can have as its base."""
        with self._holding:
            bases, savings = self._bases, [*self._bases, *self._recent]
            needed = {base.path for base in bases} | {path for saving in savings for path in saving.may_reuse()}
            for path in self._held - needed:
                self._steps.free(path)
            self._held &= needed

    def _hold(self, path: Place) -> bool:
        """Keep a step that a later save may reuse from being deleted."""
        with self._holding:
            if path not in self._held and self._steps.hold(path):
                self._held.add(path)
            return path in self._held
