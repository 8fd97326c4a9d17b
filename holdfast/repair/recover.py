"""Commits a background save that died before its commit, although all its ranks had finished.

Users call `recover`; the manager does the same when it restores. Never commits a save that is not whole.
"""

from __future__ import annotations

import os

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.commit.commit import commit_late
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline


def recover(path: str | os.PathLike[str] | Place) -> Checkpoint:
    """Commit a background save that died before its commit, although all its ranks had finished, and open it.

    `CheckpointManager.restore` does so by itself.

    Args:
        path: The folder of the save, a path or a URL.

    Returns:
        The checkpoint.

    Raises:
        NotACheckpoint: Not all ranks had finished.
        StorageError: The disk or store refused.
    """
    folder = with_default_deadline(location(path), DEADLINE)
    commit_late(folder, strict=True)
    return open_checkpoint(folder)
