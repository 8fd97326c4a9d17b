"""Locks that mark the files of a save under way: the kernel drops them when its process dies.

Whoever writes a data file takes a shared lock; whoever deletes asks for an exclusive one. Never waits for long.

We rejected ages and process ids, because on a shared file system both can be wrong about whether a save still lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import time
from contextlib import suppress
from pathlib import Path

from holdfast.storage.local import disk
from holdfast.storage.naming import naming_unless_missing

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
