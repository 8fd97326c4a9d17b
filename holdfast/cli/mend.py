"""``holdfast verify``, ``repair`` and ``rescue``: check a checkpoint, mend it, make its lost manifest again.

`app` calls them. They list what was not checked, what could not be mended, and what is lost.
"""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.errors import Code
from holdfast.cli.options import Json, Source
from holdfast.doctor.mending import mending, not_by_headers
from holdfast.errors import Mismatch
from holdfast.read.damage import Damage, Verified
from holdfast.repair.repair import Repaired
from holdfast.repair.rescue import Rescued


def verify(
    path: Source,
    shallow: Annotated[bool, typer.Option("--shallow", help="Headers, sizes and attachments only.")] = False,
    json: Json = False,
) -> None:
    """Check every byte of a checkpoint; exit code 1 if any is not what was written."""
    report = holdfast.tools.verify(path, deep=not shallow, raises=False)
    hint = "" if report.whole else mending(path)
    output.answer(output.fields(report, "whole") | {"next": hint}, lambda: _show_verified(report, hint), json=json)
    raise typer.Exit(Code.FINE if report.whole else Code.DAMAGED)


def _show_verified(report: Verified, hint: str) -> None:
    _show_damages(report.damages)
    unchecked = f", {output.size(report.unverified)} of it without sums" if report.unverified else ""
    checked = "checked" if report.deep else "of headers checked"
    state = "whole" if report.whole else f"damaged: {len(report.tensors)} tensors are hit"
    amount = f"{output.size(report.nbytes)} {checked}{unchecked}, {report.seconds:.1f} s"
    output.say(f"{report.path} is {state}{':' if report.whole else ';'} {amount}")
    _show_next(hint)


def _show_damages(damages: tuple[Damage, ...]) -> None:
    """Print a line for each."""
    output.table(
        ("hit", "bytes", "file", "what"),
        (
            (
                str(damage) if damage.tensor or damage.value else "", f"{damage.begin}:{damage.begin + damage.nbytes}",
                damage.file, damage.what.removeprefix(damage.file).partition(";")[0].strip(),
            )
            for damage in damages
        ),
    )  # fmt: skip


def _show_next(hint: str) -> None:
    """Print what to do about the damage."""
    if hint:
        output.say(f"next: {hint}")


def repair(
    path: Annotated[str, typer.Argument(help="A checkpoint of holdfast: a path or a URL.")],
    source: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="SOURCE", help="A checkpoint, or a folder of checkpoints. May come again."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing, say what could be mended.")] = False,
    json: Json = False,
) -> None:
    """Put right what is damaged, from the checkpoint itself and the sources; exit code 1 if anything stays damaged."""
    done = holdfast.tools.repair(path, sources=source or (), dry_run=dry_run)
    hint = "" if done.whole else mending(path, source or ())
    result = output.fields(done, "whole") | {"mended": [one._asdict() for one in done.mended], "next": hint}
    output.answer(result, lambda: _show_repaired(done, hint, dry_run=dry_run), json=json)
    raise typer.Exit(Code.FINE if done.whole else Code.DAMAGED)


def _show_repaired(done: Repaired, hint: str, *, dry_run: bool) -> None:
    rows = ((f"{one.begin}:{one.begin + one.nbytes}", one.file, one.source) for one in done.mended)
    output.table(("bytes", "of", "could come from" if dry_run else "came from"), rows)
    _show_damages(done.left)
    if not done.damages:
        output.say(f"{done.path} is whole, there was nothing to repair")
    elif done.whole:
        output.say(f"{done.path} {'could be' if dry_run else 'is'} whole: {output.size(done.nbytes)} mended")
    else:
        output.say(f"{done.path} stays damaged: {len(done.tensors)} tensors are hit")
    _show_next(hint)


def rescue(
    folder: Annotated[str, typer.Argument(help="A folder with data files of holdfast: a path or a URL.")],
    like: Annotated[
        str | None, typer.Option("--like", metavar="STEP", help="A copy, or a step of the same run: values from there.")
    ] = None,
    save: Annotated[str | None, typer.Option("--save", help="Which save, if the folder has files of several.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The step to be noted.")] = None,
    json: Json = False,
) -> None:
    """Make the manifest of a checkpoint anew from its data files; exit code 1 if bytes are damaged."""
    if like is None and save is None and (why := not_by_headers(folder)):
        raise Mismatch(f"{why}, or the save with --save to do without")
    done = holdfast.tools.rescue(folder, like=like, save=save, step=step)
    output.answer(done, lambda: _show_rescued(done), json=json)
    raise typer.Exit(Code.DAMAGED if done.damages else Code.FINE)


def _show_rescued(done: Rescued) -> None:
    output.say(f"{done.path} is a checkpoint again: {done.tensors} tensors, {output.size(done.nbytes)}")
    output.say(f"made from {done.origin}, save {done.save}, step {done.step}")
    for lost in done.lost:
        output.say(f"- {lost}")
    _show_damages(done.damages)
