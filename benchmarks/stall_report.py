"""The figures of the stall bench as a table for people.

Called by the bench at its end, and for each segment as it comes.
Never computes a figure: the rows do.
"""

from __future__ import annotations

from statistics import median

from rich.table import Table

from benchmarks import report
from benchmarks.bar import Bar
from benchmarks.stall_rows import Row, Rows
from benchmarks.stall_systems import BARE, HOLDFAST

_COLUMNS = (
    "system", "training\ns", "added\ns a save", "added\nby best", "call ms\nmedian", "call ms\nmax",
    "hook ms\nmedian", "hook ms\nmax", "waited\ns max", "durable\nmedian s", "first\nsave s", "later\nsaves s",
    "CPU s\na save", "extra\nMiB",
)  # fmt: skip


def show(rows: Rows, bars: list[Bar], facts: dict[str, object]) -> None:
    """Print everything."""
    console = report.tell_facts(facts, width=166)
    table = Table(title="saves beside training", title_justify="left", title_style="bold")
    for i, column in enumerate(_COLUMNS):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows.all.values():
        table.add_row(*_cells(row, rows), style="bold" if row.system in (*HOLDFAST, *BARE) else None)
    console.print(table)
    for row in rows.all.values():
        if row.error:
            console.print(f"  [red]{row.system} failed[/red]: {row.error}", highlight=False, soft_wrap=True)
        if row.over > 0:
            console.print(
                f"  {row.system}: a last save outlasted its segment by {row.over:.2f} s, which are not counted"
            )
    report.show_bars(console, bars)


def _cells(row: Row, rows: Rows) -> list[str]:
    memory = rows.memory(row.system)
    return [
        row.system,
        _number(median(row.seconds) if row.seconds else None),
        _number(rows.added(row.system)),
        _number(rows.added(row.system, best=True)),
        _number(row.middle("call"), 1e3),
        _number(row.worst("call"), 1e3),
        _number(row.middle("hook"), 1e3),
        _number(row.worst("hook"), 1e3),
        _number(row.worst("waited")),
        _number(row.middle("end_to_end")),
        _number(row.middle("end_to_end", first=True)),
        _number(row.middle("end_to_end", first=False)),
        _number(rows.cpu(row.system)),
        "" if memory is None else f"{memory / 2**20:.0f}",
    ]


def _number(value: float | None, times: float = 1) -> str:
    return "" if value is None else f"{value * times:.2f}"


def line(row: Row) -> str:
    """One segment as it comes."""
    saves = row.saves[-len(row.segments[-1][0].saves) :] if row.segments[-1][0].saves else []
    calls = ", ".join(f"{save.stall * 1e3:.0f} ms, durable in {save.end_to_end:.2f} s" for save in saves)
    return f"{row.system}: {row.seconds[-1]:.2f} s of training" + (f"; stalls {calls}" if calls else "")
