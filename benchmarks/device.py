"""The limit of the machine: large aligned direct reads and writes, with no checkpoint in them.

Called by the jobs, on every rank at once, for the same bytes as the systems move.
Never touches the page cache.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 16 << 20
THREADS = 4


def buffers(*, huge: bool) -> list[memoryview]:
    """Memory for each thread, there before the clock starts.

    ``huge``: of huge pages; a disk request can carry more of it than of 4 KiB pages.
    """
    made = []
    for _ in range(THREADS):
        # Aligned to pages, as direct I/O wants it; private, because shared memory gets no huge pages.
        memory = mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        memory[:] = bytes(CHUNK)
        made.append(memoryview(memory))
    return made


def raw_write(path: Path, nbytes: int, memory: list[memoryview]) -> None:
    """Write a new file of ``nbytes`` (rounded up to whole pages), its space taken up front, and make it durable."""
    total = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    try:
        os.posix_fallocate(fd, 0, total)
        _in_parallel(total, lambda buffer, at: os.pwrite(fd, buffer, at), memory)
        os.fsync(fd)
    finally:
        os.close(fd)


def raw_read(path: Path, memory: list[memoryview]) -> None:
    """Read a file that `raw_write` wrote."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _in_parallel(os.fstat(fd).st_size, lambda buffer, at: os.preadv(fd, [buffer], at), memory)
    finally:
        os.close(fd)


def _in_parallel(total: int, move: Callable[[memoryview, int], int], memory: list[memoryview]) -> None:
    def work(thread: int) -> None:
        for at in range(thread * CHUNK, total, THREADS * CHUNK):
            size = min(CHUNK, total - at)
            if move(memory[thread][:size], at) != size:
                raise OSError(f"a transfer of {size} bytes came short at {at}")

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
