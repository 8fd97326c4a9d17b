"""A trainer written like torchtitan's goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

from tests.trainers.lives import KILLED, differences, live
from tests.trainers.scripts import play


def test_it_is_killed_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = live(2, play, "titan.py", tmp_path / "whole", [], {}, "")
    assert live(2, play, "titan.py", tmp_path / "killed", [], {}, "step 14:") == KILLED
    again = live(2, play, "titan.py", tmp_path / "killed", [], {}, "")
    assert [lines[-len(again[0]) :] for lines in whole] == again and len(again[0]) in (10, 15)
    unlike = differences(tmp_path / "whole/checkpoint/step-20", tmp_path / "killed/checkpoint/step-20")
    assert [name for name in unlike if not name.startswith("rng")] == []  # the script seeds torch's generators alone
    assert sorted(path.name for path in tmp_path.glob("whole/checkpoint/step-*")) == ["step-10", "step-15", "step-20"]
