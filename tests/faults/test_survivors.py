"""Background saves whose trainers, writer processes or both are killed: what a restart finds is one whole step."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.faults.survivor_trials import STAGES
from tests.programs import run_module

BEFORE, AFTER = STAGES[: STAGES.index("handed")], STAGES[STAGES.index("handed") :]
SOME = {"save", "staging", "handed", "durable", "committing", "parts"}


def run(folder: Path, trials: list[dict[str, Any]]) -> dict[str, int]:
    ended = run_module("tests.faults.survivor_trials", folder, json.dumps(trials), seconds=280)
    assert ended.returncode == 0, ended.stderr[-6000:]
    counts: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    assert counts["trials"] == len(trials)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_all_trainers_die_and_their_writers_finish(world: int, tmp_path: Path) -> None:
    """From the moment on when all ranks have handed everything over, the new step is saved whatever happens to them."""
    trials = [{"stage": stage, "world": world, "expect": 3} for stage in AFTER if world != 2 or stage in SOME]
    trials += [{"stage": stage, "world": world, "expect": 2} for stage in BEFORE if world != 2 or stage in SOME]
    run(tmp_path, trials)


@pytest.mark.slow
def test_writers_that_are_still_writing_at_the_restart_are_waited_for(tmp_path: Path) -> None:
    run(
        tmp_path,
        [
            {"stage": "handed", "slow": True, "expect": 3},
            {"stage": "staged", "slow": True, "expect": 2},
            {"stage": "handed", "slow": True, "kill": ["trainers", "writers"], "expect": 2},
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_trainers_die_and_their_writers_are_threads(world: int, tmp_path: Path) -> None:
    stages = [stage for stage in STAGES if world != 2 or stage in SOME]
    # At "handed" the threads may have been as far, or not.
    expected = {stage: 3 if stage in AFTER else 2 for stage in stages} | {"handed": None}
    run(tmp_path, [{"stage": s, "world": world, "worker": "thread", "expect": expected[s]} for s in stages])


@pytest.mark.slow
def test_one_trainer_dies_and_its_writer_finishes(tmp_path: Path) -> None:
    """The others raise SaveFailed and name it; their files wait for the restart."""
    run(
        tmp_path,
        [
            {"stage": "handed", "of": [0], "world": 3, "expect": 3},
            {"stage": "staging", "of": [1], "expect": 2},
        ],
    )


@pytest.mark.slow
@pytest.mark.parametrize("of", [[0], [1]])
@pytest.mark.parametrize("worker", ["process", "thread"])
def test_one_trainer_dies_at_any_stage(worker: str, of: list[int], tmp_path: Path) -> None:
    trials: list[dict[str, Any]] = []
    for stage in STAGES:
        # The first rank may have committed before the others could be lost, and with threads all is open at "handed".
        sure = stage in BEFORE or (stage in ("handed", "durable") and worker == "process") or stage == "parts"
        expect = (3 if stage in AFTER else 2) if sure else None
        if stage in ("committing", "committed") and of == [1]:
            expect = 3
        trials.append({"stage": stage, "of": of, "worker": worker, "world": 2, "expect": expect})
    run(tmp_path, trials)


def test_writers_die_and_training_goes_on(tmp_path: Path) -> None:
    """The save fails, the next one has a new writer: the newest step is the last one."""
    trials = [
        {"stage": "handed", "kill": ["writers"], "of": [1], "slow": True, "expect": 6},
        {"stage": "staging", "kill": ["writers"], "expect": 6},
    ]
    assert run(tmp_path, trials)["failed saves"] >= 2


@pytest.mark.slow
@pytest.mark.parametrize("of", [None, [0]])
def test_writers_die_at_any_stage(of: list[int] | None, tmp_path: Path) -> None:
    run(tmp_path, [{"stage": stage, "kill": ["writers"], "of": of, "expect": 6} for stage in STAGES])


@pytest.mark.slow
@pytest.mark.parametrize("of", [None, [0], [1]])
def test_both_die_at_any_stage(of: list[int] | None, tmp_path: Path) -> None:
    trials = [{"stage": stage, "kill": ["trainers", "writers"], "of": of} for stage in STAGES]
    for trial in trials:
        if trial["stage"] in BEFORE:
            trial["expect"] = 2
        elif trial["stage"] in ("durable", "parts"):
            trial["expect"] = 3
    run(tmp_path, trials)


@pytest.mark.slow
@pytest.mark.parametrize("count", [60])
def test_kills_at_random_moments(count: int, tmp_path: Path) -> None:
    chance = random.Random(count)
    trials = []
    for number in range(count):
        world = chance.choice([1, 2, 3])
        worker = chance.choice(["process", "process", "thread"])
        kill = ["trainers"] if worker == "thread" else chance.choice(
            [["trainers"], ["writers"], ["trainers", "writers"]]
        )  # fmt: skip
        of = chance.choice([None, [chance.randrange(world)]])
        trials.append({"world": world, "worker": worker, "kill": kill, "of": of, "seed": number})
    assert run(tmp_path, trials)["interrupted"] > 0, "no kill hit a save in its middle: the trial proves nothing"
