"""``holdfast timeline``: what every rank wrote down while it saved and loaded, joined into one trace.

Called by `app`. Never changes what was written down.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.report.slowest import Phase
from holdfast.report.timeline import merge


def timeline(
    folder: Annotated[Path, typer.Argument(help="The folder of HOLDFAST_TIMELINE or holdfast.timeline.")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the trace goes; FOLDER/trace.json by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Join a timeline into a trace for Perfetto or Chrome, and say who was the slowest in each phase."""
    trace, target = merge(folder), to or folder / "trace.json"
    trace.write(target)
    told = {name: getattr(trace, name) for name in ("began", "processes", "spans", "unfinished", "unread", "phases")}
    if json:
        output.as_json({"trace": str(target), **told})
        return
    output.table(
        ("of", "phase", "times", "median", "longest", "by", "in", "most often"), (_row(phase) for phase in trace.phases)
    )
    broken = f", {trace.unfinished} of them unfinished" if trace.unfinished else ""
    unread = f"; {trace.unread} lines could not be read" if trace.unread else ""
    output.say(f"{target}: {trace.spans} spans of {_processes(trace.processes)} from {trace.began} on{broken}{unread}")
    output.say("open it in https://ui.perfetto.dev or chrome://tracing")


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"


def _row(phase: Phase) -> tuple[str, ...]:
    by = phase.host if phase.rank is None else f"rank {phase.rank} ({phase.host})"
    often = "" if phase.often is None else f"rank {phase.often}"
    median, longest = _seconds(phase.median), _seconds(phase.longest)
    return phase.of, phase.name, str(phase.times), median, longest, by, phase.path, often


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
