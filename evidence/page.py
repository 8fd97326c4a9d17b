"""The part of docs/trust.md that says what was run, from the rows.

`python -m evidence` writes it, and a test compares it. Never changes the rest of the page but the counts of the soak,
and never says whether a row is stale: then each change of the code would change the page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from evidence import row
from evidence.digest import ROOT
from evidence.row import Row, State
from evidence.runs import RUNS, Run
from tests.soak import report

PAGE = ROOT / "docs" / "trust.md"
BEGIN, END = "<!-- evidence -->", "<!-- end of evidence -->"
SHOWN = ("passed", "failed", "skipped", "wrong", "runs", "kinds", "right", "suites", "left out", "trials", "distinct",
         "episodes", "violations", "faults")  # fmt: skip
"""Counts that the table has unless they are 0; the files of the rows have all."""


def anchor(name: str) -> str:
    """What a link to this run ends with."""
    return f"run-{name}"


def states(runs: Mapping[str, Run] = RUNS, folder: Path = row.ROWS) -> dict[str, tuple[State, Row | None]]:
    """Each run, with its row."""
    rows = {name: row.read(name, folder) for name in runs}
    return {name: (row.state(run, rows[name]), rows[name]) for name, run in runs.items()}


def with_evidence(page: str, runs: Mapping[str, Run] = RUNS, folder: Path = row.ROWS) -> str:
    """The page with the table as the rows give it now, and the counts of the soak if there is a row of one."""
    rows = {name: row.read(name, folder) for name in runs}
    page = _between(page, BEGIN, END, table(rows))
    soak = rows.get("soak")
    if soak is not None and soak.result == "passed":
        numbers = {what: count for what, count in soak.counts.items() if isinstance(count, int)}
        page = _between(page, report.BEGIN, report.END, report.table(numbers))
    return page


def _between(page: str, begin: str, end: str, text: str) -> str:
    if page.count(begin) != 1 or page.count(end) != 1:
        raise ValueError(f"{PAGE.name} needs the lines {begin} and {end}, once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"


def table(rows: Mapping[str, Row | None]) -> str:
    """One line for each run with a row, then the names of the others."""
    done = {name: one for name, one in rows.items() if one is not None}
    lines = []
    if done:
        machines = {_machine(one) for one in done.values()}
        alike = len(machines) == 1
        lines += [f"All on {machines.pop()}.", ""] if alike else []
        lines += [f"| run | result | began | commit | took |{'' if alike else ' machine |'}"]
        lines += [f"|---|---|---|---|---|{'' if alike else '---|'}"]
        lines += [_line(name, one, alike=alike) for name, one in done.items()]
    missing = [f'<a id="{anchor(name)}"></a>{name}' for name in rows if name not in done]
    if missing:
        lines += [*([""] if done else []), f"No row yet: {', '.join(missing)}."]
    return "\n".join(lines)


def _line(name: str, one: Row, *, alike: bool) -> str:
    """Without blanks around cells: the pages are counted in words, and a lone bar is none."""
    result = _counts(one) if one.result == "passed" else f"failed: {'; '.join(one.why)}; {_counts(one)}"
    commit = one.commit[:7] + ("" if one.clean else " and changes")
    cells = [
        f'<a id="{anchor(name)}"></a>{name}', result, one.began[:10], commit, _duration(one.seconds),
        *([] if alike else [_machine(one)]),
    ]  # fmt: skip
    return f"|{'|'.join(cells)}|"


def _counts(one: Row) -> str:
    if "bars" in one.counts:
        bars, missed = int(one.counts["bars"]), int(one.counts["bars missed"])
        return f"{bars - missed}/{bars} bars" if bars else "no bars"
    parts = [(name, one.counts[name]) for name in SHOWN if one.counts.get(name)]
    return ", ".join(f"{count:,} {name}" if isinstance(count, (int, float)) else count for name, count in parts)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _machine(one: Row) -> str:
    facts = one.machine
    return (
        f"{facts['cores']} cores, {facts['memory_gib']:.0f} GiB, Python {'.'.join(str(facts['python']).split('.')[:2])}"
    )
