"""Which command brings back the bytes that a checkpoint lacks, and where it takes them from. Changes nothing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from holdfast.errors import Damaged, HoldfastError, Mismatch, NotACheckpoint, StorageError, Unsupported
from holdfast.ondisk import manifest
from holdfast.repair.rescue import IN_NO_FILE, rescuable
from holdfast.storage.place import Place
from holdfast.storage.urls import location


def not_by_headers(path: str) -> str:
    """Why `rescue` should not use headers alone at a local ``path``: a step beside it holds more. Else empty."""
    try:
        place = location(path)
        older = [] if place.is_remote else neighbours(place)
        if older and not (place / manifest.FILE_NAME).is_file() and rescuable(place)[0] == "headers":
            if gone := lacking(place, older[-1]):
                return f"{place} is not all there: {gone}. Name a copy of it with --like"
            if fits(place, older[-1]):
                reason = f"{place} can be made from its headers, which hold no values (steps, settings), tied names or"
                return f"{reason} lists; {older[-1]} holds them. Name it with --like"
    except (HoldfastError, OSError, ValueError):  # rescuing it says what is wrong
        return ""
    return ""


def mending(path: str, searched: Sequence[str] = ()) -> str:
    """How to get back what is damaged at a local ``path`` that opens; empty in a store, where that costs requests.

    ``searched``: the sources that did not have it.
    """
    try:
        place = location(path)
        if place.is_remote:
            return ""
        if searched:
            return _mend_elsewhere(place)
        return mend(place) if (place / manifest.FILE_NAME).is_file() else BRING_BACK
    except (HoldfastError, OSError, ValueError):
        return ""


BRING_BACK = "bring back that file from where it was copied, or take another checkpoint"


def _mend_elsewhere(place: Place) -> str:
    older = neighbours(place)
    go_on = f"go on from {older[-1].name}, as a restore of the run does" if older else "take another checkpoint"
    return f"none of these sources has what is left: name a copy by --from COPY; or {go_on}"


def mend(place: Place) -> str:
    """What to do about bytes that are damaged."""
    older = neighbours(place)
    if not older:
        return f"{command('repair', place)} --from COPY, if there is a copy; else take another checkpoint"
    return (
        f"{command('repair', place, '--from', place.parent)} takes what other steps share, --from COPY all of it; "
        f"or go on from {older[-1].name}, as a restore of the run does"
    )


def command(word: str, *paths: object) -> str:
    return " ".join(["holdfast", word, *(shlex.quote(str(path)) for path in paths)])


def steps_in(root: Place) -> list[Place]:
    """The checkpoints in a folder, the latest by their numbers last."""
    names = root.folder_names() if root.is_remote or root.is_dir() else []
    return [root / name for name in sorted(names, key=_order) if (root / name / manifest.FILE_NAME).is_file()]


def _order(name: str) -> tuple[int, str]:
    number = re.search(r"(\d{1,18})\D*$", name)
    return (int(number[1]) if number else -1), name


def neighbours(place: Place) -> list[Place]:
    """Checkpoints beside one, the newest last."""
    try:
        return [path for path in steps_in(place.parent) if path != place]
    except StorageError:  # a web server, or a folder that may not be listed
        return []


def lacking(place: Place, like: Place) -> str:
    """What a step has that is in no file of ``place``, whose headers by themselves are whole; else empty."""
    try:
        rescuable(place, like)
    except Damaged as error:
        lines = [line.partition(": ")[2] for line in str(error).splitlines() if line.endswith(IN_NO_FILE)]
        gone = [line.removesuffix(IN_NO_FILE) for line in lines]
        more = f" and {len(gone) - 1} more tensors" if len(gone) > 1 else ""
        return f"{gone[0]}{more}, which {like.name} has, stand in none of its files" if gone else ""
    except (Mismatch, NotACheckpoint, StorageError, Unsupported):  # it does not help: another model, for example
        return ""
    return ""


def fits(place: Place, like: Place) -> bool:
    try:
        rescuable(place, like)
    except (Damaged, Mismatch, NotACheckpoint, StorageError, Unsupported):
        return False
    return True
