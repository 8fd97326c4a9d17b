"""Files of a checkpoint's folder: which there are, which may be read, and whether those of all ranks are there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar

from holdfast.errors import Damaged, HoldfastError, NotACheckpoint
from holdfast.events import log
from holdfast.formats import members
from holdfast.formats.sources import file
from holdfast.read.files import ASKERS
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

BATCH = 64
"""Files of a store whose ends are read at once before they are opened."""

T = TypeVar("T")
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
    """Whether a path, links followed, is a folder or below it. One with a zero byte is nowhere."""
    if "\0" in str(path):
        return False
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
        real = path if path.is_remote or folder.is_remote else _followed(path, folder, by)
        if not real.is_file():
            raise Damaged(f"{path}{by} is missing; bring it back, or fetch the checkpoint again")
    return real


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
    latest = folder / "snapshots" / revision
    return latest if _HEX.fullmatch(revision) and latest.is_dir() else None


def attachments(folder: Place, names: Iterable[str]) -> dict[str, Place]:
    """Those of the files that say how the weights are to be used: configurations, tokenizers, model code."""
    attached = {}
    for name in names:
        if not name.lower().endswith(ATTACHED):
            continue
        try:
            path = member(folder, name)
        except Damaged as error:
            log.warning("%s: %s is not attached: %s", folder, name, error)
            continue
        if path.stat().st_size <= MAX_ATTACHMENT:
            attached[name] = path
        else:
            log.warning("%s: %s is not attached: it has %d bytes", folder, name, path.stat().st_size)
    return attached


def glanced(items: Iterable[T], path_of: Callable[[T], Place]) -> Iterator[T]:
    """The items; of the files of those in a store both ends are read before, of many at once."""
    waiting = iter(items)
    while batch := [*islice(waiting, BATCH)]:
        if len(batch) > 1 and path_of(batch[0]).is_remote:
            with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-look") as pool:
                list(pool.map(_glance, map(path_of, batch)))
        yield from batch


def _glance(path: Place) -> None:
    with suppress(HoldfastError, OSError):  # raised again when the file is opened
        source = file(path)
        for begin in (0, source.nbytes - 1):
            source.read(max(begin, 0), 1)


def prove_all(ranks: Collection[int], world_size: int, folder: Place, name_of: Callable[[int], str]) -> None:
    """Raise Damaged unless ``ranks``, which have a file, are 0 to ``world_size`` - 1. ``name_of`` names their files."""
    missing = [rank for rank in range(min(world_size, len(ranks) + 10)) if rank not in ranks]
    if missing:
        names = ", ".join(map(name_of, missing[:10]))
        raise Damaged(
            f"{folder} is a checkpoint of {world_size} ranks, but {names} {'is' if len(missing) == 1 else 'are'} "
            f"missing ({len(ranks)} are there): the save never finished, or files were left behind when it was copied"
        )
    if len(ranks) > world_size:
        raise Damaged(
            f"{folder} is a checkpoint of {world_size} ranks, but holds {name_of(max(ranks))} too: files of two saves "
            "are mixed. Move away those that are older"
        )


_NUMBER = re.compile(r"[0-9]+")


def newest(run: Place, is_complete: Callable[[Place], bool]) -> tuple[Place, str] | None:
    """The folder with the highest numbers in its name that is complete, and why it was taken; None if there is none.

    Names that differ in more than their numbers belong to several runs. Raises NotACheckpoint if more than one of them
    has a checkpoint.
    """
    series: dict[str, list[tuple[tuple[int, ...], str]]] = {}
    for name in members.folders(run):
        numbers = tuple(map(int, _NUMBER.findall(name)))
        if numbers:
            series.setdefault(_NUMBER.sub("#", name), []).append((numbers, name))
    newest_of_each: list[tuple[Place, str]] = []
    for steps in series.values():
        skipped: list[str] = []
        for _, name in sorted(steps, reverse=True):
            if is_complete(run / name):
                newer = f"; {', '.join(skipped[:3])} {'is' if len(skipped) == 1 else 'are'} not complete"
                newest_of_each.append(
                    (run / name, f"{name}, the newest of {len(steps)} steps{newer if skipped else ''}")
                )
                break
            skipped.append(name)
    if len(newest_of_each) > 1:
        names = ", ".join(path.name for path, _ in newest_of_each)
        raise NotACheckpoint(f"{run} holds several series of checkpoints; open one of them: {names}")
    return newest_of_each[0] if newest_of_each else None
