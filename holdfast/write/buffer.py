"""The staging buffer: host memory laid out like the files, in chunks that are filled, written, and filled again.

A blocking save makes a small one for itself; a Saver keeps some that hold all its files, so that filling never waits
for the disk. Never hands out memory that is still being written.

We rejected a copy of the state dict that is serialized later, as torch does it: that moves every byte twice and sums it
from cold memory. Here bytes are summed as they are copied, and the worker needs only a number, an offset and a length.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from holdfast.buffers import device
from holdfast.buffers.memory import buffer, populate
from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.local.disk import SECTOR
from holdfast.write.jobs import Worker

CHUNK = 16 << 20
"""Bytes of one chunk: large enough for a disk's full rate, small enough that four cost 64 MiB."""


@dataclass(frozen=True)
class Chunk:
    """A stretch of a buffer's memory, at ``start`` of it, lent for one save: the ``generation``.

    Whole sectors: what is written of it may be padded to a sector without touching its neighbour.
    """

    view: memoryview
    address: int
    start: int
    generation: int

    @property
    def nbytes(self) -> int:
        return len(self.view)


class StagingBuffer:
    """Memory for one save at a time, known to the worker that writes it.

    ``begin`` opens a generation; `take` lends chunks and `give` brings them back, from any thread. One thread takes.
    The last bytes of several files share a chunk, so that a buffer takes about as much memory as is saved.
    """

    def __init__(self, number: int, worker: Worker, *, chunk_bytes: int = CHUNK) -> None:
        self.number, self.worker, self.chunk_bytes = number, worker, chunk_bytes
        self.nbytes = 0
        self.generation = 0
        self._memory: mmap.mmap | None = None
        self._fd = -1
        self._pinned = False
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()  # chunks of which nothing is lent
        self._lent: Counter[int] = Counter()  # by chunk: how many stretches of it are lent
        self._open: tuple[int, int] | None = None  # the chunk that is shared now, and how much of it is lent already
        self._lock = threading.Lock()

    @property
    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) if self._memory is not None else 0

    def reserve(self, nbytes: int, *, pinned: bool = False, touch: bool = False) -> None:
        """Have at least ``nbytes``; ``pinned`` for a device to copy into, ``touch``ed so that they are there.

        What is there already is kept if it is enough. Raises HoldfastError if chunks are lent out.
        """
        with self._lock:
            self._refuse_if_lent()
            if nbytes > self.nbytes:
                self._release()
                self._allocate(_whole_sectors(nbytes))
            if touch:
                populate(self._address, self.nbytes)
            if pinned and not self._pinned:
                self._pinned = device.pin(self._address, self.nbytes)

    def begin(self) -> None:
        """Start a new save in this buffer. Raises HoldfastError if a chunk of the last one is not back."""
        with self._lock:
            self._refuse_if_lent()
            self.generation += 1
            self._free = queue.SimpleQueue()
            whole, short = divmod(self.nbytes, self.chunk_bytes)
            for index in range(whole):
                self._free.put(index)
            self._open = (whole, 0) if short else None

    def take(self, nbytes: int, timeout: float) -> Chunk | None:
        """A stretch for the next ``nbytes`` of a file, perhaps a shorter one; None if none is free within ``timeout``.

        What fills a chunk gets one of its own. Less shares one with the last bytes of other files.
        """
        wanted = min(_whole_sectors(nbytes), self.chunk_bytes)
        with self._lock:
            if self._open is not None and (wanted < self.chunk_bytes or self._free.empty()):
                return self._lend(*self._open, wanted)
        try:
            index = self._free.get(timeout=timeout)
        except queue.Empty:
            return None
        with self._lock:
            return self._lend(index, 0, wanted)

    def _lend(self, index: int, used: int, wanted: int) -> Chunk:
        if self._memory is None:
            raise HoldfastError(f"buffer {self.number} is closed")
        end = min(self.chunk_bytes, self.nbytes - index * self.chunk_bytes)
        n = min(wanted, end - used)
        self._lent[index] += 1
        if used + n < end:
            self._open = index, used + n
        elif self._open is not None and self._open[0] == index:
            self._open = None
        start = index * self.chunk_bytes + used
        return Chunk(memoryview(self._memory)[start : start + n], self._address + start, start, self.generation)

    def give(self, chunk: Chunk) -> None:
        """Bring a chunk back. Raises HoldfastError if it was lent for another save."""
        with self._lock:
            if chunk.generation != self.generation:
                raise HoldfastError(
                    f"a chunk of save {chunk.generation} came back to buffer {self.number} in save {self.generation}"
                )
            index = chunk.start // self.chunk_bytes
            self._lent[index] -= 1
            if not self._lent[index]:
                del self._lent[index]
                if self._open is not None and self._open[0] == index:
                    self._open = None
                self._free.put(index)

    def _refuse_if_lent(self) -> None:
        if self._lent:
            raise HoldfastError(f"buffer {self.number} is still being written; this is a fault of holdfast")

    def attach(self, worker: Worker) -> None:
        """Make the memory known to another worker; the last one is gone and brings nothing back."""
        with self._lock:
            self.worker = worker
            self._lent.clear()
            self.generation += 1
            if self._memory is not None:
                worker.map(self.number, memoryview(self._memory), self._fd)

    def close(self) -> None:
        """Let the memory go."""
        with self._lock:
            self._release()

    def _allocate(self, nbytes: int) -> None:
        if self.worker.shares_memory:
            # Nameless, so that nothing is left behind by a killed process, and not bounded by the size of /dev/shm.
            fd = os.memfd_create("holdfast", os.MFD_CLOEXEC)
            try:
                _extend(fd, nbytes)
                memory = mmap.mmap(fd, nbytes)
            except BaseException:
                os.close(fd)
                raise
            with suppress(OSError, AttributeError):
                memory.madvise(mmap.MADV_HUGEPAGE)
            self._fd, self._memory = fd, memory
        else:
            self._memory = buffer(nbytes).memory
        self.worker.map(self.number, memoryview(self._memory), self._fd)
        self.nbytes = nbytes  # last: an interrupt before this leaves memory that the next call lets go

    def _release(self) -> None:
        if self._memory is None:
            return
        with suppress(HoldfastError):  # a dead worker has forgotten it already
            self.worker.map(self.number, None)
        if self._pinned:
            device.unpin(self._address)
            self._pinned = False
        # Views of it may still be on their way out of other threads: the last of them frees it.
        self._memory, self.nbytes = None, 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def room_for(sizes: Iterable[int], chunk_bytes: int = CHUNK) -> int:
    """Bytes of a buffer that hold files with so many tensor bytes each, all at once and in any order of writing."""
    return sum(size // chunk_bytes * chunk_bytes + _whole_sectors(size % chunk_bytes) for size in sizes)


def _whole_sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR) * SECTOR


def _extend(fd: int, nbytes: int) -> None:
    try:
        os.ftruncate(fd, nbytes)
    except OSError as error:
        named = StorageError(
            f"cannot share {nbytes} bytes of memory with the writer process: {error.strerror} (a limit on the size of "
            'files, ulimit -f, counts for it too; Saver(worker="thread") shares none)'
        )
        named.errno = error.errno
        raise named from error
