"""The program as a shell runs it: bars at a terminal and none in a pipe, closed pipes, interrupts, completion."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.cli.codes import Code
from tests.cli.conftest import Run

# Bars come after two seconds of work: here at once, however quick the work is.
PROGRAM = """
import sys
import holdfast
from holdfast.report import progress
progress.PATIENCE = 0.0
from holdfast.cli import app
sys.argv[0] = "holdfast"
app.main()
"""


def _environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "200", **more}


def _at_a_terminal(*arguments: object, until: Callable[[bytes], bool] | None = None) -> tuple[int, str]:
    """Run the program at a terminal of its own; an interrupt is typed once ``until`` says so of what was shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.execve(sys.executable, [sys.executable, "-c", PROGRAM, *map(str, arguments)], _environment())
    shown, typed = b"", False
    while True:
        ready, _, _ = select.select([terminal], [], [], 120)
        assert ready, shown
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if until is not None and not typed and until(shown):
            os.write(terminal, b"\x03")
            typed = True
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), shown.decode()


@pytest.mark.parametrize("command", ["convert", "copy", "verify"])
def test_bars_at_a_terminal_and_none_in_a_pipe(command: str, steps: Path) -> None:
    step = steps / "step-000000200"
    arguments = [command, step] if command == "verify" else [command, step, steps.parent / "at-a-terminal"]
    code, shown = _at_a_terminal(*arguments)
    assert code == Code.FINE and "\x1b[" in shown and command in shown and "%" not in command
    assert "/s" in shown or "━" in shown, shown
    if command != "verify":
        arguments[2] = steps.parent / "in-a-pipe"
    words = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, env=_environment(), timeout=120)
    assert done.returncode == Code.FINE and done.stderr == "" and "\x1b" not in done.stdout


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    code, shown = _at_a_terminal("bench", tmp_path / "b", "--size", "64MB", until=lambda told: b"raw write" in told)
    assert code == Code.INTERRUPTED and "interrupted" in shown and "Traceback" not in shown, shown
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves(steps: Path) -> None:
    for command in (["--help"], ["prune", str(steps)], ["prune", str(steps), "--json"]):
        reader, writer = os.pipe()
        os.close(reader)
        words = [sys.executable, "-m", "holdfast", *command]
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, env=_environment(), timeout=120)
        os.close(writer)
        assert (done.returncode, done.stderr) == (Code.CLOSED, "")


def test_completion(run: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def completed(words: str, count: int) -> list[str]:
        environment = _environment(_HOLDFAST_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(count))
        words_ = [sys.executable, "-c", PROGRAM]
        return subprocess.run(words_, capture_output=True, text=True, env=environment, timeout=120).stdout.split()

    assert {"prune", "gc"} <= set(completed("holdfast ", 1)) and completed("holdfast pru", 1) == ["prune"]
    assert set(completed("holdfast convert a b --to ", 5)) == {"holdfast", "torch", "dcp", "huggingface"}
    # Nothing of its own for a path: then the shell completes files (complete -o default).
    assert completed("holdfast verify /tm", 2) == []
    code, out, _ = run("--show-completion", "bash")
    assert "-o default" in out or "complete_bash" in out


def test_quiet_and_debug_are_understood_anywhere(steps: Path, run: Run) -> None:
    assert run("verify", steps / "step-000000100", "--quiet") == (Code.FINE, "", "")
    assert run("--quiet", "prune", steps)[1:] == ("", "")
    assert run("--quiet", "verify", steps / "step-000000100", "--json")[1].startswith("{")
    assert "error" in run("verify", steps, "--quiet")[2]
    with pytest.raises(FileNotFoundError):
        run("verify", steps, "--debug")
    assert "Usage" in run()[1]


def test_a_signal_ends_a_benchmark_gently(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "holdfast", "bench", str(tmp_path / "b"), "--size", "64MB"]
    running = subprocess.Popen(words, env=_environment(), stderr=subprocess.PIPE)
    while running.poll() is None and not list(tmp_path.glob("b/.holdfast-bench-*/raw")):
        pass
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == Code.INTERRUPTED and not list(tmp_path.iterdir())
