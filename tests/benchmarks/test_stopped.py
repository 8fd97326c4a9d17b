"""A benchmark that is stopped leaves no folder and no process; one that was killed leaves its folder to the next."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from benchmarks.frame import folder, remove
from tests.patience import LONG, wait_until

MARK = "HOLDFAST_TEST_STOPPED"
STALL = ["benchmarks.stall", "--quick", "--only", "holdfast process", "--dir"]


def processes(mark: str) -> set[int]:
    """Those that were started with this mark in their environment, and live."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes().split(b"\0"):
                found.add(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(
    "command", [["tests.benchmarks.stopped"], pytest.param(STALL, marks=pytest.mark.slow)], ids=["small", "stall"]
)
def test_a_stopped_benchmark_leaves_nothing(tmp_path: Path, command: list[str], number: signal.Signals) -> None:
    mark, work = uuid.uuid4().hex, tmp_path / "work"
    running = subprocess.Popen(
        [sys.executable, "-m", *command, str(work)],
        env={**os.environ, MARK: mark, "PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: any(path.is_dir() for path in work.glob("*/*/*")) or running.poll() is not None)
        assert running.poll() is None, running.communicate()
        if number == signal.SIGINT:
            os.killpg(running.pid, number)  # as a terminal does
        else:
            running.send_signal(number)
        _, said = running.communicate(timeout=LONG)
        assert running.returncode in (-signal.SIGINT, 130), said
        assert "KeyboardInterrupt" in said and "FileNotFoundError" not in said and "OSError" not in said, said
        assert not work.exists()
        wait_until(lambda: not processes(mark))
    finally:
        for pid in processes(mark):
            os.kill(pid, signal.SIGKILL)


def test_a_folder_of_a_process_that_is_gone_is_removed_by_the_next(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = tmp_path / f"holdfast-bench-stall-{gone.pid}"
    alive = tmp_path / f"holdfast-bench-stall-{os.getppid()}"
    others = tmp_path / f"values-{gone.pid}"
    for path in (left, alive, others):
        (path / "holdfast").mkdir(parents=True)
    with folder(tmp_path, "values") as work:
        assert work.is_dir() and not left.exists()
    assert alive.exists() and others.exists() and not work.exists()


def test_the_handlers_of_signals_come_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), folder(tmp_path / "work", "values"):
        signal.raise_signal(signal.SIGTERM)
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert not (tmp_path / "work").exists()


def test_what_is_gone_already_is_no_error(tmp_path: Path) -> None:
    remove(tmp_path / "never there")
    with folder(tmp_path / "work", "values") as work:
        work.rmdir()
