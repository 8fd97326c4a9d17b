"""SIGKILL at random moments of real saves on real ranks: what is left is a whole step, the new or the one before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_module


@pytest.mark.timed
@pytest.mark.parametrize("trials", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_sigkill_of_a_random_rank(trials: int, tmp_path: Path) -> None:
    ended = run_module("tests.faults.kill_trials", trials, trials, tmp_path, seconds=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts["trials"] == trials
    assert counts["interrupted saves"] > 0, "no kill hit a save in its middle: the trial proves nothing"
