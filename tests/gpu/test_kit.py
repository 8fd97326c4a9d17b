"""The kit of `make gpu` itself: its plan, its runner, its page, and what it measures in small."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.page import is_good, page
from benchmarks.gpu.plan import MOST, PARTS, Part, chosen, in_turn, longest, most
from benchmarks.gpu.run import ROOT, Run

HERE = Path(__file__).parent


def a_run(folder: Path, **options: Any) -> Run:
    (folder / "out").mkdir()
    return Run(folder / "out", folder / "work", folder / "site", small=True, **options)


# The plan


def test_all_of_it_ends_within_nine_minutes() -> None:
    assert longest(PARTS) <= most(PARTS) == MOST < 540
    for part in PARTS:
        assert most([part]) <= MOST


def test_every_test_of_devices_is_in_a_part() -> None:
    named = {name for part in PARTS for name in part.tests}
    assert named | {Path(__file__).name} == {path.name for path in HERE.glob("test_*.py")}


def test_every_part_is_there_once() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
    for part in PARTS:
        assert bool(part.tests) != bool(part.module)
        assert not part.module or importlib.util.find_spec(part.module)


def test_parts_are_chosen_by_name_and_nothing_runs_beside_one_that_measures() -> None:
    assert [part.name for part in chosen(["loads", "steps"], small=False)] == ["steps", "loads"]
    with pytest.raises(ValueError, match=r"there is no part nothing: rates, .*"):
        chosen(["nothing"], small=False)
    assert all(len(turn) == 1 or not any(part.alone for part in turn) for turn in in_turn(PARTS))
    assert [part for turn in in_turn(PARTS) for part in turn] == PARTS


# The runner

SAMPLE = """
import os, signal, time
import pytest

def test_passes(): pass
def test_fails(tmp_path): assert str(tmp_path) == "elsewhere"
def test_kills(): os.kill(os.getpid(), signal.SIGKILL)
def test_hangs(): time.sleep(600)
@pytest.mark.skip(reason="for a reason")
def test_skips(): pass
def test_passes_too(): pass
"""


@pytest.mark.slow
def test_a_hang_and_a_crash_are_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the tests behind them run, in another process."""
    tests = tmp_path / "tests"
    tests.mkdir()
    (tests / "conftest.py").write_text("from tests.gpu.conftest import *\n")
    (tests / "test_sample.py").write_text(SAMPLE)
    monkeypatch.setenv("HOLDFAST_GPU_LONGEST", "2")
    run = a_run(tmp_path, tests=tests)
    run.all([Part("sample", "tests that behave badly", 120, ("test_sample.py",))])
    [answer] = run.answers
    rows = {row["test"].partition("::")[2]: row for row in answer["tests"]}
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "test_passes": "passed", "test_fails": "failed", "test_kills": "did not end", "test_hangs": "did not end",
        "test_skips": "skipped", "test_passes_too": "passed",
    }  # fmt: skip
    assert answer["outcome"] == "done" and rows["test_skips"]["why"] == "for a reason"
    assert "elsewhere" in rows["test_fails"]["why"] and "Timeout" in rows["test_hangs"]["why"]
    assert str(tmp_path / "work") not in json.dumps(answer) and not is_good(run.told)
    text = page(run.told)
    assert "1 failed, 2 passed, 1 skipped" in text and "did not end: `::test_hangs`" in text
    assert json.loads((tmp_path / "out/gpu.json").read_text()) == run.told
    assert (tmp_path / "out/gpu.md").read_text() == text


MEASURING = """
import subprocess, sys, time
from pathlib import Path
from benchmarks.bar import Bar
from benchmarks.gpu.part import a_part

if __name__ == "__main__":
    with a_part("measuring") as part:
        part.small = False
        part.row(what="before", unit="s", value=1.0)
        part.bar(Bar("too slow", 3.0, most=2.0))
        part.shared.mkdir()
        Path(__file__).with_name("shared").write_text(str(part.shared))
        (part.shared / "large").write_bytes(bytes(1000))
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600 if part.seconds < 80 else 0)
"""


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.slow
def test_a_part_that_measures_is_ended_and_what_it_had_is_kept(
    hangs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "measuring.py").write_text(MEASURING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    run = a_run(tmp_path)
    run.all([Part("measuring", "something", 60 if hangs else 100, module="measuring")])
    [answer] = run.answers
    assert answer["outcome"] == ("ended after its 60 s" if hangs else "done")
    assert [row["value"] for row in answer["rows"]] == [1.0]
    assert [bar["met"] for bar in answer["bars"]] == [False]
    assert not Path((tmp_path / "shared").read_text()).exists() and not (tmp_path / "work/measuring").exists()
    text = page(run.told)
    assert "|too slow|≤ 2×|3×|**missed**|" in text and ("did not come to its end" in text) == hangs


def test_wheels_of_this_python_are_unpacked(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    mine = "cp{}{}".format(*sys.version_info[:2])
    for name in (f"one-1.0-{mine}-{mine}-manylinux2014_x86_64", "two-1.0-py3-none-any", "three-1.0-cp27-cp27m-any"):
        with zipfile.ZipFile(wheels / f"{name}.whl", "w") as file:
            file.writestr(f"{name.partition('-')[0]}/__init__.py", "")
    assert len(command.unpacked(wheels, site)) == 2
    assert {path.name for path in site.iterdir()} == {"one", "two"}
    assert command.unpacked(tmp_path / "none", site) == [] and not list(site.iterdir())


# What is measured, in small


@pytest.mark.parametrize("name", [part.name for part in PARTS if part.module])
@pytest.mark.slow
def test_what_is_measured_runs_in_small(name: str, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    [part] = chosen([name], small=True)
    run.all([replace(part, seconds=250)])
    [answer] = run.answers
    assert answer["outcome"] == "done", (tmp_path / "out/gpu.log").read_text()
    assert answer["rows"] and not [row for row in answer["rows"] if row.get("error")]
    assert answer["bars"] == [], "in small nothing is judged"
    assert all(row.get("value") != 0 for row in answer["rows"])


@pytest.mark.slow
def test_the_whole_command_in_small(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--small", "--out", tmp_path / "out", "--work", tmp_path / "w"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.startswith(f"{longest(chosen([], small=True), 1) / 60:.1f} minutes at the most")
    answers = json.loads((tmp_path / "out/gpu.json").read_text())
    assert [part["part"] for part in answers["parts"]] and is_good(answers)
    assert not (tmp_path / "w").exists()


# The page


def test_the_page_is_that_of_the_last_run() -> None:
    figures = ROOT / "docs/gpu.json"
    answers = json.loads(figures.read_text()) if figures.exists() else None
    assert (ROOT / "docs/gpu.md").read_text() == page(answers), "make gpu-page"
    assert answers is None or not answers["facts"]["small"]


def test_what_failed_or_was_left_out_stands_on_the_page() -> None:
    figures = {"facts": {"state": "20 GB"}, "bars": [], "rows": [
        {"system": "holdfast process", "stall": 0.008, "rate": 48.0},
        {"system": "torch.save", "error": "left out: no time for it"},
    ]}  # fmt: skip
    parts = [
        {"part": "training", "what": "saves", "outcome": "failed with code 1", "seconds": 3, "limit": 5, **figures},
        {"part": "steps", "what": "steps", "outcome": "killed by signal 11", "seconds": 3, "limit": 5, "tests": []},
    ]
    before = {"name": "a device", "memory.used": "4 MiB"}
    told = {"facts": {"before": before, "after": {**before, "memory.used": "900 MiB"}}, "parts": parts}
    text = page(told)
    assert "|holdfast process|8|48|" in text and "**left out: no time for it**" in text
    assert "killed by signal 11" in text and "memory.used was 4 MiB and is 900 MiB" in text
    assert not is_good(told)
