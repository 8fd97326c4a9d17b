"""Counts are read from what each kind of run prints."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from evidence.counts import bad, read


def test_of_pytest_the_last_lines_are_added_up() -> None:
    text = "...\n=== 1 failed, 6845 passed, 5 skipped, 2 warnings in 537.33s (0:08:57) ===\n12 passed in 3.10s\n"
    assert read("pytest", text) == {"passed": 6857, "failed": 1, "skipped": 5}
    assert bad(read("pytest", text)) == ["1 failed"]
    assert read("pytest", "interrupted") == {}


def test_of_a_soak() -> None:
    text = '{"seed": 7, "folder": "f"}\nnoise\n{"counts": {"episodes": 3, "violations": 0, "kill: injected": 2}}\n'
    assert read("soak", text) == {"episodes": 3, "violations": 0, "kill: injected": 2}
    text = '{"violation": "two steps are mixed", "episode": 5, "replay": "…", "folder": "f"}\n'
    assert bad(read("soak", text)) == ["1 violations"]


def test_of_a_fuzzer() -> None:
    from tests.fuzz.run import Tally

    told = Tally("url", Path("found"))
    line = f'{{"target": "{told.target}", "minutes": 10.0, "runs": 9, "opened": 2, "outcomes": {{}}, "faults": 1}}'
    assert read("fuzz", f"INFO\n{line}\n") == {"runs": 9, "opened": 2, "faults": 1, "minutes": 10.0}
    assert bad(read("fuzz", line)) == ["1 faults"]


def test_of_crash_states() -> None:
    total = Counter({"built": 12, "distinct": 9, "saved to": 3, "faults": 0, "by ext4-ordered": 4})
    text = f"operation calls\nsave over 3 12 9 3 none\n{', '.join(f'{n} {what}' for what, n in total.items())}\n"
    assert read("crash", text) == {"built": 12, "distinct": 9, "saved to": 3, "faults": 0}


def test_of_random_states_the_zoo_and_other_projects() -> None:
    assert read("any-state", '{"seed": 1}\n{"trials": 40, "right": 39, "wrong": 1}\n')["wrong"] == 1
    modules = "modules: 2 kinds, 9 right, 1 refused, 0 wrong, 3 not by torch"
    zoo = f"3/3 1.0 s  adam: right\n{modules}\nschedules: 1 kinds, 1 right\n0.1 minutes"
    assert read("zoo", zoo) == {"kinds": 3, "right": 10, "refused": 1, "wrong": 0, "not by torch": 3}
    outside = "torch: 60 of the 61 that pass with torch (at least 60); abc\nlightning: left out, there is no x\n"
    assert read("outside", outside) == {"suites": 1, "tests": 61, "passed": 60, "left out": 1}
    assert read("outside", "lightning: left out, there is no x\n") == {}


def test_of_a_benchmark_a_missed_bar_is_a_failure() -> None:
    figures = {"rows": [{}, {}], "bars": [{"what": "a", "met": True}, {"what": "b", "met": False}]}
    assert read("benchmark", "", figures) == {"rows": 2, "bars": 2, "bars missed": 1}
    assert bad(read("benchmark", "", figures)) == ["1 bars missed"]
    assert read("benchmark", "", None) == {}
