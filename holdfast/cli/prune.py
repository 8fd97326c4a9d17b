"""``holdfast prune`` and ``gc``: list the steps that no rule keeps, or the orphans of dead saves, and delete them.

`app` calls them. They delete nothing without ``--yes``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.cli import output
from holdfast.cli.options import Json, Yes
from holdfast.run.keep import Keep
from holdfast.run.orphans import Collected, collect
from holdfast.run.prune import Fate, Pruned
from holdfast.run.prune import prune as pruned

_GOES = {"nothing": "stays", "optimizer": "loses its optimizer", "all": "goes"}
_WENT = {"nothing": "stays", "optimizer": "lost its optimizer", "all": "is gone"}
_UPLOADS = (
    "uploads in parts that were killed are not seen from here, and cost money: "
    "a lifecycle rule of the bucket ends them (docs/stores.md)"
)


def prune(
    root: Annotated[str, typer.Argument(help="The folder of a run: a path or a URL.")],
    last: Annotated[int, typer.Option("--keep-last", metavar="N", help="The newest N.", min=1)] = 2,
    every: Annotated[
        int | None, typer.Option("--keep-every", metavar="K", help="Every multiple of K.", min=1, show_default=False)
    ] = None,
    best: Annotated[int, typer.Option("--keep-best", metavar="N", help="The N with the best metric.", min=0)] = 0,
    highest: Annotated[bool, typer.Option("--highest", help="The best metric is the highest.")] = False,
    optimizer_last: Annotated[
        int | None,
        typer.Option(
            "--optimizer-last", metavar="N", min=1, show_default=False,
            help="Only the newest N of these keep their optimizer.",
        ),
    ] = None,
    model_every: Annotated[
        int | None,
        typer.Option(
            "--model-every", metavar="K", help="Every multiple of K without its optimizer.", min=1, show_default=False
        ),
    ] = None,
    optimizer: Annotated[
        list[str] | None,
        typer.Option(
            "--optimizer", metavar="SECTION", show_default=False,
            help="What the optimizer is called: a name or pattern, optim* by default. May come again.",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", show_default=False, help="What steps are called: step-{step}."),
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Delete the steps of a run that no rule keeps; a dry run unless --yes is given.

    A step stays if any rule keeps it. The newest step that is whole always stays, and so do files that other steps have
    borrowed.
    """
    keep = Keep(
        last=last, every=every, best=best, mode="max" if highest else "min", optimizer_last=optimizer_last,
        model_every=model_every, optimizer=tuple(optimizer) if optimizer else "optim*",
    )  # fmt: skip
    done = pruned(root, keep, name=name, dry_run=not yes)
    output.answer(done, lambda: _show(done), json=json)


def _show(done: Pruned) -> None:
    words = _WENT if done.done else _GOES
    output.table(
        ("step", "bytes", "freed" if done.done else "would free", "", "why"),
        (
            (f.name, output.size(f.nbytes), output.size(f.freed) if f.goes != "nothing" else "", words[f.goes], _why(f))
            for f in done.steps
        ),
    )
    gone = sum(fate.goes == "all" for fate in done.steps)
    lost = sum(fate.goes == "optimizer" for fate in done.steps)
    stay = len(done.steps) - gone
    summary = f"{gone} of {len(done.steps)} steps {'are gone' if done.done else 'would go'}"
    summary += f", {lost} {'lost' if done.done else 'would lose'} their optimizer" if lost else ""
    output.say(f"{summary}, {stay} stay; {output.size(done.freed)} {'freed' if done.done else 'would be freed'}")
    if not done.done and (gone or lost):
        output.say("nothing was changed: the same command with --yes does it")


def _why(fate: Fate) -> str:
    lent = f"; {output.size(fate.lent)} stay: other steps have borrowed them" if fate.lent else ""
    return ", ".join(fate.why) + lent


def gc(
    root: Annotated[str, typer.Argument(help="The folder of a run, or one step: a path or a URL.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Delete what dead saves, copies and conversions left; a dry run unless --yes is given.

    What a save under way may need is never touched, nor what holdfast did not write.
    """
    done = collect(root, dry_run=not yes)
    output.answer(done, lambda: _show_orphans(done), json=json)


def _show_orphans(done: Collected) -> None:
    output.table(
        ("folder", "files", "bytes", "deleted" if done.done else "would go"),
        ((one.path, one.files, output.size(one.nbytes), one.what) for one in done.orphans),
    )
    for one in done.orphans:
        if one.warning and not done.done:
            output.say(f"careful with {one.path}: {one.warning}")
    output.table(("stays", "why"), ((one.path, one.why) for one in done.spared))
    if done.orphans:
        output.say(f"{output.size(done.nbytes)} {'freed' if done.done else 'would be freed'}")
        if not done.done:
            output.say("nothing was changed: the same command with --yes does it")
    else:
        output.say(f"{done.root} holds no leavings")
    if "://" in done.root:
        output.say(_UPLOADS)
