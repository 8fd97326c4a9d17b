"""``holdfast prune``: list the steps that no rule keeps, or the orphans of dead saves, and delete them.

`commands` calls it. It deletes nothing without ``--yes``.
"""

from __future__ import annotations

import typer

from holdfast.cli import output
from holdfast.run.keep import Keep
from holdfast.run.orphans import Collected, collect
from holdfast.run.prune import Fate, Pruned
from holdfast.run.prune import prune as pruned

_GOES = {"nothing": "stays", "optimizer": "loses its optimizer", "all": "goes"}
_WENT = {"nothing": "stays", "optimizer": "lost its optimizer", "all": "is gone"}
_UPLOADS = (
    "killed uploads of large files cannot be seen from here, and cost money: a lifecycle rule of the bucket ends them "
    "(docs/stores.md)"
)
_AGAIN = "nothing was changed: the same command with --yes does it"


def prune(
    *, root: str, last: int | None, every: int | None, best: int | None, highest: bool, optimizer_last: int | None,
    model_every: int | None, optimizer: list[str] | None, name: str | None, orphans: bool, yes: bool, json: bool,
) -> None:  # fmt: skip
    if orphans:
        if any((last, every, best, highest, optimizer_last, model_every, optimizer, name)):
            raise typer.BadParameter("--orphans deletes no step: leave out the options that say which steps to keep")
        swept = collect(root, dry_run=not yes)
        output.answer(swept, lambda: _show_orphans(swept), json=json)
        return
    keep = Keep(
        last=last or 2, every=every, best=best or 0, mode="max" if highest else None, optimizer_last=optimizer_last,
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
    stays = f"{stay} stay{'s' if stay == 1 else ''}"
    summary = f"{gone} of {len(done.steps)} steps {'are gone' if done.done else 'would go'}"
    summary += f", {lost} {'lost' if done.done else 'would lose'} their optimizer" if lost else ""
    output.say(f"{summary}, {stays}; {output.size(done.freed)} {'freed' if done.done else 'would be freed'}")
    if not done.done and (gone or lost):
        output.say(_AGAIN)


def _why(fate: Fate) -> str:
    lent = f"; {output.size(fate.lent)} stay: other steps reuse them" if fate.lent else ""
    return ", ".join(fate.why) + lent


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
            output.say(_AGAIN)
    else:
        output.say(f"{done.root} holds no orphans")
    if "://" in done.root:
        output.say(_UPLOADS)
