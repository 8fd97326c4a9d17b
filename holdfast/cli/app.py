"""The command line: the list of commands, and what becomes of their errors.

`main` is the console script. It shows no traceback for an error that a user can cause, unless ``--debug`` is given.
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
    ls,
    mend,
    output,
    plan,
    prune,
    show,
    timeline,
    view,
    watch,
)
from holdfast.cli.errors import Code
from holdfast.ondisk.version import __version__
from holdfast.report import progress
from holdfast.storage.local import disk

LOOK, CHECK, CHANGE, RUN = "Look", "Check and mend", "Change", "Runs and machines"

_COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    # Help lists them in this order, each under the name of its function.
    (LOOK, ls.ls),
    (LOOK, show.show),
    (LOOK, diff.diff),
    (LOOK, du.du),
    (LOOK, plan.plan),
    (LOOK, view.view),
    (CHECK, mend.verify),
    (CHECK, doctor.doctor),
    (CHECK, mend.repair),
    (CHECK, mend.rescue),
    (CHANGE, convert.convert),
    (CHANGE, convert.unshard),
    (CHANGE, copy.copy),
    (CHANGE, prune.prune),
    (CHANGE, prune.gc),
    (RUN, watch.watch),
    (RUN, bench.bench),
    (RUN, timeline.timeline),
)

_EVERYWHERE = ("--debug", "--quiet")
"""Options of the program that may stand behind a command too."""

app = typer.Typer(
    name="holdfast", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Paths may be URLs: s3://, gs://, az://, https://. Every command takes --json. holdfast COMMAND --help "
    "tells more; docs/cli.md has an example of each.",
)  # fmt: skip
for _panel, _command in _COMMANDS:
    app.command(_command.__name__, rich_help_panel=_panel)(_command)


def _version(wanted: bool) -> None:
    if wanted:
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
    before = {name: os.environ[name] for name in (progress.VARIABLE,) if name in os.environ}
    os.environ[progress.VARIABLE] = "0"
    try:
        yield
    finally:
        del os.environ[progress.VARIABLE]
        os.environ.update(before)


def main() -> None:
    """Run the command that the arguments name, and exit."""
    for number in (0, 1, 2):  # they may be closed, and a file of a checkpoint must not get one of these numbers
        try:
            os.fstat(number)
        except OSError:
            disk.open(os.devnull, os.O_RDWR)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):  # escapes for characters that an old terminal cannot show
        if isinstance(stream, TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` name, and return the exit code of the program."""
    try:
        return _run(arguments, _in_front(arguments))
    except BrokenPipeError:
        return _closed()


def _run(arguments: Sequence[str], given: list[str]) -> int:
    try:
        # The standalone mode has exit codes of its own for usage errors, interrupts and closed pipes.
        code: Any = app(given or ["--help"], prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich exits with a code of its own
            raise BrokenPipeError from None
        return int(ended.code or 0)  # shell completion exits
    except (Exception, KeyboardInterrupt) as error:
        failure = errors.failure_of(error, given, _places(given))
        if failure is None or "--debug" in arguments:
            raise
        return _failed(failure, arguments)
    if code == Code.INTERRUPTED:  # newer versions of typer return it
        return _failed(errors.INTERRUPTED, arguments)
    return int(code or Code.FINE)


def _failed(failure: errors.Failure, arguments: Sequence[str]) -> int:
    try:
        output.fail(failure, as_json="--json" in arguments)
        sys.stderr.flush()
    except SystemExit:  # rich again
        raise BrokenPipeError from None
    return failure.code


def _closed() -> int:
    """The reader of a pipe has read enough, as `head` does. Print nothing, and keep Python from flushing again."""
    nowhere = disk.open(os.devnull, os.O_WRONLY)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, number)
    return Code.CLOSED


def _places(given: Sequence[str]) -> list[str]:
    """The arguments of the command without options and their values: the paths that it is about."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    words = [word for word in given if word not in _EVERYWHERE]
    command = commands.get(words[0]) if words else None
    if command is None:
        return []
    with command.make_context(words[0], words[1:], resilient_parsing=True) as context:
        values = [context.params.get(one.name) for one in command.params if one.param_type_name == "argument"]
    return [str(value) for value in values if value]


def _in_front(arguments: Sequence[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    moved = [word for word in arguments[:end] if word in _EVERYWHERE]
    return [*moved, *(word for word in arguments[:end] if word not in _EVERYWHERE), *arguments[end:]]
