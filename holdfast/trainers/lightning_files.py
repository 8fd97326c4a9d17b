"""PyTorch Lightning: a checkpoint as one ``.ckpt`` file that `torch.load` reads, saved in the background."""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from time import monotonic
from typing import Any
from zlib import crc32

from holdfast import events
from holdfast.buffers.memory import Buffer
from holdfast.errors import Damaged, StorageError
from holdfast.events import log
from holdfast.export import torch_file
from holdfast.export.torch_file import Image
from holdfast.formats.machine.zips import Archive, is_zip
from holdfast.formats.sources import all_of, file
from holdfast.ondisk.manifest import FILE_NAME
from holdfast.ranks.ranks import Call, Ranks
from holdfast.save import label_of
from holdfast.saving import Saving
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.storage.place import Place

SUFFIX = ".ckpt"

_MARK = "holdfast"
"""The member of the archive by which a file is known to be ours: then each of its members has a CRC-32."""

_SPAN = 8 << 20
_READERS = 4


def is_file_path(path: Place) -> bool:
    """Whether a checkpoint at this path is one file. In a store every checkpoint is a folder."""
    return path.has_descriptors and path.name.endswith(SUFFIX)


class FileSaver:
    """Writes one file at a time in a thread of its own, and keeps the memory of the last one for the next."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._memory: Buffer | None = None
        self._thread: threading.Thread | None = None

    def save(self, state: Mapping[str, Any], path: LocalPlace, step: int | None) -> Saving:
        """Begin to save ``state``: it may change once this returns. The save before this one has ended.

        Raises SaveFailed if the state cannot be saved; of what fails later the `Saving` tells.
        """
        self.join()
        saving = Saving(path, step)
        span = events.begin(events.BACKGROUND, path, 0, whole=True, step=step, lane="saves")
        images: list[Image] = []

        def copy() -> int:
            images.append(torch_file.copied(state, self._memory))
            return images[0].end

        try:
            with self._call(path, step) as call:
                call.settle("stage", copy, lambda sizes: sizes[0], int)
        except BaseException as error:
            span.end(error)
            raise
        self._memory = images[0].memory
        saving.returned()
        write = partial(self._write, images[0], path, saving, span, monotonic())
        # Not a daemon: an interpreter that ends waits for it.
        thread = threading.Thread(target=write, name="holdfast-save", daemon=False)
        try:
            thread.start()
        except BaseException as error:
            span.end(error)
            raise
        self._thread = thread
        return saving

    def join(self) -> None:
        """Wait until the thread of the last save has ended."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(
        self, image: Image, path: LocalPlace, saving: Saving, span: events.Opened, staged_at: float
    ) -> None:  # fmt: skip
        failed: BaseException | None = None
        nbytes = 0

        def write(_: list[int]) -> int:
            return torch_file.write(image, path, {_MARK: b'{"version":1}'}, partial(_commit, path=path))

        try:
            with self._call(path, saving.step) as call:
                nbytes = call.settle("write", int, write, int)  # decided: so it can say that it is not settled
        except BaseException as error:  # noqa: BLE001 - kept, and raised by `wait`
            log.warning("%s: %s", path, error)
            failed = error
        span.nbytes = nbytes
        span.end(failed)
        saving.note_written(nbytes, staged_at, monotonic())
        saving.finish(failed)

    def _call(self, path: LocalPlace, step: int | None) -> AbstractContextManager[Call]:
        """A part of a save, by this process alone: whatever goes wrong in it is raised as SaveFailed."""
        return Ranks(0, 1).call(label_of(path, step), deadline=self._deadline, saving=True)


def _commit(temporary: LocalPlace, path: LocalPlace) -> None:
    """Give a file that is whole and durable its own name."""
    with naming(path, "replace"):
        _give_name(temporary, path)
    try:
        path.parent.sync_folder()
    except StorageError as error:
        error.settled = False  # it has its name, which may not outlast a power cut
        raise


def _give_name(temporary: LocalPlace, path: LocalPlace) -> None:
    """Replace what has the name in one step: a file, a link, or the folder of a checkpoint."""
    if not path.is_dir() or path.is_symlink():
        disk.replace(temporary, path)
        return
    if not (path / FILE_NAME).is_file():
        raise OSError(errno.EISDIR, "it is a folder that is no checkpoint of holdfast, and stays")
    if disk.exchange(temporary, path):
        _delete_all(temporary)  # the folder, which has this name now
        return
    aside = temporary.with_suffix(".replaced")  # on a file system that cannot exchange names
    disk.replace(path, aside)
    try:
        disk.replace(temporary, path)
    except BaseException:
        disk.replace(aside, path)
        raise
    _delete_all(aside)


def _delete_all(path: LocalPlace) -> None:
    try:
        disk.delete_all(path)
    except OSError as error:
        log.warning("%s stays, and is of no use any more: %s", path, error)


def check_file(path: LocalPlace) -> bool:
    """Whether `FileSaver` wrote this file; then every byte of it has been checked.

    Raises FileNotFoundError, Damaged, StorageError.
    """
    data = all_of(file(path))
    if not is_zip(data):
        return False
    archive = Archive(data)
    if not any(name.endswith(f"/{_MARK}") for name in archive.names):
        return False
    with ThreadPoolExecutor(_READERS, thread_name_prefix="holdfast-verify") as pool:
        for name, right in zip(archive.names, pool.map(partial(_is_right, archive), archive.names), strict=True):
            if not right:
                damaged = Damaged(f"{path}: its member {name} has another CRC-32: the file was altered; restore a copy")
                damaged.file = str(path)
                raise damaged
    return True


def _is_right(archive: Archive, name: str) -> bool:
    member = archive.member(name)
    total = 0
    for begin in range(0, member.nbytes, _SPAN):
        total = crc32(member.read(begin, min(_SPAN, member.nbytes - begin)), total)
    return total == (member.member.crc32 if member.member is not None else 0)
