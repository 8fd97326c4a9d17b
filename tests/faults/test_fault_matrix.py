"""Each fault on each of four ranks at each phase: the same verdict on all, the culprit named, and training goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.events import LOADING, SAVING
from tests.faults.fault_trials import FIRST_ALONE, REFUSED, SIGNALS, WORLD
from tests.programs import run_module

ERRORS = tuple(REFUSED)


def run(folder: Path, trials: list[dict[str, Any]], *, limit: float = 290) -> dict[str, int]:
    ended = run_module("tests.faults.fault_trials", folder, json.dumps(trials), seconds=limit)
    assert ended.returncode == 0, ended.stderr[-6000:]
    counts: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    assert counts["trials"] == len(trials)
    return counts


def phases_of(act: str) -> tuple[str, ...]:
    return LOADING if act == "load" else SAVING


def ranks_at(phase: str) -> range:
    return range(1 if phase in FIRST_ALONE else WORLD)


def cells(acts: tuple[str, ...], faults: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {"act": act, "fault": fault, "rank": rank, "phase": phase}
        for act in acts
        for fault in faults
        for phase in phases_of(act)
        for rank in ranks_at(phase)
    ]


def test_a_diagonal_of_it(tmp_path: Path) -> None:
    """Each phase of a save and a load once, each rank, each error, and a rank that dies."""
    trials = []
    for act in ("save", "load"):
        for n, phase in enumerate(phases_of(act)):
            rank = 0 if phase in FIRST_ALONE else n % WORLD
            trials.append({"act": act, "fault": ERRORS[n % len(ERRORS)], "rank": rank, "phase": phase})
    trials += [
        {"act": "overwrite", "fault": "EIO", "rank": 0, "phase": "commit"},
        {"act": "background", "fault": "ENOSPC", "rank": 2, "phase": "stage"},
        {"act": "background", "fault": "EIO", "rank": 1, "phase": "write"},
        {"act": "save", "fault": "SIGKILL", "rank": 2, "phase": "durable"},
    ]
    counts = run(tmp_path, trials)
    assert counts["refused"] >= 8 and counts["lost"] == 1


@pytest.mark.slow
def test_ranks_that_die_or_freeze(tmp_path: Path) -> None:
    """A few of them; tests/faults/test_freezes.py has others that are fast."""
    trials = [
        {"act": "save", "fault": "SIGSTOP", "rank": 1, "phase": "write"},
        {"act": "load", "fault": "SIGSTOP", "rank": 3, "phase": "read"},
        {"act": "save", "fault": "SIGKILL", "rank": 0, "phase": "committed"},
    ]
    assert run(tmp_path, trials)["lost"] == 2


@pytest.mark.slow
def test_disks_that_refuse_by_themselves(tmp_path: Path) -> None:
    """A limit on the size of files, on one rank after the other."""
    trials = [{"act": act, "fault": "EFBIG", "rank": n, "real": True} for n, act in enumerate(["save", "overwrite"])]
    run(tmp_path, trials + [{"act": "background", "fault": "EFBIG", "rank": 3, "real": True}])


@pytest.mark.slow
def test_real_full_and_read_only_disks(small_disk: Path) -> None:  # that fixture skips where nothing can be mounted
    trials = [{"act": "save", "fault": "ENOSPC", "rank": rank, "real": True} for rank in range(WORLD)]
    trials += [{"act": act, "fault": "EROFS", "rank": 0, "real": True} for act in ("save", "overwrite", "load")]
    trials += [{"act": "background", "fault": "ENOSPC", "rank": 1, "real": True}]
    run(small_disk.parent, trials)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["save", "overwrite", "background", "load"])
def test_every_error_on_every_rank_at_every_phase(act: str, tmp_path: Path) -> None:
    run(tmp_path, cells((act,), ERRORS))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", SIGNALS)
@pytest.mark.parametrize("act", ["save", "background", "load"])
def test_every_rank_dies_or_freezes_at_every_phase(act: str, fault: str, tmp_path: Path) -> None:
    run(tmp_path, cells((act,), (fault,)), limit=1190)
