"""Which byte ranges of a data file bring what is wanted of it, and where each byte goes.

`read` asks here and then only reads. Touches no file; the only memory it makes are the small windows in which short
runs meet that go to a view which cannot be read into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import msgspec
import torch

from holdfast.buffers.device import SMALL
from holdfast.buffers.scatter import RunBuffer
from holdfast.buffers.stage import HOST, is_plain_memory
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, flat_boxes, intersect, relative
from holdfast.ondisk.datafile import Piece

SPAN = 8 << 20
"""Neighbouring ranges are read together up to this many bytes.

We rejected 16 MiB for a store: a load takes 0.94 of the time and 190 MiB more of memory on each rank (measured)."""

GAP = 4096
"""Ranges this far apart are still read together: a page costs no more than a second request."""

DIRECT_FROM = 256 << 10
"""A range of this many bytes goes straight into its destination; smaller ones by way of a buffer."""

SLACK = 0.04
"""By default a block wanted in part is read whole, to be verified, while all such extra stays below this part.

Other bytes count as unverified. We rejected reading every block whole by default, because that may double the bytes of
a resharded load. Sums that compose would end the choice, but XXH3 has none."""

PACKED, PACKED_RUNS = 1 << 20, 4096
"""Bytes and runs of one window in which short runs meet on their way to a view that cannot be read into."""

Verify = bool | Literal["blocks"]
"""How much to check: see `read_boxes`."""


class Overlap(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one wanted box takes from one piece."""

    file: int
    piece: Piece
    sums: Sequence[str]
    box: Box  # of the tensor, both wanted and in the piece
    cell: Box
    view: torch.Tensor
    dtype: str

    @property
    def is_whole(self) -> bool:
        """Whether the piece is wanted whole."""
        return self.cell is self.box or self.cell == self.box


class Range(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Bytes ``begin:begin + nbytes`` of a file, of which ``wanted`` are wanted.

    They go one after the other, from byte ``start`` of the range on, to an ``address``; or they lie scattered in the
    range and go to the view of a ``overlap``. ``sum`` is set if the range is one whole block. ``key`` names the piece
    for errors. ``buffer`` waits for what goes to an address of its own.
    """

    begin: int
    nbytes: int
    sum: str | None
    key: str
    wanted: int = 0
    start: int = 0
    address: int = 0
    buffer: RunBuffer | None = None
    overlap: Overlap | None = None

    @property
    def is_small_on_device(self) -> bool:
        """Whether it goes with its neighbours: a small tensor, whole and as it is, to plain memory of a device."""
        overlap = self.overlap
        if overlap is None or self.nbytes > SMALL or self.nbytes != overlap.piece.nbytes or not overlap.is_whole:
            return False
        view = overlap.view
        return view.device != HOST and dtypes.name_of(view.dtype) == overlap.dtype and is_plain_memory(view)


class Spans(NamedTuple):
    """Stretches of a piece, in bytes, with nothing wanted between them; ``solid`` if all is wanted in them."""

    nbytes: int
    solid: bool
    first: int
    outer: tuple[tuple[int, int], ...]  # how often, how far apart, from the outermost axis on

    @property
    def end(self) -> int:
        return self.first + sum((n - 1) * pitch for n, pitch in self.outer) + self.nbytes

    def starts(self) -> Iterator[int]:
        """Where they begin: one at a time, for a narrow slice of a tall tensor has millions."""
        return _starts(self.first, self.outer)


def _starts(at: int, outer: tuple[tuple[int, int], ...]) -> Iterator[int]:
    if not outer:
        yield at
        return
    count, pitch = outer[0]
    for i in range(count):
        if len(outer) == 1:
            yield at + i * pitch
        else:
            yield from _starts(at + i * pitch, outer[1:])


def spans_of(overlap: Overlap, gap: int = GAP) -> Spans:
    """What the overlap takes from its piece; what lies no more than ``gap`` bytes apart is one span."""
    if overlap.is_whole:
        return Spans(overlap.piece.nbytes, True, 0, ())
    size = dtypes.itemsize(overlap.dtype)
    inner = relative(overlap.box, overlap.cell)
    pitch, first, extent, solid = size, 0, size, True
    outer: list[tuple[int, int]] = []
    for offset, length, n in zip(*map(reversed, (*inner, overlap.cell.lengths)), strict=True):
        first += offset * pitch
        if length > 1:
            if outer or pitch - extent > gap:
                outer.append((length, pitch))
            else:
                solid = solid and pitch == extent
                extent += (length - 1) * pitch
        pitch *= n
    return Spans(extent, solid, first, tuple(reversed(outer)))


def _in_place(overlap: Overlap) -> bool:
    view = overlap.view
    return view.device == HOST and dtypes.name_of(view.dtype) == overlap.dtype and is_plain_memory(view)


def rounds_up(overlaps: Iterable[Overlap], verify: Verify, needed: int) -> bool:
    """Whether blocks that are wanted in part are to be read whole; ``needed`` is what all of them take, in bytes."""
    if verify is not True:
        return verify == "blocks"
    extra = 0
    for overlap in overlaps:
        if overlap.is_whole or not overlap.sums:
            continue
        spans = spans_of(overlap)
        low, high = spans.first // BLOCK * BLOCK, min(-(-spans.end // BLOCK) * BLOCK, overlap.piece.nbytes)
        # What lies between neighbours is read in any case.
        taken = overlap.box.size * dtypes.itemsize(overlap.dtype) if spans.outer else spans.nbytes
        extra += high - low - taken
        if extra > SLACK * needed:
            return False
    return True


def ranges_of(overlap: Overlap, verify: Verify, *, round_up: bool, gap: int = GAP) -> Iterable[Range]:
    """The ranges that bring one overlap, in the order of the file; those that are whole blocks carry their sum."""
    if 0 in overlap.box.lengths:
        return ()
    piece, sums = overlap.piece, overlap.sums if verify else ()
    address = overlap.view.data_ptr() if _in_place(overlap) else None
    if piece.nbytes <= BLOCK and overlap.is_whole:  # a small tensor, whole: by far the most common
        known = sums[0] if sums else None
        if address is not None:
            return (Range(piece.begin, piece.nbytes, known, piece.key, piece.nbytes, 0, address),)
        return (Range(piece.begin, piece.nbytes, known, piece.key, piece.nbytes, overlap=overlap),)
    return _ranges_of(overlap, sums, address, round_up=round_up, gap=gap)


def _ranges_of(
    overlap: Overlap, sums: Sequence[str], address: int | None, *, round_up: bool, gap: int
) -> Iterator[Range]:
    piece, spans = overlap.piece, spans_of(overlap, gap)
    if spans.nbytes == piece.nbytes <= BLOCK and spans.solid and address is not None:  # whole, in other words
        yield Range(piece.begin, piece.nbytes, sums[0] if sums else None, piece.key, piece.nbytes, 0, address)
    elif round_up and sums:  # without sums there is nothing to prove
        yield from _whole_blocks(overlap, spans, sums, address)
    elif address is None and spans.solid and spans.outer and spans.nbytes < DIRECT_FROM:
        yield from _packed(overlap, spans, sums)
    else:
        for start in spans.starts():
            yield from _cut(overlap, start, spans, sums, address)
            address = address if address is None else address + spans.nbytes


def _cut(
    overlap: Overlap,
    start: int,
    spans: Spans,
    sums: Sequence[str],
    address: int | None,
    buffer: RunBuffer | None = None,
) -> Iterator[Range]:
    """One span cut at block borders; a block taken whole carries its sum."""
    piece, end = overlap.piece, start + spans.nbytes
    at = start
    while at < end:
        block = at // BLOCK
        low, high = block * BLOCK, min((block + 1) * BLOCK, piece.nbytes)
        stop = min(end, high)
        known = sums[block] if sums and at == low and stop == high else None
        if address is not None and spans.solid:
            there = address + at - start
            yield Range(piece.begin + at, stop - at, known, piece.key, stop - at, 0, there, buffer)
        else:
            yield _scattered(overlap, at, stop, known)
        at = stop


def _scattered(overlap: Overlap, low: int, high: int, known: str | None) -> Range:
    wanted = high - low
    if overlap.cell != overlap.box:
        size, inner = dtypes.itemsize(overlap.dtype), relative(overlap.box, overlap.cell)
        parts = (intersect(box, inner) for box in flat_boxes(overlap.cell.lengths, low // size, high // size))
        wanted = size * sum(part.size for part in parts if part is not None)
    return Range(overlap.piece.begin + low, high - low, known, overlap.piece.key, wanted, overlap=overlap)


def _packed(overlap: Overlap, spans: Spans, sums: Sequence[str]) -> Iterator[Range]:
    """Short runs far apart that cannot be read to where they go: together, for to hand over each costs more."""
    starts, first = spans.starts(), 0
    most = max(1, min(PACKED // spans.nbytes, PACKED_RUNS))
    while some := [*islice(starts, most)]:
        buffer = RunBuffer(first, len(some) * spans.nbytes, overlap.box.lengths, overlap.view, overlap.dtype)
        ranges: list[Range] = []
        for i, start in enumerate(some):
            ranges += _cut(overlap, start, spans, sums, buffer.address + i * spans.nbytes, buffer)
        buffer.left = len(ranges)
        first += buffer.nbytes
        yield from ranges


def _whole_blocks(overlap: Overlap, spans: Spans, sums: Sequence[str], address: int | None) -> Iterator[Range]:
    """Every block of which anything is wanted, whole and once, however many spans meet in it."""
    piece, last = overlap.piece, -1
    for start in spans.starts():
        end = start + spans.nbytes
        for block in range(start // BLOCK, (end - 1) // BLOCK + 1):
            low, high = block * BLOCK, min((block + 1) * BLOCK, piece.nbytes)
            begin, stop = max(start, low), min(end, high)
            known = sums[block]
            if address is not None and spans.solid and (not spans.outer or (begin, stop) == (low, high)):
                there = address + begin - start
                yield Range(piece.begin + low, high - low, known, piece.key, stop - begin, begin - low, there)
            elif block != last:
                last = block
                yield _scattered(overlap, low, high, known)
        address = address if address is None else address + spans.nbytes


def jobs_of(
    ranges: Iterable[Range], *, gap: int = GAP, straight: bool = True, span: int = SPAN
) -> Iterator[list[Range]]:  # fmt: skip
    """Neighbouring ranges together, up to ``span`` bytes; by itself one that is longer, or is read ``straight``."""
    job: list[Range] = []
    begin = end = 0
    alone = False
    for r in ranges:
        lone = straight and r.nbytes >= DIRECT_FROM and is_straight(r)
        if job and (lone or alone or not 0 <= r.begin - end <= gap or r.begin + r.nbytes - begin > span):
            yield job
            job = []
        if not job:
            begin = r.begin
        job.append(r)
        end, alone = r.begin + r.nbytes, lone
    if job:
        yield job


def is_straight(r: Range) -> bool:
    """Whether a range is read into its destination without a buffer."""
    return r.overlap is None and r.nbytes >= DIRECT_FROM and r.wanted == r.nbytes
