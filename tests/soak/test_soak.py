"""A short soak with a fixed seed holds, the harness finds a library that is broken, and plans are pure."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.programs import run_module
from tests.soak import loop
from tests.soak.mutants import MUTANTS
from tests.soak.plan import begins, episode_of, first_of
from tests.soak.report import table
from tests.soak.world import Violation

FOUND_WITHIN = 60
"""Episodes in which each mutant has to be found."""


def soak(folder: Path, *words: str, seconds: int = 280) -> subprocess.CompletedProcess[str]:
    return run_module("tests.soak", "--folder", folder, *words, seconds=seconds)


def counts_of(ended: subprocess.CompletedProcess[str]) -> dict[str, int]:
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    found: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])["counts"]
    return found


@pytest.mark.slow
def test_a_few_episodes(tmp_path: Path) -> None:
    counts = counts_of(soak(tmp_path, "--seed", "7", "--episodes", "4"))
    assert counts["episodes"] == 4 and counts["violations"] == 0
    assert counts["saves acknowledged"] > 10 and counts["steps verified"] > 5 and counts["restores"] > 0
    assert any(key.endswith("injected") for key in counts), "no fault came: the soak proves nothing"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_minutes(tmp_path: Path) -> None:
    counts = counts_of(soak(tmp_path, "--seed", "11", "--minutes", "5", seconds=880))
    assert counts["kill: in the middle of a save"] > 0 and counts["freeze: injected"] > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", sorted(MUTANTS))
def test_a_broken_library_is_found(mutant: str, tmp_path: Path) -> None:
    ended = soak(tmp_path, "--seed", "5", "--episodes", str(FOUND_WITHIN), "--mutant", mutant, seconds=880)
    assert ended.returncode == 1, f"{mutant} passes:\n{ended.stdout[-2000:]}"
    told = json.loads(ended.stdout.splitlines()[-1])
    assert "violation" in told, told
    assert told["replay"] == f"python -m tests.soak --replay 5:{told['episode']}"
    assert Path(told["folder"]).is_dir(), "the folder of the failed run is gone"


def test_memory_that_this_process_loses_is_found_and_freed_memory_is_not(tmp_path: Path) -> None:
    soak = loop.Soak(tmp_path, 1)
    soak.counts["episodes"] = loop.WARM
    soak._check_self()
    soak.counts["episodes"] += 1
    blocks = [b"x" * (4000 + number % 2) for number in range(2 * loop.GROWTH // 4000)]
    with pytest.raises(Violation, match=r"took \d+ bytes, now \d+"):
        soak._check_self()
    del blocks[::2], blocks[: len(blocks) * 3 // 4]
    soak._check_self()


def test_a_plan_follows_from_its_seed_alone() -> None:
    assert [episode_of(3, n) for n in range(50)] == [episode_of(3, n) for n in range(50)]
    assert episode_of(3, 1) != episode_of(4, 1)


def test_a_replay_begins_where_the_run_began() -> None:
    for number in range(200):
        first = first_of(9, number)
        assert first <= number and first_of(9, first) == first
        assert all(first_of(9, between) == first for between in range(first, number + 1))
        assert episode_of(9, number).run == episode_of(9, first).run
    assert begins(9, 0)


def test_counts_become_a_table() -> None:
    text = table({"seed": 1, "seconds": 3600, "episodes": 1234, "kill: injected": 3, "kill: missed": 1})
    assert "60 minutes" in text and "|episodes|1,234|" in text and "|kill|3|0|1|" in text
