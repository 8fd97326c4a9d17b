"""The counts that a run printed, or that are in the JSON of its figures.

The recorder calls it when a run has ended. Never decides whether the command succeeded.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from evidence.runs import Output

Counts = dict[str, int | float | str]

_SUMMARY = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s", re.MULTILINE)
_PART = re.compile(r"(\d+) ([a-z]+)")
_ZOO = re.compile(r"^(?P<kind>\w+): (?P<kinds>\d+) kinds, (?P<rest>\d+ .*)$", re.MULTILINE)
_SUITE = re.compile(r"^.+: (?P<good>\d+) of the (?P<all>\d+) that pass with torch", re.MULTILINE)
_STATES = re.compile(r"^(?:\d+ [\w -]+(?:, |$))+$", re.MULTILINE)
BAD = ("failed", "error", "errors", "faults", "wrong", "violations", "bars missed")
"""Counts of a run that passed are 0 here."""


def read(output: Output, text: str, figures: Mapping[str, Any] | None = None) -> Counts:
    """Empty if there are none."""
    if output == "benchmark":
        return _bars(figures) if figures is not None else {}
    return _READERS[output](text)


def bad(counts: Counts) -> list[str]:
    """What in these counts is a failure."""
    return [f"{counts[name]} {name}" for name in BAD if counts.get(name)]


def _bars(figures: Mapping[str, Any]) -> Counts:
    bars = figures["bars"]
    missed = sum(not bar["met"] for bar in bars)
    return {"rows": len(figures["rows"]), "bars": len(bars), "bars missed": missed}


def _pytest(text: str) -> Counts:
    """The sum of pytest's last lines: some targets run it twice."""
    total: Counter[str] = Counter()
    for summary in _SUMMARY.finditer(text):
        total.update({kind: int(number) for number, kind in _PART.findall(summary[1])})
    kept = ("passed", "failed", "error", "errors", "skipped", "xfailed", "xpassed")
    return {kind: total[kind] for kind in kept if total[kind]}


def _lines(text: str) -> list[dict[str, Any]]:
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def _soak(text: str) -> Counts:
    """All counts that it writes; what broke a soak stands in the place of them."""
    for line in reversed(_lines(text)):
        if "counts" in line:
            return dict(line["counts"])
        if "violation" in line or "error" in line:
            return {"violations": 1, "episode": line["episode"]}
    return {}


def _fuzz(text: str) -> Counts:
    ends = [line for line in _lines(text) if "target" in line]
    return {name: ends[-1][name] for name in ("runs", "opened", "faults", "minutes")} if ends else {}


def _crash(text: str) -> Counts:
    ends = [line[0] for line in _STATES.finditer(text) if "distinct" in line[0]]
    parts = [part.split(" ", 1) for part in ends[-1].split(", ")] if ends else []
    return {what: int(number) for number, what in parts if not what.startswith("by ")}


def _any_state(text: str) -> Counts:
    ends = [line for line in _lines(text) if "trials" in line]
    return dict(ends[-1]) if ends else {}


def _zoo(text: str) -> Counts:
    total: Counter[str] = Counter()
    for line in _ZOO.finditer(text):
        total["kinds"] += int(line["kinds"])
        for part in line["rest"].split(", "):
            number, word = part.split(" ", 1)
            total[word] += int(number)
    return dict(total)


def _outside(text: str) -> Counts:
    suites = list(_SUITE.finditer(text))
    if not suites:
        return {}
    passed, tests = (sum(int(suite[name]) for suite in suites) for name in ("good", "all"))
    return {"suites": len(suites), "tests": tests, "passed": passed, "left out": text.count(": left out, ")}


_READERS: dict[str, Callable[[str], Counts]] = {
    "pytest": _pytest,
    "soak": _soak,
    "fuzz": _fuzz,
    "crash": _crash,
    "any-state": _any_state,
    "zoo": _zoo,
    "outside": _outside,
}
