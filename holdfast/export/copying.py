"""Copies the units of a draft from the source to the files of the target, through windows, in a few threads.

Memory stays bounded. A unit is noted as done only once its bytes are durable.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from holdfast.buffers.memory import Buffer, buffer
from holdfast.buffers.stage import host_tensor
from holdfast.checkpoint import Checkpoint
from holdfast.export.draft import WINDOW, Atom, Draft, Fixed, Sums, Unit
from holdfast.export.partial import Journal, Row
from holdfast.export.selection import Leaf
from holdfast.ondisk import blocks, dtypes
from holdfast.ondisk.box import Box, flat_boxes
from holdfast.ondisk.cells import TensorRecord
from holdfast.read.ranges import Verify
from holdfast.read.read import Wanted, read_boxes
from holdfast.read.source import ReadStats
from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.naming import naming

WORKERS = 3
"""Threads that each copy a unit at a time: while one reads, one sums, and one writes."""

SYNC = 256 << 20
"""After so many bytes files are synced and units noted: about what a killed process has to do again."""

ALIGN = 64
"""Tensors that are to be cast begin at multiples of this."""

DIRECT_FROM = 512 << 10
"""Stretches with fewer bytes of whole sectors are written through the page cache."""


class _Done(NamedTuple):
    unit: Unit
    row: Row
    stats: ReadStats


@dataclass
class Copied:
    """What one rank has copied, and the bytes read for it."""

    rows: list[Row] = field(default_factory=list)
    read: int = 0
    unverified: int = 0


def copy_units(
    checkpoint: Checkpoint, draft: Draft, units: Sequence[Unit], content: Path, journal: Journal, *, verify: Verify,
    progress: Callable[[int], None],
) -> Copied:  # fmt: skip
    """Copy these units into the files below ``content``, which have their room already; all is durable at the end."""
    copied = Copied()
    ours = {unit.number for unit in units}
    local = threading.local()
    fresh: list[_Done] = []

    def work(unit: Unit) -> _Done:
        if not hasattr(local, "windows"):
            local.windows = _Windows()
        alone = unit.number - 1 not in ours
        done = _copy(checkpoint, unit, local.windows, content / unit.path, draft.sums, verify, alone=alone)
        progress(unit.nbytes)
        return done

    def note() -> None:
        for path in {done.unit.path for done in fresh}:
            sync(content / path)
        rows = [done.row for done in fresh]
        journal.add(rows)
        copied.rows += rows
        copied.read += sum(done.stats.read for done in fresh)
        copied.unverified += sum(done.stats.unverified for done in fresh)
        fresh.clear()

    unsynced = 0
    for done in _in_order(work, units):
        fresh.append(done)
        unsynced += done.unit.nbytes
        if unsynced >= SYNC:
            note()
            unsynced = 0
    note()
    return copied


def _in_order(work: Callable[[Unit], _Done], units: Iterable[Unit]) -> Iterator[_Done]:
    """The results of a few threads, in the order of the units; no more are begun than will be waited for soon."""
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="holdfast-convert") as pool:
        pending: deque[Future[_Done]] = deque()
        try:
            for unit in units:
                pending.append(pool.submit(work, unit))
                if len(pending) > 2 * WORKERS:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


class _Windows:
    """The memory of one thread: an image of a stretch of a file, and room for what is to be cast."""

    def __init__(self) -> None:
        self.image = buffer(WINDOW + SECTOR)
        self._raw: Buffer | None = None

    def raw(self, nbytes: int) -> Buffer:
        """At least so many bytes; what was there before is lost."""
        if self._raw is None or len(self._raw.view) < nbytes:
            self._raw = buffer(-(-nbytes // WINDOW) * WINDOW)
        return self._raw


def _copy(
    checkpoint: Checkpoint, unit: Unit, windows: _Windows, path: Path, sums: Sums, verify: Verify, *, alone: bool
) -> _Done:
    # The image is one of a stretch of the file: what is a whole sector there is one here, as direct writes ask.
    first = unit.atoms[0].offset
    base, image = first // SECTOR * SECTOR, windows.image
    stats = _read(checkpoint, _stretches(unit, image.address - base), windows, verify)
    atom_sums = [sum_of(image.view[atom.offset - base : atom.end - base], sums) for atom in unit.atoms]
    # A sector may be shared with a unit of another rank, and if two machines change a page of a file, one change may be
    # lost. The other rank writes that sector now; the first rank writes our bytes of it at the end.
    whole = -(-first // SECTOR) * SECTOR if alone else first
    heads = []
    for begin, end in _without_gaps(unit.atoms):
        if begin < whole:
            heads.append((begin, bytes(image.view[begin - base : min(end, whole) - base])))
        if end > whole:
            begin = max(begin, whole)
            write(path, image.view[begin - base : end - base], begin)
    return _Done(unit, Row(unit.number, atom_sums, heads), stats)


class _Stretch(NamedTuple):
    """Elements ``start:stop`` of a tensor, and the memory that takes them as the target wants them."""

    leaf: Leaf
    start: int
    stop: int
    address: int


def _stretches(unit: Unit, origin: int) -> list[_Stretch]:
    """The atoms of a unit joined by spans. ``origin``: the address for the first byte of the file."""
    spans = (list(atoms) for _, atoms in groupby(unit.atoms, key=lambda atom: atom.span))
    return [_Stretch(a[0].leaf, a[0].start, a[-1].stop, origin + a[0].offset) for a in spans]


def _read(checkpoint: Checkpoint, stretches: Sequence[_Stretch], windows: _Windows, verify: Verify) -> ReadStats:
    """Read all stretches into memory, through the other window if they are to be cast."""
    sizes = [_room(s) if s.leaf.dtype != s.leaf.record.dtype else 0 for s in stretches]
    raw = windows.raw(sum(sizes)).address if any(sizes) else 0
    runs: list[Wanted] = []
    boxes: list[Wanted] = []
    casts = []
    for stretch, size in zip(stretches, sizes, strict=True):
        if size:
            casts.append((stretch, raw))
        address, raw = (raw, raw + size) if size else (stretch.address, raw)
        (boxes if stretch.leaf.runs is None else runs).extend(_wanted(stretch, address))
    stats = ReadStats()
    sealed = stretches[0].leaf.sealed
    # Of runs each block is read whole and proved; of boxes in many pieces that might be many times their bytes.
    for wanted, how in ((runs, "blocks" if verify is True else verify), (boxes, verify if sealed else False)):
        if wanted:
            counts = read_boxes(checkpoint.files, wanted, verify=how)
            stats.read += counts.read
            stats.unverified += counts.unverified if sealed or not verify else counts.needed
    for stretch, address in casts:
        leaf, count = stretch.leaf, stretch.stop - stretch.start
        saved = host_tensor(address, count * dtypes.itemsize(leaf.record.dtype))
        target = host_tensor(stretch.address, count * leaf.itemsize)
        target.view(dtypes.torch_dtype(leaf.dtype)).copy_(saved.view(dtypes.torch_dtype(leaf.record.dtype)))
    return stats


def _room(stretch: _Stretch) -> int:
    nbytes = (stretch.stop - stretch.start) * dtypes.itemsize(stretch.leaf.record.dtype)
    return -(-nbytes // ALIGN) * ALIGN


def _wanted(stretch: _Stretch, at: int) -> Iterator[Wanted]:
    """What to read for a stretch, as it was saved: parts of whole pieces if they are runs, else boxes."""
    leaf, record = stretch.leaf, stretch.leaf.record
    dtype, size = dtypes.torch_dtype(record.dtype), dtypes.itemsize(record.dtype)
    if leaf.runs is None:
        for box in flat_boxes(leaf.shape, stretch.start, stretch.stop):
            view = host_tensor(at, box.size * size).view(dtype).view(box.lengths)
            yield Wanted(leaf.saved, record, box, view)
            at += view.nbytes
        return
    for run in leaf.runs:
        start, stop = max(run.start, stretch.start), min(run.stop, stretch.stop)
        if start < stop:
            # A piece by itself, as a tensor with one axis: then a block of it is one range, wherever rows end.
            piece = TensorRecord(record.dtype, (run.stop - run.start,), None, str(run.file))
            view = host_tensor(at, (stop - start) * size).view(dtype)
            yield Wanted(f"{_SECTION}/{run.key}", piece, Box((start - run.start,), (stop - start,)), view)
            at += view.nbytes


_SECTION = "state"  # any section: a piece's key is its name without one


def sum_of(data: memoryview | bytes, sums: Sums) -> str:
    """The sum of bytes in the way that a format wants it."""
    if sums == "crc32":
        return str(crc32(data))
    if sums == "none":
        return ""
    return "".join(blocks.block_sum(data[at : at + blocks.BLOCK]) for at in range(0, len(data), blocks.BLOCK))


def _without_gaps(atoms: Sequence[Atom]) -> Iterator[tuple[int, int]]:
    """Atoms that follow each other without a gap, as one. What lies in a gap is not ours to write."""
    begin, end = atoms[0].offset, atoms[0].end
    for atom in atoms[1:]:
        if atom.offset != end:
            yield begin, end
            begin = atom.offset
        end = atom.end
    yield begin, end


def write(path: Path, data: memoryview, offset: int) -> None:
    """Write to a place of a file that exists. Whole sectors of large stretches go directly, their ends do not.

    ``data`` lies in memory at the same distance from a whole sector as ``offset`` does.
    """
    low, high = -(-offset // SECTOR) * SECTOR, (offset + len(data)) // SECTOR * SECTOR
    with naming(path, "write"):
        written = _write_directly(path, data[low - offset : high - offset], low) if high - low >= DIRECT_FROM else 0
        at = low + written
        rest = [(offset, data[: low - offset]), (at, data[at - offset :])] if written else [(offset, data)]
        if any(part for _, part in rest):
            with opened(path, os.O_RDWR) as fd:
                for place, part in rest:
                    disk.write_all(fd, part, place, path)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """The descriptor of a file, closed at the end."""
    fd = disk.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _write_directly(path: Path, data: memoryview, offset: int) -> int:
    """How many bytes were written so, all of whole sectors; the rest goes through the page cache."""
    try:
        fd = disk.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:  # a file system without direct I/O; any other error comes up again in the ordinary write
        return 0
    try:
        at = 0
        while at < len(data):
            count = disk.write(fd, data[at:], offset + at, path) // SECTOR * SECTOR
            if not count:
                break
            at += count
        return at
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return at
    finally:
        os.close(fd)


def sync(path: Path) -> None:
    """Make a file's bytes durable."""
    with naming(path, "sync"), opened(path, os.O_RDONLY) as fd:
        disk.sync(fd, path)


def finish(content: Path, fixed: Iterable[Fixed]) -> list[str]:
    """Write what is no tensor's, one after the other, and make it durable; the files that were touched."""
    touched: dict[str, None] = {}
    for name, pieces in groupby(fixed, key=lambda piece: piece.path):
        path = content / name
        touched[name] = None
        with naming(path, "write"):
            disk.make_folders(path.parent)
            with opened(path, os.O_RDWR | os.O_CREAT) as fd:
                for piece in pieces:
                    disk.write_all(fd, piece.data, piece.offset, path)
    for name in touched:
        sync(content / name)
    return list(touched)
