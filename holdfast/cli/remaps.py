"""What ``--remap MAP`` means, and what a map does beside moving each element to one place, in words.

`show`, `diff` and `convert` call it. It reads the map and no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from tempfile import TemporaryDirectory

import typer

from holdfast import remap
from holdfast.cli import output
from holdfast.errors import Mismatch
from holdfast.remap import Proof, Remap
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.urls import location

_NAMED = ("transformers", "torchtitan", "megatron")
_BACK = ":inverse"
_SHOWN = 4


def map_of(text: str | None) -> Remap | None:
    """``FILE.json``, or a named map as ``transformers:FOLDER``; ``:inverse`` behind either is the way back.

    Raises typer.BadParameter, Mismatch, Unsupported.
    """
    if text is None:
        return None
    what = text.removesuffix(_BACK)
    kind, colon, folder = what.partition(":")
    forward = named(kind, folder) if colon and kind in _NAMED else _from_file(what)
    return forward.inverse() if text.endswith(_BACK) else forward


def named(kind: str, folder: str) -> Remap:
    """The map of that name for the model whose config.json is in a folder, which may be a URL."""
    config = location(folder.removesuffix("/config.json")) / "config.json"
    make = getattr(remap, kind, None)
    if make is None:
        raise typer.BadParameter(f"this version of holdfast has no map {kind}")
    if not config.is_file():
        raise typer.BadParameter(f"--remap {kind}:{folder}: there is no config.json in {config.parent}")
    if not config.is_remote:
        made: Remap = make(str(config.parent))
        return made
    with TemporaryDirectory(prefix="holdfast-config-") as copied:  # transformers reads folders and its own hub alone
        (LocalPlace(copied) / config.name).write_small(config.read_small())
        made = make(copied)
        return made


def _from_file(text: str) -> Remap:
    place = location(text)
    try:
        data = place.read_small()
    except FileNotFoundError:
        forms = f"a JSON file, or {', '.join(f'{kind}:FOLDER' for kind in _NAMED)}"
        raise typer.BadParameter(f"--remap {text}: there is no such file; a map is {forms}") from None
    except OSError:
        if not place.is_dir():
            raise
        raise typer.BadParameter(f"--remap {text} is a folder: write transformers:{text} for its model") from None
    try:
        return Remap.from_json(data)
    except Mismatch as error:
        raise Mismatch(f"--remap {text}: {error}") from None


def show_proof(proof: Proof, before: str = "") -> None:
    """Print what a map leaves over, repeats, makes up and casts, in sentences."""
    if proof.is_exact:
        output.say(f"{before}the map moves every element of the checkpoint to one place, and makes none up")
    for line in _sentences(proof):
        output.say(before + line)


def _sentences(proof: Proof) -> Iterator[str]:
    for names, text in (
        (proof.left_over, "the map leaves over, so that it is not there"),
        (proof.repeated, "the map puts in several places"),
        (proof.made_up, "the map makes up elements of"),
        (proof.cast, "the map casts, which may round"),
    ):
        if names:
            yield f"{text}: {len(names)} ({_first(names)})"


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
