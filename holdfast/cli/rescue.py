"""``holdfast rescue``: a lost or damaged manifest, made anew.

Called by `app`. Never says that all is back: what is lost is listed.
"""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.codes import Code
from holdfast.cli.verify import show_damages
from holdfast.doctor.mending import not_by_headers
from holdfast.errors import Mismatch


def rescue(
    folder: Annotated[str, typer.Argument(help="A folder with data files of holdfast: a path or a URL.")],
    like: Annotated[
        str | None, typer.Option("--like", metavar="STEP", help="A copy, or a step of the same run: values from there.")
    ] = None,
    save: Annotated[str | None, typer.Option("--save", help="Which save, if the folder has files of several.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step to be noted.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Make the manifest of a checkpoint anew from its data files; exit code 1 if bytes are damaged."""
    if like is None and save is None and (why := not_by_headers(folder)):
        raise Mismatch(f"{why}, or the save with --save to do without")
    done = holdfast.rescue(folder, like=like, save=save, step=step)
    if json:
        output.as_json(done)
    else:
        output.say(f"{done.path} is a checkpoint again: {done.tensors} tensors, {output.size(done.nbytes)}")
        output.say(f"made from {done.origin}, save {done.save}, step {done.step}")
        for lost in done.lost:
            output.say(f"- {lost}")
        show_damages(done.damages)
    raise typer.Exit(Code.FINE if not done.damages else Code.DAMAGED)
