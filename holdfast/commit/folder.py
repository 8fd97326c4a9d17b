"""A checkpoint's folder before and after it is one: who may save there, what dead saves leave, deleting in order.

Called by save, open and the manager. Never deletes a file that holdfast did not write, nor one of a save that still
lives, nor one that another checkpoint reuses. Such files may stay long after the folder's own checkpoint is gone.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterable, Sequence

from holdfast.commit.reused import ReusedPaths, Reuses, let_go, reused_beside, reused_in, root_of
from holdfast.errors import Damaged, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.ondisk import datafile, manifest, signature
from holdfast.ondisk.manifest import Manifest
from holdfast.storage import storage
from holdfast.storage.place import Place

HINT = ".metadata"
HINT_BEGINS = b"\x80\x04\x8c\x2csaved by holdfast: load it with holdfast.dcp0"
"""A file beside a checkpoint that tells programs of torch.distributed.checkpoint that there is one, and how it begins:
a string that is dropped as the file is unpickled."""

ASIDE = "manifest.json.damaged"
"""What `rescue` keeps a damaged manifest as: it stays as long as the checkpoint does."""

DELETED = ".manifest.deleted.tmp"
"""What the manifest of a checkpoint on disk is called while its other files are deleted. By it a sweep tells a deletion
that was interrupted from a checkpoint that has lost its manifest."""

TAKEN = "already holds a committed checkpoint"


def prepare(folder: Place, *, overwrite: bool) -> None:
    """Create the folder, or make sure that it may take a save; orphans of dead saves are removed."""
    if folder.has_folders and folder.exists() and not folder.is_dir():
        raise taken(f"{folder} is a file")
    files = folder.files_below()  # of a store the one request that tells everything
    if manifest.FILE_NAME in files:
        if not overwrite:
            raise taken(f"{folder} {TAKEN}")
        return
    ours = [f for f in files if is_orphan(f)]
    foreign = [f for f in files if f not in ours and not (ours and goes_along(folder, f)) and f != ASIDE]
    if foreign:
        raise taken(f"{folder} holds other files ({foreign[0]}{' and more' if len(foreign) > 1 else ''})")
    if folder.living([f for f in ours if datafile.save_of(f)]):
        if not folder.has_locks:
            return  # a dead save's or a living one's, who can tell: names hold save ids, and the commit has one winner
        raise taken(f"another save is writing to {folder} right now")
    if ours and (folder / manifest.FILE_NAME).is_file():
        if not overwrite:
            raise taken(f"{folder} holds a checkpoint that another save has just committed")
        return
    try:
        kept = reused_in(folder) if files else set()
    except (StorageError, Unsupported) as error:  # names hold save ids: nothing of it is in the way
        log.warning("what older saves left in %s stays, to be swept later: %s", folder, error)
        kept = set(files)
    storage.delete(*(folder / f for f in files if f not in kept))
    folder.make_home()


def is_orphan(path: str) -> bool:
    """Whether a file of an uncommitted folder, by its relative path, is what a save of ours leaves."""
    return (
        _save_of(path) is not None
        or (path.startswith(".manifest.") and path.endswith(".tmp"))
        or path.startswith(f"{manifest.FILE_NAME}.claim.")
        or path.rpartition("/")[2].startswith(".holdfast-")
        or (path.startswith("parts/") and path.endswith((".json", ".tmp")))
    )


def goes_along(folder: Place, path: str) -> bool:
    """Whether a file that is no leaving goes with those that are: by its name alone nobody tells whose it is."""
    return path.startswith("attachments/") or path == ASIDE or (path == HINT and is_our_hint(folder))


def is_our_hint(folder: Place) -> bool:
    """Whether the `HINT` in a folder is one that holdfast wrote, and no file of torch's own."""
    try:
        return (folder / HINT).read_start(len(HINT_BEGINS))[0] == HINT_BEGINS
    except FileNotFoundError:
        return False


def copy_hint(source: Place, target: Place, save: str) -> None:
    """Copy the `HINT` of a checkpoint that is committed at ``target``, if it has one. What goes wrong is logged."""
    try:
        if is_our_hint(source):
            (target / HINT).replace_small((source / HINT).read_small(), f".manifest.{HINT}.{save}.tmp")
    except (StorageError, FileNotFoundError) as error:
        log.warning("%s is copied, but programs that look for %s do not see it: %s", target, HINT, error)


def delete_hint(folder: Place) -> None:
    """Delete the `HINT` of a checkpoint that was replaced. Raises StorageError."""
    if is_our_hint(folder):
        (folder / HINT).delete()


def may_hold_orphans(files: Sequence[str]) -> bool:
    """Whether a folder of these files can hold more than one committed save, by their names alone."""
    saves = {_save_of(path) for path in files if is_orphan(path)}
    return manifest.FILE_NAME not in files or len(saves) > 1 or None in saves


def _save_of(path: str) -> str | None:
    """The save that a data file or a signature is of, by its relative path."""
    return datafile.save_of(path) or signature.save_of(path)


def taken(text: str) -> StorageError:
    error = StorageError(f"{text}; choose another path" + ("" if "holds other" in text else ", or pass overwrite=True"))
    error.errno = errno.EEXIST
    return error


def refuse_cited(folder: Place) -> None:
    """Raises StorageError (EEXIST) if other checkpoints reuse files of a folder that is to be replaced."""
    if reused_in(folder):
        error = StorageError(
            f"{folder} holds files that checkpoints beside it reuse, and cannot be replaced: choose another path, or "
            "first make those whole by themselves (holdfast.copy)"
        )
        error.errno = errno.EEXIST
        raise error


def withdraw(paths: Sequence[Place], folder: Place | None) -> None:
    """Delete what this rank wrote for a save that did not commit; the last rank to do so takes the folder away.

    ``folder`` is None while other ranks may still write: an empty folder can be one that such a rank has just made.
    Never raises an OSError: the failure of the save is what its caller has to hear of.
    """
    try:
        storage.delete(*paths)
        # A writer that was killed may have left a small file under the name that it has before it is whole.
        local = [path for path in paths if not path.is_remote]
        storage.delete(*(half for path in local for half in path.parent.glob(f".{path.name}.*.tmp")))
        if folder is not None:
            folder.delete_empty_folders()
    except OSError as error:
        log.warning("a failed save leaves files behind, to be swept later: %s", error)


def delete_checkpoint(path: Place) -> None:
    """Delete a checkpoint; see `delete_checkpoints`."""
    root, name = root_of(path)
    delete_checkpoints(root, [name], reused_beside(path), Reuses(root).by([name]))


def delete_checkpoints(
    root: Place, names: Sequence[str], reused: ReusedPaths, loose: ReusedPaths, spare: Collection[Place] = ()
) -> None:
    """Delete the checkpoints of these ``names``: their manifests first, so that none is one from that moment on.

    On a disk a manifest is renamed to `DELETED`, and deleted when the other files are gone.

    Then what they have held and what they have reused elsewhere (``loose``), but for what is ``reused`` by the others,
    which are all that stay. It goes once the last of those goes. Empty folders go too, but for those to ``spare``.
    Of a checkpoint that is a symbolic link the link goes: somebody else may use what it leads to.
    """
    links = [name for name in names if (root / name).is_symlink()]
    storage.delete(*(root / name for name in links))
    names = [name for name in names if name not in links]
    storage.set_aside((root / name / manifest.FILE_NAME for name in names), DELETED)
    for name in names:
        try:
            (root / name).sync_folder()
        except StorageError as error:
            if error.errno != errno.ENOENT:  # somebody else deletes it, too, and was quicker
                raise
    for name in names:
        _delete_ours(root / name, (root / name).files_below(), reused.get(name, set()))
    let_go(root, {name: paths for name, paths in loose.items() if name not in names}, reused, spare)


def standing_save(folder: Place) -> str | None:
    """The save that is committed in a folder now; None if there is none, or it cannot be read.

    If no living process holds a lock there, ask this once more: a save may have ended meanwhile.
    """
    target = folder / manifest.FILE_NAME
    try:
        return manifest.decode(target.read_small(), str(target)).save
    except (FileNotFoundError, NotACheckpoint, Damaged, Unsupported):
        return None


def sweep_dead(
    path: Place, reused: Callable[[Place], Collection[str]] = reused_in,
    spares: Callable[[Sequence[str]], bool] = lambda going: False,
) -> bool:  # fmt: skip
    """Delete what is left in ``path`` of a save that never committed, or of a checkpoint that was being deleted.

    False if a living save may write there.

    What is ``reused`` stays: `reused_in` unless the caller knows it cheaper; and all of it if the caller ``spares`` the
    files that would go.
    """
    present = path.files_below()
    orphans = [f for f in present if is_orphan(f)]
    if path.may_live(orphans):
        return False
    if orphans and (path / manifest.FILE_NAME).is_file():
        return False  # committed since the caller looked: locks go after the commit, so now it can be seen
    kept = reused(path) if orphans else ()
    going = [f for f in orphans if f not in kept]
    if going and spares(going):
        return True
    if going:
        what = "a checkpoint that was being deleted" if DELETED in going else "a save that never committed"
        log.info("sweeping %s: %s", path, what)
    _delete_ours(path, present, kept)  # what came since is of a living save
    return True


def sweep_beside(path: Place, record: Manifest, reused: Callable[[Place], Collection[str]] = reused_in) -> bool:
    """Delete orphans of dead saves beside a committed checkpoint: data files that no manifest names.

    False if a living save may need them.
    """
    named = {f.path for f in record.data_files}
    strays = [f for f in path.files_below() if is_orphan(f) and f not in named]
    strays = [f for f in strays if signature.save_of(f) != record.save]
    kept = reused(path) if strays else ()
    strays = [f for f in strays if f not in kept]
    # All or nothing: a first rank that still holds its own file may yet commit those of the others.
    if strays:
        if path.may_live(strays) or standing_save(path) != record.save:
            return False
        storage.delete(*(path / f for f in strays))
    (path / "parts").delete_if_empty()  # a trainer may have died between the last part and their folder
    return True


def _delete_ours(path: Place, present: Iterable[str], kept: Collection[str]) -> None:
    ours = [f for f in present if is_orphan(f) or goes_along(path, f)]
    storage.delete(*(path / f for f in ours if f not in kept and f != DELETED))
    if DELETED in ours:
        storage.delete(path / DELETED)  # as the last one: if this is interrupted, the next sweep knows
    path.delete_empty_folders()


LEVELS = 3
"""Levels of a folder that tell what it is: of a root, the files of its steps. Data sets may lie beside a run."""


def what_is_there(folder: Place) -> str:
    """What a place holds that is no checkpoint, and which path might be meant."""
    if folder.is_remote:
        return _what_is_in_store(folder)
    if not folder.exists():
        above = folder.parent
        kin = sorted(p.parent.name for p in above.glob(f"*/{manifest.FILE_NAME}")) if above.is_dir() else []
        return f"there is nothing at {folder}" + (
            f"; beside it are the checkpoints {', '.join(kin[-5:])}" if kin else ""
        )
    if folder.is_file():
        if folder.name == manifest.FILE_NAME:
            return f"{folder} is a file of a checkpoint: give its folder {folder.parent}"
        if not folder.stat().st_size:
            return f"{folder} is empty: its writer broke off, or the disk was full"
        return f"{folder} is a file of no format that holdfast reads (docs/formats.md lists them)"
    below = sorted(p.parent.name for p in folder.glob(f"*/{manifest.FILE_NAME}"))
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    for above in (folder.parent, folder.parent.parent):
        if (above / manifest.FILE_NAME).is_file():
            return f"{folder} is a part of the checkpoint {above}"
    return _uncommitted(folder, folder.files_near(levels=LEVELS))


def _what_is_in_store(folder: Place) -> str:
    """The same with few requests: what a folder is called tells enough."""
    try:
        files = folder.files_below()
        beside = folder.parent.folder_names() if not files else []
    except StorageError as error:  # a web server lists nothing
        return f"there is no {folder / manifest.FILE_NAME}, and what else is there cannot be listed ({error})"
    if not files:
        return f"there is nothing at {folder}" + (f"; beside it are {', '.join(beside[-5:])}" if beside else "")
    below = sorted({path.split("/")[0] for path in files if path.endswith(f"/{manifest.FILE_NAME}")})
    if below:
        return f"{folder} holds checkpoints but is none itself: open one of {', '.join(below[-5:])}"
    return _uncommitted(folder, files)


def unfinished(files: Iterable[str]) -> list[str]:
    """The folders of a root, by the paths of its files, that hold data of a save of ours, and no manifest."""
    parted = [path.partition("/") for path in files]
    committed = {name for name, _, rest in parted if rest == manifest.FILE_NAME}
    return sorted({name for name, _, rest in parted if datafile.save_of(rest) is not None} - committed)


def what_is_lent(names: Sequence[str]) -> str:
    """Of the folder of a swept step, whose files checkpoints of these ``names`` have reused."""
    borrowers = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    return f"no checkpoint any more: its files stay since {borrowers} reuse{'s' if len(names) == 1 else ''} them"


def _uncommitted(folder: Place, files: Sequence[str]) -> str:
    if any(path.startswith("parts/") for path in files):
        return (
            f"{folder} holds a save that never committed; holdfast.tools.recover commits it if all its ranks had "
            "finished"
        )
    if any(datafile.save_of(path) for path in files):
        return (
            f"{folder} holds data but no manifest.json: a save that never committed, or its manifest was deleted; "
            "holdfast doctor says which"
        )
    if any(path.endswith(".safetensors") and "/" not in path for path in files):
        return f"{folder} holds data but no manifest.json: a save that never committed, or another program's files"
    begun = unfinished(files)
    if begun:
        return f"no step was saved here yet: {folder} holds saves that never committed, {', '.join(begun[-5:])}"
    if files and all(path.startswith(f"{storage.JOURNAL}/") for path in files):
        return f"no step was saved here yet: {folder} holds the journal of a run and no checkpoint"
    if not files:
        return f"no step was saved here yet: {folder} is empty"
    return f"{folder} holds no manifest.json, and no checkpoint of a format that holdfast reads (docs/formats.md)"
