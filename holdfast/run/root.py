"""Whether the root of a run takes saves, asked before training has done hours of work.

The manager asks. Never writes: what only a write can tell, the first save tells.
"""

from __future__ import annotations

import errno
import os

from holdfast.errors import Unsupported
from holdfast.storage.naming import storage_error
from holdfast.storage.place import Place


def refuse_no_folder(root: Place) -> None:
    """Raise Unsupported where nothing can be saved, StorageError where the root is a file, or lies below one."""
    if root.no_saves:
        raise Unsupported(f"{root} cannot be the root of a manager: {root.no_saves}")
    if root.has_folders and not _nearest(root).is_dir():
        raise storage_error("save steps in", str(root), errno.ENOTDIR, f"{_nearest(root)} is not a folder")


def refuse_read_only(root: Place) -> None:
    """Raise StorageError for a folder on disk in which this process may not save; a store is not asked."""
    refuse_no_folder(root)
    if not root.has_folders:
        return
    folder = _nearest(root)
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
        raise storage_error("save steps in", str(root), number, f"{folder} may not be written to")


def _nearest(root: Place) -> Place:
    """The root, or what is there of the folders above it."""
    return next(path for path in (root, *root.parents) if os.path.exists(path))
