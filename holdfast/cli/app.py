"""The command line: which commands there are, and what becomes of an error.

`main` is the console script. Never shows a traceback for what a user can cause; ``--debug`` shows it all the same.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
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
from holdfast.engine import disk
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
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show where errors come from.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing but errors; --json is still answered.")] = False,
) -> None:
    """Look at checkpoints, check them, change them, and watch over the runs that write them."""
    output.be_quiet(quiet)
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_time=False, show_path=debug, markup=False, highlighter=None)
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s", handlers=[handler])


def main() -> None:
    """Run the command that the arguments name, and exit."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command that ``arguments`` name; what the program ends with."""
    given = _in_front(arguments)
    try:
        # Not in the standalone mode, in which usage errors, interrupts and closed pipes would get codes of their own.
        code: Any = app(given or ["--help"], prog_name="holdfast", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed()
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich ends the program by itself, with a code of its own
            return _closed()
        return int(ended.code or 0)  # completion ends in this way
    except (Exception, KeyboardInterrupt) as error:
        told = errors.told(error, given)
        if told is None or "--debug" in arguments:
            raise
        output.fail(told, as_json="--json" in arguments)
        return told.code
    if code == Code.INTERRUPTED:  # newer typers tell an interrupt in this way
        output.fail(errors.INTERRUPTED, as_json="--json" in arguments)
    return int(code or Code.FINE)


def _closed() -> int:
    """Whoever read has read enough, as `head` does. Nothing is said, and Python shall not try to flush again."""
    os.dup2(disk.open(os.devnull, os.O_WRONLY), 1)
    return Code.CLOSED


def _in_front(arguments: Sequence[str]) -> list[str]:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    moved = [word for word in arguments[:end] if word in _EVERYWHERE]
    return [*moved, *(word for word in arguments[:end] if word not in _EVERYWHERE), *arguments[end:]]
