"""``holdfast doctor``: what is wrong with this machine, a folder, a store or a checkpoint, and how to mend it.

`app` calls it. It shows no secret, and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, TypeVar

import typer

from holdfast.cli import output
from holdfast.cli.errors import Code
from holdfast.cli.options import Json
from holdfast.doctor import checkpoints, folders, machine, stores
from holdfast.doctor.finding import Finding
from holdfast.errors import StorageError
from holdfast.ondisk import manifest
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.urls import location

Here = TypeVar("Here", bound=Place)

_CODES = {
    "damaged": Code.DAMAGED, "no checkpoint": Code.NOT_A_CHECKPOINT, "storage": Code.STORAGE, "mismatch": Code.MISMATCH,
}  # fmt: skip


def doctor(
    path: Annotated[
        str | None, typer.Argument(help="A folder, a place in a store, or a checkpoint: a path or a URL.")
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Do not try to write there.")] = False,
    json: Json = False,
) -> None:
    """Look for what is wrong, and say how to mend it; the exit code tells of the first thing that failed."""
    sections: dict[str, list[Finding]] = {}
    for section, findings in _sections(path, write=not read_only):
        sections[section] = list(findings)
        if not json:
            _show(section, sections[section])
    everything = [finding for findings in sections.values() for finding in findings]
    failed = [one for one in everything if one.verdict == "fail"]
    if json:
        output.as_json({"well": not failed, **sections})
    else:
        warned = sum(one.verdict == "warn" for one in everything)
        output.say(f"{len(everything)} looked at: {len(failed)} wrong, {warned} to know of")
    raise typer.Exit(_CODES.get(failed[0].kind, Code.FAILED) if failed else Code.FINE)


def _sections(path: str | None, *, write: bool) -> Iterator[tuple[str, Iterator[Finding] | list[Finding]]]:
    yield "machine", machine.findings()
    if path is None:
        return
    place = location(path)
    if place.is_remote:
        of_store = list(stores.findings(as_store(_around(place)), write=write))
        yield "store", of_store
        if any(one.verdict == "fail" for one in of_store):
            return
    else:
        yield "folder", folders.findings(_around(place), write=write)
    try:
        if place.is_remote or not place.is_dir() or any(place.iterdir()):  # else a folder for what is to come
            yield "checkpoint", checkpoints.diagnose(path)
    except OSError as error:
        mend = "docs/stores.md lists the rights that are needed"
        if not place.is_remote:
            mend = folders.when_refused(error, place)
        yield "checkpoint", [Finding("checkpoint", "fail", str(error), mend, "storage")]


def _around(place: Here) -> Here:
    """The folder in which writing is tried: not a checkpoint, but the folder that it is in."""
    try:
        return place.parent if (place / manifest.FILE_NAME).is_file() else place
    except (PermissionError, StorageError):  # a finding will say so
        return place


_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "bold red")}


def _show(section: str, findings: list[Finding]) -> None:
    output.say((section, "bold"))
    for one in findings:
        output.say("  ", _MARKS[one.verdict], f" {one.name}: {one.text}")
        if one.mend:
            output.say("       ", ("->", "dim"), f" {one.mend}")
