"""A checkpoint's folder before and after it is one: who may save there, what dead saves leave, deleting in order.

Called by save and the manager. Never deletes a file that holdfast did not write, nor one of a save that still lives.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from holdfast.engine import storage
from holdfast.engine.stores.place import Location, Place
from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.ondisk import datafile, manifest
from holdfast.ondisk.manifest import Manifest


def prepare(folder: Location, *, overwrite: bool) -> None:
    """Create the folder, or make sure that it may take a save; leavings of dead saves are removed."""
    if not isinstance(folder, Place) and folder.exists() and not folder.is_dir():
        raise taken(f"{folder} is a file")
    found = storage.files_below(folder)  # of a store the one request that tells everything
    if manifest.FILE_NAME in found:
        if not overwrite:
            raise taken(f"{folder} already holds a committed checkpoint")
        return
    ours = [f for f in found if is_leaving(f)]
    foreign = [f for f in found if f not in ours and not (ours and f.startswith("attachments/"))]
    if foreign:
        raise taken(f"{folder} holds other files ({foreign[0]}{' and more' if len(foreign) > 1 else ''})")
    if storage.living(folder, [f for f in ours if datafile.save_of(f)]):
        if isinstance(folder, Place):
            return  # a dead save's or a living one's, who can tell: names hold save ids, and the commit has one winner
        raise taken(f"another save is writing to {folder} right now")
    storage.delete(*(folder / f for f in found))
    storage.make_folder(folder)


def is_leaving(path: str) -> bool:
    """Whether a file of an uncommitted folder, by its relative path, is what a save of ours leaves."""
    return (
        datafile.save_of(path) is not None
        or (path.startswith(".manifest.") and path.endswith(".tmp"))
        or path.startswith(f"{manifest.FILE_NAME}.claim.")
        or path.rpartition("/")[2].startswith(".holdfast-")
        or (path.startswith("parts/") and path.endswith((".json", ".tmp")))
    )


def may_hold_leavings(files: Sequence[str]) -> bool:
    """Whether a folder of these files can hold more than one committed save, by their names alone."""
    saves = {datafile.save_of(path) for path in files if is_leaving(path)}
    return manifest.FILE_NAME not in files or len(saves) > 1 or None in saves


def taken(text: str) -> StorageError:
    error = StorageError(f"{text}; choose another path" + ("" if "holds other" in text else ", or pass overwrite=True"))
    error.errno = errno.EEXIST
    return error


def withdraw(paths: Sequence[Location], folder: Location) -> None:
    """Delete what this rank wrote for a save that did not commit; the last rank to do so takes the folder away."""
    try:
        storage.delete(*paths)
    except StorageError as error:
        log.warning("a failed save leaves files behind, to be swept later: %s", error)
    storage.delete_empty_folders(folder)


def delete_checkpoint(path: Location) -> None:
    """Delete a checkpoint: its manifest first, so that it is none from the first moment on; then the rest."""
    storage.delete(path / manifest.FILE_NAME)
    storage.sync_folder(path)
    _delete_ours(path)


def sweep_dead(path: Location) -> bool:
    """Delete what a save that never committed left in ``path``; False if a living save may write there."""
    if storage.living(path, [f for f in storage.files_below(path) if is_leaving(f)]):
        return False
    log.info("sweeping %s: a save that never committed", path)
    _delete_ours(path)
    return True


def sweep_beside(path: Location, record: Manifest) -> bool:
    """Delete leavings of dead saves beside a committed checkpoint: data files that its manifest does not name.

    False if a living save may need them.
    """
    named = {f.path for f in record.data_files}
    strays = [f for f in storage.files_below(path) if is_leaving(f) and f not in named]
    # All or nothing: a first rank that still holds its own file may yet commit those of the others.
    if strays:
        if storage.living(path, strays):
            return False
        storage.delete(*(path / f for f in strays))
        storage.delete_if_empty(path / "parts")
    return True


def _delete_ours(path: Location) -> None:
    ours = [f for f in storage.files_below(path) if is_leaving(f) or f.startswith("attachments/")]
    storage.delete(*(path / f for f in ours))
    storage.delete_empty_folders(path)
