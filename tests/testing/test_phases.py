"""Phases of saves and loads: told in order, and a process dies or freezes at the one that was named."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.events import LOADING, SAVING, Event
from holdfast.testing import at_phase, freeze_at, kill_at
from holdfast.testing.phases import PHASES
from tests import pool
from tests.trials import forked


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.arange(50.0) + step}, "step": step}


def phases_of(path: str, kind: str) -> list[tuple[str, int]]:
    """What a rank comes to in a save and a load."""
    told: list[Event] = []
    with holdfast.events.listen(told.append):
        if kind == "save":
            holdfast.save(state_of(1), path)
        else:
            with holdfast.Saver(worker=kind) as saver:  # type: ignore[arg-type]
                saver.save(state_of(1), path).wait()
        holdfast.load(path, state_of(0))
    phases = [event for event in told if event.kind == "phase"]
    assert {event.path for event in phases} == {path}
    return [(event.task, event.rank) for event in phases]


@pytest.mark.parametrize("kind", ["save", "thread", "process"])
def test_phases_come_in_order(tmp_path: Path, kind: str) -> None:
    assert phases_of(str(tmp_path / "c"), kind) == [(phase, 0) for phase in PHASES]
    for rank, found in enumerate(pool.run(2, phases_of, str(tmp_path / "c2"), kind)):
        own = [phase for phase in PHASES if rank == 0 or phase not in ("commit", "committed")]
        assert found == [(phase, rank) for phase in own]


def ended(work: Any) -> int:
    """How a process ends that does it."""

    def quietly() -> None:
        work()

    return os.waitstatus_to_exitcode(os.waitpid(forked(quietly), 0)[1])


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_a_phase(tmp_path: Path, phase: str) -> None:
    def work() -> None:
        with kill_at(phase, nth=2):
            for n in (1, 2, 3):
                holdfast.save(state_of(n), tmp_path / str(n))
                holdfast.load(tmp_path / str(n), state_of(0))

    assert ended(work) == -signal.SIGKILL
    assert holdfast.open(tmp_path / "1").step == 1
    assert not (tmp_path / "3").exists()
    committed = SAVING.index(phase) > SAVING.index("commit") if phase in SAVING else True
    assert (tmp_path / "2" / "manifest.json").exists() == committed


def test_frozen_at_a_phase_until_it_is_woken(tmp_path: Path) -> None:
    def work() -> None:
        with freeze_at("stage", under=tmp_path / "2"):
            for n in (1, 2):
                holdfast.save(state_of(n), tmp_path / str(n))

    pid = forked(work)
    _, status = os.waitpid(pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == signal.SIGSTOP
    assert (tmp_path / "1" / "manifest.json").exists() and not (tmp_path / "2" / "manifest.json").exists()
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert holdfast.open(tmp_path / "2").step == 2


def test_of_another_rank_or_path_nothing_happens(tmp_path: Path) -> None:
    came: list[str] = []
    with (
        at_phase("plan", lambda: came.append("rank"), rank=1),
        at_phase("plan", lambda: came.append("path"), under=tmp_path / "d"),
        at_phase("plan", lambda: came.append("third"), nth=3),
        at_phase("plan", lambda: came.append("this"), under=tmp_path),
    ):
        for name in ("a", "b"):
            holdfast.save(state_of(1), tmp_path / name)
    assert came == ["this"]
    with pytest.raises(ValueError, match="no phase"), kill_at("writing"):
        pass
    with pytest.raises(ValueError, match="counts from 1"), kill_at("write", nth=0):
        pass


def test_phases_are_those_of_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
    assert all(f"`{phase}`" in text for phase in (*SAVING, *LOADING))
