"""The program as a shell runs it: bars at a terminal and none in a pipe, closed pipes, interrupts, completion."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

import holdfast
from holdfast.cli import app as application
from holdfast.cli.errors import Code
from holdfast.report import progress
from tests.cli.conftest import Run


def run_here(arguments: tuple[object, ...]) -> NoReturn:
    """In a forked child, whose imports are done: run the program on the descriptors 0 to 2, and end."""
    code = 99
    try:
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(TERM="xterm", COLUMNS="200")
        progress.PATIENCE = 0.0  # bars come after two seconds of work: here at once, however quick the work is
        code = application.run([str(argument) for argument in arguments])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def _at_a_terminal(*arguments: object, until: Callable[[bytes], bool] | None = None) -> tuple[int, str]:
    """Run the program at a terminal of its own; an interrupt is typed once ``until`` says so of what was shown."""
    child, terminal = pty.fork()
    if child == 0:
        run_here(arguments)
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


def _in_a_pipe(*arguments: object, gone: bool = False) -> tuple[int, str, str]:
    """Run the program with pipes: exit code, standard output, standard error. ``gone``: nobody reads the output."""
    pipes = [os.pipe(), os.pipe()]
    if gone:
        os.close(pipes[0][0])
    child = os.fork()
    if child == 0:
        os.dup2(pipes[0][1], 1)
        os.dup2(pipes[1][1], 2)
        for _, writer in pipes:
            os.close(writer)
        run_here(arguments)
    for _, writer in pipes:
        os.close(writer)
    told = []
    for reader, _ in pipes[gone:]:
        with open(reader) as file:
            told.append(file.read())
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), "" if gone else told[0], told[-1]


@pytest.mark.parametrize("command", ["convert", "copy", "verify"])
def test_bars_at_a_terminal_and_none_in_a_pipe(command: str, steps: Path) -> None:
    step = steps / "step-000000200"
    arguments = [command, step] if command == "verify" else [command, step, steps.parent / "at-a-terminal"]
    code, shown = _at_a_terminal(*arguments)
    assert code == Code.FINE and "\x1b[" in shown and command in shown
    assert "/s" in shown or "━" in shown, shown
    if command != "verify":
        arguments[2] = steps.parent / "in-a-pipe"
    code, out, err = _in_a_pipe(*arguments)
    assert code == Code.FINE and err == "" and "\x1b" not in out


def test_no_bars_where_quiet_is_asked_for(steps: Path) -> None:
    code, shown = _at_a_terminal("verify", steps / "step-000000200", "--quiet")
    assert (code, shown) == (Code.FINE, "") and progress.VARIABLE not in os.environ


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    code, shown = _at_a_terminal(
        "doctor", tmp_path / "b", "--bench", "--size", "64MB", until=lambda told: b"raw write" in told
    )
    assert code == Code.INTERRUPTED and "interrupted" in shown and "Traceback" not in shown, shown
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves(steps: Path) -> None:
    for command in (["--help"], ["prune", str(steps)], ["prune", str(steps), "--json"]):
        code, _, err = _in_a_pipe(*command, gone=True)
        assert (code, err) == (Code.CLOSED, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_nobody_hears_an_error(options: list[str], tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    child = os.fork()
    if child == 0:
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        run_here(("verify", tmp_path / "nothing", *options))
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == Code.CLOSED


def test_nobody_listens_at_all(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under some daemons: the program starts with its standard streams closed."""
    copied = steps.parent / "copy"
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.closerange(0, 3)
            sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]
            sys.argv = ["holdfast", "copy", str(steps / "step-000000200"), str(copied)]
            application.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == Code.FINE
    assert holdfast.tools.verify(copied).whole


def test_an_old_terminal(steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, open(steps.parent / "told", "w", encoding="ascii") as told:
        patch.setattr(sys, "stdout", told)
        patch.setattr(sys, "argv", ["holdfast", "watch", str(steps), "--once"])
        with pytest.raises(SystemExit) as ended:
            application.main()
    assert not ended.value.code and "\\u25cf" in (steps.parent / "told").read_text()


def test_quiet_and_debug_are_understood_anywhere(steps: Path, run: Run) -> None:
    assert run("verify", steps / "step-000000100", "--quiet") == (Code.FINE, "", "")
    assert run("--quiet", "prune", steps)[1:] == ("", "")
    assert run("--quiet", "verify", steps / "step-000000100", "--json")[1].startswith("{")
    assert "error" in run("show", steps, "--quiet")[2]
    with pytest.raises(FileNotFoundError):
        run("show", steps, "--debug")
    assert "Usage" in run()[1]


@pytest.mark.slow
def test_a_signal_ends_a_benchmark_gently(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "holdfast", "doctor", str(tmp_path / "b"), "--bench", "--size", "64MB"]
    running = subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, stderr=subprocess.PIPE
    )
    while running.poll() is None and not list(tmp_path.glob("b/.holdfast-bench-*/raw")):
        pass
    running.send_signal(signal.SIGTERM)
    assert running.wait(120) == Code.INTERRUPTED and not list(tmp_path.iterdir())
