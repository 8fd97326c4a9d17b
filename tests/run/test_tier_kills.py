"""SIGKILL at random moments of saves and uploads, then a tier or a node lost: the newest whole step is restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.programs import run_module


@pytest.mark.timed
@pytest.mark.parametrize("trials", [4, pytest.param(60, marks=pytest.mark.slow)])
def test_sigkill_and_a_tier_lost(trials: int, tmp_path: Path) -> None:
    ended = run_module("tests.run.tier_trials", trials, trials, tmp_path, seconds=280)
    assert ended.returncode == 0, ended.stderr[-4000:]
    counts = json.loads(ended.stdout.splitlines()[-1])
    assert counts["trials"] == trials
    assert counts["half uploaded"] > 0, "no kill hit an upload in its middle: the trial proves nothing"
    assert all(counts[f"lost {what}"] > 0 for what in ("nothing", "fast", "node", "store"))
