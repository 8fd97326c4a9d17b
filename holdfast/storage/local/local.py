"""A store over a folder of a local disk: what it says is written is on the disk, whole, under its own name.

Copies between homes of a checkpoint and tiers of them go through it. Save and load of a local path never do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming, naming_unless_missing, storage_error
from holdfast.storage.store import Buffer, Entry, Got, Listing, check_key, clipped

_TEMPORARY = re.compile(r"\.holdfast-[0-9a-f]{16}\.tmp")
_MISSING = (errno.ENOENT, errno.ENOTDIR)

_DEAD = 60.0
"""Seconds after which a temporary file that nobody has locked is the orphan of a process that died."""

_ATTEMPTS = 100
"""How often a folder is made again that others delete, as it is empty, before anything is in it."""

T = TypeVar("T")


class Local:
    """A `Store` of the files below ``root``, which is made with the first file and never removed.

    Links are followed within ``root``, to files and by key; a listing does not go into linked folders. A file that
    leads out of ``root`` is listed, and refused when it is asked for. A key cannot be both a file and a folder here.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = LocalPlace(os.path.abspath(root))

    @property
    def url(self) -> str:
        return self._root.as_posix().rstrip("/")

    def list(self, prefix: str, *, deep: bool) -> Listing:
        folder = self._followed(prefix) if prefix else self._root
        listing = Listing([], [])
        with naming(folder, "list"):
            self._look_into(folder, f"{prefix}/" if prefix else "", listing, deep=deep)
        return Listing(sorted(listing.files), sorted(listing.folders))

    def size(self, key: str) -> int | None:
        path = self._followed(key)
        with naming(path, "look for"):
            status = _status(path)
        return status.st_size if status is not None and stat.S_ISREG(status.st_mode) else None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        path = self._followed(key)
        with naming_unless_missing(path, "read"):
            try:
                fd = disk.open_regular(path)
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.EISDIR, errno.EINVAL):
                    raise
                raise FileNotFoundError(errno.ENOENT, "No such file", str(path)) from None
            try:
                status = os.fstat(fd)
                if not stat.S_ISREG(status.st_mode):
                    raise FileNotFoundError(errno.ENOENT, "There is a folder and no file", str(path))
                return Got(_read(fd, path, *clipped(begin, end, status.st_size)), status.st_size)
            finally:
                os.close(fd)

    def create(self, key: str, data: bytes) -> bool:
        path = self._path(key)
        try:
            return _in_folder(path.parent, lambda: path.create_small(data, _temporary()))
        except BaseException:
            self._tidy(path.parent)
            raise

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        path = self._path(key)
        temporary = path.with_name(_temporary())
        try:
            fd = _in_folder(path.parent, lambda: _open_new(temporary, nbytes))
            try:
                _write(fd, path, chunks, nbytes)
                with naming(path, "write"):
                    disk.sync(fd, temporary)
                    disk.replace(temporary, path)
            except BaseException:
                with suppress(FileNotFoundError):
                    disk.delete(temporary)
                raise
            finally:
                os.close(fd)
        except BaseException:
            self._tidy(path.parent)
            raise
        _sync(path.parent)

    def delete(self, keys: Sequence[str]) -> None:
        failed: OSError | None = None
        paths = [self._path(key) for key in keys]
        for path in paths:
            try:
                with naming(path, "delete"):
                    if not path.is_dir():
                        disk.delete(path)
            except OSError as error:
                if error.errno not in _MISSING:
                    failed = failed or error
        for folder in sorted({path.parent for path in paths}, reverse=True):
            if folder.is_dir():
                _sync(folder)
                with naming(folder, "tidy up"):
                    _sweep(folder)
                self._tidy(folder)
        if failed is not None:
            raise failed

    # Keys and paths

    def _path(self, key: str) -> LocalPlace:
        """Where a file of this key lies or will lie. Raises ValueError, and OSError if its folder leads out."""
        path = self._root / check_key(self.url, key)
        if any(_TEMPORARY.fullmatch(part) for part in path.parts):
            raise ValueError(f"{key!r} is no key for {self.url}: names like this are its temporary files")
        self._refuse_out(path, path.parent)
        return path

    def _followed(self, key: str) -> LocalPlace:
        path = self._path(key)
        self._refuse_out(path, path)
        return path

    def _refuse_out(self, path: LocalPlace, linked: LocalPlace) -> None:
        if self._leads_out(linked):
            real = os.path.realpath(linked)
            text = f"a link leads out of {self._root}, to {real}: name a folder that holds both"
            raise storage_error("use", str(path), errno.EXDEV, text)

    def _leads_out(self, path: LocalPlace) -> bool:
        root = os.path.realpath(self._root)
        return os.path.commonpath([os.path.realpath(path), root]) != root

    # Folders

    def _look_into(self, folder: LocalPlace, above: str, listing: Listing, *, deep: bool) -> None:
        for entry in _scan(folder):
            key = above + entry.name
            if _TEMPORARY.fullmatch(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                if deep:
                    self._look_into(LocalPlace(entry.path), f"{key}/", listing, deep=True)
                else:
                    listing.folders.append(key)
                continue
            path = LocalPlace(entry.path)
            status = _status(path)
            if status is None:  # deleted meanwhile, or a link to nothing
                continue
            if entry.is_symlink() and not stat.S_ISDIR(status.st_mode) and self._leads_out(path):
                status = path.lstat()  # listed, so that a copy of the folder fails instead of lacking it silently
            elif not stat.S_ISREG(status.st_mode):
                log.debug("passed over in a listing, as it is no file: %s", path)
                continue
            listing.files.append(Entry(key, status.st_size, status.st_mtime))

    def _tidy(self, folder: LocalPlace) -> None:
        """Delete a folder if it is empty, and those above it that are empty then."""
        while folder != self._root and self._root in folder.parents:
            try:
                disk.remove_folder(folder)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    log.debug("cannot remove %s: %s", folder, error)
                if error.errno != errno.ENOENT:
                    return
            folder = folder.parent


def _temporary() -> str:
    return f".holdfast-{secrets.token_hex(8)}.tmp"


def _in_folder(folder: LocalPlace, work: Callable[[], T]) -> T:
    """Do ``work`` in a folder that is made if need be. Another process may just delete it with its last file."""
    for _ in range(_ATTEMPTS):
        try:
            folder.make_folder()
            return work()
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise
    folder.make_folder()
    return work()


def _sync(folder: LocalPlace) -> None:
    try:
        folder.sync_folder()
    except StorageError as error:
        if error.errno != errno.ENOENT:  # others have deleted all that was in it, and then the folder
            raise


def _open_new(path: LocalPlace, nbytes: int) -> int:
    fd, direct = path.open_to_write(nbytes)
    if direct:  # chunks lie at any address and have any length
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
    return fd


def _write(fd: int, path: LocalPlace, chunks: Iterable[Buffer], nbytes: int) -> None:
    at = 0
    for chunk in chunks:  # what this raises is raised as it is
        at = _write_one(fd, path, chunk, at)
        del chunk  # the next one may need its memory
    if at != nbytes:
        raise ValueError(f"cannot write {path}: {nbytes} bytes were announced, {at} given")


def _write_one(fd: int, path: LocalPlace, chunk: Buffer, at: int) -> int:
    with naming(path, "write"), memoryview(chunk) as whole, whole.cast("B") as view:
        done = 0
        while done < len(view):
            with view[done:] as rest:
                done += disk.write(fd, rest, at + done, path)
    return at + done


def _read(fd: int, path: LocalPlace, begin: int, end: int) -> Buffer:
    data = memoryview(bytearray(end - begin))
    done = 0
    while done < len(data):
        nbytes = disk.read(fd, data[done:], begin + done, path)
        if nbytes == 0:
            raise OSError(errno.EIO, f"the file ended at byte {begin + done}: it was cut while it was read")
        done += nbytes
    return data


def _scan(folder: LocalPlace) -> Iterator[os.DirEntry[str]]:
    try:
        yield from disk.listed(folder)
    except OSError as error:
        if error.errno not in _MISSING:  # deleted meanwhile, or never there
            raise


def _status(path: LocalPlace) -> os.stat_result | None:
    try:
        return disk.stat(path)
    except OSError as error:
        if error.errno not in _MISSING:
            raise
        return None


def _sweep(folder: LocalPlace) -> None:
    """Delete temporary files of processes that died: they are not listed, and would keep the folder for ever."""
    for entry in list(_scan(folder)):
        if _TEMPORARY.fullmatch(entry.name):
            path = LocalPlace(entry.path)
            status = _status(path)
            if status is not None and time.time() - status.st_mtime > _DEAD and not path.in_use():
                with suppress(FileNotFoundError):
                    disk.delete(path)
