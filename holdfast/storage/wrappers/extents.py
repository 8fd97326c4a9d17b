"""The files of a cache on local disk: extents of a store's files, each of 128 pages that are there or not.

`Cached` and `eviction` call it. Never asks a store, and never hands out a page whose sum is wrong.

An extent, `<folder>/<object>/<number>`, is 8 MiB of one file; `<object>` is a digest of the store's url and the key. It
begins with 4096 bytes: a mark, the bytes of the whole file, and a sum of these with url, key, version and
number (which tells an extent of something else); then the XXH3-64 of each of its 128 pages, zeros for one that is not
there. The pages follow, each in its place. A page is written before its sum, and a reader of a page sums it, so a
crash at any moment, of a process or of the machine, leaves pages that are there or are not. Nothing is ever synced.

A page that is being fetched is locked (byte *n* of the file stands for page *n*, by locks of the open file description,
which also keep threads apart): the kernel drops the lock of a process that dies. A lock only saves work: the bytes of a
version never change, so two that write one page write the same.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import xxhash

from holdfast.events import log
from holdfast.storage.local import disk

PAGE = 64 << 10
"""Reads are rounded to pages: at most two are fetched in vain, 1.6 % of a block of 8 MiB."""

PAGES = 128
EXTENT = PAGES * PAGE
"""What eviction takes: as much as a block."""

_HEAD = 4096
_MARK = struct.Struct("<8sQ8s")
_MAGIC = b"hf-ext-1"
_ABSENT = bytes(8)
_FLOCK = struct.Struct("hhqqi4x")
NO_LOCKS = (errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)

Run = tuple[int, int]
"""Pages ``first:last`` of a file."""


class DiskFault(Exception):
    """The cache's disk refused; the store still has everything."""


@contextmanager
def disk_faults() -> Iterator[None]:
    """Turn an OSError inside the block into a DiskFault: it is no error of the store's."""
    try:
        yield
    except OSError as error:
        raise DiskFault(str(error)) from error


class Version(NamedTuple):
    """Bytes that never change: a key of a store, and what tells its content from an older one of the same key."""

    url: str
    key: str
    version: str

    @property
    def folder(self) -> str:
        return xxhash.xxh3_128_hexdigest(f"{self.url}\0{self.key}".encode())


class Extent:
    """One extent, open; made if there is none. Pages are counted from the beginning of the whole file."""

    def __init__(self, path: Path, version: Version, number: int) -> None:
        self.first, self.last = number * PAGES, (number + 1) * PAGES
        self._path = path
        self._identity = "\0".join([*version, str(number)]).encode()
        with disk_faults():
            self._fd = _opened(path)
            try:
                self.nbytes = self._length()
                """Of the whole file; None if this is new."""
            except BaseException:
                os.close(self._fd)
                raise

    def close(self) -> None:
        try:
            self.unlock()
        finally:
            os.close(self._fd)

    def _length(self) -> int | None:
        for _ in range(3):  # another may be writing it now
            head = disk.read_bytes(self._fd, _MARK.size, 0, self._path)
            if not any(head):
                return None
            if len(head) == _MARK.size:
                _, nbytes, _ = _MARK.unpack(head)
                if head == self._head(nbytes):
                    return int(nbytes)
            time.sleep(0.001)
        log.warning("%s in the cache is damaged or of another file; it is fetched again", self._path)
        with suppress(FileNotFoundError):
            disk.delete(self._path)
        os.close(self._fd)
        self._fd = _opened(self._path)
        return None

    def _head(self, nbytes: int) -> bytes:
        proof = xxhash.xxh3_64_digest(_MAGIC + nbytes.to_bytes(8, "little") + self._identity)
        return _MARK.pack(_MAGIC, nbytes, proof)

    def _place(self, page: int) -> int:
        return _HEAD + (page - self.first) * PAGE

    def read(self, run: Run, memory: Callable[[Run], memoryview]) -> list[int]:
        """Read those of these pages that are there to where ``memory`` says; those that are not."""
        with disk_faults():
            if self.nbytes is None:
                self.nbytes = self._length()
            if self.nbytes is None:
                return [*range(*run)]
            table = disk.read_bytes(self._fd, 8 * PAGES, _MARK.size, self._path).ljust(8 * PAGES, b"\0")
            sums = {page: table[8 * (page - self.first) :][:8] for page in range(*run)}
            there = [page for page in sums if sums[page] != _ABSENT]
            damaged = [page for part in runs(there) for page in self._read(part, memory(part), sums, self.nbytes)]
            if there:
                os.utime(self._fd)
        return sorted({*sums}.difference(there).union(damaged))

    def _read(self, run: Run, memory: memoryview, sums: Mapping[int, bytes], nbytes: int) -> list[int]:
        """Pages whose sum is wrong; from now on they are not there."""
        end = min(run[1] * PAGE, nbytes) - run[0] * PAGE
        nbytes_read = disk.read(self._fd, memory[:end], self._place(run[0]), self._path)
        damaged = []
        for page in range(*run):
            at = (page - run[0]) * PAGE
            stop = min(at + PAGE, end)
            if stop > nbytes_read or xxhash.xxh3_64_digest(memory[at:stop]) != sums[page]:
                damaged.append(page)
        if damaged:
            log.warning("%d pages of %s in the cache are damaged; they are fetched again", len(damaged), self._path)
            for part in runs(damaged):
                self._note(part, _ABSENT * (part[1] - part[0]))
        return damaged

    def write(self, run: Run, data: memoryview, nbytes: int) -> None:
        """Keep these pages. ``data`` is theirs, the last one shorter if the file of ``nbytes`` ends in it."""
        sums = b"".join(xxhash.xxh3_64_digest(data[at : at + PAGE]) for at in range(0, len(data), PAGE))
        with disk_faults():
            if self.nbytes is None:
                disk.write_all(self._fd, self._head(nbytes), 0, self._path)
                self.nbytes = nbytes
            disk.write_all(self._fd, data, self._place(run[0]), self._path)
            self._note(run, sums)

    def _note(self, run: Run, sums: bytes) -> None:
        disk.write_all(self._fd, sums, _MARK.size + 8 * (run[0] - self.first), self._path)

    def lock(self, run: Run) -> list[Run]:
        """Lock those of these pages that nobody else has locked; does not wait."""
        first, last = run
        if self._lock(fcntl.F_WRLCK, first, last):
            return [run]
        if last - first == 1:
            return []
        middle = (first + last) // 2
        return self.lock((first, middle)) + self.lock((middle, last))

    def unlock(self) -> None:
        """Give back all that this lent. Not left to `close`: a child that was forked meanwhile has the file open."""
        self._lock(fcntl.F_UNLCK, self.first, self.last)

    def _lock(self, kind: int, first: int, last: int) -> bool:
        lock = _FLOCK.pack(kind, os.SEEK_SET, first - self.first, last - first, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, lock)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            if error.errno not in NO_LOCKS:
                raise DiskFault(str(error)) from error
        return True


def runs(pages: Iterable[int]) -> list[Run]:
    """Ascending pages as runs."""
    joined: list[Run] = []
    for page in pages:
        if joined and joined[-1][1] == page:
            joined[-1] = (joined[-1][0], page + 1)
        else:
            joined.append((page, page + 1))
    return joined


def _opened(path: Path) -> int:
    for _ in range(5):
        try:
            return disk.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except FileNotFoundError:  # also when eviction takes an empty folder away just now
            disk.make_folders(path.parent, 0o700)
    raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path))
