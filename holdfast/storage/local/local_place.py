"""A place on local disk: a path of pathlib's with the methods of a `Place`.

`location` makes one of what a user writes. Each system call of its own methods goes through `disk`.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import PosixPath
from typing import Any

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.local import disk, durable, large
from holdfast.storage.naming import naming, naming_unless_missing
from holdfast.storage.place import LIVING, Place


class LocalPlace(PosixPath, Place):
    """A file or folder on local disk. It equals the `pathlib.Path` of the same name, and is pickled as that.

    Other programs pickle paths into their own files (torch's ``.metadata``), which must not name a class of holdfast.
    """

    is_remote = False
    has_locks = has_folders = has_links = has_descriptors = True

    def __reduce__(self) -> str | tuple[Any, ...]:
        return PosixPath(self).__reduce__()

    def __copy__(self) -> LocalPlace:
        return self

    def __deepcopy__(self, memo: object) -> LocalPlace:
        return self

    def is_file(self) -> bool:
        with naming(self, "look for"):
            return super().is_file()

    def real(self) -> LocalPlace:
        return LocalPlace(os.path.realpath(self))

    def modified(self) -> float:
        return self.stat().st_mtime

    # Small files

    def read_small(self) -> bytes:
        with naming_unless_missing(self, "read"):
            return disk.read_file(self)

    def read_start(self, nbytes: int) -> tuple[bytes, int]:
        with naming_unless_missing(self, "read"):
            fd = disk.open_regular(self)
            try:
                size = os.fstat(fd).st_size
                return disk.read_bytes(fd, min(nbytes, size), 0, self), size
            finally:
                os.close(fd)

    def write_small(self, data: bytes) -> None:
        with naming(self, "write"):
            durable.write_small(os.fspath(self), data)

    def create_small(self, data: bytes, temporary: str) -> bool:
        half = self.with_name(temporary)
        with naming(self, "create"):
            try:
                durable.write_synced(os.fspath(half), data)
                try:
                    disk.link(half, self)
                except FileExistsError:
                    return False
                except OSError as error:
                    if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP):
                        return self._create_without_links(data)
                    if not self._holds(data):
                        raise
            finally:
                half._clear()
        try:
            self.parent.sync_folder()
        except StorageError:
            self._delete()  # what is not durable must not be seen
            raise
        return True

    def _create_without_links(self, data: bytes) -> bool:
        # File systems without hard links (some FUSE and SMB mounts): an exclusive create is atomic there, the bytes
        # are not; the manifest's digest finds a torn one.
        try:
            fd = disk.open(self, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            return False
        try:
            disk.write_all(fd, data, 0, self)
            disk.sync(fd, self)
        except BaseException:
            self._delete()  # half of it would keep everybody from this name
            raise
        finally:
            os.close(fd)
        self.parent.sync_folder()
        return True

    def _holds(self, data: bytes) -> bool:
        """Whether a call that gave its file this name was carried out although it failed, as over a network."""
        try:
            return disk.read_file(self) == data
        except OSError:  # then the failure that was raised stands
            return False

    def _clear(self) -> None:
        """Delete what is of no use any more: where that fails, it costs space alone, and what was done stays done."""
        try:
            self._delete()
        except OSError as error:
            log.warning("%s stays, to be swept later: %s", self, error)

    def replace_small(self, data: bytes, temporary: str) -> None:
        half = self.with_name(temporary)
        with naming(self, "replace"):
            try:
                durable.write_synced(os.fspath(half), data)
                try:
                    disk.replace(half, self)
                except OSError:
                    if not self._holds(data):
                        raise
            finally:
                half._clear()
        self.parent.sync_folder()

    def size(self) -> int | None:
        try:
            with naming_unless_missing(self, "look for"):
                return disk.stat(self).st_size
        except FileNotFoundError:
            return None

    def delete(self) -> None:
        with naming(self, "delete"):
            self._delete()

    def _delete(self) -> None:
        with suppress(FileNotFoundError):
            disk.delete(self)

    def set_aside(self, name: str) -> None:
        """Rename the file to ``name`` in its folder, if it is there. A disk too full for another name deletes it."""
        with naming(self, "rename"), suppress(FileNotFoundError):
            try:
                disk.replace(self, self.with_name(name))
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._delete()

    # What lies below

    def file_names(self) -> list[str]:
        with naming(self, "list"):
            return [entry.name for entry in disk.listed(self) if entry.is_symlink() or entry.is_file()]

    def folder_names(self) -> list[str]:
        with naming(self, "list"):
            return [entry.name for entry in disk.listed(self) if _is_folder(entry)] if self.is_dir() else []

    def files_below(self) -> list[str]:
        return sorted(self._walk())

    def sizes_below(self) -> dict[str, int]:
        return {path: status.st_size for path, status in self._statuses()}

    def modified_below(self) -> dict[str, float]:
        return {path: status.st_mtime for path, status in self._statuses()}

    def _statuses(self) -> Iterator[tuple[str, os.stat_result]]:
        for path in self.files_below():
            try:
                yield path, disk.stat(self / path)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ELOOP):  # deleted meanwhile, or a link that leads nowhere
                    raise

    def _walk(self, above: str = "") -> Iterator[str]:
        """Relative paths of all files; what is deleted meanwhile is left out. Raises StorageError."""
        with naming_unless_missing(self, "list"), suppress(FileNotFoundError, NotADirectoryError):
            for entry in disk.listed(self):
                if entry.is_dir(follow_symlinks=False):
                    yield from (self / entry.name)._walk(f"{above}{entry.name}/")
                elif not _is_folder(entry):
                    yield above + entry.name

    def files_near(self, *, levels: int, most: int = 5000, each: int = 1000) -> list[str]:
        paths: list[str] = []
        near = [""]
        for level in range(levels):
            below: list[str] = []
            for above in near:
                if most <= 0:
                    paths.append(above)
                    continue
                try:
                    with naming_unless_missing(self / above, "list"):
                        entries = sorted(disk.listed(self / above), key=lambda entry: entry.name)[: min(each, most)]
                except (FileNotFoundError, NotADirectoryError):
                    continue
                except StorageError:
                    if not level:
                        raise
                    paths.append(above)
                    continue
                most -= len(entries)
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        below.append(f"{above}{entry.name}/")
                    elif not _is_folder(entry):
                        paths.append(above + entry.name)
            near = below
        return paths + near

    # Folders

    def make_folder(self) -> None:
        with naming(self, "create the folder"):
            durable.make_folder(os.fspath(self))

    def make_folders(self, names: Iterable[str]) -> None:
        with naming(self, "create folders in"):
            durable.make_folders(os.fspath(self / name) for name in names)

    def make_home(self) -> None:
        existed = self.is_dir()
        self.make_folder()
        if existed:
            try:
                self.parent.sync_folder()
            except StorageError as error:
                if error.errno not in (errno.EACCES, errno.EPERM):  # a folder that we may not open we have not changed
                    raise

    def sync_folder(self) -> None:
        with naming(self, "sync the folder"):
            disk.sync_folder(self)

    def delete_if_empty(self) -> None:
        try:
            disk.remove_folder(self)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                log.debug("cannot remove %s: %s", self, error)

    def delete_empty_folders(self) -> None:
        with naming_unless_missing(self, "list"), suppress(FileNotFoundError):
            for entry in disk.listed(self):
                if entry.is_dir(follow_symlinks=False):
                    (self / entry.name).delete_empty_folders()
        self.delete_if_empty()

    # Large files and locks

    def open_to_write(self, nbytes: int) -> tuple[int, bool]:
        return large.open_to_write(self, nbytes)

    def open_to_read(self) -> tuple[int, int | None]:
        return large.open_to_read(self)

    def open_locked(self) -> int:
        return large.open_locked(self)

    def in_use(self) -> bool:
        return large.is_locked(self)

    def living(self, paths: list[str]) -> list[str]:
        return [path for path in paths if (self / path).in_use()]

    def may_live(self, paths: list[str]) -> bool:
        if self.living(paths):
            return True
        if not paths or large.can_lock(self / paths[0]):
            return False
        since = time.time() - LIVING
        with suppress(FileNotFoundError):  # then somebody else sweeps here
            return any(disk.stat(self / path).st_mtime > since for path in paths)
        return True


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link that leads back to itself is like one that leads nowhere


def private_folder(name: str) -> LocalPlace:
    """A folder for temporary files that nobody else can write to. Raises StorageError if somebody else made it."""
    root = LocalPlace(tempfile.gettempdir()) / f"holdfast-{name}-{os.geteuid()}"
    with suppress(FileExistsError):
        disk.make_folder(root, 0o700)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise StorageError(
            f"{root} is not a folder that only this user can use: nothing is written to it. Remove it, or set TMPDIR"
        )
    return root
