"""Ranks that freeze (SIGSTOP) or die (SIGKILL) in any phase of a save or a load: named on all others, who go on."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.faults.freeze_trials import FIRST, LOAD, MANAGER, SAVE
from tests.programs import run_module

STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)


def run(folder: Path, trials: list[dict[str, Any]]) -> None:
    ended = run_module("tests.faults.freeze_trials", folder, json.dumps(trials), seconds=280)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert json.loads(ended.stdout.splitlines()[-1])["trials"] == len(trials)


def saves(does: str, of: int, phases: list[str], **how: Any) -> list[dict[str, Any]]:
    return [{"does": does, "phase": p, "of": of, **how} for p in phases if of == 0 or p not in FIRST]


SOME: list[dict[str, Any]] = [
    {"does": "save", "phase": "written"},
    {"does": "load", "phase": "reading"},
    {"does": "writer", "phase": "writer"},
]
MORE: list[dict[str, Any]] = [
    {"does": "save", "phase": "claimed", "of": 0},
    {"does": "background", "phase": "staging", "then": "left"},
    {"does": "save", "phase": "committed", "of": 0, "number": KILL, "then": "left"},
]


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_learns_the_same(tmp_path: Path) -> None:
    """In a save, in a load that is shared, with a writer process that hangs."""
    run(tmp_path, SOME)


@pytest.mark.slow
def test_a_first_rank_that_freezes_or_dies_once_it_decides(tmp_path: Path) -> None:
    run(tmp_path, MORE)


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 2])
@pytest.mark.parametrize("does", ["save", "background", "thread"])
def test_frozen_in_every_phase_of_a_save(does: str, of: int, tmp_path: Path) -> None:
    run(tmp_path, saves(does, of, list(SAVE)))


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 2])
def test_left_behind_or_killed_in_every_phase_of_a_save(of: int, tmp_path: Path) -> None:
    run(tmp_path, saves("save", of, list(SAVE), number=KILL, then="left"))
    (tmp_path / "frozen").mkdir()
    run(tmp_path / "frozen", saves("save", of, ["gather", "written", "claimed", "committed"], then="left"))


@pytest.mark.slow
@pytest.mark.parametrize("of", [0, 2])
@pytest.mark.parametrize(("number", "then"), [(STOP, "wakes"), (STOP, "left"), (KILL, "left")])
def test_every_phase_of_a_load(number: int, then: str, of: int, tmp_path: Path) -> None:
    how = {"of": of, "number": number, "then": then}
    trials = [{"does": "load", "phase": phase, **how} for phase in LOAD]
    run(tmp_path, [*trials, *({"does": "load alone", "phase": phase, **how} for phase in ("match", "read"))])


@pytest.mark.slow
def test_every_phase_of_a_manager_with_tiers(tmp_path: Path) -> None:
    where = [(phase, of) for phase in MANAGER for of in (0, 2) if of == 0 or phase != "nodes"]
    run(tmp_path, [{"does": "manager", "phase": phase, "of": of} for phase, of in where])
