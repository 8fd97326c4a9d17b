"""Progress bars: at real terminals and in notebooks, one a node, after two seconds; else silence."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.events import BACKGROUND, Event
from holdfast.report import display, progress
from holdfast.report.progress import Bars
from tests.report.terminals import Watched, seen

SAVE = """
import torch, holdfast
from holdfast.report import progress
progress.PATIENCE = 0.0
holdfast.save({"w": torch.zeros(10_000_000)}, %r)
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _watch(bars: Bars, *, seconds: float = 3.0, task: str = "save") -> None:
    for kind, done in (("start", 0), ("advance", 500), ("advance", 1000), ("end", 1000)):
        bars(Event(kind, task, "/ckpt/step-7", 0, done, 1000, seconds))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*progress._LOCAL_RANKS, "LOCAL_WORLD_SIZE", progress.VARIABLE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("seconds", "rank", "task", "shown"),
    [(3.0, "0", "save", True), (1.0, "0", "save", False), (3.0, "1", "save", False), (3.0, "0", BACKGROUND, False)],
)
def test_bar(seconds: float, rank: str, task: str, shown: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setenv("TERM", "xterm")
    _watch(Bars(), seconds=seconds, task=task)
    assert ("save /ckpt/step-7" in terminal.getvalue()) == shown


def test_reports_of_threads_out_of_order_leave_the_bar_where_the_task_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, bars = Terminal(), Bars()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    for kind, done in (("start", 0), ("advance", 1000), ("advance", 400), ("end", 1000)):
        bars(Event(kind, "save", "/ckpt/step-7", 0, done, 1000, 3.0))
    assert "1.0/1.0 kB" in terminal.getvalue().rpartition("save /ckpt/step-7")[2]


def test_silence_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    _watch(Bars(), seconds=9.0)
    assert not pipe.getvalue()


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_nothing_without_standard_error(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if stderr is not None:
        stderr.close()
    monkeypatch.setattr(sys, "stderr", stderr)
    _watch(Bars())


def test_forced_bars_are_lines_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setenv("HOLDFAST_PROGRESS", "1")
    _watch(Bars())
    assert pipe.getvalue() == "save /ckpt/step-7: 50 %, 500 B of 1.0 kB\n"  # the next one is due in seconds


def test_forbidden_bars_are_none_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("HOLDFAST_PROGRESS", "0")
    _watch(Bars())
    assert not terminal.getvalue()


def test_a_bar_at_a_real_terminal_is_gone_afterwards(tmp_path: Path) -> None:
    written = Watched(SAVE % str(tmp_path / "a"), {}).written()
    assert f"save {tmp_path / 'a'}" in written and "40.0/40.0 MB" in written and "B/s" in written
    assert not seen(written)


@pytest.mark.slow
def test_nothing_in_a_real_pipe(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SAVE % str(tmp_path / "a")], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "a" / "manifest.json").exists()


class Handle:
    """What IPython returns for an output that can be changed."""

    def __init__(self, shown: list[dict[str, str]]) -> None:
        self.shown = shown

    def update(self, data: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(data)


def _ipython(monkeypatch: pytest.MonkeyPatch, *, kernel: object) -> list[dict[str, str]]:
    shown: list[dict[str, str]] = []

    def show(data: dict[str, str], *, raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        shown.append(data)
        return Handle(shown)

    modules = {"IPython": ModuleType("IPython"), "IPython.display": ModuleType("IPython.display")}
    modules["IPython"].get_ipython = lambda: SimpleNamespace(kernel=kernel)  # type: ignore[attr-defined]
    modules["IPython.display"].display = show  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return shown


def test_a_bar_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(display, "EVERY", 0.0)
    shown = _ipython(monkeypatch, kernel=object())
    bars = Bars()
    for kind, done in (("start", 0), ("advance", 500), ("advance", 1000), ("end", 1000)):
        bars(Event(kind, "save", "/ckpt/<b>7", 0, done, 1000, 3.0))
    assert shown[0]["text/plain"] == "save /ckpt/<b>7: 50 %, 500 B of 1.0 kB"
    assert 'value="1000"' in shown[-2]["text/html"] and "B/s" in shown[-2]["text/html"]
    assert all("<b>" not in one["text/html"] for one in shown)
    assert shown[-1] == {"text/plain": "", "text/html": ""}


def test_a_bar_of_several_ranks_says_that_it_is_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", lines := io.StringIO())
    monkeypatch.setenv(progress.VARIABLE, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(display, "LINES", 0.0)
    _watch(Bars())
    assert "this rank's share" in lines.getvalue()


def test_without_a_launcher_the_first_rank_shows_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [progress.local_rank(rank) for rank in (0, 3)] == [0, 3]
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert progress.local_rank(0) == 2


def test_ipython_at_a_terminal_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    shown = _ipython(monkeypatch, kernel=None)
    _watch(Bars())
    assert "save /ckpt/step-7" in terminal.getvalue() and not shown


@pytest.mark.slow
def test_a_bar_in_a_real_notebook(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    client = pytest.importorskip("jupyter_client")
    manager, kernel = client.manager.start_new_kernel(kernel_name="python3", env={**os.environ})
    told: list[dict[str, Any]] = []
    try:
        code = SAVE % str(tmp_path / "a")
        reply = kernel.execute_interactive(code, timeout=240, output_hook=told.append)
    finally:
        kernel.stop_channels()
        manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    kinds = [message["msg_type"] for message in told]
    assert kinds.count("display_data") == 1 and "stream" not in kinds
    shown = [message["content"]["data"] for message in told if message["msg_type"] == "display_data"]
    assert f"save {tmp_path / 'a'}: " in shown[0]["text/plain"] and "<progress" in shown[0]["text/html"]
    last = [message["content"] for message in told if message["msg_type"] == "update_display_data"][-1]
    assert last["data"]["text/html"] == ""
