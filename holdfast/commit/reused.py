"""Files that a checkpoint has reused from its siblings: who reuses what, and what of it nobody needs any more.

`folder`, `commit` and the manager ask here before they delete. Reads manifests alone. Deletes only files that a save of
ours wrote and that no committed checkpoint names.

We rejected counts of references, and marks beside files that are reused, because they would have to stay right through
every crash and every copy by another program.
"""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import Damaged, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.ondisk import datafile, manifest
from holdfast.ondisk.manifest import Manifest, is_reused, sibling_of
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.storage import without_links_out

ReusedPaths = dict[str, set[str]]
"""By the name of a folder, the paths in it that are reused from elsewhere."""

ASKERS = 16
"""Manifests of a store that are read at once."""

_HINT = b'"..'
"""Without this in its bytes a manifest reuses nothing, and need not be decoded."""

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOTSUP)
"""Why a neighbour cannot be looked into that is somebody else's: it can have reused nothing here."""


def reused_by(record: Manifest) -> ReusedPaths:
    reused: ReusedPaths = {}
    for file in record.data_files:
        if is_reused(file.path):
            name, below = sibling_of(file.path)
            reused.setdefault(name, set()).add(below)
    return reused


class Reuses:
    """What the checkpoints below ``root`` reuse.

    Each manifest is read once: on disk again when it has changed, in a store again after `forget`.
    """

    def __init__(self, root: Place) -> None:
        self._root = root
        self._known: dict[str, tuple[object, ReusedPaths]] = {}

    def by(self, names: Iterable[str]) -> ReusedPaths:
        """What the checkpoints of these names reuse, all together. Raises StorageError, Unsupported."""
        stamps = {name: self._stamp(name) for name in names}
        lacking = [name for name, stamp in stamps.items() if self._known.get(name, (_NONE,))[0] != stamp]
        if self._root.is_remote and len(lacking) > 1:
            with ThreadPoolExecutor(min(ASKERS, len(lacking)), thread_name_prefix="holdfast-reused") as pool:
                read = list(pool.map(self._read, lacking))
        else:
            read = [self._read(name) for name in lacking]
        self._known.update((name, (stamps[name], reused)) for name, reused in zip(lacking, read, strict=True))
        joined: ReusedPaths = {}
        for name in stamps:
            for folder, paths in self._known[name][1].items():
                joined.setdefault(folder, set()).update(paths)
        return joined

    def forget(self, names: Iterable[str]) -> None:
        """These checkpoints are no more, or are others now."""
        for name in names:
            self._known.pop(name, None)

    def _read(self, name: str) -> ReusedPaths:
        return _reused_at(self._root / name)

    def _stamp(self, name: str) -> object:
        if self._root.is_remote:
            return None
        try:
            status = disk.stat(self._root / name / manifest.FILE_NAME)
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns


_NONE = object()


def _reused_at(folder: Place) -> ReusedPaths:
    target = folder / manifest.FILE_NAME
    try:
        data = target.read_small()
        if _HINT not in data:
            return {}
        try:
            return reused_by(manifest.decode(data, str(target)))
        except Damaged:
            if not folder.is_remote:
                raise
            return reused_by(manifest.decode(target.read_small(), str(target)))  # on the way a bit may flip
    except (FileNotFoundError, NotACheckpoint):
        return {}
    except Damaged as error:  # it cannot be restored, and must not keep everything else for ever
        log.warning("what %s reuses is not spared: %s", folder, error)
        return {}
    except StorageError as error:
        if error.errno not in _NOT_OURS:
            raise
        return {}


def root_of(folder: Place) -> tuple[Place, str]:
    """Where the siblings of a checkpoint lie, and what it is called there; links are followed as `..` follows them."""
    real = folder.real()
    return real.parent, real.name


def reused_beside(folder: Place) -> ReusedPaths:
    """What all checkpoints beside this one reuse: every manifest there is read.

    Raises StorageError, and Unsupported for a manifest that a newer holdfast wrote.
    """
    root, name = root_of(folder)
    try:
        kin = [other for other in root.folder_names() if other not in (name, storage.JOURNAL)] if name else []
    except StorageError as error:
        if error.errno not in _NOT_OURS:
            raise
        kin = []
    return Reuses(root).by(kin)


def who_reuses(folder: Place, files: Collection[str], reuses: Reuses | None = None) -> list[str]:
    """The checkpoints beside ``folder`` that reuse ``files`` of it, if they reuse every one; else none.

    Then these files are neither a save under way nor a dead one's orphans, but what a swept step has lent. ``reuses``
    of the folder's root, if the caller asks of several folders. Raises StorageError.
    """
    root, name = root_of(folder)
    known = reuses or Reuses(root)
    try:
        kin = [other for other in root.folder_names() if other not in (name, storage.JOURNAL)]
        if not files or not set(files) <= known.by(kin).get(name, set()):
            return []
        return sorted(other for other in kin if name in known.by([other]))
    except Unsupported:  # a newer holdfast wrote one of them: what that reuses is not known
        return []


def reused_in(folder: Place) -> set[str]:
    """Paths in ``folder`` that other checkpoints reuse; raises as `reused_beside` does."""
    return reused_beside(folder).get(root_of(folder)[1], set())


def let_go(root: Place, loose: ReusedPaths, reused: ReusedPaths, spare: Collection[Place] = ()) -> None:
    """Delete of the ``loose`` files what nobody needs any more: what is neither ``reused`` nor of a checkpoint there.

    Folders that are empty then go too, but for those to ``spare``, where saves are under way. Raises StorageError.
    """
    for name, paths in sorted(loose.items()):
        folder = root / name
        if folder.is_symlink():
            continue  # it may lead out of the root
        free = {path for path in paths - reused.get(name, set()) if datafile.save_of(path) is not None}
        free = _unnamed(folder, free) if free else free
        if free:
            storage.delete(*without_links_out(folder, sorted(free)))
            if folder not in spare:
                folder.delete_empty_folders()


def _unnamed(folder: Place, paths: set[str]) -> set[str]:
    """Those of ``paths`` that the folder's own checkpoint does not name, if it is one; none if it cannot be read."""
    target = folder / manifest.FILE_NAME
    try:
        return paths - {file.path for file in manifest.decode(target.read_small(), str(target)).data_files}
    except (FileNotFoundError, NotACheckpoint):
        return paths
    except (Damaged, Unsupported):
        return set()
