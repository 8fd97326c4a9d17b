"""``holdfast ls``: the checkpoints of a run with their age, size and health, or the runs of a folder.

`commands` calls it. It reads no tensor, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone

import typer

from holdfast.cli import output
from holdfast.cli.sizes import show_sizes
from holdfast.errors import NotACheckpoint
from holdfast.inspect.runs import Run, runs_in
from holdfast.inspect.survey import Step, survey
from holdfast.run.keep import best_of


def ls(*, root: str, sizes: bool, fast: str | None, headers: bool, json: bool) -> None:
    if sizes and (fast or headers):
        raise typer.BadParameter("--sizes goes without --fast and --headers")
    try:
        if sizes:
            show_sizes(root, json=json)
            return
        steps = survey(root, fast=fast, headers=headers)
    except NotACheckpoint:
        runs = runs_in(root)
        if not runs:
            raise
        output.answer({"root": root, "runs": runs}, lambda: _show_runs(runs), json=json)
        return
    output.answer({"root": root, "checkpoints": steps}, lambda: _show_steps(steps, headers=headers), json=json)


def _say_what_whole_is(steps: Sequence[Step], looked_at: str = "size") -> None:
    """Say below a table that it verifies nothing."""
    if any(step.health == "whole" for step in steps):
        output.say(f"whole: every file has its {looked_at}; holdfast verify reads the bytes")


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
    _say_what_whole_is([run.newest for run in runs if run.newest])


def _show_steps(steps: Sequence[Step], *, headers: bool) -> None:
    now, best = datetime.now(timezone.utc), best_in(steps)
    # Columns that are empty or the same for all steps are left out.
    columns: dict[str, tuple[bool, Callable[[Step], object]]] = {
        "step": (True, lambda s: "" if s.step is None else s.step),
        "name": (True, lambda s: s.name or s.path),
        "age": (True, lambda s: age(s.created, now)),
        "bytes": (True, lambda s: output.size(s.nbytes)),
        "own": (any(s.own != s.nbytes for s in steps), lambda s: output.size(s.own)),
        "ranks": (any(s.world_size for s in steps), lambda s: s.world_size or ""),
        "metric": (any(s.metric is not None for s in steps), lambda s: _metric(s, best)),
        "run": (len({s.run for s in steps if s.run}) > 1, lambda s: s.run or ""),
        "tier": (any(s.tier for s in steps), lambda s: s.tier),
        "format": (any(s.format != "holdfast" for s in steps), lambda s: s.format),
        "health": (True, health),
    }
    shown = {name: cell for name, (is_shown, cell) in columns.items() if is_shown}
    output.table(tuple(shown), ([cell(step) for cell in shown.values()] for step in steps))
    _say_what_whole_is(steps, "size and header" if headers else "size")
    for step in steps:
        if step.fault:
            output.say(f"{step.name or step.path}: {step.fault}")
    if any(step.health == "left behind" for step in steps):
        output.say("left behind: training went back and goes on without these; restore(state, step=…) still loads one")


def best_in(steps: Sequence[Step]) -> int | None:
    """The step with the best metric, as `CheckpointManager.best`; None if the steps did not record which is better."""
    rated = {s.step: s for s in steps if s.step is not None and s.metric is not None and s.health != "left behind"}
    mode = next((rated[step].mode for step in sorted(rated, reverse=True) if rated[step].mode), None)
    return None if mode is None else best_of({step: one.metric for step, one in rated.items()}, mode)


def _metric(step: Step, best: int | None) -> str:
    if step.metric is None:
        return ""
    is_best = step.step == best and step.health != "left behind"
    return f"{step.metric:.6g}{' (best)' if is_best else ''}"


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
