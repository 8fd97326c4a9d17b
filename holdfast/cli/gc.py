"""``holdfast gc``: what dead saves and conversions left, told and then deleted.

Called by `app`. Never deletes anything without ``--yes``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.run.leavings import collect

_UPLOADS = (
    "uploads in parts that were killed are not seen from here, and cost money: "
    "a lifecycle rule of the bucket ends them (docs/stores.md)"
)


def gc(
    root: Annotated[str, typer.Argument(help="The folder of a run, or one step: a path or a URL.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete. Without it nothing is changed.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Delete what dead saves, copies and conversions left; a dry run unless --yes is given.

    What a save under way may need is never touched, nor what holdfast did not write.
    """
    done = collect(root, dry_run=not yes)
    if json:
        output.as_json(done)
        return
    output.table(
        ("folder", "files", "bytes", "deleted" if done.done else "would go"),
        ((one.path, one.files, output.size(one.nbytes), one.what) for one in done.leavings),
    )
    for one in done.leavings:
        if one.warning and not done.done:
            output.say(f"careful with {one.path}: {one.warning}")
    output.table(("stays", "why"), ((one.path, one.why) for one in done.spared))
    if done.leavings:
        output.say(f"{output.size(done.nbytes)} {'freed' if done.done else 'would be freed'}")
        if not done.done:
            output.say("nothing was changed: the same command with --yes does it")
    else:
        output.say(f"{done.root} holds no leavings")
    if "://" in done.root:
        output.say(_UPLOADS)
