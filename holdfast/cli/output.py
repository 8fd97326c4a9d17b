"""What commands print: tables for people, or one JSON object for programs.

Every command calls it. Results go to standard output, everything else to standard error. It never decides an exit
code, and never lets a name or a path move a terminal's cursor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from holdfast.cli.errors import Failure

_quiet = False


def be_quiet(quiet: bool) -> None:
    """From now on print errors and JSON only, or everything again."""
    global _quiet
    _quiet = quiet


@contextmanager
def no_bars() -> Iterator[None]:
    """Inside the block no command shows a progress bar."""
    from holdfast.report.progress import VARIABLE

    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def answer(value: object, show: Callable[[], None], *, json: bool) -> None:
    """The result of a command: as JSON, or as ``show`` prints it for people."""
    as_json(value) if json else show()


def fields(value: object, *properties: str) -> dict[str, object]:
    """The fields of a dataclass for JSON, and these properties of it."""
    return {name: getattr(value, name) for name in (*value.__dataclass_fields__, *properties)}  # type: ignore[attr-defined]


def as_json(value: object) -> None:
    """One line of JSON on standard output; dataclasses and structs are objects."""
    sys.stdout.write(_encoded(value) + "\n")


def _encoded(value: object) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # a file's name that is no text: its odd bytes as Python has them, lone surrogates
        return json.dumps(msgspec.to_builtins(value), separators=(",", ":"))


def say(*parts: str | tuple[str, str]) -> None:
    """Print a line for people: texts, and texts with a style. Lines are not wrapped, so that paths can be copied."""
    if not _quiet:
        _console(soft_wrap=True).print(_line(parts))


def progress(text: str) -> None:
    """What is being done, on standard error, if that is a terminal."""
    if not _quiet and sys.stderr.isatty():
        _console(stderr=True, soft_wrap=True).print(_line([(text, "dim")]))


def fail(failure: Failure, *, as_json: bool) -> None:
    """What went wrong and what to do next, on standard error: two lines for people, or one JSON object."""
    if as_json:
        sys.stderr.write(_encoded({"error": failure}) + "\n")
        return
    console = _console(stderr=True, soft_wrap=True)
    console.print(_line([("error", "bold red"), f": {failure.text}"]))
    if failure.next:
        console.print(_line([("next", "bold"), f":  {failure.next}"]))


def visible(text: str) -> str:
    """The text with an escape for each character that cannot be printed, moves a cursor or turns the direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _line(parts: Iterable[str | tuple[str, str]]) -> Text:
    line = Text()
    for part in parts:
        text, style = (part, "") if isinstance(part, str) else part
        line.append("\n".join(map(visible, text.split("\n"))), style)
    return line


def _console(*, stderr: bool = False, soft_wrap: bool = False, width: int | None = None) -> Console:
    return Console(stderr=stderr, soft_wrap=soft_wrap, width=width, highlight=False)


def show(picture: RenderableType) -> None:
    """Print what rich can draw, as wide as the terminal."""
    if not _quiet:
        _console().print(picture)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, gap: bool = False) -> None:
    """Print rows under their headings, with ``gap`` below a blank line; nothing if there are no rows."""
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        drawn.add_column(Text(visible(column)), overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(visible(str(cell))) for cell in row))
    if not drawn.rows:
        return
    if gap:
        say("")
    if _quiet:
        return
    if sys.stdout.isatty():
        _console().print(drawn)
        return
    # In a pipe, a table is as wide as its cells need, and no line ends with blanks: other programs search and cut it.
    console = _console(width=_WIDEST)
    with console.capture() as printed:
        console.print(drawn)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in printed.get().splitlines()))


_WIDEST = 1 << 20
"""Columns of a line that is not printed to a terminal."""


def count(number: int, what: str) -> str:
    """A number of things, such as 1 tensor or 1,200 tensors."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(nbytes: int) -> str:
    """A number of bytes, such as 1.5 GB."""
    amount, unit = float(nbytes), "B"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"


def span(seconds: float | None) -> str:
    """A length of time, such as 1 h 20 min."""
    if seconds is None:
        return "–"
    if seconds < 0.00095:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 0.0995:
        return f"{seconds * 1000:.{0 if seconds >= 0.00995 else 1}f} ms"
    if seconds < 99.5:
        return f"{seconds:.{2 if seconds < 0.995 else 1 if seconds < 9.95 else 0}f} s"
    for unit, name, below, small in ((60, "min", 60, "s"), (3600, "h", 48, "min")):
        if seconds < unit * below:
            whole, rest = divmod(seconds, unit)
            part = int(rest / (1 if small == "s" else 60))
            return f"{whole:.0f} {name} {part} {small}" if part and whole < 10 else f"{whole:.0f} {name}"
    return f"{seconds / 86400:.1f} days"


def ago(seconds: float | None) -> str:
    """How long ago something was."""
    return "a while ago" if seconds is None else "just now" if seconds < 1 else f"{span(seconds)} ago"
