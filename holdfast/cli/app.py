"""The program `holdfast`: the list of its commands, how its arguments are read, and what becomes of errors.

`main` is the console script. It shows no traceback for an error that a user can cause, unless ``--debug`` is given.
Help and TAB import neither torch nor the rest of the package.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from io import TextIOWrapper
from itertools import takewhile
from typing import Annotated, Any

import typer

from holdfast.cli import commands, errors, old_words, output
from holdfast.cli.errors import Code
from holdfast.ondisk.version import __version__
from holdfast.storage.local import disk

_COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    # Help lists them in this order, each under the name of its function.
    "Look": (commands.ls, commands.show, commands.diff, commands.view, commands.watch),
    "Check and repair": (commands.verify, commands.doctor, commands.repair, commands.rescue),
    "Convert, copy and delete": (commands.convert, commands.copy, commands.prune),
}

_EVERYWHERE = ("--debug", "--quiet")
"""Options of the program that may stand behind a command too."""

app = typer.Typer(
    name="holdfast", pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Paths may be URLs: s3://, gs://, az://, hf://, https://. Every command takes --json. `holdfast COMMAND "
    "--help` lists its options; docs/cli.md has an example of each command.",
)  # fmt: skip
for _panel, _functions in _COMMANDS.items():
    for _function in _functions:
        app.command(_function.__name__, rich_help_panel=_panel)(_function)


def _version(wanted: bool) -> None:
    if wanted:
        output.say(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show where an error comes from.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print errors only; --json still prints its object.")] = False,
) -> None:
    """Look at checkpoints, check and repair them, convert and copy them, and watch the runs that write them."""
    from rich.console import Console
    from rich.logging import RichHandler

    output.be_quiet(quiet)
    if quiet:
        context.with_resource(output.no_bars())
    handler = RichHandler(
        console=Console(stderr=True), show_time=False, show_path=debug, markup=False, highlighter=None
    )
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s", handlers=[handler])


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
        return _run(arguments)
    except BrokenPipeError:
        return _closed()


def _run(arguments: Sequence[str]) -> int:
    words, notice = old_words.renamed(_in_order(arguments))
    if notice and "--quiet" not in words:
        sys.stderr.write(f"{notice}\n")
    try:
        # The standalone mode has exit codes of its own for usage errors, interrupts and closed pipes.
        code: Any = app(words or ["--help"], prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich exits with a code of its own
            raise BrokenPipeError from None
        return int(ended.code or 0)  # shell completion exits
    except (Exception, KeyboardInterrupt) as error:
        failure = errors.failure_of(error, words, _places(words))
        if failure is None or "--debug" in words:
            raise
        return _failed(failure, words)
    if code == Code.INTERRUPTED:  # newer versions of typer return it
        return _failed(errors.interrupted(words), words)
    return int(code or Code.FINE)


def _in_order(arguments: Sequence[str]) -> list[str]:
    """The options of the program in front of the command, and a ``--json`` that stands there behind it."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = [word for word in arguments[:end] if word not in _EVERYWHERE]
    front = list(takewhile(lambda word: word.startswith("-"), words))
    if "--json" in front and len(front) < len(words):
        front.remove("--json")
        words = [*front, words[len(front) + 1], "--json", *words[len(front) + 2 :]]
    return [*(word for word in arguments[:end] if word in _EVERYWHERE), *words, *arguments[end:]]


def _places(words: Sequence[str]) -> list[str]:
    """The arguments of the command without options and their values: the paths that it is about."""
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands", {})
    words = [word for word in words if word not in _EVERYWHERE]
    command = commands.get(words[0]) if words else None
    if command is None:
        return []
    with command.make_context(words[0], words[1:], resilient_parsing=True) as context:
        values = [context.params.get(one.name) for one in command.params if one.param_type_name == "argument"]
    return [str(place) for value in values if value for place in (value if isinstance(value, list) else [value])]


def _failed(failure: errors.Failure, words: Sequence[str]) -> int:
    try:
        output.fail(failure, as_json="--json" in words)
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
