"""The results as a line, as JSON, and as the page zoo/results.md.

`zoo.__main__` calls it. Never runs a case.
"""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from zoo.case import Case
from zoo.forks import Task
from zoo.verdict import LOCAL, SHARDED, Cell

COLUMNS = (*LOCAL, *SHARDED)
Chosen = dict[str, list[Case]]
Done = dict[str, Task]

_WORDS = {"right": "right", "refused": "refused", "wrong": "**wrong**", "torch": "not by torch"}
_HEAD = """# The zoo

<!-- Written by `make zoo`. -->

Does it come back? `make zoo` saves and loads {kinds} kinds of objects that have `state_dict()` and
`load_state_dict()`: optimizers, modules, schedulers, loaders, of torch and of {libraries} other libraries. Every cell
below was run.

Each case trains three steps and is saved. A fresh object, made with another seed, loads the checkpoint and takes ten
more steps. Another fresh object gets `load_state_dict(copy.deepcopy(saved.state_dict()))`, torch's own way, and a third
run is never interrupted. Outputs, parameters, buffers and states are compared. A cell says:

| | |
|---|---|
| right | it goes on as after torch's own load, bit for bit, or as the uninterrupted run where torch's own does not |
| refused | `holdfast.save` or `holdfast.load` raised a `HoldfastError` that names the leaf, and nothing had changed |
| **wrong** | other numbers, another exception, a refusal after a change, a false name in `Loaded.restored` |
| not by torch | with torch alone it does not train like this, or its state is not had or loaded like this |
| – | there is nothing to be sharded |

| column | what it is |
|---|---|
| one process | saved by `holdfast.save`, loaded into a fresh object |
| into a trained one | the same checkpoint, loaded into an object that has trained |
| background | saved by a `holdfast.Saver`, while training goes on |
| 2 ranks | FSDP2 over two ranks, saved and loaded |
| 2 ranks to 1 | what two ranks saved, loaded by one process, beside a load of the state that torch gathers |
| 2 ranks to 4 | the same on four ranks: what they hold, gathered by torch, is what was saved |

{counts}

{libraries_table}

{made}

`make zoo` takes less than half an hour on two cores, `make zoo ONLY=adam` runs a part of it. It ends with an error if
any cell is wrong. A library that cannot be installed is left out{left_out}.

What no list has is drawn: `python -m tests.any_state --minutes 60` makes random models (ties, shared and frozen
parameters, buffers, several dtypes, parameter groups) on random meshes (DDP, FSDP2, HSDP, tensor parallel with uneven
and strided shards, and mixes of them), saves them on one, loads them on another, and compares with what torch gathers
and lays out.
"""


def line(cells: dict[str, Cell]) -> str:
    """The verdicts of one case."""
    return " | ".join(cells[c].verdict if c in cells else "–" for c in COLUMNS)


def results(chosen: Chosen, done: Done) -> dict[str, Any]:
    """Everything, as JSON."""
    return {
        kind: {
            case.name: {
                "seconds": round(done[case.name].seconds, 2),
                "cells": {c: [cell.verdict, cell.text] for c, cell in done[case.name].cells.items()},
            }
            for case in found
            if case.name in done
        }
        for kind, found in chosen.items()
    }


def summary(chosen: Chosen, done: Done, seconds: float) -> str:
    """Counts of verdicts."""
    lines = []
    for kind, found in chosen.items():
        counts = _counts(found, done)
        lines.append(f"{kind}: {len(found)} kinds, " + ", ".join(f"{counts[v]} {v}" for v in _WORDS))
    return "\n".join([*lines, f"{seconds / 60:.1f} minutes"])


def _counts(found: list[Case], done: Done) -> Counter[str]:
    return Counter(cell.verdict for case in found for cell in done[case.name].cells.values())


def markdown(chosen: Chosen, done: Done, left_out: list[str]) -> str:
    """The page: what is judged, counts, and a table for each library of each kind."""
    libraries = {case.library for found in chosen.values() for case in found} - {"torch", "python"}
    counts = ["| | kinds | right | refused | wrong | not by torch |", "|---|---|---|---|---|---|"]
    for kind, found in chosen.items():
        number = _counts(found, done)
        counts.append(f"| {kind} | {len(found)} | " + " | ".join(str(number[v]) for v in _WORDS) + " |")
    text = _HEAD.format(
        kinds=sum(map(len, chosen.values())), libraries=len(libraries), counts="\n".join(counts),
        libraries_table=by_library(chosen, done),
        made=_made_with(sorted(libraries)), left_out=f" ({', '.join(left_out)} here)" if left_out else "",
    )  # fmt: skip
    notes = _Notes()
    for kind, found in chosen.items():
        text += f"\n## {kind.capitalize()}\n"
        for library in dict.fromkeys(case.library for case in found):
            text += f"\n### {library}: {kind}\n\n" + _table([c for c in found if c.library == library], done, notes)
    return text + "\n## Notes\n\n" + notes.text()


def by_library(chosen: Chosen, done: Done) -> str:
    """A table with a line for each library. docs/trust.md has how many kinds of each."""
    cases: dict[str, list[Case]] = {}
    for found in chosen.values():
        for case in found:
            cases.setdefault(case.library, []).append(case)
    rows = ["| library | kinds | right | refused | wrong | not by torch |", "|---|---|---|---|---|---|"]
    for library in sorted(cases, key=str.lower):
        number = _counts(cases[library], done)
        rows.append(f"| {library} | {len(cases[library])} | " + " | ".join(str(number[v]) for v in _WORDS) + " |")
    return "\n".join(rows)


def _made_with(libraries: list[str]) -> str:
    known = []
    for library in ["torch", *libraries]:
        for name in (
            library,
            library.replace("_", "-"),
            {
                "optimi": "torch-optimi",
                "muon": "muon-optimizer",
                "quanto": "optimum-quanto",
                "lycoris": "lycoris-lora",
            }.get(library, library),
        ):
            try:
                known.append(f"{library} {version(name).partition('+')[0]}")
                break
            except PackageNotFoundError:
                continue
    return "Run with " + ", ".join(known) + "."


class _Notes:
    """What cells say beyond a word, each text once, by number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def mark(self, text: str) -> str:
        text = _tidy(text)
        return f" [{self._numbers.setdefault(text, len(self._numbers) + 1)}](#notes)" if text else ""

    def text(self) -> str:
        return "".join(f"{number}. {text}\n" for text, number in self._numbers.items()) or "None.\n"


def _tidy(text: str) -> str:
    text = re.sub(r"\S*/zoo-\w+/[\w-]+", "the checkpoint", text)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x…", text)
    text = re.sub(r"/[\w./-]+/site-packages/", "", text)
    for old, new in (
        ("\\", "\\\\"),
        ("<", "&lt;"),
        ("*", "\\*"),
        ("_", "\\_"),
        ("[", "\\["),
        ("`", "\\`"),
        ("|", "\\|"),
    ):
        text = text.replace(old, new)
    return text


def _table(found: list[Case], done: Done, notes: _Notes) -> str:
    sharded = any(c in done[case.name].cells for case in found for c in SHARDED)
    columns = COLUMNS if sharded else LOCAL
    rows = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for case in found:
        cells = done[case.name].cells
        shown = [_cell(cells[c], notes) if c in cells else "–" for c in columns]
        rows.append(f"| {_tidy(case.name.removeprefix(case.library + ': '))} | {' | '.join(shown)} |")
    return "\n".join(rows) + "\n"


def _cell(cell: Cell, notes: _Notes) -> str:
    return _WORDS[cell.verdict] + ("" if cell.text == "as above" else notes.mark(cell.text))
