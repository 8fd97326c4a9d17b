"""The staging buffers of a Saver, and the worker that writes them: one buffer for each save that may be in memory.

A Saver owns one pool; each of its saves has a `Lease`. Starts another worker when the last one has died.
"""

from __future__ import annotations

import threading
import weakref

from holdfast.errors import HoldfastError
from holdfast.write.buffer import CHUNK, StagingBuffer, room_for
from holdfast.write.jobs import Worker
from holdfast.write.worker import start

GRAIN = 1 << 20
"""Bytes of which a buffer below one chunk takes a multiple."""


class BufferPool:
    """``count`` staging buffers of at most ``limit`` bytes each, and a worker of this ``kind``."""

    def __init__(self, kind: str, count: int, limit: int | None) -> None:
        self.buffers: dict[int, StagingBuffer] = {}
        self.worker: Worker | None = None
        self._kind, self._limit = kind, limit
        self._leases: list[Lease | None] = [None] * count  # which save has the buffer of that number
        self._claiming, self._equipping = threading.Lock(), threading.Lock()
        self._last_will: weakref.finalize[..., BufferPool] | None = None

    def lease(self) -> Lease:
        """One save's claim on a buffer."""
        return Lease(self)

    def claim(self, lease: Lease) -> bool:
        """Give a free buffer to a save; False if there is none."""
        with self._claiming:
            for number, holder in enumerate(self._leases):
                if holder is None:
                    self._leases[number] = lease  # in one step, whatever interrupts this
                    return True
        return False

    def number_of(self, lease: Lease) -> int | None:
        """The number of the buffer that a save has; None if it has none."""
        return self._leases.index(lease) if lease in self._leases else None

    def free(self, lease: Lease) -> None:
        """Free the buffer of a save for the next one. Idempotent."""
        for number, holder in enumerate(self._leases):
            if holder is lease:
                self._leases[number] = None

    def prepare(self, sizes: list[int], *, pinned: bool) -> None:
        """Allocate and touch all buffers, for files of these sizes."""
        for number in range(len(self._leases)):
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
        return self._pool.claim(self)

    def take(self, sizes: list[int], *, pinned: bool) -> StagingBuffer:
        """The buffer, large enough for files with this many tensor bytes each."""
        number = self._pool.number_of(self)
        if number is None:
            raise HoldfastError("a save without a staging buffer was to write; this is a fault of holdfast")
        return self._pool.equip(number, sizes, pinned=pinned)

    def give(self) -> None:
        """Free it for the next save. Idempotent."""
        self._pool.free(self)


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
