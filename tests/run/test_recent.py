"""Which saves still count, also if one ends while the next is added."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast import SaveFailed
from holdfast.run.recent import Recent
from holdfast.saving import Saving


class EndsMeanwhile(Saving):
    """A save that ends right before it is looked at for the second time."""

    looks = 0
    outcome: SaveFailed | None = None

    @property
    def done(self) -> bool:
        self.looks += 1
        if self.looks == 2:
            self.finish(self.outcome)
        return super().done


def under_way(step: int) -> Saving:
    return Saving(Path(f"step-{step}"), step)


def skipped(step: int) -> Saving:
    saving = under_way(step)
    saving.end_planning(skipped=True)
    saving.finish(SaveFailed("skipped"))
    return saving


@pytest.mark.parametrize("outcome", [None, SaveFailed("the disk is full")])
def test_a_save_that_ends_while_the_next_is_added_still_counts(outcome: SaveFailed | None) -> None:
    """One rank in four forgot it, began another last save after a SIGTERM, and waited for the others in vain."""
    recent, ends = Recent(raises=True), EndsMeanwhile(Path("step-41"), 41)
    ends.outcome = outcome
    recent.add(ends)
    recent.add(skipped(42))
    recent.add(skipped(43))
    assert ends in list(recent) and ends.done
    assert recent.unheard == ([] if outcome is None else [1])


def test_the_last_save_that_took_place_counts_and_those_before_it_do_not() -> None:
    recent = Recent(raises=True)
    for step in (1, 2):
        saving = under_way(step)
        recent.add(saving)
        saving.finish(None)
    recent.add(skipped(3))
    recent.add(under_way(4))
    recent.add(under_way(5))
    assert [saving.step for saving in recent] == [2, 4, 5]
    assert [saving.step for saving in recent.under_way] == [4, 5]


def test_a_failure_counts_until_it_is_heard() -> None:
    recent = Recent(raises=True)
    failed = under_way(1)
    recent.add(failed)
    failed.finish(SaveFailed("the disk is full"))
    for step in (2, 3):
        saving = under_way(step)
        recent.add(saving)
        saving.finish(None)
    assert recent.unheard == [1]
    with pytest.raises(SaveFailed, match="full"):
        recent.raise_failure(1)
    recent.add(under_way(4))
    assert [saving.step for saving in recent] == [3, 4] and not recent.unheard
