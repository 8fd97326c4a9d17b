"""Which byte ranges of a data file bring what is wanted of it, and where each byte goes.

`read` asks here and then only reads. Touches no file; the only memory it makes are host copies for views that cannot
be read into.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from holdfast.engine.stage import as_integers, is_plain_memory
from holdfast.ondisk import dtypes
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, relative, runs, whole
from holdfast.ondisk.datafile import Piece

SPAN = 8 << 20
"""Neighbouring ranges are read together up to this many bytes."""

GAP = 4096
"""Ranges this far apart are still read together: a page costs no more than a second request."""

DIRECT_FROM = 256 << 10
"""A range of this many bytes goes straight into its destination; smaller ones by way of a buffer."""

SLACK = 0.04
"""By default a block wanted in part is read whole, to be verified, while all such extra stays below this share."""

Verify = bool | Literal["blocks"]
"""How much to check: see `read_boxes`."""


class Share(NamedTuple):
    """What one wanted box takes from one piece."""

    file: int
    piece: Piece
    sums: Sequence[str]
    box: Box  # of the tensor, both wanted and in the piece
    cell: Box
    view: torch.Tensor
    dtype: str


@dataclass(slots=True)
class Landing:
    """A host copy on its way to a view that cannot be read into; delivered once all its ranges have come."""

    host: torch.Tensor
    view: torch.Tensor
    left: int
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arrived(self) -> None:
        with self.lock:
            self.left -= 1
            last = self.left == 0
        if last:
            deliver(self.host, self.view)


class Range(NamedTuple):
    """Bytes ``begin:begin + nbytes`` of a file; from each, (start, address, length) are wanted at an address.

    ``sum`` is set if the range is one whole block. ``key`` names the piece for errors.
    """

    begin: int
    nbytes: int
    sum: str | None
    key: str
    parts: tuple[tuple[int, int, int], ...]
    landing: Landing | None

    @property
    def wanted(self) -> int:
        """Bytes of it that somebody wants."""
        return sum(length for _, _, length in self.parts)


def deliver(host: torch.Tensor, view: torch.Tensor) -> None:
    """Copy a host tensor into any view of the same shape, casting if the types differ."""
    if host.dtype == view.dtype and not view.is_neg() and not view.is_conj():
        host, view = as_integers(host), as_integers(view)
    view.copy_(host)


def _slabs(share: Share) -> Iterator[Share]:
    """A share that needs a host copy, cut along its first axes so that no copy is larger than a span."""
    size = share.box.size * dtypes.itemsize(share.dtype)
    if size <= 2 * SPAN or not share.box.lengths or max(share.box.lengths) == 1:
        yield share
        return
    dim = next(d for d, n in enumerate(share.box.lengths) if n > 1)
    length = share.box.lengths[dim]
    rows = max(1, 2 * SPAN * length // size)
    for start in range(0, length, rows):
        count = min(rows, length - start)
        offsets, lengths = list(share.box.offsets), list(share.box.lengths)
        offsets[dim], lengths[dim] = offsets[dim] + start, count
        part = share._replace(box=Box(tuple(offsets), tuple(lengths)), view=share.view.narrow(dim, start, count))
        if count == 1:
            yield from _slabs(part)
        else:
            yield part


def _in_place(share: Share) -> bool:
    view = share.view
    return view.device.type == "cpu" and dtypes.name_of(view.dtype) == share.dtype and is_plain_memory(view)


def _byte_runs(share: Share) -> tuple[int, list[int]]:
    """Length and starts, in bytes of the piece, of what the share takes from it."""
    if share.cell is share.box or share.cell == share.box:
        return share.piece.nbytes, [0]
    size = dtypes.itemsize(share.dtype)
    run, starts = runs(whole(share.cell.lengths), relative(share.box, share.cell))
    return run * size, [s * size for s in starts]


def rounds_up(shares: Iterable[Share], verify: Verify, needed: int) -> bool:
    """Whether blocks that are wanted in part are to be read whole; ``needed`` is what all shares take, in bytes."""
    if verify is not True:
        return verify == "blocks"
    extra = 0
    for share in shares:
        if share.cell == share.box:
            continue
        run, starts = _byte_runs(share)
        first, last = starts[0] // BLOCK, (starts[-1] + run - 1) // BLOCK
        extra += min((last + 1) * BLOCK, share.piece.nbytes) - first * BLOCK - run * len(starts)
        if extra > SLACK * needed:
            return False
    return True


def ranges_of(share: Share, verify: Verify, *, round_up: bool) -> Iterator[Range]:
    """The ranges that bring one share; those that are whole blocks carry their sum. Host copies are made on the way."""
    if not share.box.size:
        return
    if _in_place(share):
        yield from _ranges_to(share, share.view.data_ptr(), None, verify, round_up=round_up)
        return
    for slab in _slabs(share):
        host = torch.empty(slab.box.lengths, dtype=dtypes.torch_dtype(slab.dtype))
        landing = Landing(host, slab.view, 0)
        found = list(_ranges_to(slab, host.data_ptr(), landing, verify, round_up=round_up))
        landing.left = len(found)
        yield from found


def _ranges_to(
    share: Share, address: int, landing: Landing | None, verify: Verify, *, round_up: bool
) -> Iterator[Range]:
    """Cut what a share takes at block borders; a block taken whole (or rounded up to whole) carries its sum."""
    piece, sums = share.piece, share.sums
    run, starts = _byte_runs(share)
    if len(starts) == 1 and run == piece.nbytes <= BLOCK:  # a small tensor, whole
        yield Range(piece.begin, run, sums[0] if verify and sums else None, piece.key, ((0, address, run),), landing)
        return
    if round_up and verify:
        yield from _whole_blocks(share, run, starts, address, landing)
        return
    for start in starts:
        at = start
        while at < start + run:
            block = at // BLOCK
            low, high = block * BLOCK, min((block + 1) * BLOCK, piece.nbytes)
            stop = min(start + run, high)
            full = at == low and stop == high and bool(verify) and bool(sums)
            parts = ((0, address, stop - at),)
            yield Range(piece.begin + at, stop - at, sums[block] if full else None, piece.key, parts, landing)
            address += stop - at
            at = stop


def _whole_blocks(share: Share, run: int, starts: list[int], address: int, landing: Landing | None) -> Iterator[Range]:
    piece, sums = share.piece, share.sums
    parts: dict[int, list[tuple[int, int, int]]] = {}
    for start in starts:
        at = start
        while at < start + run:
            block = at // BLOCK
            stop = min(start + run, (block + 1) * BLOCK)
            parts.setdefault(block, []).append((at - block * BLOCK, address, stop - at))
            address += stop - at
            at = stop
    for block, found in parts.items():
        low, high = block * BLOCK, min((block + 1) * BLOCK, piece.nbytes)
        known = sums[block] if sums else None
        yield Range(piece.begin + low, high - low, known, piece.key, tuple(found), landing)


def jobs_of(ranges: Iterable[Range], *, gap: int = GAP, straight: bool = True) -> Iterator[list[Range]]:
    """Neighbouring ranges together, up to a span; a large one by itself, if it is read ``straight`` to its place."""
    job: list[Range] = []
    end = 0
    for r in ranges:
        near = job and 0 <= r.begin - end <= gap and r.begin + r.nbytes - job[0].begin <= SPAN
        if job and (not near or (straight and (is_straight(r) or is_straight(job[-1])))):
            yield job
            job = []
        job.append(r)
        end = r.begin + r.nbytes
    if job:
        yield job


def is_straight(r: Range) -> bool:
    """Whether a range is read into its destination without a buffer."""
    return len(r.parts) == 1 and r.nbytes >= DIRECT_FROM and r.parts[0][0] == 0 and r.parts[0][2] == r.nbytes
