"""``holdfast watch``: how a running job saves, shown again and again, on its machine or another.

`commands` calls it. It reads the journal of the run and the manifests of its steps, no data file, and changes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from shlex import quote

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from holdfast.cli import output
from holdfast.cli.output import ago, size, span
from holdfast.errors import NotACheckpoint, StorageError
from holdfast.inspect.history import History, Past, ends_with
from holdfast.inspect.standing import Save, Standing, rate_of, standing

ROWS = 8
"""Saves that are listed."""

_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = {"running": "green", "saving": "cyan", "ended": "blue", "silent": "red", "unknown": "yellow"}


def watch(*, root: str, once: bool, every: float, json: bool) -> None:
    past = Past(root)
    history = past.look()
    if json:
        output.as_json(standing(root, history))
    elif once:
        output.show(picture(standing(root, history), history))
    if once:
        return
    try:
        if json:
            while history := _next(past, every) or history:
                output.as_json(standing(root, history))
                sys.stdout.flush()
        elif sys.stdout.isatty():
            _live(root, past, history, every)
        else:
            _tail(past, history, every)
    except KeyboardInterrupt:  # the way to end it, and no failure
        return


def _next(past: Past, every: float) -> History | None:
    """The history after a pause; None if it cannot be read now."""
    time.sleep(every)
    try:
        return past.look()
    except (NotACheckpoint, StorageError):  # deleted, or the network is down: the next look may succeed
        return None


def _live(root: str, past: Past, history: History, every: float) -> None:
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            # Ages grow while the root cannot be read.
            stale = time.time() - history.at if time.time() - history.at > 2 * every + 5 else None
            live.update(picture(standing(root, history), history, stale=stale), refresh=True)
            history = _next(past, every) or history


def _tail(past: Past, history: History, every: float) -> None:
    """For a pipe: a line for each save from now on."""
    printed = {(entry.step, entry.began) for entry in history.entries}
    while True:
        for entry in history.entries:
            if (entry.step, entry.began) not in printed:
                printed.add((entry.step, entry.began))
                when = datetime.fromtimestamp(entry.began).strftime("%Y-%m-%d %H:%M:%S")
                output.say(f"{when} step {entry.step} {entry.outcome}: {entry.error or size(entry.bytes)}")
                sys.stdout.flush()
        history = _next(past, every) or history


# The picture


def picture(now: Standing, history: History, *, stale: float | None = None) -> RenderableType:
    """What `watch` shows of a look."""
    colour = _COLOURS[now.state]
    head = Text.assemble(
        ("● ", colour), (_state(now), f"bold {colour}"), ("   " + now.root, "dim"), overflow="ellipsis"
    )
    head.no_wrap = True
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(overflow="fold")
    for name, words in _lines(now):
        rows.add_row(name, Text(words) if isinstance(words, str) else words)
    parts: list[RenderableType] = [head, rows]
    if history.entries:
        parts += ["", _saves(history)]
    if stale is not None:
        parts.append(Text(f"the root cannot be read; this is from {ago(stale)}", "red"))
    return Group(*parts)


def _state(now: Standing) -> str:
    step = "" if now.step is None else f" at step {now.step:,}"
    if now.state == "silent":
        return f"silent for {span(now.heard)}{step}: killed, hung, or it cannot write its journal"
    if now.state == "ended":
        return f"ended{step}, {ago(now.heard)}"
    if now.state == "unknown":
        if now.fast_of is not None:
            return "the fast tier of a run, whose journal is with its root"
        return f"steps without a journal, so it is unknown whether it runs; the last one is{step[3:] or ' not known'}"
    return f"running{step}"


def _lines(now: Standing) -> list[tuple[str, str | Text]]:
    lines: list[tuple[str, str | Text]] = []
    if now.fast_of is not None:
        lines.append(("root", f"{now.fast_of}: holdfast watch {quote(now.fast_of)}"))
    ranks = [] if now.ranks is None else [output.count(now.ranks, "rank")]
    pace = [] if now.step_seconds is None else [f"{span(now.step_seconds)} a step"]
    start = [f"start {now.starts}"] if now.starts > 1 else []
    lines.append(("run", ", ".join([*pace, *ranks, *start]) or "–"))
    for one in now.saving:
        step = f"step {one.step:,}" if one.step is not None else one.name
        since = "" if one.since is None else f" for {span(now.at - one.since)}"
        done = f": {one.durable:,} of {one.ranks:,} ranks have their files in place" if one.ranks and one.name else ""
        lines.append(("saving", Text(f"{step}{since}{done}", "cyan")))
    if now.last is not None:
        lines.append(("last save", _last(now.last)))
    if now.next_step is not None:
        wait = "" if now.next_in is None else f" in about {span(now.next_in)}" if now.next_in else " any moment"
        lines.append(("next save", f"step {now.next_step:,}{wait}"))
    counts = [f"{now.saved:,} saved", f"{now.failed:,} failed", f"{now.skipped:,} skipped"]
    present = "none is there now" if not now.there else f"{len(now.there):,} there now"
    present += f", {len(now.left_behind):,} of them left behind" if now.left_behind else ""
    lines.append(("saves", f"{', '.join(c for c in counts if not c.startswith('0 ')) or 'none yet'}; {present}"))
    if now.failure is not None:
        since = f"{now.failed_since:,} since the last save; " if now.failed_since else ""
        words = f"{since}step {now.failure.step:,}, {ago(now.failure.age)}: {now.failure.error}"
        lines.append(("failure", Text(words, "red" if now.failed_since else "yellow")))
    if now.unreadable:
        more = f" (and {len(now.unreadable) - 1:,} more)" if len(now.unreadable) > 1 else ""
        lines.append(("unreadable", Text(next(iter(now.unreadable.values())) + more, "red")))
    if now.best is not None:
        lines.append(("best", f"{now.best.metric:.6g} at step {now.best.step:,}"))
    if now.backlog is not None:
        words = f"{output.count(now.backlog, 'step')} to be uploaded" if now.backlog else "all uploaded"
        lines.append(("backlog", Text(words, "yellow" if now.backlog > 1 else "")))
    if any(now.stalls):
        lines.append(("stalls", f"{spark(now.stalls)}  {_range(now.stalls, span)}"))
    if any(now.rates):
        lines.append(("rates", f"{spark(now.rates)}  {_range(now.rates, _rate)}"))
    return lines


def _last(last: Save) -> str:
    took = "" if last.seconds is None else f" in {span(last.seconds)}"
    rate = "" if last.rate is None else f" ({_rate(last.rate)})"
    stall = "" if last.stall is None else f", training waited {span(last.stall)}"
    return f"step {last.step:,}, {ago(last.age)}: {size(last.bytes)}{took}{rate}{stall}"


def _saves(history: History) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    rated = any(entry.metric is not None for entry in history.entries[-ROWS:])
    newest = {id(entry) for entry in history.saved}
    columns = ["step", "age", "took", "stall", "size", "rate", *(["metric"] if rated else []), "outcome"]
    for column in columns:
        table.add_column(column, justify="left" if column == "outcome" else "right", no_wrap=column != "outcome")
    for entry in history.entries[-ROWS:]:
        rate, timed, saved = rate_of(entry), bool(entry.start), entry.outcome == "saved"
        fate = _fate(entry.step, history) if id(entry) in newest else ", replaced"
        words = f"{entry.outcome}{fate}" if saved else f"{entry.outcome}: {entry.error}"
        style = "" if saved else "red" if entry.outcome == "failed" else "yellow"
        cells = [
            f"{entry.step:,}", span(max(history.at - entry.began, 0.0)), span(entry.seconds) if timed else "–",
            span(entry.stall) if timed else "–", size(entry.bytes), "–" if rate is None else _rate(rate),
            *([] if not rated else ["–" if entry.metric is None else f"{entry.metric:.5g}"]),
        ]  # fmt: skip
        table.add_row(*cells, Text(words, style, overflow="ellipsis", no_wrap=True))
    return table


def _fate(step: int, history: History) -> str:
    """What became of a saved step that is not there as it was saved."""
    if step in history.there:
        return ", left behind" if step in history.behind else ""
    return ", unreadable" if any(ends_with(name, step) for name in history.unreadable) else ", swept"


def spark(values: Sequence[float | None]) -> str:
    """A line of blocks as high as the values; × for None."""
    top = max((value for value in values if value is not None), default=0.0)
    return "".join(
        "×" if value is None else _LEVELS[min(int(value / top * 8), 7) if top > 0 else 0] for value in values
    )


def _range(values: Sequence[float | None], text: Callable[[float], str]) -> str:
    known = [value for value in values if value is not None]
    low, high = text(min(known)), text(max(known))
    return low if low == high else f"{low} to {high}"


def _rate(rate: float) -> str:
    return f"{size(round(rate))}/s"
