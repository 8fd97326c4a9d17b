"""The folder of a cache on local disk: counts the bytes of its extents, and deletes those used longest ago.

`Cached` alone calls it. Never disturbs a process that has an extent open, never deletes a file that no cache made.

    <folder>/usage                 bytes taken, as 8 bytes; its lock is held to change it and to evict
    <folder>/<object>/<number>     the extents
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.events import log
from holdfast.storage.local import disk
from holdfast.storage.wrappers.extents import EXTENT, NO_LOCKS, Extent, Version, disk_faults

LIMIT = 100 << 30
SHARE = 0.8
"""Of what the disk has free or the cache has taken, unless a limit is given; and never more than LIMIT bytes."""

_OBJECT = re.compile(r"[0-9a-f]{32}")
USAGE = "usage"


class CacheFolder:
    """All extents in a folder, of whatever stores, kept below ``limit`` bytes."""

    def __init__(self, folder: Path, limit: int | None, patience: float) -> None:
        self._folder, self._limit, self._patience = folder, limit, patience
        self._turn = threading.Lock()

    def opened(self, version: Version, number: int) -> Extent:
        return Extent(self._folder / version.folder / str(number), version, number)

    def drop(self, version: Version, begin: int, end: int | None) -> None:
        """Keep nothing of bytes ``begin:end`` of a file, of any version."""
        folder = self._folder / version.folder
        with disk_faults():
            for entry in _entries(folder):
                if entry.name.isdecimal():
                    first = int(entry.name) * EXTENT
                    if first + EXTENT > begin and (end is None or first < end):
                        with suppress(FileNotFoundError):
                            disk.delete(entry.path)
            self._tidy(folder)

    def reserve(self, nbytes: int) -> None:
        """Count bytes that will be written; what was used longest ago goes if that is too much."""
        with disk_faults(), self._usage() as fd:
            noted = disk.read_bytes(fd, 8, 0, self._folder / USAGE)
            # A process that dies between counting and writing makes it too high; then it is counted again.
            taken = int.from_bytes(noted, "little") if len(noted) == 8 else sum(size for _, size, _ in self._scan())
            limit = self._limit or self._share(taken)
            if taken + nbytes > limit:
                taken = self._evict(limit - limit // 10 - nbytes)
            disk.write_all(fd, (taken + nbytes).to_bytes(8, "little"), 0, self._folder / USAGE)

    def _share(self, taken: int) -> int:
        disk_space = os.statvfs(self._folder)
        return min(LIMIT, int(SHARE * (disk_space.f_bavail * disk_space.f_frsize + taken)))

    @contextmanager
    def _usage(self) -> Iterator[int]:
        until = time.monotonic() + self._patience
        with self._turn:
            fd = disk.open(self._folder / USAGE, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                while not _try_flock(fd):
                    if time.monotonic() > until:
                        raise TimeoutError(errno.ETIMEDOUT, f"{self._folder}/usage was locked for too long")
                    time.sleep(0.002)
                yield fd
            finally:
                fcntl.flock(fd, fcntl.LOCK_UN)
                os.close(fd)

    def _evict(self, target: int) -> int:
        """Unlink what was used longest ago until no more than ``target`` bytes are taken; how many are then."""
        extents = sorted(self._scan())
        before = taken = sum(size for _, size, _ in extents)
        for _, size, path in extents:
            if taken <= target:
                break
            with suppress(FileNotFoundError):
                disk.delete(path)
            self._tidy(path.parent)
            taken -= size
        log.debug("the cache %s held %d bytes, now %d", self._folder, before, taken)
        return taken

    def _scan(self) -> Iterator[tuple[int, int, Path]]:
        """When it was used last, bytes and path of every extent; anything else in the folder is none of ours."""
        for folder in disk.listed(self._folder):
            if _OBJECT.fullmatch(folder.name) and folder.is_dir(follow_symlinks=False):
                for entry in _entries(Path(folder.path)):
                    if entry.name.isdecimal():
                        try:
                            stat = entry.stat(follow_symlinks=False)
                        except FileNotFoundError:
                            continue
                        yield stat.st_mtime_ns, stat.st_blocks * 512, Path(entry.path)

    def _tidy(self, folder: Path) -> None:
        try:
            disk.remove_folder(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
                raise


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        return disk.listed(folder)
    except FileNotFoundError:
        return []


def _try_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True
