"""A target in a store: it is written on local disk, and uploaded when it is complete."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from holdfast import events
from holdfast.commit.folder import refuse_cited, taken
from holdfast.errors import Unsupported
from holdfast.export.partial import LAST, holds_others, not_a_checkpoint
from holdfast.export.pushing import prepare_push, push
from holdfast.ondisk import blocks, manifest
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace, private_folder
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

PART = 8 << 20

MARK = ".holdfast-converting"
"""A file that is there until the upload is complete: what an interrupted upload has left may be replaced."""


def grown_at(place: Place) -> LocalPlace:
    """The local folder or file in which a target for ``place`` grows: the same one for a call that is repeated.

    Nobody else can write there. Raises StorageError if that cannot be had.
    """
    with naming(tempfile.gettempdir(), "make a folder in"):
        return private_folder(f"convert-{blocks.digest(str(place).encode())[:12]}") / (place.name or "root")


def check_free(place: StorePlace, *, overwrite: bool) -> None:
    """Raises StorageError if something is at ``place`` already and may not be replaced, or if nobody may push there."""
    if place.takes_pushes:
        prepare_push(place, overwrite=overwrite)
        return
    existing = place.files_below() or ([place.name] if place.is_file() else [])
    if MARK in existing:
        return
    if existing and not overwrite:
        raise taken(f"{place} holds {existing[0]}{' and more' if len(existing) > 1 else ''}")
    if existing and existing != [place.name] and not any(name in existing for name in LAST):
        raise not_a_checkpoint(place)
    inner = next((name for name in existing if "/" in name and name.rpartition("/")[2] in LAST), None)
    if inner is not None:
        raise holds_others(place, inner.rpartition("/")[0])
    if existing:
        refuse_cited(place)


def check_one_machine(hosts: list[str]) -> str:
    """Raises Unsupported if the ranks do not share a local disk."""
    if len(set(hosts)) > 1:
        raise Unsupported(
            f"a target in a store grows on one machine's disk, and the ranks are on {len(set(hosts))}: "
            "convert to a folder that all of them share and copy that, or convert with the ranks of one machine"
        )
    return ""


def upload(grown: LocalPlace, place: StorePlace) -> int:
    """Upload a complete target, then delete the local one; returns the bytes of all its files.

    A checkpoint of ours that was at ``place`` is there until the new one is: no file of theirs has the same name but
    the manifest, which is replaced in one step. Files of other formats have the same names in every save, so the old
    ones are deleted first, and for a moment there is no checkpoint. To a repository all goes in one commit.
    """
    if place.takes_pushes:
        nbytes = push(grown, place)
    elif grown.is_file():
        nbytes = grown.stat().st_size
        _put(grown, place)
    else:
        files = grown.sizes_below()
        nbytes, old = sum(files.values()), set(place.files_below())
        (place / MARK).write_small(b"an upload is under way, or broke off\n")
        if old.intersection(files) != {manifest.FILE_NAME}:
            storage.delete(*(place / path for path in LAST if path in old))
        with events.task("upload", str(place), total=nbytes) as task:
            for path in sorted(files, key=lambda path: (path in LAST, path)):
                _put(grown / path, place / path)
                task.advance(files[path])
        storage.delete(*(place / path for path in {*old, MARK} - set(files)))
    disk.delete_all(grown)
    return nbytes


def _put(path: Path, place: StorePlace) -> None:
    with naming(place, "upload"):
        place.store.put(place.key, _parts(path), path.stat().st_size)


def _parts(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(PART):
            yield part
