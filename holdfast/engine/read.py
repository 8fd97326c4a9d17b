"""The reader: from boxes wanted to exactly the byte ranges that hold them, summed on the way.

`load` and `Checkpoint` call `read_boxes`. Cached pages come at memory speed, cold ones directly; memory stays bounded.
Never reads a block that nobody wants, and never hands out a whole block whose sum is wrong.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from holdfast.engine.memory import Buffer, buffer
from holdfast.engine.stage import host_view, is_plain_memory
from holdfast.engine.storage import SECTOR, is_cached, naming, naming_unless_missing, open_to_read
from holdfast.errors import Damaged
from holdfast.ondisk import blocks, datafile, dtypes, names
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, intersect, relative, runs, whole
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import FileRecord, TensorRecord

READERS = 4
SPAN = 8 << 20
"""Neighbouring ranges are read together up to this many bytes."""

GAP = 4096
"""Ranges this far apart are still read together: a page costs no more than a second request."""

DIRECT_FROM = 256 << 10
"""A range of this many bytes goes straight into its destination; smaller ones by way of a buffer."""

SLACK = 0.04
"""By default a block wanted in part is read whole, to be verified, while all such extra stays below this share."""

Verify = bool | Literal["blocks"]


class Wanted(NamedTuple):
    """A box of a saved tensor and the memory that takes it; ``view`` has the box's lengths as shape.

    ``name`` is the saved name. A view of another dtype, on a device or scattered is filled by way of a host copy.
    """

    name: str
    record: TensorRecord
    box: Box
    view: torch.Tensor


@dataclass
class ReadStats:
    """Bytes: ``needed`` by the boxes, ``read`` from storage, ``unverified`` of those needed."""

    needed: int = 0
    read: int = 0
    unverified: int = 0
    seconds: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int) -> None:
        with self._lock:
            self.read += read


@dataclass(slots=True)
class _Landing:
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


class _Range(NamedTuple):
    """Bytes ``begin:begin + nbytes`` of a file; from each, (start, address, length) are wanted at an address.

    ``sum`` is set if the range is one whole block. ``key`` names the piece for errors.
    """

    begin: int
    nbytes: int
    sum: str | None
    key: str
    parts: tuple[tuple[int, int, int], ...]
    landing: _Landing | None


def deliver(host: torch.Tensor, view: torch.Tensor) -> None:
    """Copy a host tensor into any view of the same shape, casting if the types differ."""
    if host.dtype == view.dtype and dtypes.code_of(dtypes.name_of(host.dtype)) is None and host.dim():
        width = host.dtype.itemsize
        if view.is_contiguous() or (view.stride(-1) == 1 and width):
            view, host = view.view(torch.uint8), host.view(torch.uint8)
    view.copy_(host)


class DataFiles:
    """The data files of one checkpoint: headers read once and proved, descriptors opened once."""

    def __init__(self, folder: Path, records: Sequence[FileRecord]) -> None:
        self.folder, self.records = folder, records
        self._headers: dict[int, Header] = {}
        self._lock = threading.Lock()

    def path(self, index: int) -> Path:
        return self.folder / self.records[index].path

    def header(self, index: int, stats: ReadStats | None = None) -> Header:
        """The header of a file. Raises Damaged if the file is missing, has another size or another header."""
        if index in self._headers:
            return self._headers[index]
        with self._lock:
            if index not in self._headers:
                self._headers[index] = self._read_header(index)
                if stats is not None:
                    stats.add(self.records[index].header_bytes)
            return self._headers[index]

    def _read_header(self, index: int) -> Header:
        record, path = self.records[index], self.path(index)
        try:
            with naming_unless_missing(path, "read"), path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                data = file.read(record.header_bytes) if size == record.bytes else b""
        except FileNotFoundError:
            raise _damaged(path, "is missing") from None
        if size != record.bytes:
            raise _damaged(path, f"has {size} bytes, the manifest says {record.bytes}")
        if blocks.digest(data) != record.header_digest:
            raise _damaged(path, "has an altered header: its digest is not the manifest's")
        try:
            return datafile.parse_header(data, size)
        except ValueError as error:
            raise _damaged(path, f"cannot be read: {error}") from None

    @contextmanager
    def opened(self, index: int) -> Iterator[tuple[int, int | None]]:
        """Descriptors of a file: cached, and direct if that can be had."""
        try:
            cached, direct = open_to_read(self.path(index))
        except FileNotFoundError:
            raise _damaged(self.path(index), "is missing") from None
        try:
            yield cached, direct
        finally:
            os.close(cached)
            if direct is not None:
                os.close(direct)


def _damaged(path: Path, what: str) -> Damaged:
    error = Damaged(f"{path} {what}; restore another step, or bring this file back from a copy")
    error.file = str(path)
    return error


def read_boxes(
    files: DataFiles, wanted: Iterable[Wanted], *, verify: Verify = True, progress: Callable[[int], None] | None = None
) -> ReadStats:
    """Fill every view. Raises Damaged, naming file and tensor, for a missing, short or altered file.

    ``verify``: True checks every block that is read whole, and reads blocks that are wanted in part whole as long
    as that adds less than 4 % in all (the rest is counted as unverified); ``"blocks"`` reads and checks whole blocks
    always; False checks none.
    """
    stats = ReadStats()
    plans: dict[int, list[_Share]] = {}
    for want in wanted:
        stats.needed += want.view.numel() * dtypes.itemsize(want.record.dtype)
        for share in _shares(files, want, stats):
            plans.setdefault(share.file, []).append(share)
    partial = _partial_blocks(plans, verify, stats.needed)
    with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read") as pool, ExitStack() as stack:
        pending: list[Future[None]] = []
        for index in sorted(plans):
            descriptors = stack.enter_context(files.opened(index))
            source = _Source(files.path(index), *descriptors, stats)
            shares = sorted(plans[index], key=lambda share: share.piece.begin)
            ranges = (r for share in shares for r in _ranges(share, verify, partial, stats))
            for job in _jobs(ranges):
                while len(pending) >= 4 * READERS:  # bounded: no more host copies alive than are being filled
                    pending.pop(0).result()
                pending.append(pool.submit(_run, source, job, progress))
        for future in pending:
            future.result()
    return stats


def check_file(files: DataFiles, index: int, stats: ReadStats, progress: Callable[[int], None]) -> list[str]:
    """Read every block of a data file and compare its sum: one text for each fault. Raises Damaged for its header."""
    header = files.header(index, stats)
    faults: list[str] = []

    def check(source: _Source, job: list[_Range]) -> None:
        begin, end = job[0].begin, job[-1].begin + job[-1].nbytes
        buffer = source.buffer(end - begin)
        try:
            source.read(begin, buffer.view[: end - begin], buffer.address)
        except (Damaged, OSError) as error:
            faults.append(str(error))
            return
        for r in job:
            try:
                source.check(r, buffer.view[r.begin - begin : r.begin - begin + r.nbytes])
            except Damaged as error:
                faults.append(str(error))
        progress(end - begin)

    ranges = (
        _Range(piece.begin + n * BLOCK, min(BLOCK, piece.nbytes - n * BLOCK), total, piece.key, (), None)
        for piece in header.pieces.values()
        for n, total in enumerate(header.sums.get(piece.key, ()))
    )
    with files.opened(index) as descriptors, ThreadPoolExecutor(READERS) as pool:
        source = _Source(files.path(index), *descriptors, stats)
        for future in [pool.submit(check, source, job) for job in _jobs(ranges)]:
            future.result()
    return faults


class _Share(NamedTuple):
    """What one wanted box takes from one piece."""

    file: int
    piece: Piece
    sums: Sequence[str]
    box: Box  # of the tensor, both wanted and in the piece
    cell: Box
    view: torch.Tensor
    dtype: str


def _shares(files: DataFiles, want: Wanted, stats: ReadStats) -> Iterator[_Share]:
    record, box = want.record, want.box
    base = names.in_section(want.name)
    for cell, index in record.touching(box):
        header = files.header(index, stats)
        key = datafile.key_of(base, cell, record.shape)
        piece = header.pieces.get(key)
        if piece is None or piece.dtype != record.dtype or piece.nbytes != cell.size * dtypes.itemsize(record.dtype):
            raise _damaged(files.path(index), f"does not hold {key} as the manifest says")
        if cell == box:
            yield _Share(index, piece, header.sums.get(key, ()), box, cell, want.view, record.dtype)
            continue
        share = intersect(cell, box)
        if share is None:
            continue
        view = want.view
        for dim, (start, length) in enumerate(zip(*relative(share, box), strict=True)):
            if length != view.shape[dim]:
                view = view.narrow(dim, start, length)
        yield _Share(index, piece, header.sums.get(key, ()), share, cell, view, record.dtype)


def _slabs(share: _Share) -> Iterator[_Share]:
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


def _in_place(share: _Share) -> bool:
    view = share.view
    return view.device.type == "cpu" and dtypes.name_of(view.dtype) == share.dtype and is_plain_memory(view)


def _byte_runs(share: _Share) -> tuple[int, list[int]]:
    """Length and starts, in bytes of the piece, of what the share takes from it."""
    size = dtypes.itemsize(share.dtype)
    if share.cell == share.box:
        return share.piece.nbytes, [0]
    run, starts = runs(whole(share.cell.lengths), relative(share.box, share.cell))
    return run * size, [s * size for s in starts]


def _partial_blocks(plans: dict[int, list[_Share]], verify: Verify, needed: int) -> bool:
    """Whether blocks that are wanted in part are to be read whole."""
    if verify is not True:
        return verify == "blocks"
    extra = 0
    for shares in plans.values():
        for share in shares:
            if share.cell == share.box:
                continue
            run, starts = _byte_runs(share)
            first, last = starts[0] // BLOCK, (starts[-1] + run - 1) // BLOCK
            extra += min((last + 1) * BLOCK, share.piece.nbytes) - first * BLOCK - run * len(starts)
            if extra > SLACK * needed:
                return False
    return True


def _ranges(share: _Share, verify: Verify, round_up: bool, stats: ReadStats) -> Iterator[_Range]:
    if not share.box.size:
        return
    if _in_place(share):
        yield from _ranges_to(share, share.view.data_ptr(), None, verify, round_up, stats)
        return
    for slab in _slabs(share):
        host = torch.empty(slab.box.lengths, dtype=dtypes.torch_dtype(slab.dtype))
        landing = _Landing(host, slab.view, 0)
        found = list(_ranges_to(slab, host.data_ptr(), landing, verify, round_up, stats))
        landing.left = len(found)
        yield from found


def _ranges_to(
    share: _Share, address: int, landing: _Landing | None, verify: Verify, round_up: bool, stats: ReadStats
) -> Iterator[_Range]:
    """Cut what a share takes at block borders; a block taken whole (or rounded up to whole) carries its sum."""
    piece, sums = share.piece, share.sums
    run, starts = _byte_runs(share)
    if len(starts) == 1 and run == piece.nbytes <= BLOCK:  # a small tensor, whole
        yield _Range(piece.begin, run, sums[0] if verify and sums else None, piece.key, ((0, address, run),), landing)
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
            if verify and not full:
                stats.unverified += stop - at
            parts = ((0, address, stop - at),)
            yield _Range(piece.begin + at, stop - at, sums[block] if full else None, piece.key, parts, landing)
            address += stop - at
            at = stop


def _whole_blocks(
    share: _Share, run: int, starts: list[int], address: int, landing: _Landing | None
) -> Iterator[_Range]:
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
        yield _Range(piece.begin + low, high - low, known, piece.key, tuple(found), landing)


def _jobs(ranges: Iterable[_Range]) -> Iterator[list[_Range]]:
    """Neighbouring ranges together, up to a span; a large one by itself."""
    job: list[_Range] = []
    end = 0
    for r in ranges:
        near = job and 0 <= r.begin - end <= GAP and r.begin + r.nbytes - job[0].begin <= SPAN
        if job and (not near or _straight(r) or _straight(job[-1])):
            yield job
            job = []
        job.append(r)
        end = r.begin + r.nbytes
    if job:
        yield job


def _straight(r: _Range) -> bool:
    """Whether a range is read into its destination without a buffer."""
    return len(r.parts) == 1 and r.nbytes >= DIRECT_FROM and r.parts[0][0] == 0 and r.parts[0][2] == r.nbytes


def _run(source: _Source, job: list[_Range], progress: Callable[[int], None] | None) -> None:
    first = job[0]
    if _straight(first):
        address = first.parts[0][1]
        memory = host_view(address, first.nbytes)
        source.read(first.begin, memory, address)
        source.check(first, memory)
    else:
        begin, end = first.begin, max(r.begin + r.nbytes for r in job)
        buffer = source.buffer(end - begin)
        source.read(begin, buffer.view[: end - begin], buffer.address)
        for r in job:
            at = r.begin - begin
            source.check(r, buffer.view[at : at + r.nbytes])
            for start, address, length in r.parts:
                ctypes.memmove(address, buffer.address + at + start, length)
    for r in job:
        if r.landing is not None:
            r.landing.arrived()
    if progress is not None:
        progress(sum(n for r in job for _, _, n in r.parts))


_buffers = threading.local()


def _buffer(name: str, nbytes: int) -> Buffer:
    """Memory of this thread, grown as needed and used again."""
    found: Buffer | None = getattr(_buffers, name, None)
    if found is None or len(found.view) < nbytes:
        found = buffer(-(-nbytes // (2 << 20)) * (2 << 20))
        setattr(_buffers, name, found)
    return found


@dataclass(frozen=True)
class _Source:
    """One open data file."""

    path: Path
    cached: int
    direct: int | None
    stats: ReadStats

    def buffer(self, nbytes: int) -> Buffer:
        return _buffer("gather", nbytes)

    def read(self, begin: int, memory: memoryview, address: int) -> None:
        """Fill ``memory`` (at ``address``) from the file: pages that are cached from there, cold ones directly."""
        total = len(memory)
        with naming(self.path, "read"):
            at = 0
            if self.direct is not None and is_cached(self.cached, begin, total):
                at = os.preadv(self.cached, [memory], begin)
                self.stats.add(at)
            while at < total and self.direct is not None:
                low = (begin + at) // SECTOR * SECTOR
                high = -(-min(begin + total, low + SPAN) // SECTOR) * SECTOR
                bounce = _buffer("bounce", high - low)
                got = os.preadv(self.direct, [bounce.view[: high - low]], low)
                skip = begin + at - low
                useful = min(got - skip, total - at)
                if useful <= 0:
                    break
                ctypes.memmove(address + at, bounce.address + skip, useful)
                self.stats.add(got)
                at += useful
            while at < total:
                got = os.preadv(self.cached, [memory[at:]], begin + at)
                if not got:
                    raise _damaged(self.path, f"ends at byte {begin + at}")
                self.stats.add(got)
                at += got

    def check(self, r: _Range, data: memoryview) -> None:
        if r.sum is not None and blocks.block_sum(data) != r.sum:
            raise _damaged(self.path, f"is altered: bytes {r.begin}:{r.begin + r.nbytes}, in {r.key}, have another sum")
