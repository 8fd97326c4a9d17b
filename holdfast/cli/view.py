"""``holdfast view``: an HTML page, written as one file or served to the browser of this machine; or a trace.

`commands` calls it. It overwrites no file but pages of holdfast, and serves on loopback alone.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import typer

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.cli import output
from holdfast.errors import HoldfastError, NotACheckpoint
from holdfast.inspect.runs import run_at
from holdfast.report.timeline import merge
from holdfast.report.trace import Phase, Trace
from holdfast.storage.local.local_place import LocalPlace
from holdfast.view.checkpoint import checkpoint_page, figures
from holdfast.view.diff import diff_page
from holdfast.view.run import run_page
from holdfast.view.server import Served
from holdfast.view.traces import Timeline, read_timeline

_OURS = b'<meta name="generator" content="holdfast '


def view(
    *, path: str, out: str | None, serve: bool, port: int, stats: list[str] | None, timeline: Path | None,
    require: list[str] | None, check: bool | None, against: str | None, browser: bool, json: bool,
) -> None:  # fmt: skip
    if serve and (out or stats):
        raise typer.BadParameter("--serve writes no file and computes statistics on demand: leave out -o and --stats")
    trusted = [Path(key) for key in require] if require else None
    of_run = against is None and run_at(path) is not None
    of_one = serve or stats or timeline or check is not None
    if (of_run or against is not None) and (of_one or (of_run and trusted)):
        raise typer.BadParameter(
            "--serve, --stats, --timeline and --check are for the page of one checkpoint"
            + (f", and so is --require; {path} is a run" if of_run else ": leave out --against")
        )
    if of_run:
        text = run_page(path)
    elif against is not None:
        text = diff_page(holdfast.open(path, require=trusted), holdfast.open(against, require=trusted))
    else:
        try:
            checkpoint = holdfast.open(path, require=trusted)
        except NotACheckpoint:
            if of_one or trusted or not _write_trace(path, out, json=json):
                raise
            return
        spans = read_timeline(LocalPlace(timeline), of=_name(path)) if timeline else None
        if serve:
            _serve(checkpoint, spans, port=port, check=check, browser=browser, json=json)
            return
        text = checkpoint_page(checkpoint, stats=stats or None, timeline=spans, look=check)
    if out == "-":
        sys.stdout.write(text)
        return
    page = LocalPlace(out or f"{_name(path)}.html").absolute()
    _write(page, text.encode())
    if json:
        output.as_json({"page": str(page), "bytes": len(text.encode())})
    else:
        output.say(f"{page}: {output.size(len(text.encode()))}, open it in any browser")
    if browser:
        _browse(page.as_uri())


def _serve(
    checkpoint: Checkpoint, spans: Timeline | None, *, port: int, check: bool | None, browser: bool, json: bool
) -> None:
    try:
        served = Served(
            lambda: checkpoint_page(checkpoint, timeline=spans, look=check, served=True),
            {"statistics": lambda name: figures(checkpoint, name)},
            port=port,
        )
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        raise ValueError(f"port {port} is not free ({error.strerror}): leave out --port, or name another") from None
    with served:
        if json:
            output.as_json({"url": served.url})
        else:
            output.say(f"{served.url}\nOnly this machine can open it, and only with this address. Ctrl-C ends it.")
        sys.stdout.flush()
        if browser:
            _browse(served.url)
        try:
            served.serve_forever()
        except KeyboardInterrupt:  # the way to end it, and no failure
            return


def _name(path: str) -> str:
    text = path.partition("?")[0] if "://" in path else os.path.abspath(path)  # also of "." and ".."
    return text.rstrip("/").rpartition("/")[2].replace("{", "").replace("}", "") or "checkpoint"


def _write(page: LocalPlace, data: bytes) -> None:
    """Write a page, in the place of an older page at most. Raises ValueError for any other file."""
    try:
        start = page.read_start(4096)[0]
    except FileNotFoundError:
        start = _OURS
    if _OURS not in start:
        raise ValueError(f"{page} exists and is not a page of holdfast: name another file with -o")
    if not page.parent.is_dir():
        raise ValueError(f"there is no folder {page.parent}: make it, or name another file with -o")
    page.write_small(data)


def _browse(url: str) -> None:
    import webbrowser

    if not webbrowser.open(url):
        output.say("there is no browser here: open the address yourself")


# Timelines


def _write_trace(path: str, to: str | None, *, json: bool) -> bool:
    """Join timelines into a trace and print the slowest rank of each phase. False if there are none at ``path``."""
    try:
        trace = merge(path)
    except (HoldfastError, OSError):
        return False
    if to == "-":
        raise typer.BadParameter("a trace is a file: name one with -o, or leave it out")
    target = Path(to or f"{path}/trace.json")
    trace.write(target)
    names = ("began", "processes", "spans", "unfinished", "unread", "phases")
    result = {"trace": str(target)} | {name: getattr(trace, name) for name in names}
    output.answer(result, lambda: _show_trace(trace, target), json=json)
    return True


def _show_trace(trace: Trace, target: Path) -> None:
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
    spans = output.span(phase.median), output.span(phase.longest)
    return phase.of, phase.name, str(phase.times), *spans, by, phase.path, often
