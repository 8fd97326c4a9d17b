"""An OSError becomes a StorageError that says what was done to which file, and what to do about it.

Called wherever a file is touched. Never touches one.
"""

from __future__ import annotations

import errno
import os
from types import TracebackType
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


# Classes, and not generators of `contextlib`: in Python 3.12 these keep an error that passes through, and with it the
# frames of the caller and the state that is saved, until garbage is collected.
class naming:
    """Turn an OSError inside the block into a StorageError that says what was done to which file, and what to do."""

    def __init__(self, path: str | os.PathLike[str] | Place, doing: str) -> None:
        self.path, self.doing = path, doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error(self.doing, str(self.path), error.errno, error.strerror or str(error)) from error


class naming_unless_missing(naming):
    """`naming`, but a missing file stays a FileNotFoundError: the caller knows what that means."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if isinstance(error, FileNotFoundError):
            return
        missing = isinstance(error, StorageError) and isinstance(error.__cause__, FileNotFoundError)
        if missing or (isinstance(error, StorageError) and error.errno == errno.ENOENT):
            raise FileNotFoundError(errno.ENOENT, "No such file", str(self.path)) from None
        super().__exit__(kind, error, at)


def storage_error(doing: str, file: str, number: int | None, text: str) -> StorageError:
    """The error that says what was done to which file, and what to do."""
    advice = _ADVICE.get(number or 0) if "://" not in file else None
    message = text if "://" in file and file in text else f"cannot {doing} {file}: {text}"  # stores name their files
    error = StorageError(message + (f" ({advice})" if advice else ""))
    error.errno, error.file = number, file
    return error
