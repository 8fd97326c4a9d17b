"""``holdfast doctor``: what is wrong with this machine, a folder, a store or a checkpoint, and how to repair it.

`commands` calls it. It shows no secret, and leaves nothing behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from holdfast.cli import output
from holdfast.cli.errors import Code
from holdfast.cli.options import bytes_of, seconds_of
from holdfast.doctor.bench import Benched, Row
from holdfast.doctor.bench import bench as measured
from holdfast.doctor.finding import Finding
from holdfast.doctor.sections import sections_of

_CODES = {
    "damaged": Code.DAMAGED, "no checkpoint": Code.NOT_A_CHECKPOINT, "storage": Code.STORAGE, "mismatch": Code.MISMATCH,
}  # fmt: skip


def doctor(
    *, path: str | None, read_only: bool, bench: bool, size: str, state: str | None, mtbf: str, step: str | None,
    json: bool,
) -> None:  # fmt: skip
    if bench:
        if path is None:
            raise typer.BadParameter("--bench needs a PATH: the folder or the place in a store to measure")
        _bench(path, size=size, state=state, mtbf=mtbf, step=step, json=json)
        return
    sections: dict[str, list[Finding]] = {}
    for section, findings in sections_of(path, write=not read_only):
        sections[section] = list(findings)
        if not json:
            _show(section, sections[section])
    everything = [finding for findings in sections.values() for finding in findings]
    failed = [one for one in everything if one.verdict == "fail"]
    if json:
        output.as_json({"well": not failed, **sections})
    else:
        warned = sum(one.verdict == "warn" for one in everything)
        output.say(f"{len(everything)} checks: {len(failed)} failed, {warned} warnings")
    raise typer.Exit(_CODES.get(failed[0].kind, Code.FAILED) if failed else Code.FINE)


_MARKS = {
    "ok": ("ok  ", "green"), "absent": ("--  ", "dim"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red"),
}  # fmt: skip


def _show(section: str, findings: list[Finding]) -> None:
    output.say((section, "bold"))
    for one in findings:
        output.say("  ", _MARKS[one.verdict], f" {one.name}: {one.text}")
        if one.mend:
            output.say("       ", ("->", "dim"), f" {one.mend}")


# With --bench


def _bench(root: str, *, size: str, state: str | None, mtbf: str, step: str | None, json: bool) -> None:
    """Measure a disk or a store, bare and through holdfast, and say how often to save there."""
    of_state = None if state is None else bytes_of(state)
    between, of_step = seconds_of(mtbf), None if step is None else seconds_of(step)
    with _ended_gently():
        done = measured(
            root, bytes_of(size), tell=lambda row: None if json else output.progress(f"{row.what}: {_rate(row)}")
        )
    nbytes = of_state or done.nbytes
    advice = done.advice(nbytes, between, of_step or 1.0)
    if json:
        rows = [{"what": row.what, "nbytes": row.nbytes, "seconds": row.seconds, "rate": row.rate} for row in done.rows]
        output.as_json(output.fields(done) | {"rows": rows, "mtbf": between, "state": nbytes, "advice": advice})
        return
    _show_rows(done)
    output.say(
        f"a state of {output.size(nbytes)} a rank: saved in {advice.save:.1f} s, of which training waits "
        f"{advice.stall:.2f} s at most"
    )
    steps = f" ({advice.steps} steps)" if of_step is not None else ""
    output.say(f"with a failure every {output.span(between)}: save every {output.span(advice.seconds)}{steps}")
    output.say(f"{advice.lost:.1%} of the time is lost then, to saves and to work done again")


@contextmanager
def _ended_gently() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the benchmark, so that it cleans up, unless they are ignored, as under nohup."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handled = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rate(row: Row) -> str:
    if row.what == "small files":
        return f"{row.files / row.seconds:.0f} files/s"
    return f"{row.rate / 1e9:.2f} GB/s"


def _show_rows(done: Benched) -> None:
    raw = {row.what: row.rate for row in done.rows}
    of = {"save": "raw write", "load": "raw read"}
    output.table(
        ("", "moved", "seconds", "rate", "of raw"),
        (
            (
                row.what, output.size(row.nbytes), f"{row.seconds:.2f}", _rate(row),
                f"{row.rate / raw[of[row.what]]:.0%}" if row.what in of else "",
            )
            for row in done.rows
        ),
    )  # fmt: skip
    if not done.direct:
        output.say("there is no direct I/O here: what is read may come from memory")
