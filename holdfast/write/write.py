"""The writer of a save: data files are copied into chunks of the staging buffer, summed, and handed to a worker.

Each save makes a `Writing`. Sees names, bytes and offsets: no ranks and no plans. Host memory is the staging buffer,
whatever the size of the state.

A file for a store needs its sums first. We rejected uploading the header as the last part: S3 takes parts in any order,
but no client for all clouds offers it. Summing first reads the tensors once more, at the speed of memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from holdfast.buffers.device import Copier, Moments
from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks, datafile
from holdfast.storage.place import Place
from holdfast.write.buffer import StagingBuffer, room_for
from holdfast.write.datafiles import DataFile, OpenFiles, Written
from holdfast.write.filling import FilledFile, Landing, Sums, sums_of


@dataclass
class Progress:
    """Where bytes that are written are reported. No method of a save: the worker would keep it, and so the state."""

    report: Callable[[int], None] | None = None

    def __call__(self, nbytes: int) -> None:
        if self.report is not None:
            self.report(nbytes)


class Writing:
    """The data files of one save on one rank, on their way to disk or to a store.

    A store takes a file from its first byte to its last, and the first are the header, which holds the sums of all
    others. So a file is handed over once it is all staged, or, if the buffer cannot hold all files at once, its
    tensors are summed before they are staged. If nothing changes before the save has ended (``still``), tensors in host
    memory are not staged at all: a store takes them from where they lie. ``strong``: headers hold SHA-256 sums too.

    Making one opens all files, so that a full disk shows before any copying. Files that devices copy into a buffer
    which holds them all are opened once their first bytes land: training waits for the copies, and should not wait for
    a file system too. Then `stage`, and `finish`, which waits until all is durable. The folders exist already;
    ``opened`` collects what was opened, for the caller to close or delete. ``progress.report`` is called with the bytes
    that are written. A failure of the worker is raised by the next call: a StorageError that names the file.
    """

    def __init__(
        self, files: Sequence[DataFile], folder: Place, *, save: str, rank: int, buffer: StagingBuffer,
        opened: OpenFiles, after: Moments, still: bool = False, strong: bool = False,
    ) -> None:  # fmt: skip
        self.folder, self.copier = folder, Copier(after)
        self.progress = Progress()
        self._buffer, self._still, self._strong = buffer, still, strong
        self._sums_first = room_for([file.nbytes for file in files], buffer.chunk_bytes) > buffer.nbytes
        self._files: list[FilledFile] = []
        self._to_stage: list[FilledFile] = []
        self._landing: deque[Landing] = deque()
        self._has_landed = False
        self._done: list[Future[None]] = []
        buffer.begin()
        try:
            for file in files:
                self._open(file, _header_of(file, save, rank, strong=strong), opened)
        except BaseException:
            self.close()  # a writer process that kept the first files open would keep their space on a full disk
            raise

    def _open(self, file: DataFile, header: bytes, opened: OpenFiles) -> None:
        size = len(header) + file.nbytes
        create = partial(opened.open, self.folder / file.path, size, self._buffer.worker)
        filled = FilledFile(
            file, header, create, self._buffer, self.copier, self._landing, self.progress, strong=self._strong
        )
        if not file.is_on_device or self._still or self._sums_first:
            filled.handover.open()
        self._files.append(filled)
        self._to_stage.append(filled)

    def stage(self, sections: Collection[str] | None = None) -> None:
        """Copy the files of these sections, or all that are left, and hand over each chunk that is full.

        From devices the copies are only queued, and `land` hands over what has arrived.
        """
        for filled in self._to_stage:
            if sections is None or filled.file.section in sections:
                self._fill(filled)
        self._to_stage = [f for f in self._to_stage if sections is not None and f.file.section not in sections]

    def _fill(self, filled: FilledFile) -> None:
        from_memory = self._still and not filled.handover.has_begun and not filled.is_on_device
        if not filled.handover.has_begun and (self._sums_first or from_memory):
            self._begin(filled, sums_of(filled.file, self._buffer, self.copier, strong=self._strong))
            filled.sums = None
        if from_memory:
            filled.send()
        else:
            filled.fill()
        if not filled.is_on_device:
            self._seal(filled)

    def land(self) -> None:
        """Wait for what devices are still copying, and hand it over as it arrives."""
        while self._landing:
            self._landing[0].file.land_first()
        for filled in self._files:
            if not filled.is_sealed:
                self._seal(filled)
        self._has_landed = True

    def _begin(self, filled: FilledFile, sums: Sums) -> None:
        """The header of a file is known: from now on it goes to the store."""
        file = filled.file
        filled.header = header = datafile.with_sums(filled.header, *sums.texts())
        size = len(header) + file.nbytes
        if not filled.handover.has_begun:
            filled.handover.begin(self._buffer.worker.begin(self.folder / file.path, header, size))
        strong = blocks.strong_sum(header) if self._strong else ""
        filled.written = Written(file.path, size, len(header), blocks.digest(header), strong)

    def _seal(self, filled: FilledFile) -> None:
        filled.handover.open()
        if filled.sums is not None:
            self._begin(filled, filled.sums)
        size = len(filled.header) + filled.file.nbytes
        self._done.append(self._buffer.worker.finish(filled.handover.number, filled.header, size))
        filled.is_sealed = True
        self.progress(len(filled.header))

    def written(self) -> list[Written]:
        """What will stand on disk once all is done; known when every file is staged and landed."""
        return [filled.written for filled in self._files if filled.written is not None]

    def leave(self, small: Sequence[tuple[Place, bytes]]) -> None:
        """After the data files: their folders durable, then small files (a part, attachments) in this order."""
        folders = list(dict.fromkeys((self.folder / filled.file.path).parent for filled in self._files))
        numbers = [filled.handover.number for filled in self._files]
        self._done.append(self._buffer.worker.leave(numbers, folders, small))

    def wait_written(self) -> None:
        """Wait until every chunk is written, so that the buffer is free for the next save."""
        for filled in self._files:
            filled.handover.wait()

    def finish(self) -> None:
        """Wait until all is durable: as long as the storage takes, or until the worker dies.

        A rank whose storage hangs stays here; the others see that it makes no progress, and name it.
        """
        for future in self._done:
            future.result()

    def close(self) -> None:
        """Wait for all that is still on its way, then let the worker forget the files; never raises.

        After this their descriptors may be closed: no thread writes by a number that another file may have by then.
        """
        if not self._has_landed:
            # Into chunks that are handed over next to another save, and out of tensors that may be freed.
            self.copier.give_up()
        while self._landing:
            self._buffer.give(self._landing.popleft().chunk)
        begun = [filled for filled in self._files if filled.handover.has_begun]
        self._buffer.worker.give_up([filled.handover.number for filled in begun if not filled.is_sealed])
        for filled in self._files:
            filled.give_up()
        for future in self._done:
            future.exception()
        self._buffer.worker.drop([filled.handover.number for filled in begun])


def _header_of(file: DataFile, save: str, rank: int, *, strong: bool) -> bytes:
    """The header, as long as it will be, before any sum is known."""
    header = datafile.build_header(
        file.pieces, save=save, rank=rank, section=file.section, shapes=file.shapes,
        sums="0" * datafile.sums_length(file.pieces),
        strong="0" * datafile.sums_length(file.pieces, blocks.STRONG) if strong else None,
    )  # fmt: skip
    if len(header) > datafile.MAX_HEADER:
        raise HoldfastError(
            f"{file.path} would have a header of {len(header)} bytes for {len(file.pieces)} pieces, more than the "
            f"{datafile.MAX_HEADER} that readers of safetensors accept: put the tensors under more than one first key "
            "of the state, or under shorter names"
        )
    return header
