"""Timelines: real ranks that save beside training, joined on one clock, as a trace that keeps to the format."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.report import timeline
from tests.pool import run
from tests.report.other_clock import REFUSED
from tests.report.recorded import save_beside_training
from tests.report.trace_format import check

Spans = list[dict[str, Any]]


def _spans(trace: dict[str, Any], name: str, path: str) -> Spans:
    """Spans of this name, by rank."""
    ranks = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    found = [e for e in trace["traceEvents"] if e["name"] == name and e["args"].get("path", "").endswith(path)]
    return sorted((e | {"rank": ranks[e["pid"]]} for e in found), key=lambda e: e["rank"])


def _end(span: dict[str, Any]) -> float:
    return span["ts"] + span["dur"]


def _inside(span: dict[str, Any], of: dict[str, Any]) -> bool:
    return of["ts"] <= span["ts"] and _end(span) <= _end(of) + 0.002  # of rounding


def _inside_of(wholes: Spans, spans: Spans) -> Spans:
    """Those that lie in one of the same rank."""
    return [span for span in spans if any(of["rank"] == span["rank"] and _inside(span, of) for of in wholes)]


@pytest.mark.parametrize(
    ("worker", "skew"), [("process", 0.0), ("thread", 1000.0), pytest.param("thread", -3.5, marks=pytest.mark.slow)]
)
def test_saves_of_four_ranks_on_one_clock(tmp_path: Path, worker: str, skew: float) -> None:
    stalls = run(4, save_beside_training, str(tmp_path), worker, skew)
    merged = timeline.merge(tmp_path / "timeline")
    assert (merged.processes, merged.unfinished, merged.unread) == (4, 0, 0)
    merged.write(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    check(trace)

    for path in ("a", "b"):
        whole = _spans(trace, "background save", path)
        assert [span["rank"].partition(" ·")[0] for span in whole] == [f"rank {rank}" for rank in range(4)]
        for name in ("call", "gather", "plan", "layout", "stage", "write", "durable", "settle"):
            parts = _inside_of(whole, _spans(trace, name, path))
            assert [span["rank"] for span in parts] == [span["rank"] for span in whole], name
        (commit,) = _spans(trace, "commit", path)
        assert commit["rank"].startswith("rank 0")
        assert _inside(commit, _inside_of(whole, _spans(trace, "settle", path))[0])
        # What the commit rests on has happened before it, and nobody knows of it before it has begun.
        assert all(_end(span) <= commit["ts"] for span in _spans(trace, "durable", path))
        assert all(_end(span) >= commit["ts"] for span in whole)

    waits = _spans(trace, "hook wait", "a")
    assert len(waits) == 4
    for wait, stage, stall in zip(waits, _spans(trace, "stage", "a"), stalls, strict=True):
        assert wait["ts"] <= _end(stage) and stage["ts"] <= _end(wait)  # it ends once all is copied
        assert wait["dur"] / 1e6 <= stall
    assert {span["name"] for span in trace["traceEvents"] if span.get("cat") == "file"} == {
        "write file", "sync file", "small files",
    }  # fmt: skip
    for name in ("load", "open", "match", "read", "fill"):
        assert len(_spans(trace, name, "b")) == 4, name


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The timeline of two ranks."""
    folder = tmp_path_factory.mktemp("two")
    run(2, save_beside_training, str(folder), "thread", 0.0)
    return folder / "timeline"


def test_who_was_the_slowest(of_two: Path) -> None:
    merged = timeline.merge(of_two)
    rows = {(phase.of, phase.name): phase for phase in merged.phases}
    seconds = {}
    for event in merged.events:
        if event["name"] == "stage":
            seconds[event["args"]["path"], event["pid"] - 1] = event["dur"] / 1e6
    stage = rows["background save", "stage"]
    (path, rank), longest = max(seconds.items(), key=lambda item: item[1])
    assert (stage.times, stage.path, stage.rank) == (2, path, rank) and stage.longest == pytest.approx(longest)
    assert rows["background save", "commit"].rank == 0
    names = [phase.name for phase in merged.phases if phase.of == "background save"]
    assert [name for name in names if name in ("call", "plan", "stage", "write", "settle")] == [
        "call", "plan", "stage", "write", "settle",
    ]  # fmt: skip


def test_ranks_of_one_host_need_no_measurement(of_two: Path) -> None:
    lines = [json.loads(text) for path in of_two.iterdir() for text in path.read_text().splitlines()]
    assert [(one["offset"], one["error"]) for one in lines if one["type"] == "clock"] in (
        [(0.0, 0.0)] * count for count in range(8)
    )


@pytest.mark.slow
def test_a_host_with_another_clock(tmp_path: Path) -> None:
    """The second rank and its writer process live in a time namespace of their own, as far away as two boots are."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "save.py"
    script.write_text(
        "import torch.distributed as dist\nfrom tests.report.recorded import save_beside_training\n"
        f"dist.init_process_group('gloo')\nsave_beside_training({str(tmp_path)!r}, 'process', 0.0)\n"
    )
    start = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    start["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), start.get("PYTHONPATH", "")])
    elsewhere = ["-m", "tests.report.other_clock", "-50000" if _uptime() > 60_000 else "50000"]
    ranks = [
        subprocess.Popen([sys.executable, *how, str(script)], env={**start, "RANK": str(rank)})
        for rank, how in enumerate([[], elsewhere])
    ]
    if ranks[1].wait(200) == REFUSED:
        ranks[0].kill()
        ranks[0].wait()
        pytest.skip("time namespaces are not permitted here")
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    merged = timeline.merge(tmp_path / "timeline")
    trace = {"traceEvents": merged.events, "displayTimeUnit": "ms"}
    check(trace)
    for path in ("a", "b"):
        (commit,) = _spans(trace, "commit", path)
        durable, whole = _spans(trace, "durable", path), _spans(trace, "background save", path)
        assert len(durable) == 2 and all(_end(span) <= commit["ts"] for span in durable)
        files = [span for name in ("write file", "sync file") for span in _spans(trace, name, ".safetensors")]
        inside = _inside_of(whole, [span for span in files if f"/{path}/" in span["args"]["path"]])
        assert {span["pid"] for span in inside} == {1, 2}  # also of what another process wrote


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text().split()[0])
