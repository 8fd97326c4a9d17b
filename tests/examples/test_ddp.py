"""A DDP script with `torch.save`, and the same on holdfast: few lines of difference, and every bit is kept."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest

from tests.trainers.lives import KILLED, live
from tests.trainers.scripts import EXAMPLES, play


def test_fewer_than_ten_lines_change() -> None:
    before, after = [
        (EXAMPLES / f"ddp_{when}.py").read_text().split('"""', 2)[2].splitlines() for when in ("before", "after")
    ]
    changes = [line for line in difflib.ndiff(before, after) if line[:2] in ("+ ", "- ") and line[2:].strip()]
    added = [line for line in changes if line.startswith("+ ")]
    assert 0 < len(added) < 10, added
    assert len(changes) - len(added) > len(added)  # and more go than come


@pytest.mark.slow
def test_it_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (whole, silent) = live(2, play, "ddp_after.py", tmp_path / "whole", [], {}, "")
    assert len(whole) == 5 and silent == []
    assert live(2, play, "ddp_after.py", tmp_path / "killed", [], {}, "epoch 4") == KILLED
    again, _ = live(2, play, "ddp_after.py", tmp_path / "killed", [], {}, "")
    assert len(again) in (1, 2) and again == whole[-len(again) :]  # the save of epoch 4 may have been done or not


def test_before_it_was_a_script_that_works(tmp_path: Path) -> None:
    # On one rank: of two that end without a barrier, one sometimes waits in torch for ever for the one that has ended.
    (whole,) = live(1, play, "ddp_before.py", tmp_path / "whole", [], {}, "")
    assert len(whole) == 5
