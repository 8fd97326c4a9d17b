"""What commands say: tables for people, one JSON object for programs.

Every command calls it. Results go to standard output, everything else to standard error. Never decides an exit code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.cli.errors import Told

_quiet = False


def be_quiet(quiet: bool) -> None:
    """From now on say nothing but errors and JSON, or all again."""
    global _quiet
    _quiet = quiet


def as_json(value: object) -> None:
    """One line of JSON on standard output; dataclasses and structs are objects."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


def say(text: str) -> None:
    """A line for people; of any length, so that paths can be copied."""
    if not _quiet:
        Console(soft_wrap=True, highlight=False).print(escape(text))


def plain(text: str) -> str:
    """A text for `marked`, in which brackets are brackets."""
    return escape(text)


def marked(text: str) -> None:
    """A line with rich's marks."""
    if not _quiet:
        Console(soft_wrap=True, highlight=False).print(text)


def aside(text: str) -> None:
    """What is being done, on standard error, if a person is looking."""
    if not _quiet and sys.stderr.isatty():
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[dim]{escape(text)}[/]")


def fail(told: Told, *, as_json: bool) -> None:
    """What went wrong and what to do next, on standard error: two lines for people, or one object."""
    if as_json:
        sys.stderr.write(msgspec.json.encode({"error": told}).decode() + "\n")
        return
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    console.print(f"[bold red]error[/]: {escape(told.text)}")
    if told.next:
        console.print(f"[bold]next[/]:  {escape(told.next)}")


def show(picture: RenderableType) -> None:
    """What rich can draw, as wide as the terminal."""
    if not _quiet:
        Console(highlight=False).print(picture)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows under their headings; nothing if there are none."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(column, overflow="fold")
    for row in rows:
        found.add_row(*(escape(str(cell)) for cell in row))
    if found.rows and not _quiet:
        # Not on a terminal, a table is as wide as it needs: it is searched and cut by other programs.
        console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=1000)
        console.print(found)


def size(nbytes: int) -> str:
    """Bytes as people say them."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
