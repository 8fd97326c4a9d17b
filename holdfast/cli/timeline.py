"""``holdfast timeline``: join what every rank recorded of its saves and loads into one trace.

`app` calls it. It never changes the records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import Json
from holdfast.report.slowest import Phase
from holdfast.report.timeline import merge
from holdfast.report.trace import Trace


def timeline(
    folder: Annotated[Path, typer.Argument(help="The folder of HOLDFAST_TIMELINE or holdfast.timeline.")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the trace goes; FOLDER/trace.json by default.")
    ] = None,
    json: Json = False,
) -> None:
    """Join a timeline into a trace for Perfetto or Chrome, and say who was the slowest in each phase."""
    trace, target = merge(folder), to or folder / "trace.json"
    trace.write(target)
    names = ("began", "processes", "spans", "unfinished", "unread", "phases")
    result = {"trace": str(target)} | {name: getattr(trace, name) for name in names}
    output.answer(result, lambda: _show(trace, target), json=json)


def _show(trace: Trace, target: Path) -> None:
    output.table(
        ("of", "phase", "times", "median", "longest", "by", "in", "most often"), (_row(phase) for phase in trace.phases)
    )
    broken = f", {trace.unfinished} of them unfinished" if trace.unfinished else ""
    unread = f"; {trace.unread} lines could not be read" if trace.unread else ""
    processes = "1 process" if trace.processes == 1 else f"{trace.processes} processes"
    output.say(f"{target}: {trace.spans} spans of {processes} from {trace.began} on{broken}{unread}")
    output.say("open it in https://ui.perfetto.dev or chrome://tracing")


def _row(phase: Phase) -> tuple[str, ...]:
    by = phase.host if phase.rank is None else f"rank {phase.rank} ({phase.host})"
    often = "" if phase.often is None else f"rank {phase.often}"
    median, longest = _seconds(phase.median), _seconds(phase.longest)
    return phase.of, phase.name, str(phase.times), median, longest, by, phase.path, often


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
