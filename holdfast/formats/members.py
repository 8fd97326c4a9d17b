"""Files of a checkpoint's folder: which there are, and which may be read through names and links that others made.

Readers of folders call these. Never follows a link out of a folder, except into the store of a Hugging Face cache.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.storage.place import Place

MAX_ATTACHMENT = 64 << 20
"""Larger files beside the weights are no configuration."""

ATTACHED = (
    ".json", ".jsonl", ".txt", ".model", ".jinja", ".md", ".py", ".yaml", ".yml", ".toml", ".tiktoken", ".vocab",
    ".bpe", ".merges", ".cfg", ".ini", ".csv",
)  # fmt: skip
"""How files end that say how weights are to be used."""

_HEX = re.compile(r"[0-9a-f]{40,128}")
_REPOSITORY = re.compile(r"[a-z]+--.+")


def names(folder: Place) -> list[str]:
    """Names of all that is in a folder, hidden or not, sorted. Raises StorageError."""
    with naming(folder, "list"):
        return sorted(path.name for path in folder.iterdir())


def listed(folder: Place) -> list[str]:
    """Names of the files in a folder that are not hidden, sorted; links count. Raises StorageError."""
    return _seen(folder.file_names())


def folders(folder: Place) -> list[str]:
    """Names of the folders in a folder that are not hidden, sorted."""
    return _seen(folder.folder_names())


def _seen(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def lies_in(path: Place, folder: Place) -> bool:
    """Whether a path, links followed, is a folder or below it."""
    real, home = str(path.real()), str(folder.real())
    return real == home or real.startswith(home.rstrip("/") + "/")


def member(folder: Place, name: str, said_by: str = "") -> Place:
    """The file ``name`` of a folder, where it really lies. Raises Damaged if it is missing or lies elsewhere.

    ``said_by``: which file names it, for the error.
    """
    by = f", which {said_by} names," if said_by else ""
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Damaged(f"{name[:200]!r}{by} is no path inside of {folder}: nothing outside of it is read")
    path = folder / name
    with naming(path, "open"):
        found = path if path.is_remote or folder.is_remote else _followed(path, folder, by)
        if not found.is_file():
            raise Damaged(f"{path}{by} is missing; bring it back, or fetch the checkpoint again")
    return found


def _followed(path: Place, folder: Place, by: str) -> Place:
    real, home = LocalPlace(os.path.realpath(path)), LocalPlace(os.path.realpath(folder))
    if not real.is_relative_to(home) and not _in_store(real, home):
        raise Damaged(f"{path}{by} is a link that leads out of the folder, to {real}: put the file itself there")
    return real


def _in_store(real: Path, home: Path) -> bool:
    # <cache>/models--x--y/snapshots/<revision>/… links to ../../blobs/<hash>, which may itself be a link to
    # <cache>/blobs/<two digits>/<hash>. Only files that are named by a hash in exactly these places are taken, and a
    # `blobs` that is itself a link ends elsewhere.
    for revision in (home, *home.parents):
        if revision.parent.name == "snapshots":
            repository = revision.parent.parent
            shared = repository.parent / "blobs" / real.name[:2]
            return bool(_HEX.fullmatch(real.name)) and (
                real.parent == repository / "blobs"
                or (real.parent == shared and bool(_REPOSITORY.fullmatch(repository.name)))
            )
    return False


def snapshot(folder: Place) -> Place | None:
    """The snapshot of ``main`` in the folder that a Hugging Face cache keeps for a repository, or None."""
    reference = folder / "refs" / "main"
    if not _REPOSITORY.fullmatch(folder.name) or not reference.is_file():
        return None
    with naming(reference, "read"):
        revision = reference.read_bytes()[:200].decode("ascii", "replace").strip()
    found = folder / "snapshots" / revision
    return found if _HEX.fullmatch(revision) and found.is_dir() else None


def attachments(folder: Place, names: Iterable[str]) -> dict[str, Place]:
    """Those of the files that say how the weights are to be used: configurations, tokenizers, model code."""
    found = {}
    for name in names:
        if not name.lower().endswith(ATTACHED):
            continue
        try:
            path = member(folder, name)
        except Damaged as error:
            log.warning("%s: %s is not attached: %s", folder, name, error)
            continue
        if path.stat().st_size <= MAX_ATTACHMENT:
            found[name] = path
        else:
            log.warning("%s: %s is not attached: it has %d bytes", folder, name, path.stat().st_size)
    return found
