"""Small files, listing and deleting, on local disk or in a store; and how a large local file is opened.

Called by save, load and the manager. Knows nothing of tensors or ranks; every error names the file.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.cloud.conditions import create_once
from holdfast.storage.local import disk, durable
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.place import Place, StorePlace

_ADVICE = {
    errno.ENOSPC: "the disk is full: free space or prune old steps",
    errno.EDQUOT: "the quota is used up: free space or raise it",
    errno.EACCES: "no permission: check the owner and mode of the folder",
    errno.EPERM: "not permitted: check the owner and mode of the folder",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.ENAMETOOLONG: "a name is too long for this file system",
    errno.EIO: "the device failed: check its health, then restore from another copy",
    errno.EMFILE: "too many open files: raise the limit (ulimit -n)",
}
_libc = ctypes.CDLL(None, use_errno=True)

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks answers."""

ASKED = 4
"""Times that a lock is asked for: others may hold it for an instant, to see whether it is held."""

LIVING = 6 * 3600.0
"""Seconds for which a file of a store that no manifest names may belong to a save under way: a store has no locks."""

JOURNAL = ".journal"
"""The folder in a run's root that tells of the run. It is never a checkpoint, nor looked into for one."""


@contextmanager
def naming(path: str | os.PathLike[str] | Place, doing: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that says what was done to which file, and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(doing, str(path), error.errno, error.strerror or str(error)) from error


def storage_error(doing: str, file: str, number: int | None, text: str) -> StorageError:
    """The error that says what was done to which file, and what to do."""
    advice = _ADVICE.get(number or 0) if "://" not in file else None
    told = text if "://" in file and file in text else f"cannot {doing} {file}: {text}"  # stores name what they refuse
    named = StorageError(told + (f" ({advice})" if advice else ""))
    named.errno, named.file = number, file
    return named


def make_folder(path: Place) -> None:
    """Create a folder and its parents, durably: each new entry is synced into its own parent. A store has none."""
    if isinstance(path, StorePlace):
        return
    with naming(path, "create the folder"):
        durable.make_folder(os.fspath(path))


def make_folders(above: Place, names: Iterable[str]) -> None:
    """`make_folder` for many folders below one, which is synced once."""
    if isinstance(above, StorePlace):
        return
    with naming(above, "create folders in"):
        durable.make_folders(os.fspath(above / name) for name in names)


def make_home(path: Place) -> None:
    """`make_folder` for a checkpoint. One that is there may be of a process that died before it was durable."""
    there = isinstance(path, Path) and path.is_dir()
    make_folder(path)
    if there:
        try:
            sync_folder(path.parent)
        except StorageError as error:
            if error.errno not in (errno.EACCES, errno.EPERM):  # a folder that we may not open we have not changed
                raise


def sync_folder(path: Place) -> None:
    """Make the entries of a folder durable."""
    if isinstance(path, StorePlace):
        return
    with naming(path, "sync the folder"):
        disk.sync_folder(path)


def write_small(path: Place, data: bytes) -> None:
    """Write a small file whole and durably under its final name. An older one of that name is replaced in one step."""
    with naming(path, "write"):
        if isinstance(path, StorePlace):
            path.store.put(path.key, [data], len(data))
            return
        durable.write_small(os.fspath(path), data)


def create_small(path: Place, data: bytes, temporary: str) -> bool:
    """Create a small file whole and durably, only if there is none: False if the name is taken.

    ``temporary`` is a name in the same folder for the moments before, which nobody else uses. A crash leaves either
    nothing, the temporary file, or the whole file.
    """
    if isinstance(path, StorePlace):
        with naming(path, "create"):
            return create_once(path.store, path.key, data, temporary)
    return _create_on_disk(path, data, path.with_name(temporary))


def _create_on_disk(path: Path, data: bytes, temporary: Path) -> bool:
    with naming(path, "create"):
        try:
            durable.write_synced(os.fspath(temporary), data)
            try:
                disk.link(temporary, path)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                    return _create_without_links(path, data)
                if not _holds(path, data):
                    raise
        finally:
            _clear(temporary)
    try:
        sync_folder(path.parent)
    except StorageError:
        _delete(path)  # what is not durable must not be seen
        raise
    return True


def _create_without_links(path: Path, data: bytes) -> bool:
    # File systems without hard links (some FUSE and SMB mounts): an exclusive create is atomic there, the bytes are
    # not; the manifest's digest finds a torn one.
    try:
        fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return False
    try:
        disk.write_all(fd, data, 0, path)
        disk.sync(fd, path)
    except BaseException:
        _delete(path)  # half of it would keep everybody from this name
        raise
    finally:
        os.close(fd)
    sync_folder(path.parent)
    return True


def _holds(path: Path, data: bytes) -> bool:
    """Whether a call that gave its file this name was carried out although it failed, as over a network it may be."""
    try:
        return disk.read_file(path) == data
    except OSError:  # then the failure that was told stands
        return False


def _clear(path: Path) -> None:
    """Delete what is of no use any more: where that fails, it costs space alone, and what was done stays done."""
    try:
        _delete(path)
    except OSError as error:
        log.warning("%s stays, to be swept later: %s", path, error)


def replace_small(path: Place, data: bytes, temporary: str) -> None:
    """Replace a small file in one durable step, so that at any moment either the old or the new one is there."""
    if isinstance(path, StorePlace):
        write_small(path, data)
        return
    half = path.with_name(temporary)
    with naming(path, "replace"):
        try:
            durable.write_synced(os.fspath(half), data)
            try:
                disk.replace(half, path)
            except OSError:
                if not _holds(path, data):
                    raise
        finally:
            _clear(half)
    sync_folder(path.parent)


def read_small(path: Place) -> bytes:
    """All bytes of a small file. Raises FileNotFoundError as it is, anything else as StorageError."""
    with naming_unless_missing(path, "read"):
        return path.read_bytes() if isinstance(path, StorePlace) else disk.read_file(path)


def read_start(path: Place, nbytes: int) -> tuple[bytes, int]:
    """The first bytes of a file, and how long all of it is. Raises FileNotFoundError, StorageError."""
    with naming_unless_missing(path, "read"):
        if isinstance(path, StorePlace):
            got = path.store.get(path.key, 0, nbytes)
            return bytes(got.data), got.nbytes
        fd = disk.open_regular(path)
        try:
            size = os.fstat(fd).st_size
            return disk.read_bytes(fd, min(nbytes, size), 0, path), size
        finally:
            os.close(fd)


@contextmanager
def naming_unless_missing(path: Place, doing: str) -> Iterator[None]:
    """`naming`, but a missing file stays a FileNotFoundError: the caller knows what that means."""
    try:
        with naming(path, doing):
            yield
    except FileNotFoundError:
        raise
    except StorageError as error:
        if error.errno == errno.ENOENT or isinstance(error.__cause__, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, "No such file", str(path)) from None
        raise


def is_file(path: Place) -> bool:
    """Whether there is a file of this name. Raises StorageError if a store does not tell."""
    with naming(path, "look for"):
        return path.is_file()


def size_of(path: Place) -> int | None:
    """Bytes of a file; None if there is none. Raises StorageError."""
    try:
        with naming_unless_missing(path, "look for"):
            return (path.stat() if isinstance(path, StorePlace) else disk.stat(path)).st_size
    except FileNotFoundError:
        return None


def delete(*paths: Place) -> None:
    """Delete files, those that are there. Raises StorageError for the first that cannot be, once all were tried."""
    places: dict[int, list[StorePlace]] = {}
    failed: StorageError | None = None
    for path in paths:
        if isinstance(path, StorePlace):
            places.setdefault(id(path.store), []).append(path)
            continue
        try:
            with naming(path, "delete"):
                _delete(path)
        except StorageError as error:
            failed = failed or error
    for found in places.values():
        try:
            with naming(found[0], "delete"):
                found[0].store.delete([place.key for place in found])
        except StorageError as error:
            failed = failed or error
    if failed is not None:
        raise failed


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError):
        disk.delete(path)


def is_link(path: Place) -> bool:
    """Whether a path is a symbolic link, which a store does not have."""
    return isinstance(path, Path) and path.is_symlink()


def delete_if_empty(path: Place) -> None:
    """Delete a folder that holds nothing; leave one that does."""
    if isinstance(path, StorePlace):
        return
    try:
        disk.remove_folder(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            log.debug("cannot remove %s: %s", path, error)


def delete_empty_folders(path: Place) -> None:
    """Delete every folder at or below ``path`` that holds nothing."""
    if isinstance(path, StorePlace):
        return
    with naming_unless_missing(path, "list"), suppress(FileNotFoundError):
        for entry in disk.listed(path):
            if entry.is_dir(follow_symlinks=False):
                delete_empty_folders(path / entry.name)
    delete_if_empty(path)


def folders_in(path: Place) -> list[str]:
    """Names of the folders in a folder; empty if there is none. In a store one request for a thousand of them."""
    with naming(path, "list"):
        if isinstance(path, StorePlace):
            return [key.rpartition("/")[2] for key in path.store.list(path.key, deep=False).folders]
        return [entry.name for entry in disk.listed(path) if _is_folder(entry)] if path.is_dir() else []


def files_below(folder: Place) -> list[str]:
    """Relative paths (with ``/``) of all files in a folder, sorted; empty if there is no folder."""
    return list(sizes_below(folder)) if isinstance(folder, StorePlace) else sorted(_walk(folder))


def files_near(folder: Path, *, levels: int, most: int = 5000, each: int = 1000) -> list[str]:
    """Relative paths (with ``/``) of the nearest files in a folder, the upper ones first, however much lies below.

    Of each folder no more than ``each`` entries are looked at, of all no more than ``most``. A folder that is not
    looked into, for it is too deep or cannot be listed, is told of too, with a ``/`` at its end. Raises StorageError
    if ``folder`` itself cannot be listed.
    """
    found: list[str] = []
    near = [""]
    for level in range(levels):
        below: list[str] = []
        for above in near:
            if most <= 0:
                found.append(above)
                continue
            try:
                with naming_unless_missing(folder / above, "list"):
                    entries = sorted(disk.listed(folder / above), key=lambda entry: entry.name)[: min(each, most)]
            except (FileNotFoundError, NotADirectoryError):
                continue
            except StorageError:
                if not level:
                    raise
                found.append(above)
                continue
            most -= len(entries)
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{above}{entry.name}/")
                elif not _is_folder(entry):
                    found.append(above + entry.name)
        near = below
    return found + near


def sizes_below(folder: Place) -> dict[str, int]:
    """Relative paths of all files in a folder with their bytes."""
    if isinstance(folder, StorePlace):
        return {path: nbytes for path, nbytes, _ in _entries(folder)}
    found = {}
    for path in sorted(_walk(folder)):
        try:
            found[path] = disk.stat(folder / path).st_size
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ELOOP):  # deleted meanwhile, or a link that leads nowhere
                raise
    return found


def _walk(folder: Path, above: str = "") -> Iterator[str]:
    """Relative paths of all files; what is deleted meanwhile is left out. Raises StorageError."""
    with naming_unless_missing(folder, "list"), suppress(FileNotFoundError, NotADirectoryError):
        for entry in disk.listed(folder):
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(folder / entry.name, f"{above}{entry.name}/")
            elif not _is_folder(entry):
                yield above + entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link that leads back to itself is like one that leads nowhere


def _entries(folder: StorePlace) -> list[tuple[str, int, float]]:
    skip = len(folder.key) + 1 if folder.key else 0
    with naming(folder, "list"):
        listed = folder.store.list(folder.key, deep=True).files
    return [(entry.key[skip:], entry.nbytes, entry.modified) for entry in listed]


def living(folder: Place, paths: list[str]) -> list[str]:
    """Which of these files of a folder belong to a save under way: locked, or in a store too young to tell."""
    if not paths:
        return []
    if isinstance(folder, StorePlace):
        since = time.time() - LIVING
        young = {path for path, _, modified in _entries(folder) if modified > since}
        return [path for path in paths if path in young]
    return [path for path in paths if in_use(folder / path)]


def may_live(folder: Place, paths: list[str]) -> bool:
    """Whether a save under way may need these files of a folder: for whoever would delete them.

    Where a disk has no locks, only what is old is known to be dead, as in a store.
    """
    if living(folder, paths):
        return True
    if not paths or isinstance(folder, StorePlace) or _has_locks(folder / paths[0]):
        return False
    since = time.time() - LIVING
    with suppress(FileNotFoundError):  # then somebody else sweeps here
        return any(disk.stat(folder / path).st_mtime > since for path in paths)
    return True


def _has_locks(path: Path) -> bool:
    try:
        with naming_unless_missing(path, "open"):
            fd = disk.open_regular(path)
    except OSError:  # nothing that a save writes, or gone
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _NO_LOCKS
    finally:
        os.close(fd)
    return True


def open_to_write(path: Path, nbytes: int) -> tuple[int, bool]:
    """Create a new file of ``nbytes`` for large aligned writes: (descriptor, whether it writes directly).

    Space is taken up front where the file system can, so that a full disk is found before any copying. The file
    carries a shared lock until it is closed: a sweeper can tell a save under way from the leavings of a dead one.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with naming(path, "create"):
        try:
            fd, direct = disk.open(path, flags | os.O_DIRECT), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # tmpfs before Linux 6.6 and some network file systems
                raise
            _delete(path)
            fd, direct = disk.open(path, flags), False
    try:
        with naming(path, "lock"):
            _lock(fd)
        with naming(path, f"reserve {nbytes} bytes for"):
            _reserve(fd, nbytes, path)
    except BaseException:
        os.close(fd)
        _delete(path)
        raise
    return fd, direct


def open_locked(path: Path) -> int:
    """A descriptor of an existing file that, as a rule, marks it as part of a save under way until it is closed."""
    with naming(path, "open"):
        fd = disk.open_regular(path)
        with suppress(OSError):  # somebody who asks whether it is in use has it locked for a moment
            _lock(fd)
        return fd


def _lock(fd: int) -> None:
    try:
        for _ in range(ASKED):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            _wait_a_little()  # only whoever asks `in_use` holds the other lock, for an instant
        raise OSError(errno.EAGAIN, "another process holds a lock on it")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def _wait_a_little() -> None:
    time.sleep(random.uniform(0.001, 0.01))


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    try:
        if nbytes:
            disk.reserve(fd, nbytes, path)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def in_use(path: Path) -> bool:
    """Whether a living process has this file open as part of a save under way.

    Two that ask at the same moment do not take each other for a save.
    """
    try:
        with naming_unless_missing(path, "open"):
            fd = disk.open_regular(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EISDIR):  # no file that a save writes
            return False
        raise
    try:
        for _ in range(ASKED):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            _wait_a_little()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


_CACHESTAT = 451  # the same number on every architecture; Linux 6.5


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether every page of a range of a file is in the page cache; looking brings none in.

    A read that must not wait (``RWF_NOWAIT``) would tell as well, but on a cold page it starts a read-ahead, and the
    disk then reads everything twice (measured). Without cachestat(2) one page stands for the range.
    """
    pages = _Pages()
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, nbytes)), ctypes.byref(pages), 0) == 0:
        return int(pages.cached) > (offset + nbytes - 1) // SECTOR - offset // SECTOR
    try:
        return disk.read(fd, bytearray(1), offset, "", flags=os.RWF_NOWAIT) == 1
    except (OSError, AttributeError):
        return False


def open_to_read(path: Path) -> tuple[int, int | None]:
    """Descriptors of an existing file: through the page cache, and directly (None where that cannot be had)."""
    with naming_unless_missing(path, "open"):
        cached = disk.open_regular(path)
    try:
        return cached, disk.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return cached, None
