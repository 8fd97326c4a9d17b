"""The figures of a run as tables for people.

Called by the bench at its end.
Never computes a figure: rows and bars do.
"""

from __future__ import annotations

from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.bar import Bar
from benchmarks.rows import Row, Rows

_COLUMNS = (
    "system", "median s", "best s", "GB/s", "its time\nto holdfast's", "CPU s\nper GB", "extra MiB\nworst rank",
    "read/needed\nread calls", "read/needed\nas it says", "read/needed\nfrom disk", "on disk\nto tensors",
)  # fmt: skip


def tell_facts(facts: dict[str, object], *, width: int) -> Console:
    """Print what one must know to read the figures; the console, so wide where there is no terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=width)
    for name, value in facts.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False)
    return console


def show(rows: Rows, bars: list[Bar], facts: dict[str, object]) -> None:
    """Print everything."""
    console = tell_facts(facts, width=146)
    for work, found in rows.works().items():
        table = Table(title=f"{work} ({found[0].nbytes / 1e9:.2f} GB)", title_justify="left", title_style="bold")
        for i, column in enumerate(_COLUMNS):
            table.add_column(column, justify="left" if i == 0 else "right")
        for row in found:
            table.add_row(*_cells(row, rows), style="bold" if row.system == "holdfast" else None)
        console.print(table)
        for row in found:
            if row.error:
                console.print(f"  [red]{row.system} failed[/red]: {row.error}", highlight=False)
    show_bars(console, bars)


def show_bars(console: Console, bars: list[Bar]) -> None:
    """Print what must be cleared, and whether it was."""
    table = Table(title="bars", title_justify="left", title_style="bold")
    for column in ("bar", "limit", "measured", "best of each", "floor", ""):
        table.add_column(column, justify="left" if column == "bar" else "right")
    for bar in bars:
        limit = f"≥ {bar.least:g}{bar.unit}" if bar.least is not None else f"≤ {bar.most:g}{bar.unit}"
        verdict = "[green]met[/green]" if bar.met else "[red]missed[/red]"
        numbers = [_number(figure, bar.unit) for figure in (bar.measured, bar.best, bar.floor)]
        table.add_row(bar.what, limit, *numbers, verdict)
    console.print(table)


def _cells(row: Row, rows: Rows) -> list[str]:
    return [
        row.system,
        _number(row.median),
        _number(row.best),
        _number(row.rate),
        _number(rows.ratio(row.work, row.system, "holdfast"), "×"),
        _number(row.cpu_per_gb),
        f"{max(row.memory) / 2**20:.0f}" if row.memory else "",
        "mmap" if row.mapped and row.seconds and "load" in row.work else _number(_worst(row.read_ratio)),
        _number(_worst(row.told_ratio)),
        _number(_worst(row.device_ratio) if "warm" not in row.work else None),
        _number(row.disk / row.nbytes if row.disk else None),
    ]


def _worst(values: list[float]) -> float | None:
    return max(values, default=None)


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return ""
    return f"{value:.3f}{unit}" if value < 10 else f"{value:.1f}{unit}"


def line(row: Row) -> str:
    """One repetition as it comes."""
    return f"{row.work}: {row.system} {row.seconds[-1]:.3f} s (median {median(row.seconds):.3f})"
