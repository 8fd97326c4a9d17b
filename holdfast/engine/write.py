"""The writer: images of data files stream through a small ring of aligned windows to disk, summed on the way.

`save` calls `write_images`. Sees names, bytes and offsets: no ranks, no plans. Host memory is the ring, whatever the
size of the state.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from holdfast.engine.memory import Buffer, buffer
from holdfast.engine.stage import contiguous_parts, copy_bytes, is_plain_memory
from holdfast.engine.storage import SECTOR, naming, open_to_write
from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.datafile import Piece

WINDOW = 16 << 20
"""Bytes of one window: large enough for a disk's full rate, small enough that four cost 64 MiB."""

WINDOWS = 4
WRITERS = 2
"""Threads that write: two keep a disk busy while the ring is filled (measured: a third adds nothing)."""

STRIDE = 1 << 20
"""Bytes copied and then summed at a time, so that the sum reads them from the processor's cache."""


@dataclass(frozen=True)
class Image:
    """A data file before it is written: where it goes, its pieces in file order, and each piece's tensor."""

    path: str
    section: str
    pieces: list[Piece]
    sources: list[torch.Tensor]
    shapes: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Written:
    """A durable data file: path relative to the checkpoint, size, and its header's size and digest."""

    path: str
    bytes: int
    header_bytes: int
    header_digest: str


@dataclass
class OpenFiles:
    """Descriptors of the files of a save, kept open (and so locked) until its outcome is known."""

    paths: list[Path] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


class _Ring:
    """Windows that go round: filled by one thread, written by a few."""

    def __init__(self, nbytes: int) -> None:
        size = min(WINDOW, -(-max(nbytes, 1) // SECTOR) * SECTOR)
        count = min(WINDOWS, -(-max(nbytes, 1) // size))
        self.size = size
        self.free: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        for _ in range(count):
            self.free.put(buffer(size))


def write_images(
    images: Sequence[Image], folder: Path, *, save: str, rank: int, files: OpenFiles, progress: Callable[[int], None]
) -> list[Written]:
    """Write every image below ``folder`` and make it durable; folders exist already.

    ``files`` collects what was opened, for the caller to close or delete. Raises StorageError naming the file; a
    failure of a writing thread is raised here.
    """
    headers = [_header(image, save, rank, "0" * datafile.sums_length(image.pieces)) for image in images]
    sizes = [len(h) + sum(p.nbytes for p in i.pieces) for h, i in zip(headers, images, strict=True)]
    ring = _Ring(max(sizes, default=0))
    done: list[Future[Written]] = []
    with ThreadPoolExecutor(WRITERS, thread_name_prefix="holdfast-write") as pool:
        for image, header, size in zip(images, headers, sizes, strict=True):
            path = folder / image.path
            fd, direct = open_to_write(path, size)
            files.paths.append(path)
            files.descriptors.append(fd)
            stream = _Stream(path, fd, direct, len(header), ring, pool, progress)
            sums = stream.fill(image)
            done.append(pool.submit(_finish, stream, image, save, rank, size, sums))
        return [future.result() for future in done]


def _header(image: Image, save: str, rank: int, sums: str) -> bytes:
    header = datafile.build_header(
        image.pieces, save=save, rank=rank, section=image.section, shapes=image.shapes, sums=sums
    )
    if len(header) > datafile.MAX_HEADER:
        raise HoldfastError(f"{image.path} would have a header of {len(header)} bytes, which no reader accepts")
    return header


class _Stream:
    """One file under way: fills window after window in file order and hands each to the writing threads."""

    def __init__(
        self, path: Path, fd: int, direct: bool, start: int, ring: _Ring, pool: ThreadPoolExecutor,
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        self.path, self.fd, self.direct, self.ring, self.pool, self.progress = path, fd, direct, ring, pool, progress
        self.offset = start  # in the file, of the window being filled
        self.window: Buffer | None = None
        self.used = 0
        self.pending: list[Future[None]] = []

    def fill(self, image: Image) -> str:
        """Copy every piece into windows; the text of all sums."""
        texts = []
        for piece, source in zip(image.pieces, image.sources, strict=True):
            texts.append(self._piece(piece, source))
        self._hand_over()
        return ",".join(texts)

    def _piece(self, piece: Piece, source: torch.Tensor) -> str:
        window = self.window
        size = piece.nbytes
        if window is not None and size <= self.ring.size - self.used and size <= STRIDE and is_plain_memory(source):
            # The short way for the many small tensors of a state: one copy, one sum.
            copy_bytes(source, 0, size, window.address + self.used)
            end = self.used + size
            text = xxhash.xxh3_64_hexdigest(window.view[self.used : end]) if size else ""
            self.used = end
            return text
        sums, state, left = [], xxhash.xxh3_64(), min(blocks.BLOCK, size)
        for part in contiguous_parts(source):
            at = 0
            while at < part.nbytes:
                window = self._room()
                n = min(part.nbytes - at, self.ring.size - self.used, left, STRIDE)
                copy_bytes(part, at, n, window.address + self.used)
                state.update(window.view[self.used : self.used + n])
                self.used, at, left, size = self.used + n, at + n, left - n, size - n
                if not left:
                    sums.append(state.hexdigest())
                    state, left = xxhash.xxh3_64(), min(blocks.BLOCK, size)
        return "".join(sums)

    def _room(self) -> Buffer:
        if self.window is not None and self.used == self.ring.size:
            self._hand_over()
        if self.window is None:
            while True:
                self._raise_failures()
                try:
                    self.window = self.ring.free.get(timeout=1.0)
                    return self.window
                except queue.Empty:
                    continue
        return self.window

    def _raise_failures(self) -> None:
        for future in [f for f in self.pending if f.done()]:
            future.result()
            self.pending.remove(future)

    def _hand_over(self) -> None:
        if self.window is not None:
            self.pending.append(self.pool.submit(self._write, self.window, self.used, self.offset))
            self.offset += self.used
            self.window, self.used = None, 0

    def _write(self, window: Buffer, nbytes: int, offset: int) -> None:
        try:
            self.write_at(window, nbytes, offset)
        finally:
            self.ring.free.put(window)
        self.progress(nbytes)

    def write_at(self, window: Buffer, nbytes: int, offset: int) -> None:
        """Write the first ``nbytes`` of a window; directly they are padded to whole sectors, cut off at the end."""
        padded = -(-nbytes // SECTOR) * SECTOR if self.direct else nbytes
        window.view[nbytes:padded] = bytes(padded - nbytes)
        with naming(self.path, "write"):
            at = 0
            while at < padded:
                try:
                    at += os.pwrite(self.fd, window.view[at:padded], offset + at)
                except OSError as error:
                    if error.errno != errno.EINVAL or not self.direct:
                        raise
                    # Opened directly, but this file system cannot write so (some overlay and network ones).
                    self.direct = False
                    _leave_direct(self.fd)
                if self.direct:
                    at -= at % SECTOR


def _leave_direct(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


def _finish(stream: _Stream, image: Image, save: str, rank: int, size: int, sums: str) -> Written:
    """Wait for the windows of a file, write its header, cut off the padding, make it durable."""
    for future in stream.pending:
        future.result()
    header = _header(image, save, rank, sums)
    first = buffer(len(header))
    first.view[:] = header
    stream.write_at(first, len(header), 0)
    with naming(stream.path, "sync"):
        os.ftruncate(stream.fd, size)
        os.fsync(stream.fd)
    stream.progress(len(header))
    return Written(image.path, size, len(header), blocks.digest(header))
