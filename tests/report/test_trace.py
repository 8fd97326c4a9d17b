"""What was written down, read back and drawn: parts of any shape, of processes that were killed, forked, or refused."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from heapq import merge
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast import events
from holdfast.ranks.ranks import meetings
from holdfast.report import timeline
from holdfast.report.clocks import Measured
from holdfast.report.parts import parts_in
from holdfast.report.recording import SUFFIX, Header, Line, Who
from holdfast.report.trace import joined
from tests.marks import examples
from tests.report.trace_format import check

STATE = {"w": torch.zeros(1000), "step": 1}
_moments = st.floats(0, 1e5, allow_subnormal=False)


Told = list[tuple[float, int, bool]]
"""Moments at which spans, told by number, begin or (False) end."""


@st.composite
def _nested(draw: st.DrawFn, numbers: Iterator[int], begin: float, end: float, depth: int) -> Told:
    """What a thread tells of spans that lie in each other or beside each other, as it happens."""
    if depth == 0 or not begin < end or not draw(st.booleans()):
        return []
    number, (first, second) = next(numbers), sorted((draw(st.floats(begin, end)), draw(st.floats(begin, end))))
    inside = draw(_nested(numbers, first, second, depth - 1))
    after = draw(_nested(numbers, second, end, depth - 1))
    return [(first, number, True), *inside, (second, number, False), *after]


@st.composite
def _part(draw: st.DrawFn) -> list[Any]:
    """The lines of a part: threads whose spans nest, and saves that overlap."""
    name, rank = f"p{draw(st.integers(0, 10**9))}", draw(st.none() | st.integers(0, 3))
    clock = draw(st.sampled_from(["a", "b", "c"]))
    lines: list[Any] = [Header(name, "host", 1, clock, draw(_moments) + 1e9, draw(_moments), rank)]
    if draw(st.booleans()):
        lines.append(Who(draw(st.integers(0, 3)), 4))
    if draw(st.booleans()):
        lines.append(Measured(draw(st.sampled_from(["p1", "p2"])), draw(_moments), 1e-4, draw(_moments)))
    numbers, told, of = count(1), [], {}
    for thread in range(draw(st.integers(1, 3))):
        lane = draw(
            st.sampled_from(["MainThread", "holdfast-save", "writer process: holdfast-write", "Thread-9 (run)"])
        )
        told.append(draw(_nested(numbers, 1.0, 1e4, 3)))
        of |= {number: (lane, thread) for _, number, _ in told[-1]}
    for number in range(-1, -1 - draw(st.integers(0, 3)), -1):
        began, ended = sorted(draw(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4))))
        told.append([(began, number, True), (ended, number, False)])
        of[number] = "saves", number
    begun: dict[int, Line] = {}
    for moment, number, begins in merge(*told, key=lambda one: one[0]):
        lane, thread = of[number]
        if begins:
            begun[number] = Line(number, draw(st.sampled_from(["stage", "write"])), "/ckpt/7", 0, moment, lane, thread,
                                 whole=lane == "saves", step=draw(st.none() | st.integers(0, 9)))  # fmt: skip
            lines.append(begun[number])
        else:
            nbytes = draw(st.integers(0, 10**12))
            lines.append(msgspec.structs.replace(begun[number], ended=moment, nbytes=nbytes))
    return lines


@settings(max_examples=examples(40))
@given(st.lists(_part(), min_size=1, max_size=4), st.data())
def test_whatever_was_written_down_is_a_trace(tmp_path_factory: Any, parts: list[list[Any]], data: Any) -> None:
    folder = tmp_path_factory.mktemp("timeline")
    for number, lines in enumerate(parts):
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        # A process may be killed in the middle of a line; the first one stands, or there is nothing to be read.
        cut = data.draw(st.integers(text.index(b"\n") + 1, len(text)))
        (folder / f"{number}{SUFFIX}").write_bytes(text[:cut])
    trace = joined(parts_in(folder))
    trace.write(folder / "trace.json")
    check(json.loads((folder / "trace.json").read_text()))
    assert trace.spans == sum(event["ph"] == "X" for event in trace.events)


def test_lines_that_make_no_sense_are_counted(tmp_path: Path) -> None:
    header = msgspec.json.encode(Header("p", "host", 1, "clock", 1e9, 1.0, 0))
    line = msgspec.json.encode(Line(1, "write", "/ckpt/7", 0, 2.0, "MainThread", 1, ended=3.0))
    odd = [b"{", b'{"type":"span","name":"\xff"}', b'{"type":"span","more":' + b"[" * 100_000, b"\x00\xff", b"7"]
    (tmp_path / f"a{SUFFIX}").write_bytes(b"\n".join([header, *odd, line, b""]))
    trace = timeline.merge(tmp_path)
    assert (trace.spans, trace.unread) == (1, len(odd))


def _spans(folder: Path) -> list[dict[str, Any]]:
    return [event for event in timeline.merge(folder).events if event["ph"] == "X"]


def _process(code: str, **environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **environment}, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_what_it_did(tmp_path: Path) -> None:
    code = f"""
import holdfast, os, signal, torch, time
from pathlib import Path
from holdfast.testing import at_phase
state = {{"w": torch.zeros(1000)}}
def die():
    (part,) = Path({str(tmp_path / "timeline")!r}).iterdir()
    while part.read_text().count('"durable"') < 4:  # begin and end of both
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
holdfast.save(state, {str(tmp_path / "a")!r})
with at_phase("durable", die):
    holdfast.save(state, {str(tmp_path / "b")!r})
"""
    killed = _process(code, HOLDFAST_TIMELINE=str(tmp_path / "timeline"), RANK="3")
    _, error = killed.communicate(timeout=240)
    assert killed.returncode == -signal.SIGKILL, error
    merged = timeline.merge(tmp_path / "timeline")
    whole = {Path(e["args"]["path"]).name: e for e in merged.events if e["name"] == "save"}
    assert "unfinished" not in whole["a"]["args"] and whole["b"]["args"]["unfinished"] is True
    assert merged.unfinished == 1 and {e["args"]["name"].split(" ·")[0] for e in merged.events
                                       if e["name"] == "process_name"} == {"rank 3"}  # fmt: skip


@pytest.mark.slow
def test_the_environment_records_all_of_a_process(tmp_path: Path) -> None:
    # The save is still under way when the script ends, and is waited for then.
    code = f"import holdfast, torch; holdfast.Saver().save({{'w': torch.zeros(10)}}, {str(tmp_path / 'a')!r})"
    done = _process(code, HOLDFAST_TIMELINE=str(tmp_path / "timeline"))
    assert done.communicate(timeout=240) == (None, b"") and done.returncode == 0
    assert {"background save", "commit"} <= {span["name"] for span in _spans(tmp_path / "timeline")}
    assert not timeline.merge(tmp_path / "timeline").unfinished


def _save_in_fork(folder: Path) -> None:
    holdfast.save(STATE, folder / "child")
    until = time.monotonic() + 240  # a forked child ends without asking its threads
    while not any('"commit"' in path.read_text() for path in _parts_of(os.getpid(), folder)):
        if time.monotonic() > until:
            raise SystemExit(1)
        time.sleep(0.01)


def _parts_of(pid: int, folder: Path) -> list[Path]:
    return [path for path in (folder / "timeline").iterdir() if f"-{pid}-" in path.name]


def test_a_forked_process_has_a_part_of_its_own(tmp_path: Path) -> None:
    with timeline.timeline(tmp_path / "timeline"):
        holdfast.save(STATE, tmp_path / "parent")
        child = multiprocessing.get_context("fork").Process(target=_save_in_fork, args=(tmp_path,))
        child.start()
        child.join(120)
        assert child.exitcode == 0
    saved = {part.header.pid: {Path(line.path).name for line in part.spans.values() if line.whole}
             for part in parts_in(tmp_path / "timeline")}  # fmt: skip
    assert saved == {os.getpid(): {"parent"}, child.pid: {"child"}}


def test_a_folder_that_cannot_be_written_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "holdfast"), timeline.timeline(tmp_path / "file" / "timeline"):
        holdfast.save(STATE, tmp_path / "a")
        until = time.monotonic() + 240
        while not caplog.records and time.monotonic() < until:
            time.sleep(0.01)
        assert not meetings, "nor are clocks measured for it"
    assert "the timeline of this process ends" in caplog.text
    assert holdfast.open(tmp_path / "a").verify().whole
    assert not events.observed()


def test_a_path_that_is_no_text_ends_the_timeline_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with timeline.timeline(tmp_path / "timeline"):
        events.begin("stage", "/\udcff", 0).end()
    assert "the timeline of this process ends" in caplog.text
    assert not events.observed() and not meetings


def test_a_failed_save_says_why(tmp_path: Path) -> None:
    with (
        timeline.timeline(tmp_path / "timeline"),
        holdfast.testing.faults("write", error="ENOSPC", under=tmp_path / "a"),
        pytest.raises(holdfast.SaveFailed),
    ):
        holdfast.save(STATE, tmp_path / "a")
    (save,) = [span for span in _spans(tmp_path / "timeline") if span["name"] == "save"]
    assert "No space left" in save["args"]["error"]


def test_nothing_is_recorded_after_the_block(tmp_path: Path) -> None:
    with timeline.timeline(tmp_path / "timeline"):
        holdfast.save(STATE, tmp_path / "a")
    holdfast.save(STATE, tmp_path / "b")
    assert not events.observed()
    assert {Path(e["args"]["path"]).name for e in _spans(tmp_path / "timeline") if e["name"] == "save"} == {"a"}


def test_no_timeline_is_an_error_that_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(holdfast.HoldfastError, match="HOLDFAST_TIMELINE"):
        timeline.merge(tmp_path)


def test_an_observer_that_raises_fails_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(span: events.Span) -> None:
        raise ZeroDivisionError

    events.observe(fail)
    try:
        holdfast.save(STATE, tmp_path / "a")
    finally:
        events.ignore(fail)
    assert "an observer of holdfast failed" in caplog.text


def test_nobody_who_observes_costs_no_span() -> None:
    begun = events.begin("stage", "/ckpt", 0)
    begun.end()
    assert begun._span is None
