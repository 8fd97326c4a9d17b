"""The results as a line, as JSON, and as the page docs/zoo.md.

`zoo.__main__` calls it. Never runs a case.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from zoo.case import Case
from zoo.forks import Task
from zoo.judge import LOCAL, SHARDED, Cell

COLUMNS = (*LOCAL, *SHARDED)
_VERDICTS = ("right", "refused", "wrong", "torch")


def line(cells: dict[str, Cell]) -> str:
    return " | ".join(cells[c].verdict if c in cells else "–" for c in COLUMNS)


def results(chosen: dict[str, list[Case]], done: dict[str, Task]) -> dict[str, Any]:
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


def summary(chosen: dict[str, list[Case]], done: dict[str, Task], seconds: float) -> str:
    lines = []
    for kind, found in chosen.items():
        counts = _counts(found, done)
        lines.append(f"{kind}: {len(found)} kinds, " + ", ".join(f"{counts[v]} {v}" for v in _VERDICTS))
    return "\n".join([*lines, f"{seconds / 60:.1f} minutes"])


def _counts(found: list[Case], done: dict[str, Task]) -> Counter[str]:
    return Counter(cell.verdict for case in found for cell in done[case.name].cells.values())


def markdown(chosen: dict[str, list[Case]], done: dict[str, Task], seconds: float) -> str:
    return "TODO"


_ = torch
