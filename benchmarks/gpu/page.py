"""The page of a run on a device, docs/gpu.md, from its JSON; `python -m benchmarks.gpu.page JSON`. Pure.

What failed, was left out or missed a bar stands there, too. Without a run the page says that there is none.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

Answers = dict[str, Any]

_HEAD = """\
# On a GPU

`make gpu-page` writes this page.
"""

_NOTHING = """
**Nothing was run on a real GPU yet.** The code for devices was tested with a simulated device: its tensors are in host
memory, and its streams do everything as late as they may.
"""

_HOW = """
## Run it yourself

<!-- not run: it needs a device, or minutes; tests of its own run it in small -->
```console
$ make gpu-wheels                  # once, with a network: packages for the other machine
$ make gpu                         # on a CUDA device, nine minutes at most
$ make gpu ONLY="staging steps"    # some parts
$ make gpu SMALL=1                 # on the CPU, with a simulated device
```

It needs torch, NumPy, rich, typer, xxhash and pytest (`GPU_PYTHON=python3`); the rest comes from wheels
(`WHEELS=.gpu/wheels`). Nothing is installed, and no setting of the device changes. Results are in `gpu-out` or `$OUT`.
To update this page, copy `gpu.json` to `docs/gpu.json` and run `make gpu-page`.
"""


def page(answers: Answers | None) -> str:
    """The whole page."""
    found = [_HEAD]
    if answers is None:
        found.append(_NOTHING)
    else:
        passed = [part for part in answers["parts"] if _has_passed(part)]
        others = [part for part in answers["parts"] if part not in passed]
        found += [_facts(answers), _bars(answers), _passed(passed), *map(_part, others), _left(answers)]
    return "".join(found) + _HOW


def is_good(answers: Answers) -> bool:
    """Whether all parts came to their end, no test failed, and no bar was missed."""
    return all(
        part["outcome"] == "done"
        and all(row["outcome"] in ("passed", "skipped") for row in part.get("tests", []))
        and all(bar["met"] for bar in part.get("bars", []))
        and not any(row.get("error") for row in part.get("rows", []))
        for part in answers["parts"]
    )


def _facts(answers: Answers) -> str:
    before = answers["facts"].get("before", {})  # the settings among it are compared at the end
    facts = {"driver": before["driver_version"]} if "driver_version" in before else {}
    for part in answers["parts"]:
        if part["part"] == "rates":
            facts |= part.get("facts", {})
    small = "\n**In small, on the CPU: the figures mean nothing.**\n" if answers["facts"].get("small") else ""
    return small + _table(["", ""], [[_text(name), _text(value)] for name, value in facts.items()])


def _bars(answers: Answers) -> str:
    bars = [bar for part in answers["parts"] for bar in part.get("bars", [])]
    if not bars:
        return ""
    lines = []
    for bar in bars:
        limit = f"≥ {bar['least']:g}" if bar["least"] is not None else f"≤ {bar['most']:g}"
        verdict = "met" if bar["met"] else "**missed**"
        lines.append([_text(bar["what"]), limit + bar["unit"], _number(bar["measured"], bar["unit"]), verdict])
    return "\n## Bars\n" + _table(["bar", "limit", "measured", ""], lines)


def _has_passed(part: Answers) -> bool:
    """Whether it is one of tests, of which nothing more is to be said than their number."""
    rows = part.get("tests", [])
    return bool(rows) and part["outcome"] == "done" and all(row["outcome"] == "passed" for row in rows)


def _passed(parts: list[Answers]) -> str:
    if not parts:
        return ""
    counts = [f"`{part['part']}` {len(part['tests'])}" for part in parts]
    return f"\n## Tests that passed\n\n{', '.join(counts)}.\n"


def _part(part: Answers) -> str:
    head = f"\n## {part['part']}: {part['what']}\n"
    if part["outcome"] != "done":
        head += f"\n**The part did not come to its end: {part['outcome']}.** What it had found by then:\n"
    facts = [f"- {_text(name)}: {_text(value)}" for name, value in part.get("facts", {}).items()]
    listed = "\n" + "\n".join(facts) + "\n" if facts and part["part"] != "rates" else ""
    return head + listed + (_tests(part["tests"]) if "tests" in part else _rows(part.get("rows", [])))


def _tests(rows: list[Answers]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none ran"
    text = f"\nTests: {told}.\n"
    for row in rows:
        if row["outcome"] == "skipped":
            text += f"\n- skipped: `{row['test']}` ({_text(row['why'])})"
    for row in rows:
        if row["outcome"] not in ("passed", "skipped"):
            why = row["why"].strip().replace("```", "'''")
            why = why[:1500] if row["outcome"] == "did not end" else why[-1500:]
            text += f"\n**{row['outcome']}: `{row['test']}`**\n\n```text\n{why}\n```\n"
    return text.rstrip() + "\n"


_COLUMNS = {
    "stretch": ("a stretch, s", 1), "added": ("added by a save, s", 1), "call": ("call, ms", 1e3),
    "hook": ("hook, ms", 1e3), "stall": ("stall, ms", 1e3), "copied": ("copied after, s", 1),
    "rate": ("GB/s", 1), "durable": ("durable after, s", 1), "prepared": ("prepared in, s", 1),
    "seconds": ("s", 1), "value": ("", 1), "allocated": ("allocated, MiB", 1), "kept": ("kept by torch, MiB", 1),
    "driver": ("gone by the driver, MiB", 1),
}  # fmt: skip
"""Figures that a row may have, what they are called, and by what they are multiplied."""


def _rows(rows: list[Answers]) -> str:
    names = [key for key in ("work", "system", "what") if any(row.get(key) for row in rows)]
    figures = [key for key in _COLUMNS if any(key in row for row in rows)]
    units = any("unit" in row for row in rows)
    lines = []
    for row in rows:
        if not row.get("error"):
            cells = [_number(row.get(key), times=_COLUMNS[key][1]) for key in figures]
            lines.append([*(_text(row.get(key, "")) for key in names), *cells, *([row["unit"]] if units else [])])
    text = _table([*names, *(_COLUMNS[key][0] for key in figures), *([""] if units else [])], lines) if lines else ""
    failed: dict[str, list[str]] = {}
    for row in rows:
        if row.get("error"):
            failed.setdefault(row["error"], []).append(" ".join(str(row.get(key, "")) for key in names).strip())
    for error, which in failed.items():
        text += f"\n- {_text('; '.join(which))}: **{_text(error)}**"
    return text.rstrip() + "\n"


def _left(answers: Answers) -> str:
    before, after = answers["facts"].get("before"), answers["facts"].get("after")
    if not before or not after:
        return ""
    changed = [name for name in before if before[name] != after.get(name)]
    if not changed:
        return ""
    told = ", ".join(f"{name} was {before[name]} and is {after.get(name)}" for name in changed)
    return f"\n## What was left\n\nThe device differs from before: {_text(told)}.\n"


def _table(heads: list[str], lines: list[list[str]]) -> str:
    text = "\n|" + "|".join(head or " " for head in heads) + "|\n|" + "---|" * len(heads) + "\n"
    return text + "".join("|" + "|".join(line) + "|\n" for line in lines)


def _text(value: object) -> str:
    """In one line of a table, without marks of the page's language."""
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", " ".join(str(value).split()))[:500]


def _number(value: float | None, unit: str = "", times: float = 1) -> str:
    if value is None:
        return ""
    value *= times
    return f"{value:.3g}{unit}" if abs(value) < 1000 else f"{value:.0f}{unit}"


def main() -> int:
    """Print the page of a JSON; of none if the file is not there."""
    path = Path(sys.argv[1])
    sys.stdout.write(page(json.loads(path.read_text()) if path.exists() else None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
