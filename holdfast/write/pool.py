"""The staging memory of saves: a few chunks that go round for a save that training waits for, the buffers of a Saver.

`save` makes a `Ring`. A Saver owns a `BufferPool`, and each of its saves has a `Lease`. A ring never grows with the
state; a pool starts another worker when the last one has died.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

from holdfast.buffers.device import Moments, devices_of
from holdfast.errors import HoldfastError
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.place import Place
from holdfast.write.buffer import CHUNK, StagingBuffer, room_for
from holdfast.write.datafiles import DataFile, OpenFiles
from holdfast.write.jobs import Worker
from holdfast.write.worker import ThreadWorker, start
from holdfast.write.write import Writing

GRAIN = 1 << 20
"""Bytes of which a buffer below one chunk takes a multiple."""


class BufferPool:
    """``count`` staging buffers of at most ``limit`` bytes each, and a worker of this ``kind``."""

    def __init__(self, kind: str, count: int, limit: int | None) -> None:
        self.buffers: dict[int, StagingBuffer] = {}
        self.worker: Worker | None = None
        self._kind, self._limit = kind, limit
        self.leases: list[Lease | None] = [None] * count  # which save has the buffer of that number
        self.claiming, self._equipping = threading.Lock(), threading.Lock()
        self._last_will: weakref.finalize[..., BufferPool] | None = None

    def lease(self) -> Lease:
        """One save's claim on a buffer."""
        return Lease(self)

    def prepare(self, sizes: list[int], *, pinned: bool) -> None:
        """Allocate and touch all buffers, for files of these sizes."""
        for number in range(len(self.leases)):
            self.equip(number, sizes, pinned=pinned, touch=True)

    def equip(self, number: int, sizes: list[int], *, pinned: bool, touch: bool = False) -> StagingBuffer:
        """A buffer with chunks for files of these sizes, or as many as the limit allows, known to a living worker."""
        with self._equipping:
            if self.worker is None or self.worker.dead:
                if self.worker is not None:
                    self.worker.close()
                self.worker = start(self._kind)
                # At exit a Saver waits for its saves first, by its own handler.
                self._last_will = weakref.finalize(self, _let_go, self.worker, self.buffers)
                self._last_will.atexit = False
            worker = self.worker
        buffer = self.buffers.setdefault(number, StagingBuffer(number, worker))
        if buffer.worker is not worker:
            buffer.attach(worker)
        room = room_for(sizes, buffer.chunk_bytes)
        # Some more than is needed: a state that grows a little from save to save does not need new memory each time.
        grain = buffer.chunk_bytes if room > buffer.chunk_bytes else min(GRAIN, buffer.chunk_bytes)
        room = -(-room // grain) * grain
        buffer.reserve(room if self._limit is None else min(room, self._limit), pinned=pinned, touch=touch)
        return buffer

    def close(self) -> None:
        """Let the worker finish, then let memory go. Idempotent."""
        if self.worker is not None:
            _let_go(self.worker, self.buffers)

    def stay_behind(self) -> None:
        """In a forked child: the worker is the parent's alone."""
        if self._last_will is not None:
            self._last_will.detach()


class Lease:
    """The staging memory of one save, from `claim` to `give`."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    def claim(self) -> bool:
        """Take a free buffer; False if there is none."""
        with self._pool.claiming:
            for number, holder in enumerate(self._pool.leases):
                if holder is None:
                    self._pool.leases[number] = self  # in one step, whatever interrupts this
                    return True
        return False

    def take(self, sizes: list[int], *, pinned: bool) -> StagingBuffer:
        """The buffer, large enough for files with this many tensor bytes each."""
        if self not in self._pool.leases:
            raise HoldfastError("a save without a staging buffer was to write; this is a fault of holdfast")
        return self._pool.equip(self._pool.leases.index(self), sizes, pinned=pinned)

    def give(self) -> None:
        """Free it for the next save. Idempotent."""
        leases = self._pool.leases
        for number in [number for number, holder in enumerate(leases) if holder is self]:
            leases[number] = None


def limit_of(memory_limit: int | None, count: int) -> int | None:
    """Bytes of each of ``count`` buffers. Raises ValueError if these are not two chunks at least."""
    if memory_limit is None:
        return None
    if memory_limit < 2 * count * CHUNK:
        raise ValueError(f"memory_limit={memory_limit} must be at least {2 * count * CHUNK}: two windows a slot")
    return memory_limit // count // CHUNK * CHUNK


def _let_go(worker: Worker, buffers: dict[int, StagingBuffer]) -> None:
    worker.close()
    for buffer in buffers.values():
        buffer.close()


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
    after = Moments.now(devices_of(tensor for file in files for tensor in file.sources))
    with Ring(remote=folder.is_remote) as ring:
        writing = Writing(
            files, folder, save=save, rank=rank, opened=opened, after=after,
            buffer=ring.take([file.nbytes for file in files], pinned=any(file.is_on_device for file in files)),
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
