"""What must hold of a run, told by what its ranks said and by what was done to its files.

The loop feeds it, the checks ask it. Sees step numbers, marks and verdicts, never a file's content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast import Keep
from tests.soak.content import Mark


@dataclass
class Model:
    """The steps of a run, as far as anybody can know them.

    ``must``: acknowledged steps with their marks that no rule, user or fault has taken since. ``may``: marks of saves
    that were begun in this episode and may have been committed although nobody heard of it. ``never``: marks of saves
    of which every rank was told that nothing is committed. ``safe``: steps that were said to be in the store.
    """

    must: dict[int, Mark] = field(default_factory=dict)
    may: dict[int, set[Mark]] = field(default_factory=dict)
    never: set[Mark] = field(default_factory=set)
    safe: dict[int, Mark] = field(default_factory=dict)
    metrics: dict[int, float] = field(default_factory=dict)
    begun: set[Mark] = field(default_factory=set)
    _present: dict[int, Mark] = field(default_factory=dict)

    def begin(self, mark: Mark, metric: float) -> None:
        """A save is under way."""
        self.may.setdefault(mark[1], set()).add(mark)
        self.begun.add(mark)
        self.metrics[mark[1]] = metric

    def acknowledge(self, mark: Mark) -> None:
        """A rank was told that this save is committed."""
        self.must[mark[1]] = mark

    def refuse(self, mark: Mark) -> None:
        """Every rank was told that this save is not committed, and will not be."""
        self.never.add(mark)

    def retention(self, keep: Keep) -> None:
        """Take out of ``must`` what the rules may have deleted at any moment of the episode.

        Sweeps run beside saves, so nobody knows which steps there were when one looked around. But a step that the
        rules keep among all steps there can have been, they keep among any of them.
        """
        there = {step: self.metrics.get(step) for step in self.must.keys() | self.may.keys() | self._present.keys()}
        kept = keep.kept(there)
        self.must = {step: mark for step, mark in self.must.items() if step in kept}

    def forget(self, steps: Iterable[int]) -> None:
        """A user or a fault has taken these."""
        for step in list(steps):
            self.must.pop(step, None)

    def seen(self, found: dict[int, Mark]) -> None:
        """This is there now; some of it is about to be spoiled."""
        self._present.update(found)

    def settle(self, found: dict[int, Mark], spoiled: Iterable[int] = ()) -> None:
        """The episode is over, and this is what is there.

        A step that is ``spoiled`` may be whole again later: if it loses the section that was hit.
        """
        hurt = {step: self._present[step] for step in spoiled if step in self._present}
        self._present = {**hurt, **found}
        self.must = {step: mark for step, mark in found.items() if step in self.must}
        self.may = {}

    @property
    def newest(self) -> int:
        """The newest step that has to be there; 0 if none has."""
        return max(self.must, default=0)

    def began(self, mark: Mark) -> bool:
        """Whether a save of this mark was begun at any time, and nobody was told that it is not committed."""
        return mark in self.begun and mark not in self.never

    def found_late(self, mark: Mark) -> None:
        """A save of which nobody had heard the end was committed at a restart."""
        self._present[mark[1]] = mark
        self.must[mark[1]] = mark

    def mark_of(self, step: int) -> Mark | None:
        return self.must.get(step) or self._present.get(step)

    def knows(self, mark: Mark) -> bool:
        """Whether a save of this mark was ever begun, here or in an earlier episode, and may be there."""
        return mark in self.may.get(mark[1], ()) or self._present.get(mark[1]) == mark
