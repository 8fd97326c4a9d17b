"""``holdfast bench``: how fast a disk or a store is, and how often to save on it.

`app` calls it. It leaves nothing behind, however it ends.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.convert import bytes_of
from holdfast.cli.options import Json
from holdfast.doctor.bench import Benched, Row
from holdfast.doctor.bench import bench as measured

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def bench(
    root: Annotated[str, typer.Argument(help="A folder, or a place in a store: a path or a URL.")],
    size: Annotated[str, typer.Option("--size", help="How much is written and read.")] = "1GB",
    state: Annotated[
        str | None, typer.Option("--state-size", metavar="SIZE", help="What one rank saves: for the advice.")
    ] = None,
    mtbf: Annotated[
        str, typer.Option("--mtbf", metavar="TIME", help="Between failures of the job: 30m, 8h, 2d.")
    ] = "24h",
    step: Annotated[
        str | None,
        typer.Option("--step-time", metavar="TIME", help="Of one training step: the advice is in steps too."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure a disk or a store, bare and through holdfast, and say how often to save; cleans up after itself."""
    of_state = None if state is None else bytes_of(state)
    between, of_step = seconds_of(mtbf), None if step is None else seconds_of(step)
    with _ended_gently():
        done = measured(
            root, bytes_of(size), tell=lambda row: None if json else output.progress(f"{row.what}: {_rate(row)}")
        )
    advice = done.advice(of_state or done.nbytes, between, of_step or 1.0)
    if json:
        rows = [{"what": row.what, "nbytes": row.nbytes, "seconds": row.seconds, "rate": row.rate} for row in done.rows]
        state_bytes = of_state or done.nbytes
        output.as_json(output.fields(done) | {"rows": rows, "mtbf": between, "state": state_bytes, "advice": advice})
        return
    _show(done)
    state_told, lasts = output.size(of_state or done.nbytes), f"{advice.save:.1f} s"
    output.say(
        f"a state of {state_told} a rank: saved in {lasts}, of which training waits {advice.stall:.2f} s at most"
    )
    steps = f" ({advice.steps} steps)" if of_step is not None else ""
    output.say(f"with a failure every {time_of(between)}: save every {time_of(advice.seconds)}{steps}")
    output.say(f"{advice.lost:.1%} of the time is lost then, to saves and to work done again")


def seconds_of(text: str) -> float:
    """``90``, ``30m``, ``8h`` or ``2d`` in seconds. Raises typer.BadParameter."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if parts is None or parts[2] not in _SECONDS or not float(parts[1]) > 0:
        raise typer.BadParameter(f"{text} is no time: 90s, 30m, 8h, 2d")
    return float(parts[1]) * _SECONDS[parts[2]]


def time_of(seconds: float) -> str:
    """A length of time, such as 30 min."""
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.3g} s"


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


def _show_progress(row: Row) -> None:
    output.progress(f"{row.what}: {_rate(row)}")


def _rate(row: Row) -> str:
    if row.what == "small files":
        return f"{row.files / row.seconds:.0f} files/s"
    return f"{row.rate / 1e9:.2f} GB/s"


def _show(done: Benched) -> None:
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
