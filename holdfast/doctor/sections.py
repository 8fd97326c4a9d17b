"""Which checks a path gets: of the machine, of a folder or a store, and of a checkpoint in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from holdfast.doctor import checkpoints, folders, machine, stores
from holdfast.doctor.finding import Finding
from holdfast.errors import StorageError
from holdfast.ondisk import manifest
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.urls import location

Here = TypeVar("Here", bound=Place)


def sections_of(path: str | None, *, write: bool) -> Iterator[tuple[str, Iterable[Finding]]]:
    """Check this machine, and the folder or store and the checkpoint at ``path``; with ``write`` also write there."""
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
