"""``holdfast verify``: whether every byte is what was written.

Called by `app`. Never says that a checkpoint is whole if any of it was not looked at, without saying so.
"""

from __future__ import annotations

from typing import Annotated

import typer

import holdfast
from holdfast.cli import output
from holdfast.cli.codes import Code
from holdfast.doctor.mending import mending
from holdfast.read.damage import Damage, Verified


def verify(
    path: Annotated[str, typer.Argument(help="A checkpoint of any format: a path or a URL.")],
    shallow: Annotated[bool, typer.Option("--shallow", help="Headers, sizes and attachments only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Check every byte of a checkpoint; exit code 1 if any is not what was written."""
    found = holdfast.verify(path, deep=not shallow, raises=False)
    if json:
        output.as_json({"whole": found.whole, **_told(found), "next": "" if found.whole else mending(path)})
    else:
        _show(found)
        if not found.whole:
            show_next(mending(path))
    raise typer.Exit(Code.FINE if found.whole else Code.DAMAGED)


def _told(found: Verified) -> dict[str, object]:
    return {name: getattr(found, name) for name in found.__dataclass_fields__}


def _show(found: Verified) -> None:
    show_damages(found.damages)
    unchecked = f", {output.size(found.unverified)} of it without sums" if found.unverified else ""
    looked = "checked" if found.deep else "of headers checked"
    told = f"{output.size(found.nbytes)} {looked}{unchecked}, {found.seconds:.1f} s"
    if found.whole:
        output.say(f"{found.path} is whole: {told}")
    else:
        output.say(f"{found.path} is damaged: {len(found.tensors)} tensors are hit; {told}")


def show_damages(damages: tuple[Damage, ...]) -> None:
    """A line for each."""
    output.table(
        ("hit", "bytes", "file", "what"),
        ((_name(d), f"{d.begin}:{d.begin + d.nbytes}", d.file, _short(d)) for d in damages),
    )


def show_next(hint: str) -> None:
    """What to do about what was shown."""
    if hint:
        output.say(f"next: {hint}")


def _name(damage: Damage) -> str:
    return str(damage) if damage.tensor or damage.value else ""


def _short(damage: Damage) -> str:
    return damage.what.removeprefix(damage.file).partition(";")[0].strip()
