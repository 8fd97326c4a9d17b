"""The command line: which commands there are, and what becomes of an error.

`main` is the console script. Never shows a traceback for what a user can cause; ``--debug`` shows it all the same.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler

from holdfast.cli import diff, du, ls, output, plan, repair, rescue, show, verify
from holdfast.cli.codes import Code, code_of
from holdfast.version import __version__

app = typer.Typer(
    name="holdfast", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Look after checkpoints: verify, repair and rescue them.",
)  # fmt: skip
app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("diff")(diff.diff)
app.command("du")(du.du)
app.command("plan")(plan.plan)
app.command("verify")(verify.verify)
app.command("repair")(repair.repair)
app.command("rescue")(rescue.rescue)


def _version(asked: bool) -> None:
    if asked:
        output.say(f"holdfast {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Log more, and show where errors come from.")] = False,
) -> None:
    """Look after checkpoints: verify, repair and rescue them."""
    console = Console(stderr=True)
    handler = RichHandler(console=console, show_time=False, show_path=debug, markup=False, highlighter=None)
    logging.basicConfig(level=logging.DEBUG if debug else logging.ERROR, format="%(message)s", handlers=[handler])


def main() -> None:
    """Run the command that the arguments name, and exit."""
    try:
        app()
    except (Exception, KeyboardInterrupt) as error:
        code = code_of(error)
        if code is None or "--debug" in sys.argv:
            raise
        output.fail("interrupted" if code == Code.INTERRUPTED else str(error))
        sys.exit(code)
