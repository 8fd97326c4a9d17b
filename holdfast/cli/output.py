"""What commands say: tables for people, one JSON object for programs.

Every command calls it. Results go to standard output, everything else to standard error. Never decides an exit code,
and never lets a name or a path move a terminal's cursor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    sys.stdout.write(_encoded(value) + "\n")


def _encoded(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a file's name that is no text: its odd bytes as Python has them, lone surrogates
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":"))


def say(*parts: str | tuple[str, str]) -> None:
    """A line for people, of texts and of texts with their styles; of any length, so that paths can be copied."""
    if not _quiet:
        _console(soft_wrap=True).print(_line(parts))


def aside(text: str) -> None:
    """What is being done, on standard error, if a person is looking."""
    if not _quiet and sys.stderr.isatty():
        _console(stderr=True, soft_wrap=True).print(_line([(text, "dim")]))


def fail(told: Told, *, as_json: bool) -> None:
    """What went wrong and what to do next, on standard error: two lines for people, or one object."""
    if as_json:
        sys.stderr.write(_encoded({"error": told}) + "\n")
        return
    console = _console(stderr=True, soft_wrap=True)
    console.print(_line([("error", "bold red"), f": {told.text}"]))
    if told.next:
        console.print(_line([("next", "bold"), f":  {told.next}"]))


def visible(text: str) -> str:
    """A text in which whatever moves a cursor, turns the direction of letters or is no letter is told by its number."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _line(parts: Iterable[str | tuple[str, str]]) -> Text:
    found = Text()
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        found.append("\n".join(visible(line) for line in text.split("\n")), style)
    return found


def _console(*, stderr: bool = False, soft_wrap: bool = False, width: int | None = None) -> Console:
    return Console(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False)


def show(picture: RenderableType) -> None:
    """What rich can draw, as wide as the terminal."""
    if not _quiet:
        _console().print(picture)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Rows under their headings; nothing if there are none."""
    found = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        found.add_column(Text(visible(column)), overflow="fold")
    for row in rows:
        found.add_row(*(Text(visible(str(cell))) for cell in row))
    if found.rows and not _quiet:
        # Not on a terminal, a table is as wide as it needs: it is searched and cut by other programs.
        _console(width=None if sys.stdout.isatty() else _WIDEST).print(found)


_WIDEST = 1 << 20
"""Letters of a line that nobody sees at a terminal."""


def size(nbytes: int) -> str:
    """Bytes as people say them."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
