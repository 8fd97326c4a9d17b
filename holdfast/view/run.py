"""The page of a run: its saves over steps or over time, restarts, failures, and in what health the steps are."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from holdfast.errors import NotACheckpoint
from holdfast.inspect.history import History, Past
from holdfast.inspect.standing import rate_of, standing
from holdfast.inspect.survey import Step, survey
from holdfast.run.journal import Entry
from holdfast.storage.place import Place
from holdfast.view.page import page

SCRIPTS = ("table.js", "linked.js", "run.js")

_PHASES = ("staging", "writing", "commit")
_KINDS = {
    "whole": "good",
    "opens": "good",
    "partly here": "warn",
    "pending": "warn",
    "writing": "",
    "lent": "",
    "left behind": "",
    "unfinished": "warn",
}


def run_page(root: str | os.PathLike[str] | Place) -> str:
    """The page as one HTML document. Raises NotACheckpoint if there is neither a journal nor a step, StorageError."""
    past = Past(root)
    history = past.look()
    try:
        steps = survey(past.root)
    except NotACheckpoint:  # all are gone, but the journal tells of them
        steps = []
    name = str(past.root).rstrip("/").rpartition("/")[2]
    return page(f"{name} · holdfast", SCRIPTS, contents(str(past.root), history, steps))


def contents(root: str, history: History, steps: Iterable[Step]) -> dict[str, Any]:
    """What the page shows: a column for each figure, as long as there are saves."""
    entries = history.entries
    starts = {name: number for number, name in enumerate(dict.fromkeys(entry.start for entry in entries))}
    now = standing(root, history)
    return {
        "path": root,
        "title": root.rstrip("/").rpartition("/")[2] or root,
        "at": history.at,
        "state": now.state,
        "heard": now.heard,
        "step": now.step,
        "every": None if history.now is None else history.now.every,
        "backlog": now.backlog,
        "mode": "min" if history.now is None else history.now.mode,
        "saving": [one.step for one in now.saving],
        "columns": {
            "step": [entry.step for entry in entries],
            "began": [round(entry.began, 3) for entry in entries],
            "outcome": [entry.outcome for entry in entries],
            "start": [starts[entry.start] for entry in entries],
            "ranks": [entry.ranks for entry in entries],
            "bytes": [entry.bytes if entry.outcome == "saved" else None for entry in entries],
            "written": [entry.written if entry.outcome == "saved" else None for entry in entries],
            "seconds": [_timed(entry, entry.seconds) for entry in entries],
            "stall": [_timed(entry, entry.stall) for entry in entries],
            "rate": [_short(rate_of(entry)) for entry in entries],
            "metric": [entry.metric for entry in entries],
            "step_seconds": [_short(entry.step_seconds) for entry in entries],
            "backlog": [entry.backlog for entry in entries],
            **{name: [_timed(entry, entry.phases.get(name)) for entry in entries] for name in _PHASES},
        },
        "journaled": [name != "" for name in starts],
        "errors": {number: entry.error for number, entry in enumerate(entries) if entry.error},
        "steps": [
            [step.step, step.name, _KINDS.get(step.health, "bad"), step.health, step.fault, list(step.lost)]
            for step in steps
            if step.step is not None
        ],
    }


def _timed(entry: Entry, seconds: float | None) -> float | None:
    """A time that is known, and not that of a save that did not take place."""
    return _short(seconds) if entry.start and entry.outcome != "skipped" else None


def _short(value: float | None) -> float | None:
    """Four digits are more than a chart shows."""
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
