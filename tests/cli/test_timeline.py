"""``holdfast view`` of a folder of timelines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli.errors import Code
from holdfast.report.timeline import timeline
from tests.cli.conftest import Run
from tests.report.trace_format import check


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with timeline(tmp_path / "timeline"):
        holdfast.save({"w": torch.zeros(1000), "step": 1}, tmp_path / "a")
    return tmp_path / "timeline"


def test_a_table_and_a_trace(recorded: Path, run: Run) -> None:
    code, out, _ = run("view", recorded)
    assert code == Code.FINE and "phase" in out and "commit" in out and str(recorded / "trace.json") in out
    check(json.loads((recorded / "trace.json").read_text()))


def test_as_json(recorded: Path, tmp_path: Path, run: Run) -> None:
    code, out, _ = run("view", recorded, "-o", tmp_path / "out.json", "--json")
    told = json.loads(out)
    assert code == Code.FINE and told["trace"] == str(tmp_path / "out.json")
    assert told["processes"] == 1 and told["unfinished"] == 0
    assert {"gather", "commit"} <= {phase["name"] for phase in told["phases"]}
    check(json.loads((tmp_path / "out.json").read_text()))


def test_options_of_a_page_are_none_of_a_trace(recorded: Path, tmp_path: Path, run: Run) -> None:
    assert run("view", recorded, "-o", "-")[0] == Code.USAGE
    assert run("view", recorded, "--stats", "*")[0] == Code.NOT_A_CHECKPOINT
    (tmp_path / "empty").mkdir()
    assert run("view", tmp_path / "empty")[0] == Code.NOT_A_CHECKPOINT
