"""``holdfast repair``: what is damaged, taken from copies and neighbours.

Called by `app`. Never hides what could not be mended: it is listed, and the exit code is 1.
"""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.codes import Code
from holdfast.cli.verify import show_damages, show_next
from holdfast.doctor.mending import mending


def repair(
    path: Annotated[str, typer.Argument(help="A checkpoint of holdfast: a path or a URL.")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="SOURCE", help="A checkpoint, or a folder of checkpoints. May come again."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, say what could be mended.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Put right what is damaged, from the checkpoint itself and the sources; exit code 1 if anything stays damaged."""
    done = holdfast.repair(path, sources=source or (), dry_run=dry_run)
    if json:
        told = {name: getattr(done, name) for name in done.__dataclass_fields__}
        told["mended"] = [one._asdict() for one in done.mended]
        output.as_json({"whole": done.whole, **told, "next": "" if done.whole else mending(path, source or ())})
    else:
        rows = ((f"{one.begin}:{one.begin + one.nbytes}", one.file, one.source) for one in done.mended)
        output.table(("bytes", "of", "could come from" if dry_run else "came from"), rows)
        show_damages(done.left)
        if not done.damages:
            output.say(f"{done.path} is whole, there was nothing to repair")
        elif done.whole:
            output.say(f"{done.path} {'could be' if dry_run else 'is'} whole: {output.size(done.nbytes)} mended")
        else:
            output.say(f"{done.path} stays damaged: {len(done.tensors)} tensors are hit")
            show_next(mending(path, source or ()))
    raise typer.Exit(Code.FINE if done.whole else Code.DAMAGED)
