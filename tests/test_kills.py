"""SIGKILL at random moments of real saves on real ranks: what is left is a whole step, the new or the one before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timed
@pytest.mark.parametrize("trials", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_sigkill_of_a_random_rank(trials: int, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.kill_trials", str(trials), str(trials), str(tmp_path)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts["trials"] == trials
    assert counts["interrupted saves"] > 0, "no kill hit a save in its middle: the trial proves nothing"
