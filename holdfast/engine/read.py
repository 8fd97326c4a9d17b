"""The reader: from boxes wanted to exactly the byte ranges that hold them, summed on the way.

`load` and `Checkpoint` call `read_boxes`. Cached pages come at memory speed, cold ones directly; memory stays bounded.
Never reads a block that nobody wants, and never hands out a whole block whose sum is wrong.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from holdfast.engine.courier import SECTOR
from holdfast.engine.memory import Buffer, buffer, move
from holdfast.engine.ranges import SPAN, Range, Share, Verify, is_straight, jobs_of, ranges_of, rounds_up
from holdfast.engine.stage import host_view
from holdfast.engine.storage import is_cached, naming, naming_unless_missing, open_to_read
from holdfast.errors import Damaged
from holdfast.ondisk import blocks, datafile, dtypes, names
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box, intersect, relative
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import FileRecord, TensorRecord

READERS = 4


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
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, read: int) -> None:
        with self._lock:
            self.read += read


class Files(Protocol):
    """Where the pieces of a checkpoint lie: what the reader asks of our data files, and of foreign ones."""

    def path(self, index: int) -> Path:
        """The file of that number, for errors."""

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[Piece, Sequence[str]]:
        """The bytes of one cell of a tensor, and the sums of their blocks (none, if the format has none)."""

    def opened(self, index: int) -> AbstractContextManager[tuple[int, int | None]]:
        """Descriptors of a file: cached, and direct if that can be had."""


class DataFiles:
    """The data files of one checkpoint: headers read once and proved."""

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

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[Piece, Sequence[str]]:
        header = self.header(index, stats)
        key = datafile.key_of(names.in_section(name), cell, record.shape)
        piece = header.pieces.get(key)
        if piece is None or piece.dtype != record.dtype or piece.nbytes != cell.size * dtypes.itemsize(record.dtype):
            raise _damaged(self.path(index), f"does not hold {key} as the manifest says")
        return piece, header.sums.get(key, ())

    @contextmanager
    def opened(self, index: int) -> Iterator[tuple[int, int | None]]:
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
    files: Files, wanted: Iterable[Wanted], *, verify: Verify = True, progress: Callable[[int], None] | None = None
) -> ReadStats:
    """Fill every view. Raises Damaged, naming file and tensor, for a missing, short or altered file.

    ``verify``: True checks every block that is read whole, and reads blocks that are wanted in part whole as long
    as that adds less than 4 % in all (the rest is counted as unverified); ``"blocks"`` reads and checks whole blocks
    always; False checks none.
    """
    stats = ReadStats()
    plans: dict[int, list[Share]] = {}
    for want in wanted:
        stats.needed += want.view.numel() * dtypes.itemsize(want.record.dtype)
        for share in _shares(files, want, stats):
            plans.setdefault(share.file, []).append(share)
    round_up = rounds_up((share for shares in plans.values() for share in shares), verify, stats.needed)
    pending: deque[Future[None]] = deque()
    opened: deque[tuple[int, ExitStack]] = deque()  # each with the number of jobs after which it is not needed
    finished = 0

    def settle(left: int) -> None:
        nonlocal finished
        while len(pending) > left:
            pending.popleft().result()
            finished += 1
        while opened and opened[0][0] <= finished:
            opened.popleft()[1].close()

    # The pool is left first: no file is closed while a job may still read it.
    with ExitStack() as stack, ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-read") as pool:
        for index in sorted(plans):
            one = stack.enter_context(ExitStack())
            descriptors = one.enter_context(files.opened(index))
            source = _Source(files.path(index), *descriptors, stats)
            shares = sorted(plans[index], key=lambda share: share.piece.begin)
            ranges = (r for share in shares for r in ranges_of(share, verify, round_up=round_up))
            for job in jobs_of(ranges):
                if verify:
                    stats.unverified += sum(r.wanted for r in job if r.sum is None)
                settle(4 * READERS - 1)  # bounded: no more host copies alive than are being filled
                pending.append(pool.submit(_run, source, job, progress))
            opened.append((finished + len(pending), one))
        settle(0)
    return stats


def check_file(files: DataFiles, index: int, stats: ReadStats, progress: Callable[[int], None]) -> list[str]:
    """Read every block of a data file and compare its sum: one text for each fault. Raises Damaged for its header."""
    header = files.header(index, stats)
    faults: list[str] = []

    def check(source: _Source, job: list[Range]) -> None:
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
        Range(piece.begin + n * BLOCK, min(BLOCK, piece.nbytes - n * BLOCK), total, piece.key, (), None)
        for piece in header.pieces.values()
        for n, total in enumerate(header.sums.get(piece.key, ()))
    )
    with files.opened(index) as descriptors, ThreadPoolExecutor(READERS) as pool:
        source = _Source(files.path(index), *descriptors, stats)
        for future in [pool.submit(check, source, job) for job in jobs_of(ranges)]:
            future.result()
    return faults


def _shares(files: Files, want: Wanted, stats: ReadStats) -> Iterator[Share]:
    record, box = want.record, want.box
    for cell, index in record.touching(box):
        piece, sums = files.piece(index, want.name, cell, record, stats)
        if cell == box:
            yield Share(index, piece, sums, box, box, want.view, record.dtype)
            continue
        share = intersect(cell, box)
        if share is None:
            continue
        view = want.view
        for dim, (start, length) in enumerate(zip(*relative(share, box), strict=True)):
            if length != view.shape[dim]:
                view = view.narrow(dim, start, length)
        yield Share(index, piece, sums, share, cell, view, record.dtype)


def _run(source: _Source, job: list[Range], progress: Callable[[int], None] | None) -> None:
    first = job[0]
    if is_straight(first):
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
                move(address, buffer.address + at + start, length)
    for r in job:
        if r.landing is not None:
            r.landing.arrived()
    if progress is not None:
        progress(sum(r.wanted for r in job))


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
                move(address + at, bounce.address + skip, useful)
                self.stats.add(got)
                at += useful
            while at < total:
                got = os.preadv(self.cached, [memory[at:]], begin + at)
                if not got:
                    raise _damaged(self.path, f"ends at byte {begin + at}")
                self.stats.add(got)
                at += got

    def check(self, r: Range, data: memoryview) -> None:
        if r.sum is not None and blocks.block_sum(data) != r.sum:
            raise _damaged(self.path, f"is altered: bytes {r.begin}:{r.begin + r.nbytes}, in {r.key}, have another sum")
