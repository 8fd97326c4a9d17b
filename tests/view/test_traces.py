"""Timelines as lanes of a page: what holdfast wrote, Chrome traces of others, hostile ones; and how they are drawn."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import NotACheckpoint
from holdfast.report.timeline import timeline
from holdfast.view import traces
from holdfast.view.checkpoint import checkpoint_page
from holdfast.view.traces import read_timeline
from tests.view.browser import Tab


def event(name: str, pid: object, ts: object, dur: object, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": 1, "ts": ts, "dur": dur, **more}


def test_what_holdfast_wrote_is_shown(tab: Callable[..., Tab], tmp_path: Path) -> None:
    with timeline(tmp_path / "trace"):
        saved = holdfast.save({"model": {"w": torch.ones(1000)}}, tmp_path / "c")
    assert read_timeline(tmp_path / "trace", of="another").window is None
    told = read_timeline(tmp_path / "trace", of="c")
    assert told.window is not None and told.window[1] > told.window[0]
    assert told.lanes and told.spans and "save" in told.names and told.dropped == 0
    (tmp_path / "page.html").write_text(checkpoint_page(saved, timeline=told))
    page = tab().open(tmp_path / "page.html")
    page.locator(".lanes").scroll_into_view_if_needed()
    page.focus(".lanes")
    for key in ("+", "+", "ArrowRight", "ArrowLeft", "-", "0", "."):
        page.keyboard.press(key)
    said = page.text_content("[role=status]")
    assert any(name in said for name in told.names)
    box = page.locator(".lanes").bounding_box()
    before = page.screenshot(clip=box)
    page.click("text=+")
    page.mouse.move(1, 1)
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.screenshot(clip=box) != before
    page.click("[aria-label='All of it']")
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 31)
    page.wait_for_selector(".tip:not([hidden])")
    assert "from" in page.text_content(".tip")


def test_traces_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"ph": "M", "name": "process_name", "pid": 10, "args": {"name": "rank 10"}},
        {"ph": "M", "name": "thread_name", "pid": 10, "tid": 1, "args": {"name": "save"}},
        event("write", 10, 3_000_000, 500_000, args={"bytes": 7}), event("plan", 9, 2_000_000, 1_000_000),
        {"ph": "C", "name": "memory", "pid": 9, "ts": 5}, {"ph": "i", "name": "now", "pid": 9, "ts": 5},
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": rows}))
    told = read_timeline(tmp_path / "trace.json")
    assert told.lanes == [("process 9", "1"), ("rank 10", "save")]
    assert told.spans == [(0, 0, 0.0, 1.0, ""), (1, 1, 1.0, 0.5, "bytes: 7")] and told.names == ["plan", "write"]
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    assert len(read_timeline(tmp_path).spans) == 4  # both files
    monkeypatch.setattr(traces, "SPANS", 1)
    assert read_timeline(tmp_path / "trace.json").spans == [(0, 0, 0.0, 1.0, "")]
    assert read_timeline(tmp_path / "trace.json").dropped == 1


def test_hostile_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    for text in ("", "{", "[" * 100_000, "nothing", '{"traceEvents": 7}', "[]", "7", '[{"ph": "X"}]', "\x1f\x8bx"):
        path.write_text(text, encoding="latin-1")
        if text == '[{"ph": "X"}]':
            assert read_timeline(path).spans == []
            continue
        with pytest.raises(NotACheckpoint):
            read_timeline(path)
    rows = [event("a", {"x": 1}, 1, -5), event("b", None, "soon", 1), event("c", 1, 10**400, 1), event("d", 1, 5, [])]
    path.write_text(json.dumps([*rows, 7, None, {"ph": "X", "args": 3, "ts": 7}]))
    told = read_timeline(path)
    assert {told.names[span[1]] for span in told.spans} == {"a", "d", ""} and all(span[3] >= 0 for span in told.spans)
    monkeypatch.setattr(traces, "LARGEST", 1000)
    path.write_bytes(b" " * 2000)
    with pytest.raises(holdfast.errors.StorageError, match="more than"):
        read_timeline(path)
    path.write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(holdfast.errors.StorageError, match="more than"):
        read_timeline(path)


def test_a_timeline_of_no_spans(tab: Callable[..., Tab], tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('[{"ph": "M"}]')
    saved = holdfast.save({"model": {"w": torch.ones(4)}}, tmp_path / "c")
    (tmp_path / "page.html").write_text(checkpoint_page(saved, timeline=read_timeline(tmp_path / "t.json")))
    page = tab().open(tmp_path / "page.html")
    page.focus(".lanes")
    for key in (".", ",", "+", "0", "ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
