"""A row: what one run was, on which code and machine, and its result; a file of `evidence/rows` for each.

The recorder writes rows and the page reads them. Never leaves half a row.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from evidence.counts import Counts
from evidence.digest import ROOT, digest
from evidence.runs import Run

ROWS = ROOT / "evidence" / "rows"
State = Literal["passed", "failed", "stale", "not run"]


@dataclass(frozen=True)
class Row:
    """``began`` in UTC; ``clean``: the commit is all that was run; ``why`` it failed; ``figures`` of a benchmark."""

    name: str
    command: list[str]
    began: str
    seconds: float
    commit: str
    clean: bool
    digest: str
    machine: dict[str, str | int | float]
    counts: Counts
    result: Literal["passed", "failed"]
    why: list[str]
    figures: Mapping[str, Any] | None = None


def write(row: Row, folder: Path = ROWS) -> Path:
    """Put it in the place of the one before, all at once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{row.name}.json"
    temporary = folder / f".{row.name}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(row), indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return path


def read(name: str, folder: Path = ROWS) -> Row | None:
    """None if it was never run."""
    path = folder / f"{name}.json"
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return Row(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is no row: {error}. Delete it and record the run again") from error


def state(run: Run, row: Row | None) -> State:
    """What the row says of the code as it stands now, for the command."""
    if row is None:
        return "not run"
    return row.result if row.digest == digest(run) else "stale"
