"""The sums of all blocks of a data file, from its bytes as they come, in file order.

`write` sums what it copies; `sums_of` sums a whole file first. Never copies what lies in host memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import xxhash

from holdfast.buffers.device import Copier
from holdfast.buffers.stage import address_of, contiguous_parts, host_view
from holdfast.ondisk import blocks
from holdfast.ondisk.datafile import Piece
from holdfast.write.buffer import StagingBuffer
from holdfast.write.datafiles import DataFile


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
        self._fresh = True  # no byte of the block came yet
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
        """All sums, once all bytes came, and the strong ones."""
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
