"""The figures of `benchmarks.cloud` as tables for people.

Called by the bench at its end, and for each repetition as it comes.
Never computes a figure: the rows do.
"""

from __future__ import annotations

from statistics import median

from rich.table import Table

from benchmarks import report
from benchmarks.bar import Bar
from benchmarks.cloud_rows import Row, Rows
from benchmarks.cloud_systems import HOLDFAST

_COLUMNS = (
    "system", "median s", "best s", "MB/s", "its time\nto holdfast's", "CPU s\nper GiB", "extra MiB\nworst rank",
    "requests", "on the wire\nto tensors", "read/needed\nas it says", "CPU s of\nthe proxy",
)  # fmt: skip


def show(rows: Rows, bars: list[Bar], facts: dict[str, object]) -> None:
    """Print everything."""
    console = report.tell_facts(facts, width=150)
    for (link, work), found in rows.tables().items():
        title = f"{work}; {link} ({found[0].nbytes / 1e9:.2f} GB)"
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in found:
            table.add_row(*_cells(row, rows), style="bold" if row.system == HOLDFAST else None)
        console.print(table)
        for row in found:
            if row.error:
                console.print(f"  [red]{row.system} failed[/red]: {row.error}", highlight=False)
    report.show_bars(console, bars)


def _cells(row: Row, rows: Rows) -> list[str]:
    return [
        row.system,
        _number(row.median),
        _number(row.best),
        _number(row.nbytes / row.median / 1e6 if row.median else None),
        _number(rows.times(row.link, row.work, row.system, HOLDFAST), "×"),
        _number(row.cpu_per_gib),
        f"{max(row.memory) / 2**20:.0f}" if row.memory else "",
        f"{median(row.requests):.0f}" if row.requests else "",
        _number(row.ratio),
        _number(max(row.told, default=None)),
        _number(median(row.proxy) if row.proxy else None),
    ]


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value:.3f}{unit}" if value < 10 else f"{value:.1f}{unit}"


def line(row: Row) -> str:
    """One repetition as it comes."""
    middle = median(row.seconds)
    return f"{row.link}: {row.work}: {row.system} {row.seconds[-1]:.3f} s (median {middle:.3f})"
