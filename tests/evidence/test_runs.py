"""The table of runs has what the Makefile has."""

from __future__ import annotations

import re

from evidence.digest import ROOT, exercised
from evidence.runs import BENCHMARKED, FUZZED, RUNS

MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target: str) -> str:
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found
    return found[1]


def test_every_benchmark_of_make_bench_has_a_run_with_its_command() -> None:
    assert re.findall(r"-m benchmarks\.(\w+)", recipe("bench")) == list(BENCHMARKED)
    expanded = recipe("bench").replace("$(PEERS)", ".venv/peers").replace("$(BIN)", ".venv/bin")
    for module in BENCHMARKED:
        assert f"\t{' '.join(RUNS[module.replace('_', '-')].command)}\n" in expanded


def test_every_target_of_make_fuzz_has_a_run() -> None:
    declared = re.search(r"^FUZZ_TARGETS \?= ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)
    assert declared
    assert set(declared[1].replace("\\", " ").split()) == set(FUZZED)
    assert {f"fuzz-{target}" for target in FUZZED} <= set(RUNS)


def test_targets_of_make_are_there() -> None:
    for run in RUNS.values():
        if run.command[0] == "make":
            assert recipe(run.command[1])


def test_names_are_anchors() -> None:
    assert all(re.fullmatch(r"[a-z][\w.-]*", name) and run.name == name for name, run in RUNS.items())


def test_what_a_run_exercises_is_there() -> None:
    for run in RUNS.values():
        assert len(exercised(run)) > 10, run.name


def test_a_benchmark_exercises_itself_and_what_it_asks_of_the_package() -> None:
    there = {path.relative_to(ROOT).as_posix() for path in exercised(RUNS["stall"])}
    assert {"benchmarks/stall_systems.py", "benchmarks/pool.py", "holdfast/write/writer_process.py"} <= there
    assert not {path for path in there if path.startswith(("holdfast/view/", "holdfast/trainers/"))}
    everything = {path.relative_to(ROOT).as_posix() for path in exercised(RUNS["test-all"])}
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "holdfast").rglob("*.py")} <= everything
