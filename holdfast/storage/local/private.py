"""Folders for temporary files that only this user can write to.

Called by what unpacks archives and by conversions to a store. Never deletes one.
"""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress

from holdfast.errors import StorageError
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace


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
