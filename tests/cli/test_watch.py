"""``holdfast watch``: what it says of real runs, at a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.cli import output
from holdfast.cli import watch as watching
from holdfast.cli.app import run
from holdfast.cli.errors import Code
from holdfast.inspect.history import History, Past
from holdfast.inspect.standing import standing
from holdfast.run.journal import Entry, Now
from holdfast.storage.memory import Memory
from holdfast.storage.storage import JOURNAL
from holdfast.storage.store_place import StorePlace
from tests.cli.test_terminal import run_here
from tests.rights import refused
from tests.test_manager import before_each_write, held_back, refuse


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((500, 3), float(step))}, "step": step}


def trained(root: Any, steps: int = 4, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(root, **{"every": 2, "worker": "thread", "keep": Keep(last=1, best=1), **options})
    for step in range(1, steps + 1):
        manager.step(step, state_of(step), metric=1.0 / step)
        manager.wait()
    manager._record.journal.settle(30)
    return manager


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert run([str(a) for a in arguments]) == Code.FINE
    return capsys.readouterr().out


def test_a_run_that_trains_and_one_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trained(tmp_path) as manager:
        out = shown(capsys, "watch", tmp_path, "--once")
        assert re.search(r"running at step 4\b", out) and "next save" in out and "step 6" in out
        assert "2 saved; 1 there now" in out and "0.25 at step 4" in out and "failure" not in out
        told = json.loads(shown(capsys, "watch", tmp_path, "--once", "--json"))
        assert told["state"] == "running" and told["last"]["step"] == 4 and told["there"] == [4]
        assert told["last"]["rate"] > 0 and told["best"]["metric"] == 0.25 and len(told["stalls"]) == 2
        with held_back():
            manager.step(6, state_of(6))
            manager._record.journal.settle(30)
            told = json.loads(shown(capsys, "watch", tmp_path, "--once", "--json"))
            assert told["state"] == "saving" and [one["step"] for one in told["saving"]] == [6]
            assert "saving" in shown(capsys, "watch", tmp_path, "--once")
    assert "ended at step 6" in shown(capsys, "watch", tmp_path, "--once")


def test_a_run_that_only_calls_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with CheckpointManager(tmp_path, every=1, worker="none") as manager:
        manager.save(3, state_of(3), metric=0.5)
        told = manager._record.now()
        assert (told.step, told.metric) == (3, 0.5)
    assert "ended at step 3" in shown(capsys, "watch", tmp_path, "--once")


def test_a_step_that_was_saved_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [entry(10), entry(15), entry(20), replace(entry(15, start="b"), began=130.0)]
    history = History(200.0, entries, {10: "s10", 15: "s15"}, None, [])
    output.show(watching._saves(history))
    fates = [line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [fate[-1] for fate in fates] == ["saved", "replaced", "swept", "saved"]


def test_the_fast_tier_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast, root = tmp_path / "fast", tmp_path / "a run"
    with CheckpointManager(root, fast=fast, every=1, worker="none") as manager:
        manager.save(1, state_of(1))
        out = "".join(shown(capsys, "watch", fast, "--once").split())  # where lines end depends on the path's length
        assert "thefasttierofarun" in out and f"holdfastwatch'{root}'".replace(" ", "") in out
        assert json.loads(shown(capsys, "watch", fast, "--once", "--json"))["fast_of"] == str(root)
    assert "fast tier" not in shown(capsys, "watch", root, "--once")


@pytest.mark.parametrize("mode", [0o000, 0o600])
def test_a_step_that_cannot_be_looked_into(mode: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, keep=Keep(last=9)).close()
    (shut,) = tmp_path.glob("*2")
    (tmp_path / "step-000000009" / "model").mkdir(parents=True)
    shut.chmod(mode)
    (tmp_path / "step-000000009" / "model").chmod(0)
    try:
        with refused():
            past = Past(tmp_path)
            out = " ".join(shown(capsys, "watch", tmp_path, "--once").split())
            assert "ended at step 4" in out and "unreadable cannot" in out and "saved, unreadable" in out
            assert [*past.look().unreadable] == [shut.name], "of a folder that is no step nothing is lost"
    finally:
        shut.chmod(0o700)
    found = past.look()
    assert found.unreadable == {} and sorted(found.there) == [2, 4], "the next look tells"


def test_nothing_but_what_cannot_be_looked_into(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir(mode=0)
    with refused(), pytest.raises(holdfast.errors.StorageError, match="no permission"):
        Past(tmp_path).look()


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(state_of(step), tmp_path / f"step-{step}", step=step)
    (tmp_path / "step-1" / "manifest.json").chmod(0)
    with refused():
        found = Past(tmp_path).look()
    assert [*found.unreadable] == ["step-1"] and [*found.there] == [2]


def test_failures_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with trained(tmp_path, on_failure="warn") as manager, before_each_write(refuse):
        saving = manager.step(6, state_of(6))
        assert saving is not None and not saving.settled()
    out = " ".join(shown(capsys, "watch", tmp_path, "--once").split())  # where lines end depends on the path's length
    assert "1 failed" in out and "1 since the last save" in out and "No space left" in out and "×" in out


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_a_root_without_a_journal(kind: str, tmp_path: Path) -> None:
    root: Any = StorePlace(Memory(), "run") if kind == "store" else tmp_path
    with CheckpointManager(root, every=1, keep=Keep(last=4), journal=False, worker="none") as manager:
        for step in (1, 2, 3):
            manager.step(step, state_of(step), metric=float(step))
    past = Past(root)
    found = standing("here", past.look())
    assert found.state == "unknown" and found.there == [1, 2, 3] and found.step == 3 and found.stalls == []
    assert found.last is not None and found.last.seconds is None and found.last.metric == 3.0
    assert found.best is not None and found.best.step == 1 and found.saved == 3
    holdfast.save(state_of(4), root / "step-000000004", step=4)
    assert standing("here", past.look()).there == [1, 2, 3, 4]


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    asked: list[str] = []

    class Counting(Memory):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> Any:
            asked.append(key)
            return super().get(key, begin, end)

        def size(self, key: str) -> int | None:
            asked.append(key)
            return super().size(key)

    root = StorePlace(Counting(), "run")
    with trained(root):
        past = Past(root)
        past.look()
        asked.clear()
        past.look()
        assert asked == [f"run/{JOURNAL}/now.json"], "besides listing"


def test_nothing_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(tmp_path / "none"), "--once"]) == Code.NOT_A_CHECKPOINT
    assert "there is nothing at" in capsys.readouterr().err


def read_until(fd: int, words: str, limit: float = 240.0) -> str:
    seen, until = "", time.monotonic() + limit
    while words not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen):
        assert time.monotonic() < until, f"{words!r} was not shown: {seen!r}"
        if select.select([fd], [], [], 0.2)[0]:
            seen += os.read(fd, 1 << 16).decode(errors="replace")
    return seen


def test_at_a_terminal(tmp_path: Path) -> None:
    with trained(tmp_path) as manager:
        watcher, above = pty.fork()
        if watcher == 0:
            run_here(("watch", tmp_path, "--every", 0.1))
        try:
            read_until(above, "running at step 4")
            manager.save(6, state_of(6))
            manager.step(6, state_of(6))
            manager._record.journal.tell(manager._record.now, news=True)
            assert "\x1b[" in read_until(above, "running at step 6"), "it draws over what was there"
            os.kill(watcher, signal.SIGINT)
            read_until_closed(above)
        finally:
            os.kill(watcher, signal.SIGKILL)  # one that has ended stays until it is waited for
            _, status = os.waitpid(watcher, 0)
            os.close(above)
        assert os.waitstatus_to_exitcode(status) == Code.FINE


def read_until_closed(fd: int) -> None:
    try:
        while os.read(fd, 1 << 16):
            pass
    except OSError:  # Linux tells in this way that nobody has the other end
        return


def test_in_a_pipe_each_save_is_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with trained(tmp_path, on_failure="warn") as manager:
        steps = iter([6, 8])

        def later(seconds: float) -> None:
            step = next(steps, None)
            if step is None:
                raise KeyboardInterrupt
            with before_each_write(refuse if step == 8 else lambda path: None):
                manager.step(step, state_of(step))
                manager.wait()
            manager._record.journal.settle(30)

        monkeypatch.setattr(watching.time, "sleep", later)
        lines = shown(capsys, "watch", tmp_path).splitlines()
        assert len(lines) == 2 and " step 6 saved: " in lines[0] and " step 8 failed: " in lines[1]
        steps = iter([10])
        told = [json.loads(line) for line in shown(capsys, "watch", tmp_path, "--json").splitlines()]
        assert [one["last"]["step"] for one in told] == [6, 10]


def test_a_root_that_cannot_be_read_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path).close()
    past = Past(tmp_path)
    past.look()
    monkeypatch.setattr(watching.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(past, "look", lambda: (_ for _ in ()).throw(holdfast.errors.StorageError("away")))
    assert watching._next(past, 1.0) is None


def entry(step: int, outcome: Any = "saved", start: str = "a", **more: Any) -> Entry:
    return Entry(step, 100.0 + step, 101.0 + step, 1.0, 0.1, 10, 4, None, outcome, start=start, **more)


def test_how_a_run_stands() -> None:
    now = Now(12, 200.0, 5, 4, step_seconds=2.0, mode="max", start="b")
    entries = [entry(5), entry(10, "failed", error="e"), entry(11, "skipped")]
    found = standing("r", History(203.0, entries, {5: "s5"}, now, []))
    assert (found.state, found.next_step, found.next_in, found.starts) == ("running", 15, 3.0, 2)
    assert (found.saved, found.failed, found.skipped, found.failed_since) == (1, 1, 1, 1)
    assert found.stalls == [0.1, None] and found.rates == [10.0, None]
    assert standing("r", History(500.0, entries, {}, now, [])).state == "silent"
    slow = Now(12, 200.0, 5, 4, step_seconds=100.0)
    assert standing("r", History(500.0, entries, {}, slow, [])).state == "running"
    ended = standing("r", History(500.0, entries, {}, Now(12, 200.0, 5, 4, ended=True), []))
    assert ended.state == "ended" and ended.next_step is None
    assert standing("r", History(50.0, entries, {}, now, [])).heard == 0.0, "clocks may differ"


def test_words() -> None:
    assert watching.spark([0.0, 1.0, None, 0.5]) == "▁█×▅" and watching.spark([]) == "" and watching.spark([0.0]) == "▁"
    spans = [0.0004, 0.05, 0.25, 3.14, 45.0, 125.0, 3700.0, 90_000.0, 1e6]
    told = ["400 µs", "50 ms", "0.25 s", "3.1 s", "45 s", "2 min 5 s", "1 h 1 min", "25 h", "11.6 days"]
    assert [watching.span(x) for x in spans] == told
