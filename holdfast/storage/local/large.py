"""Large local files: opened past the page cache, with their space taken up front, and locked while a save is under way.

`LocalPlace` and the `Local` store call it. Never reads or writes a byte of a tensor, and never waits for long.

The kernel drops a lock when its process dies. We rejected ages and process ids, because on a shared file system both
can be wrong about whether a save still lives.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.naming import naming, naming_unless_missing

_libc = ctypes.CDLL(None, use_errno=True)


def open_to_write(path: Path, nbytes: int) -> tuple[int, bool]:
    """Create a new file of ``nbytes`` for large aligned writes: (descriptor, whether it writes directly).

    Space is taken up front where the file system can, so that a full disk shows before any copying. The file
    carries a shared lock until it is closed, which tells a save under way from the orphans of a dead one.
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
            lock(fd)
        with naming(path, f"reserve {nbytes} bytes for"):
            _reserve(fd, nbytes, path)
    except BaseException:
        os.close(fd)
        _delete(path)
        raise
    return fd, direct


def open_to_read(path: Path) -> tuple[int, int | None]:
    """Descriptors of an existing file: through the page cache, and directly (None where that cannot be had)."""
    with naming_unless_missing(path, "open"):
        cached = disk.open_regular(path)
    try:
        return cached, disk.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return cached, None


def open_locked(path: Path) -> int:
    """A descriptor of an existing file that, as a rule, marks it as part of a save under way until it is closed."""
    with naming(path, "open"):
        fd = disk.open_regular(path)
        with suppress(OSError):  # somebody who asks whether it is in use has it locked for a moment
            lock(fd)
        return fd


def _reserve(fd: int, nbytes: int, path: Path) -> None:
    try:
        if nbytes:
            disk.reserve(fd, nbytes, path)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise


def _delete(path: Path) -> None:
    with suppress(FileNotFoundError):
        disk.delete(path)


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


_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
"""What a file system without locks answers."""

ATTEMPTS = 4
"""Times that a lock is asked for: others may hold it for an instant, to see whether it is held."""


def lock(fd: int) -> None:
    """Take a shared lock until the descriptor is closed; nothing happens on a file system without locks."""
    try:
        for _ in range(ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            _wait_a_little()  # only a caller of `is_locked` holds the other lock, for an instant
        raise OSError(errno.EAGAIN, "another process holds a lock on it")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise


def is_locked(path: Path) -> bool:
    """Whether a living process holds a lock on this file. Two that ask at the same moment do not see each other."""
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
        for _ in range(ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return False
            _wait_a_little()
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def can_lock(path: Path) -> bool:
    """Whether the file system of this file has locks; True if the file cannot be opened."""
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


def _wait_a_little() -> None:
    time.sleep(random.uniform(0.001, 0.01))
