"""``holdfast verify``, ``repair`` and ``rescue``: check checkpoints, repair data, make a lost manifest again.

`commands` calls them. They list what was not checked, what could not be repaired, and what is lost.
"""

from __future__ import annotations

from collections.abc import Sequence

import typer

from holdfast import tools
from holdfast.cli import output
from holdfast.cli.errors import Code, code_of
from holdfast.doctor.mending import mending, not_by_headers, steps_in
from holdfast.errors import HoldfastError, Mismatch
from holdfast.inspect.runs import run_at
from holdfast.read.damage import Damage, Verified, by_fault, hit_by
from holdfast.repair.repair import Repaired
from holdfast.repair.rescue import Rescued
from holdfast.storage.place import Place


def verify(*, path: str, shallow: bool, json: bool) -> None:
    run = run_at(path)
    steps = [] if run is None else steps_in(run)
    if not steps:
        result, code = _verified(path, shallow=shallow, json=json)
        if json:
            output.as_json(result)
        raise typer.Exit(code)
    results, codes = [], []
    for step in steps:
        try:
            result, code = _verified(step, shallow=shallow, json=json)
        except HoldfastError as error:  # the other steps are checked all the same
            result, code = {"path": str(step), "whole": False, "error": str(error)}, code_of(error) or Code.FAILED
            if not json:
                output.say(f"{step} cannot be checked: {error}")
        results.append(result)
        codes.append(code)
    whole = codes.count(Code.FINE)
    summary = {"path": path, "whole": whole == len(steps), "steps": results}
    output.answer(summary, lambda: output.say(f"{whole} of {len(steps)} steps are whole"), json=json)
    raise typer.Exit(next((code for code in codes if code), Code.FINE))


def _verified(path: str | Place, *, shallow: bool, json: bool) -> tuple[dict[str, object], Code]:
    """Check one checkpoint and print what was found, unless it is wanted as JSON; the result and its exit code."""
    report = tools.verify(path, deep=not shallow, raises=False)
    hint = "" if report.whole else mending(str(path))
    if not json:
        _show_verified(report, hint)
    return output.fields(report, "whole") | {"next": hint}, Code.FINE if report.whole else Code.DAMAGED


def _show_verified(report: Verified, hint: str) -> None:
    _show_damages(report.damages)
    unchecked = f", {output.size(report.unverified)} of it without sums" if report.unverified else ""
    checked = "checked" if report.deep else "of headers checked"
    state = "whole" if report.whole else f"damaged, in {_count(report.tensors)}"
    amount = f"{output.size(report.nbytes)} {checked}{unchecked}, {report.seconds:.1f} s"
    output.say(f"{report.path} is {state}{':' if report.whole else ';'} {amount}")
    _show_next(hint)


def _show_damages(damages: tuple[Damage, ...]) -> None:
    """Print a line for each fault."""
    output.table(
        ("tensor or value", "bytes", "file", "what"),
        (
            (
                hit_by(fault), f"{fault[0].begin}:{fault[0].begin + fault[0].nbytes}", fault[0].file,
                fault[0].what.removeprefix(fault[0].file).partition(";")[0].strip(),
            )
            for fault in by_fault(damages)
        ),
    )  # fmt: skip


def _count(tensors: Sequence[str]) -> str:
    return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'}"


def _show_next(hint: str) -> None:
    """Print what to do about the damage."""
    if hint:
        output.say(f"next: {hint}")


def repair(*, path: str, source: list[str] | None, dry_run: bool, json: bool) -> None:
    done = tools.repair(path, sources=source or (), dry_run=dry_run)
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
        output.say(f"{done.path} stays damaged, in {_count(done.tensors)}")
    _show_next(hint)


def rescue(*, folder: str, like: str | None, save: str | None, step: int | None, json: bool) -> None:
    if like is None and save is None and (why := not_by_headers(folder)):
        raise Mismatch(f"{why}, or name the save with --save to do without it")
    done = tools.rescue(folder, like=like, save=save, step=step)
    output.answer(done, lambda: _show_rescued(done), json=json)
    raise typer.Exit(Code.DAMAGED if done.damages else Code.FINE)


def _show_rescued(done: Rescued) -> None:
    output.say(f"{done.path} is a checkpoint again: {output.count(done.tensors, 'tensor')}, {output.size(done.nbytes)}")
    output.say(f"made from {done.origin}, save {done.save}, step {done.step}")
    for lost in done.lost:
        output.say(f"- {lost}")
    _show_damages(done.damages)
