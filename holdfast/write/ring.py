"""The staging memory of a save that training waits for: a few chunks that go round, and the threads that write them.

`save` makes one; parts of torch's saves, and of lost ranks' shares, are written through one at once. Never grows with
the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holdfast.buffers.device import Moments, devices_of
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.place import Place
from holdfast.write.buffer import CHUNK, StagingBuffer, room_for
from holdfast.write.datafiles import DataFile, OpenFiles
from holdfast.write.worker import ThreadWorker
from holdfast.write.write import Writing

CHUNKS = 4

PART, PARTS = 8 << 20, 12
"""Chunks for a store: as large as a part of an upload, and so many that latency is hidden; 96 MiB."""


class Ring:
    """A few chunks that go round, and threads that write them, for one save."""

    def __init__(self, *, remote: bool = False) -> None:
        self._worker: ThreadWorker | None = None
        self._buffers: list[StagingBuffer] = []
        self._chunk_bytes, self._most = (PART, PARTS) if remote else (CHUNK, CHUNKS)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        if self._worker is not None:
            self._worker.close()
        for buffer in self._buffers:
            buffer.close()

    def take(self, sizes: list[int], *, pinned: bool) -> StagingBuffer:
        """As much as all files need together, but no more than a few chunks."""
        self._worker = self._worker or ThreadWorker()
        buffer = StagingBuffer(0, self._worker, chunk_bytes=self._chunk_bytes)
        nbytes = min(self._most * self._chunk_bytes, max(room_for(sizes, self._chunk_bytes), SECTOR))
        buffer.reserve(nbytes, pinned=pinned)
        self._buffers.append(buffer)
        return buffer

    def give(self) -> None:
        """The memory goes when the ring does."""


def write_at_once(
    files: Sequence[DataFile], folder: Place, *, save: str, rank: int, opened: OpenFiles,
    progress: Callable[[int], None], small: Sequence[tuple[str, bytes]] = (),
) -> list[FileRecord]:  # fmt: skip
    """Write data files and then ``small`` ones, by relative path, and wait until all are durable.

    ``opened`` collects what was opened, for the caller to close, or delete if this raises: StorageError.
    """
    opened.paths += [folder / path for path, _ in small]
    folder.make_folders(file.section for file in files)
    sources = [tensor for file in files for tensor in file.sources]
    pinned = any(tensor.device.type != "cpu" for tensor in sources)
    with Ring(remote=folder.is_remote) as ring:
        writing = Writing(
            files, folder, save=save, rank=rank, opened=opened, after=Moments.now(devices_of(sources)),
            buffer=ring.take([file.nbytes for file in files], pinned=pinned),
        )  # fmt: skip
        writing.progress.report = progress
        try:
            writing.stage()
            writing.land()
            written = writing.written()
            writing.leave([(folder / path, data) for path, data in small])
            writing.wait_written()
            writing.finish()
        finally:
            writing.close()
    return [FileRecord(*file.record) for file in written]
