"""The command line: which commands there are, and what becomes of an error.

`main` is the console script. Never shows a traceback for what a user can cause; ``--debug`` shows it all the same.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from holdfast.cli import (
    bench,
    convert,
    copy,
    diff,
    doctor,
    du,
    errors,
    gc,
    ls,
    output,
    plan,
    prune,
    repair,
    rescue,
    show,
    timeline,
    unshard,
    verify,
    view,
    watch,
)
from holdfast.cli.codes import Code
from holdfast.report import progress
from holdfast.storage.local import disk
from holdfast.version import __version__

LOOK, CHECK, CHANGE, RUN = "Look", "Check and mend", "Change", "Runs and machines"

_COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    # They are listed in this order, each under the name of its function.
    (LOOK, ls.ls),
    (LOOK, show.show),
    (LOOK, diff.diff),
    (LOOK, du.du),
    (LOOK, plan.plan),
    (LOOK, view.view),
    (CHECK, verify.verify),
    (CHECK, doctor.doctor),
    (CHECK, repair.repair),
    (CHECK, rescue.rescue),
    (CHANGE, convert.convert),
    (CHANGE, unshard.unshard),
    (CHANGE, copy.copy),
    (CHANGE, prune.prune),
    (CHANGE, gc.gc),
    (RUN, watch.watch),
    (RUN, bench.bench),
    (RUN, timeline.timeline),
)

_EVERYWHERE = ("--debug", "--quiet")
"""Options of the program that are understood behind a command too."""

app = typer.Typer(
    name="holdfast", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Paths may be URLs: s3://, gs://, az://, https://. Every command takes --json. holdfast COMMAND --help "
    "tells more; docs/cli.md has an example of each.",
)  # fmt: skip
for _panel, _command in _COMMANDS:
    app.command(_command.__name__, rich_help_panel=_panel)(_command)


def _version(asked: bool) -> None:
    if asked:
        output.say(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show where errors come from.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors; --json is still answered.")] = False,
) -> None:
    """Look at checkpoints, check them, change them, and watch over the runs that write them."""
    output.be_quiet(quiet)
    if quiet:
        context.with_resource(_no_bars())
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_time=False, show_path=debug, markup=False, highlighter=None)
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s", handlers=[handler])


@contextmanager
def _no_bars() -> Iterator[None]:
    before = os.environ.get(progress.VARIABLE)
    os.environ[progress.VARIABLE] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[progress.VARIABLE]
        else:
            os.environ[progress.VARIABLE] = before


def main() -> None:
    """Run the command that the arguments name, and exit."""
    for number in (0, 1, 2):  # whoever started us may have closed them: a checkpoint's file must not get their numbers
        try:
            os.fstat(number)
        except OSError:
            disk.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):  # what an old terminal cannot show is told by its number
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` name; what the program ends with."""
    try:
        return _run(arguments, _in_front(arguments))
    except BrokenPipeError:
        return _closed()


def _run(arguments: Sequence[str], given: list[str]) -> int:
    try:
        # Not in the standalone mode, in which usage errors, interrupts and closed pipes would get codes of their own.
        code: Any = app(given or ["--help"], prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends the program by itself, with a code of its own
            raise BrokenPipeError from None
        return int(ended.code or 0)  # completion ends in this way
    except (Exception, KeyboardInterrupt) as error:
        told = errors.told(error, given, _places(given))
        if told is None or "--debug" in arguments:
            raise
        return _failed(told, arguments)
    if code == Code.INTERRUPTED:  # newer typers tell an interrupt in this way
        return _failed(errors.INTERRUPTED, arguments)
    return int(code or Code.FINE)


def _failed(told: errors.Told, arguments: Sequence[str]) -> int:
    try:
        output.fail(told, as_json="--json" in arguments)
        sys.stderr.flush()
    except SystemExit:  # rich again
        raise BrokenPipeError from None
    return told.code


def _closed() -> int:
    """Whoever read has read enough, as `head` does. Nothing is said, and Python shall not try to flush again."""
    nowhere = disk.open(os.devnull, os.O_WRONLY)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, number)
    return Code.CLOSED


def _places(given: Sequence[str]) -> list[str]:
    """The arguments of the command, without options and their values: which paths it is about."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    words = [word for word in given if word not in _EVERYWHERE]
    command = commands.get(words[0]) if words else None
    if command is None:
        return []
    with command.make_context(words[0], words[1:], resilient_parsing=True) as context:
        found = [context.params.get(one.name) for one in command.params if one.param_type_name == "argument"]
    return [str(one) for one in found if one]


def _in_front(arguments: Sequence[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    moved = [word for word in arguments[:end] if word in _EVERYWHERE]
    return [*moved, *(word for word in arguments[:end] if word not in _EVERYWHERE), *arguments[end:]]
