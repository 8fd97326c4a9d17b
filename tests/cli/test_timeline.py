"""``holdfast timeline``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import app
from holdfast.report.timeline import timeline
from tests.report.trace_format import check


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    with timeline(tmp_path / "timeline"):
        holdfast.save({"w": torch.zeros(1000), "step": 1}, tmp_path / "a")
    return tmp_path / "timeline"


def test_a_table_and_a_trace(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["timeline", str(recorded)]) == 0
    told = capsys.readouterr().out
    assert "phase" in told and "commit" in told and str(recorded / "trace.json") in told
    check(json.loads((recorded / "trace.json").read_text()))


def test_as_json(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["timeline", str(recorded), "-o", str(tmp_path / "out.json"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trace"] == str(tmp_path / "out.json") and told["processes"] == 1 and told["unfinished"] == 0
    assert {"gather", "commit"} <= {phase["name"] for phase in told["phases"]}
    check(json.loads((tmp_path / "out.json").read_text()))


def test_no_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["timeline", str(tmp_path)]) == 7
    assert "HOLDFAST_TIMELINE" in capsys.readouterr().err
    assert app.run(["timeline", str(tmp_path / "nowhere")]) == 4
