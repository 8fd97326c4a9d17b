"""The recorder: rows of runs that pass and fail, none of those that are interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from evidence import row
from evidence.record import NotRecorded, record
from evidence.row import Row
from evidence.runs import Run
from tests.patience import LONG, wait_until

FIGURES = (
    "import json, pathlib; pathlib.Path('figures.json').write_text("
    "json.dumps({'bars': [{'what': 'a', 'met': True}], 'rows': [{'system': 'b'}], 'facts': {}}))"
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with one commit."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "code.txt").write_text("one")
    (root / ".gitignore").write_text("bench-out\nfigures.json\n")
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    for words in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-qm", "one"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


def python(code: str, **more: object) -> Run:
    return Run("one", (sys.executable, "-c", code), "pytest", files=("code.txt",), **more)  # type: ignore[arg-type]


def test_a_run_that_passes(root: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = python("import os; print('3 passed in 0.1s', os.environ['WORD'])", environment={"WORD": "here"})
    made = record(run, tmp_path / "rows", root)
    assert made.result == "passed" and made.counts == {"passed": 3} and made.why == [] and made.clean
    assert made.commit == subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=root, text=True).strip()
    assert made.began.endswith("Z") and set(made.machine) == {"cores", "memory_gib", "python", "torch", "load"}
    assert "3 passed in 0.1s here" in capfd.readouterr().out
    assert "3 passed" in (root / "bench-out/evidence/one.txt").read_text()
    assert row.read("one", tmp_path / "rows") == made
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; print('3 passed in 0.1s'); sys.exit(3)", ["ended with 3"]),
        ("print('1 failed, 2 passed in 0.1s')", ["1 failed"]),
        ("print('nothing')", ["its counts are missing"]),
    ],
)
def test_a_run_that_fails_has_a_row_too(root: Path, tmp_path: Path, code: str, why: list[str]) -> None:
    assert record(python(code), tmp_path, root).why == why
    made = row.read("one", tmp_path)
    assert made is not None and made.result == "failed"


def test_figures_of_a_benchmark_are_kept_as_they_are(root: Path, tmp_path: Path) -> None:
    run = Run("one", (sys.executable, "-c", FIGURES), "benchmark", figures="figures.json")
    made = record(run, tmp_path, root)
    assert made.figures == {"bars": [{"what": "a", "met": True}], "rows": [{"system": "b"}]}
    assert made.counts == {"rows": 1, "bars": 1, "bars missed": 0} and made.result == "passed"


def test_figures_of_an_earlier_run_do_not_count(root: Path, tmp_path: Path) -> None:
    (root / "figures.json").write_text('{"bars": [], "rows": []}')
    os.utime(root / "figures.json", (1, 1))
    made = record(Run("one", (sys.executable, "-c", ""), "benchmark", figures="figures.json"), tmp_path, root)
    assert made.figures is None and made.why == ["its counts are missing"]


def test_a_changed_tree_is_said(root: Path, tmp_path: Path) -> None:
    (root / "code.txt").write_text("two")
    assert not record(python("print('1 passed in 0.1s')"), tmp_path, root).clean


def test_code_that_changes_meanwhile_gives_no_row(root: Path, tmp_path: Path) -> None:
    code = "import pathlib; pathlib.Path('code.txt').write_text('two'); print('1 passed in 0.1s')"
    with pytest.raises(NotRecorded, match="changed meanwhile"):
        record(python(code), tmp_path, root)
    assert row.read("one", tmp_path) is None


def test_a_run_that_was_ended_by_a_signal_gives_no_row(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match="interrupted"):
        record(python("import os, signal; os.kill(os.getpid(), signal.SIGTERM)"), tmp_path, root)
    assert row.read("one", tmp_path) is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interruption_ends_the_run_and_gives_no_row(root: Path, tmp_path: Path, number: signal.Signals) -> None:
    code = "import os, pathlib, time; pathlib.Path('figures.json').write_text(str(os.getpid())); time.sleep(1000)"

    def stop() -> None:
        wait_until(lambda: (root / "figures.json").exists() and (root / "figures.json").read_text())
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(NotRecorded, match="interrupted"):
        record(python(code), tmp_path, root)
    thread.join(LONG)
    assert row.read("one", tmp_path) is None
    assert not Path("/proc", (root / "figures.json").read_text()).exists()


def test_variables_that_make_a_run_smaller_do_not_reach_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUZZ_SECONDS", "1")
    monkeypatch.setenv("MAKEFLAGS", "n")
    code = "import os; print(sum(name in os.environ for name in ('FUZZ_SECONDS', 'MAKEFLAGS')) + 7, 'passed in 0.1s')"
    assert record(python(code), tmp_path, root).counts == {"passed": 7}


def test_a_word_of_the_command_comes_from_the_environment(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("one", (sys.executable, "-c", "import sys; print(sys.argv[1], 'passed in 0.1s')", "$COUNT"), "pytest")
    with pytest.raises(NotRecorded, match="set COUNT"):
        record(run, tmp_path, root)
    monkeypatch.setenv("COUNT", "4")
    made = record(run, tmp_path, root)
    assert made.counts == {"passed": 4} and made.command[-1] == "$COUNT"


def test_a_row_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text("{}")
    with pytest.raises(ValueError, match=r"one\.json is no row"):
        row.read("one", tmp_path)


def test_a_row_comes_back_as_it_was_written(tmp_path: Path) -> None:
    one = Row("a", ["b"], "2026-11-24T01:00:00Z", 1.5, "c", True, "d", {"cores": 2}, {"passed": 1}, "passed", [])
    row.write(one, tmp_path)
    assert row.read("a", tmp_path) == one
