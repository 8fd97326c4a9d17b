"""The arena: host memory that is the file image, in windows that are filled, written, and filled again.

A blocking save makes a small slot for itself; a Saver keeps slots that hold a whole image, so that filling never waits
for the disk. Never hands out a window that is still being written.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engine import device
from holdfast.engine.courier import SECTOR
from holdfast.engine.memory import buffer
from holdfast.engine.worker import Worker
from holdfast.errors import HoldfastError, StorageError

WINDOW = 16 << 20
"""Bytes of one window: large enough for a disk's full rate, small enough that four cost 64 MiB."""

_POPULATE = 23  # MADV_POPULATE_WRITE, Linux 5.14; not in the mmap module


@dataclass(frozen=True)
class Window:
    """A stretch of a slot's memory, at ``start`` of it, lent for one save: the ``generation``."""

    view: memoryview
    address: int
    start: int
    generation: int


class Slot:
    """Memory for one save at a time, known to the worker that writes it.

    ``begin`` opens a generation; `take` lends its windows and `give` brings them back, from any thread.
    """

    def __init__(self, number: int, worker: Worker, *, window: int = WINDOW) -> None:
        self.number, self.worker, self.window = number, worker, window
        self.count = 0
        self.generation = 0
        self._memory: mmap.mmap | None = None
        self._fd = -1
        self._address = 0
        self._pinned = False
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lent = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """All its memory."""
        return self.count * self.window

    def reserve(self, count: int, *, pinned: bool = False, touch: bool = False) -> None:
        """Have at least ``count`` windows; ``pinned`` for a device to copy into, ``touch``ed so that they are there.

        What is there already is kept if it is enough. Raises HoldfastError if windows are lent out.
        """
        with self._lock:
            if self._lent:
                raise HoldfastError(f"slot {self.number} is still being written; this is a fault of holdfast")
            if count > self.count:
                self._release()
                self._allocate(count)
            if touch:
                self._touch()
            if pinned and not self._pinned:
                self._pinned = device.pin(self._address, self.nbytes)

    def begin(self) -> None:
        """Start a new save in this slot. Raises HoldfastError if a window of the last one is not back."""
        with self._lock:
            if self._lent:
                raise HoldfastError(f"slot {self.number} is still being written; this is a fault of holdfast")
            self.generation += 1
            self._free = queue.SimpleQueue()
            for index in range(self.count):
                self._free.put(index)

    def take(self, timeout: float) -> Window | None:
        """A free window, or None if there is none within ``timeout`` seconds."""
        try:
            index = self._free.get(timeout=timeout)
        except queue.Empty:
            return None
        with self._lock:
            self._lent += 1
            start, memory = index * self.window, self._memory
        if memory is None:
            raise HoldfastError(f"slot {self.number} is closed")
        view = memoryview(memory)[start : start + self.window]
        return Window(view, self._address + start, start, self.generation)

    def give(self, window: Window) -> None:
        """Bring a window back. Raises HoldfastError if it was lent for another save."""
        with self._lock:
            if window.generation != self.generation:
                raise HoldfastError(
                    f"a window of save {window.generation} came back to slot {self.number} in save {self.generation}"
                )
            self._lent -= 1
            self._free.put(window.start // self.window)

    def attach(self, worker: Worker) -> None:
        """Make the memory known to another worker; the last one is gone and brings nothing back."""
        with self._lock:
            self.worker, self._lent = worker, 0
            self.generation += 1
            if self._memory is not None:
                worker.map(self.number, memoryview(self._memory), self._fd)

    def close(self) -> None:
        """Let the memory go."""
        with self._lock:
            self._release()

    def _allocate(self, count: int) -> None:
        nbytes = count * self.window
        if self.worker.shares_memory:
            # Nameless, so that nothing is left behind whoever is killed, and not bounded by the size of /dev/shm.
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
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        else:
            made = buffer(nbytes)
            self._memory, self._address = made.memory, made.address
        self.count = count
        self.worker.map(self.number, memoryview(self._memory), self._fd)

    def _touch(self) -> None:
        memory = self._memory
        if memory is not None:
            try:
                memory.madvise(_POPULATE)
            except OSError:
                for at in range(0, len(memory), SECTOR):
                    memory[at] = 0

    def _release(self) -> None:
        if self._memory is None:
            return
        with suppress(HoldfastError):  # a dead worker has forgotten it already
            self.worker.map(self.number, None)
        if self._pinned:
            device.unpin(self._address)
            self._pinned = False
        # Views of it may still be on their way out of other threads: the last of them frees it.
        self._memory, self.count = None, 0
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def windows_for(sizes: list[int], window: int = WINDOW) -> int:
    """How many windows hold files with so many tensor bytes each."""
    return sum(-(-size // window) for size in sizes)


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
