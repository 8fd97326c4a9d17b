"""The table of runs: what passed, failed or was never run; and the command that writes it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evidence import __main__ as command
from evidence import page, row
from evidence.digest import digest
from evidence.row import Row
from evidence.runs import Run
from tests.soak import report

RUNS = {name: Run(name, ("true",), "pytest") for name in ("soak", "one", "two", "three")}
PAGE = f"before\n{report.BEGIN}\nold\n{report.END}\nbetween\n{page.BEGIN}\n{page.END}\nafter\n"
MACHINE: dict[str, str | int | float] = {
    "cores": 2,
    "memory_gib": 15.6,
    "python": "3.11.7",
    "torch": "2.13.0",
    "load": 0.1,
}


def made(name: str, **changes: object) -> Row:
    one = Row(
        name, ["true"], "2026-11-24T01:00:00Z", 537.0, "abcdef1234", True, digest(RUNS[name]), MACHINE,
        {"passed": 6845, "skipped": 5, "failed": 0}, "passed", [],
    )  # fmt: skip
    return replace(one, **changes)  # type: ignore[arg-type]


def test_each_run_has_its_line_and_its_anchor(tmp_path: Path) -> None:
    row.write(made("one"), tmp_path)
    row.write(made("two", result="failed", why=["ended with 2"], clean=False, seconds=12.3), tmp_path)
    row.write(made("three", digest="other"), tmp_path)
    text = page.with_evidence(PAGE, RUNS, tmp_path)
    assert "All on 2 cores, 16 GiB, Python 3.11." in text
    assert '|<a id="run-one"></a>one|6,845 passed, 5 skipped|2026-11-24|abcdef1|9 min|' in text
    assert "></a>two|failed: ended with 2; 6,845 passed, 5 skipped|2026-11-24|abcdef1 and changes|12 s|" in text
    assert "></a>three|6,845 passed" in text, "that it is stale is for the command to say"
    assert 'No row yet: <a id="run-soak"></a>soak.' in text
    assert text.startswith(f"before\n{report.BEGIN}\nold\n") and text.endswith("\nafter\n")
    assert page.with_evidence(text, RUNS, tmp_path) == text


def test_machines_that_differ_have_a_column(tmp_path: Path) -> None:
    row.write(made("one"), tmp_path)
    row.write(made("two", machine={**MACHINE, "cores": 8}), tmp_path)
    text = page.with_evidence(PAGE, RUNS, tmp_path)
    assert "|took| machine" not in text and "| machine |" in text and "8 cores, 16 GiB, Python 3.11|" in text


def test_without_rows_there_is_no_table(tmp_path: Path) -> None:
    text = page.with_evidence(PAGE, RUNS, tmp_path)
    assert "|" not in text and text.count("<a id=") == 4


def test_counts_of_a_benchmark_are_its_bars(tmp_path: Path) -> None:
    row.write(made("one", counts={"rows": 9, "bars": 14, "bars missed": 2}), tmp_path)
    assert "|12/14 bars|" in page.with_evidence(PAGE, RUNS, tmp_path)


def test_the_counts_of_the_soak_come_from_its_row(tmp_path: Path) -> None:
    counts = {"episodes": 188, "violations": 0, "seed": 9, "seconds": 3600, "kill: injected": 45}
    row.write(made("soak", counts=counts, result="failed", why=["ended with 1"]), tmp_path)
    assert "old" in page.with_evidence(PAGE, RUNS, tmp_path)
    row.write(made("soak", counts=counts), tmp_path)
    text = page.with_evidence(PAGE, RUNS, tmp_path)
    assert "old" not in text and "|episodes|188|" in text and "Seed 9, 60 minutes." in text


def test_a_page_without_the_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="once each"):
        page.with_evidence("nothing", {}, Path("nowhere"))


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command with the runs of this file, a page of its own and its own folder of rows."""
    runs, states, with_evidence = dict(RUNS), page.states, page.with_evidence
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(page, "states", lambda *_: states(runs, tmp_path))
    monkeypatch.setattr(page, "with_evidence", lambda text: with_evidence(text, runs, tmp_path))
    monkeypatch.setattr(command, "RUNS", runs)
    return tmp_path


def test_what_is_owed_is_listed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("soak", "one"):
        row.write(made(name), small)
    row.write(made("two", digest="other"), small)
    assert command.main([]) == 1
    assert capsys.readouterr().out.splitlines()[:2] == ["two: stale", "three: not run"]
    assert command.main(["stale"]) == 0
    assert capsys.readouterr().out == "two\n"
    for name in ("two", "three"):
        row.write(made(name), small)
    assert command.main([]) == 0
    assert "No row yet" not in page.PAGE.read_text()


def test_runs_are_recorded_and_the_page_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def record(run: Run) -> Row:
        if run.name == "two":
            raise command.NotRecorded("two was interrupted")
        one = made(run.name)
        row.write(one, small)
        return one

    monkeypatch.setattr(command, "record", record)
    assert command.main(["run", "one"]) == 0
    assert command.main(["run", "three", "two"]) == 1
    assert "></a>three|6,845 passed" in page.PAGE.read_text() and "No row yet: " in page.PAGE.read_text()


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["run", "nothing"])
    assert "invalid choice: 'nothing'" in capsys.readouterr().err
