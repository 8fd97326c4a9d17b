"""Small files and folders that are on the disk, whole and under their names, when a call returns.

The file writer and `LocalPlace` call it, in the trainer and in the writer process. Never names an error; needs the
standard library alone.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress

from holdfast.storage.local import disk


def write_synced(path: str, data: bytes) -> None:
    """Write a file and make its bytes durable, though not its name."""
    fd = disk.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        disk.write_all(fd, data, 0, path)
        disk.sync(fd, path)
    finally:
        os.close(fd)


def write_small(path: str, data: bytes) -> None:
    """Write a small file whole and durably under its name, in a folder that is made if need be.

    An older file of that name is replaced in one step.
    """
    folder, name = os.path.split(path)
    make_folder(folder)
    temporary = os.path.join(folder, f".{name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, data)
        disk.replace(temporary, path)
    except BaseException:
        with suppress(FileNotFoundError):
            disk.delete(temporary)
        raise
    disk.sync_folder(folder)


def make_folder(path: str) -> None:
    """Create a folder and its parents, durably: each new entry is synced into its own parent."""
    make_folders([path])


def make_folders(paths: Iterable[str]) -> None:
    """The same for many folders: a parent of several of them is synced once."""
    parents: dict[str, None] = {}
    for path in paths:
        missing = []
        at = os.path.abspath(path)
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for folder in reversed(missing):
            try:
                disk.make_folder(folder)
            except FileExistsError:
                # Somebody else made it; if it is gone again, that is what the caller hears: ENOENT.
                if not stat.S_ISDIR(disk.stat(folder).st_mode):
                    raise OSError(errno.ENOTDIR, f"{folder} is not a folder") from None
            parents[os.path.dirname(folder)] = None
    for parent in parents:
        disk.sync_folder(parent)
