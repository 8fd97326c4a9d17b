"""``holdfast ls``: the checkpoints of a root, their age, size and health.

`app` calls it. It reads no tensor, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import Json
from holdfast.inspect.survey import Step, survey


def ls(
    root: Annotated[str, typer.Argument(help="A folder or URL with checkpoints in it, or one checkpoint.")],
    fast: Annotated[str | None, typer.Option("--fast", help="The fast tier of the same run, a local folder.")] = None,
    headers: Annotated[bool, typer.Option("--headers", help="Check the header of every data file too.")] = False,
    json: Json = False,
) -> None:
    """List checkpoints: step, age, size, health, and on which tier, of which run, with which metric if that is told."""
    steps = survey(root, fast=fast, headers=headers)
    output.answer({"root": root, "checkpoints": steps}, lambda: _show(steps), json=json)


def _show(steps: Sequence[Step]) -> None:
    now = datetime.now(timezone.utc)
    # Columns that are empty or the same for all of them are left out.
    columns = ["step", "name", "age", "bytes"]
    runs = {step.run for step in steps if step.run}
    extra = {
        "own": any(step.own != step.nbytes for step in steps),
        "ranks": any(step.world_size for step in steps),
        "metric": any(step.metric is not None for step in steps),
        "run": len(runs) > 1,
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
    """How long ago that was, in one unit; empty if it is unknown."""
    if created is None:
        return ""
    try:
        seconds = (now - datetime.fromisoformat(created.replace("Z", "+00:00"))).total_seconds()
    except (ValueError, TypeError):  # a manifest may say anything here
        return ""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
