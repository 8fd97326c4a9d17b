"""One data file while it is filled: piece after piece is copied into chunks of the staging buffer, and summed.

`Writing` has a `FilledFile` for each file, and `sums_of` sums a file before it is staged. Knows no other file, but for
the chunk that devices fill first.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from holdfast.buffers.device import Copier, Moments
from holdfast.buffers.memory import move
from holdfast.buffers.stage import address_of, contiguous_parts, copy_bytes, host_view, is_plain_memory
from holdfast.ondisk import blocks
from holdfast.ondisk.datafile import Piece
from holdfast.write.buffer import Chunk, StagingBuffer
from holdfast.write.datafiles import DataFile, Written
from holdfast.write.handover import Handover

STRIDE = 1 << 20
"""Bytes copied and then summed at a time, so that the sum reads them from the processor's cache."""

SMALL = 64 << 10
"""A tensor below this is not worth a hand-over of its own."""


@dataclass(frozen=True)
class Landing:
    """A chunk that devices still copy into, until ``moment``."""

    file: FilledFile
    chunk: Chunk
    used: int
    moment: Moments


class FilledFile:
    """One file that is filled in file order, from its ``header`` on, which is complete once ``written`` is set.

    ``create`` makes the file: see `Handover`. ``sums`` are None if the sums are known before anything is staged.
    ``landing`` is shared by all files of a save.
    """

    def __init__(
        self, file: DataFile, header: bytes, create: Callable[[], int | None], buffer: StagingBuffer, copier: Copier,
        landing: deque[Landing], progress: Callable[[int], None], *, strong: bool,
    ) -> None:  # fmt: skip
        self.file, self.header = file, header
        self.handover = Handover(create, len(header), buffer, progress)
        self.sums: Sums | None = Sums(file.pieces, strong=strong)
        self.written: Written | None = None
        self.is_sealed = False
        self.chunk: Chunk | None = None
        self.used = 0  # bytes of the chunk
        self._left = file.nbytes  # bytes that no chunk was taken for yet
        self._buffer, self._copier, self._landing = buffer, copier, landing

    @property
    def is_on_device(self) -> bool:
        """Whether bytes arrive later than they are asked for: whole chunks are summed and handed over as they land."""
        return self.file.is_on_device

    def fill(self) -> None:
        """Copy every piece into chunks, and hand over each that is full."""
        pieces, sources = self.file.pieces, self.file.sources
        at = 0
        while at < len(pieces):
            done = at if self.is_on_device else self._copy_run(at)
            if done == at:
                piece, source = pieces[at], sources[at]
                address_of(source, piece.key)
                if self.chunk is not None and piece.nbytes <= min(STRIDE, self.chunk.nbytes - self.used):
                    self._copy_small(source, piece.nbytes)
                else:
                    self._copy(source)
                done = at + 1
            at = done
        self._end_chunk()

    def _copy_run(self, at: int) -> int:
        """Copy the plain small pieces of host memory from the ``at``-th on while there is room, up to a stride.

        Returns the number of the first that is not copied. They are summed together: for each by itself a sum costs
        less than to be asked for it.
        """
        if self.chunk is None:
            return at
        pieces, sources = self.file.pieces, self.file.sources
        begin, chunk = self.used, self.chunk
        used, end = begin, min(begin + STRIDE, chunk.nbytes)
        while at < len(pieces):
            source, nbytes = sources[at], pieces[at].nbytes
            if used + nbytes > end or not is_plain_memory(source):
                break
            if nbytes:
                move(chunk.address + used, address_of(source, pieces[at].key), nbytes)
            used += nbytes
            at += 1
        if self.sums is not None and used > begin:
            self.sums.feed(chunk.view[begin:used])
        self.used = used
        return at

    def send(self) -> None:
        """Hand over every piece from where it lies; small and scattered ones in other memory, not much at a time."""
        small = bytearray()
        for piece, source in zip(self.file.pieces, self.file.sources, strict=True):
            for part in contiguous_parts(source):
                memory = host_view(address_of(part, piece.key), part.nbytes)
                if part.nbytes < SMALL:
                    small += memory
                    if len(small) < STRIDE:
                        continue
                if small:
                    self.handover.give_memory(memoryview(small), small, is_copy=True)
                    small = bytearray()
                if part.nbytes >= SMALL:
                    self.handover.give_memory(memory, part, is_copy=part is not source)
        if small:
            self.handover.give_memory(memoryview(small), small, is_copy=True)

    def _copy_small(self, source: torch.Tensor, nbytes: int) -> None:
        if nbytes and self.chunk is not None:
            if is_plain_memory(source):
                self._move(source, 0, nbytes, self.chunk)
                return
            with self._copier.on(source.device):  # what is made contiguous is made on the stream that copies it
                for part in contiguous_parts(source):
                    self._move(part, 0, part.nbytes, self.chunk)

    def _copy(self, source: torch.Tensor) -> None:
        with self._copier.on(source.device):  # a part that is made contiguous on the way is made on the side stream
            for part in contiguous_parts(source):
                at = 0
                while at < part.nbytes:
                    chunk = self._room()
                    n = min(part.nbytes - at, chunk.nbytes - self.used)
                    if not self.is_on_device:
                        n = min(n, STRIDE)
                    self._move(part, at, n, chunk)
                    at += n

    def _move(self, part: torch.Tensor, at: int, n: int, chunk: Chunk) -> None:
        if part.device.type == "cpu":
            copy_bytes(part, at, n, chunk.address + self.used)
        else:
            self._copier.copy(part, at, n, chunk.address + self.used)
        if not self.is_on_device and self.sums is not None:
            self.sums.feed(chunk.view[self.used : self.used + n])
        self.used += n

    def _room(self) -> Chunk:
        if self.chunk is not None and self.used == self.chunk.nbytes:
            self._end_chunk()
        while self.chunk is None:
            self.handover.raise_failures()
            self.chunk = self._buffer.take(self._left, timeout=0.0 if self._landing else 0.5)
            if self.chunk is not None:
                self._left -= min(self.chunk.nbytes, self._left)
            elif self._landing:
                self.land_first()  # nothing comes back before something is handed over
        return self.chunk

    def _end_chunk(self) -> None:
        if self.chunk is None:
            return
        # A device may fail here, or have no memory left: then the chunk is still here, to be given back.
        moment = self._copier.moment() if self.is_on_device else None
        chunk, used = self.chunk, self.used
        self.chunk, self.used = None, 0
        if moment is not None:
            self._landing.append(Landing(self, chunk, used, moment))
        else:
            self.handover.give_chunk(chunk, used)

    def land_first(self) -> None:
        """Wait for the chunk that devices fill first, of any file, and hand it over."""
        first = self._landing.popleft()
        try:
            first.moment.wait()
            if first.file.sums is not None:
                first.file.sums.feed(first.chunk.view[: first.used])
            first.file.handover.open()
        except BaseException:
            self._buffer.give(first.chunk)
            raise
        first.file.handover.give_chunk(first.chunk, first.used)

    def give_up(self) -> None:
        """Bring every chunk back, whatever became of it; never raises."""
        if self.chunk is not None:
            self._buffer.give(self.chunk)
            self.chunk = None
        self.handover.give_up()


class Sums:
    """The sums of all blocks of a file, from its bytes in file order; ``strong``: SHA-256 too."""

    def __init__(self, pieces: Sequence[Piece], *, strong: bool) -> None:
        self._strong = [""] * len(pieces) if strong else None
        self._sha256 = hashlib.sha256()
        self._sizes = [p.nbytes for p in pieces]
        self._texts = [""] * len(pieces)
        self._piece = -1
        self._in_piece = self._in_block = 0  # bytes left
        self._state = xxhash.xxh3_64()
        self._fresh = True  # no byte of the block was fed yet
        self._next_piece()

    def feed(self, view: memoryview) -> None:
        """The next bytes of the file."""
        at, end = 0, len(view)
        while at < end:
            if self._fresh and self._in_block == self._sizes[self._piece] <= end - at:
                at = self._feed_whole(view, at)
                continue
            n = min(end - at, self._in_block)
            self._state.update(view[at : at + n])
            if self._strong is not None:
                self._sha256.update(view[at : at + n])
            self._fresh = False
            self._in_piece -= n
            self._in_block -= n
            if not self._in_block:
                self._texts[self._piece] += self._state.hexdigest()
                if self._strong is not None:
                    self._strong[self._piece] += self._sha256.hexdigest()
                self._begin_block()
            at += n
            if not self._in_piece:
                self._next_piece()

    def _feed_whole(self, view: memoryview, at: int) -> int:
        """As many pieces of one block as are there whole, from the present one on: the short way for small tensors."""
        sizes, texts, piece, left = self._sizes, self._texts, self._piece, len(view) - at
        while piece < len(sizes) and sizes[piece] <= left and sizes[piece] <= blocks.BLOCK:
            n = sizes[piece]
            if n:  # an empty piece has no sum
                texts[piece] = xxhash.xxh3_64_hexdigest(view[at : at + n])
                if self._strong is not None:
                    self._strong[piece] = blocks.strong_sum(view[at : at + n])
            at += n
            left -= n
            piece += 1
        self._piece, self._in_piece = piece - 1, 0
        self._next_piece()
        return at

    def texts(self) -> tuple[str, str | None]:
        """All sums, once all bytes were fed, and the strong ones."""
        return ",".join(self._texts), None if self._strong is None else ",".join(self._strong)

    def _next_piece(self) -> None:
        while not self._in_piece and self._piece < len(self._sizes) - 1:
            self._piece += 1
            self._in_piece = self._sizes[self._piece]
        self._begin_block()

    def _begin_block(self) -> None:
        self._in_block, self._fresh = min(blocks.BLOCK, self._in_piece), True
        self._state.reset()
        if self._strong is not None:
            self._sha256 = hashlib.sha256()


def sums_of(file: DataFile, buffer: StagingBuffer, copier: Copier, *, strong: bool) -> Sums:
    """The sums of a file before anything of it is staged."""
    sums = Sums(file.pieces, strong=strong)
    for piece, source in zip(file.pieces, file.sources, strict=True):
        address_of(source, piece.key)
        with copier.on(source.device):
            for part in contiguous_parts(source):
                if part.device.type == "cpu":
                    sums.feed(host_view(part.data_ptr(), part.nbytes))
                else:
                    _feed_from_device(sums, part, buffer, copier)
    return sums


def _feed_from_device(sums: Sums, part: torch.Tensor, buffer: StagingBuffer, copier: Copier) -> None:
    chunk = None
    while chunk is None:  # an earlier file of the same save may be on its way out of all of them
        chunk = buffer.take(min(part.nbytes, buffer.chunk_bytes), timeout=0.5)
    try:
        for at in range(0, part.nbytes, chunk.nbytes):
            n = min(chunk.nbytes, part.nbytes - at)
            copier.copy(part, at, n, chunk.address)
            copier.moment().wait()
            sums.feed(chunk.view[:n])
    finally:
        buffer.give(chunk)
