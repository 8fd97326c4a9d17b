"""An OSError becomes a StorageError that says what was done to which file, and what to do about it.

Called wherever a file is touched. Never touches one.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.errors import StorageError

if TYPE_CHECKING:
    from holdfast.storage.place import Place

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


@contextmanager
def naming(path: str | os.PathLike[str] | Place, doing: str) -> Iterator[None]:
    """Turn an OSError inside the block into a StorageError that says what was done to which file, and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(doing, str(path), error.errno, error.strerror or str(error)) from error


@contextmanager
def naming_unless_missing(path: str | os.PathLike[str] | Place, doing: str) -> Iterator[None]:
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


def storage_error(doing: str, file: str, number: int | None, text: str) -> StorageError:
    """The error that says what was done to which file, and what to do."""
    advice = _ADVICE.get(number or 0) if "://" not in file else None
    message = text if "://" in file and file in text else f"cannot {doing} {file}: {text}"  # stores name their files
    error = StorageError(message + (f" ({advice})" if advice else ""))
    error.errno, error.file = number, file
    return error
