"""``holdfast ls``: the checkpoints of a run with their age, size and health, or the runs of a folder.

`commands` calls it. It reads no tensor, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone

import typer

from holdfast.cli import output
from holdfast.cli.sizes import show_sizes
from holdfast.errors import NotACheckpoint
from holdfast.inspect.runs import Run, runs_in
from holdfast.inspect.survey import Step, survey


def ls(*, root: str, sizes: bool, fast: str | None, headers: bool, json: bool) -> None:
    if sizes:
        if fast or headers:
            raise typer.BadParameter("--sizes goes without --fast and --headers")
        show_sizes(root, json=json)
        return
    try:
        steps = survey(root, fast=fast, headers=headers)
    except NotACheckpoint:
        runs = runs_in(root)
        if not runs:
            raise
        output.answer({"root": root, "runs": runs}, lambda: _show_runs(runs), json=json)
        return
    output.answer({"root": root, "checkpoints": steps}, lambda: _show_steps(steps), json=json)


def _show_runs(runs: Sequence[Run]) -> None:
    now = datetime.now(timezone.utc)
    output.table(
        ("run", "steps", "newest", "age", "bytes", "health of the newest"),
        (
            (
                run.name, run.steps, run.newest.name if run.newest else "",
                age(run.newest.created, now) if run.newest else "", output.size(run.nbytes),
                health(run.newest) if run.newest else run.fault,
            )
            for run in runs
        ),
    )  # fmt: skip


def _show_steps(steps: Sequence[Step]) -> None:
    now = datetime.now(timezone.utc)
    # Columns that are empty or the same for all of them are left out.
    columns = ["step", "name", "age", "bytes"]
    extra = {
        "own": any(step.own != step.nbytes for step in steps),
        "ranks": any(step.world_size for step in steps),
        "metric": any(step.metric is not None for step in steps),
        "run": len({step.run for step in steps if step.run}) > 1,
        "tier": any(step.tier for step in steps),
        "format": any(step.format != "holdfast" for step in steps),
    }
    shown = [*columns, *(name for name, there in extra.items() if there), "health"]
    rows = []
    for step in steps:
        cells = {
            "step": "" if step.step is None else step.step, "name": step.name or step.path,
            "age": age(step.created, now), "bytes": output.size(step.nbytes), "own": output.size(step.own),
            "ranks": step.world_size or "", "metric": "" if step.metric is None else f"{step.metric:.6g}",
            "run": step.run or "", "tier": step.tier, "format": step.format, "health": health(step),
        }  # fmt: skip
        rows.append([cells[name] for name in shown])
    output.table(shown, rows)
    for step in steps:
        if step.fault:
            output.say(f"{step.name or step.path}: {step.fault}")


def health(step: Step) -> str:
    """Its health, in a few words."""
    return f"{step.health}, without {', '.join(step.lost)}" if step.lost else step.health


def age(created: str | None, now: datetime) -> str:
    """How long ago that was; empty if it is unknown."""
    try:
        seconds = (now - datetime.fromisoformat((created or "").replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):  # a manifest may say anything here
        return ""
    return output.span(max(seconds, 1.0))
