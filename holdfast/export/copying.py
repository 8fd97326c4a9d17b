"""Copies the units of a draft from the source to the files of the target, through windows, in a few threads.

Memory stays bounded. A unit is noted as done only once its bytes are durable.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar
from zlib import crc32

from holdfast.checkpoint import Checkpoint
from holdfast.export.draft import Atom, Draft, Fixed, Sums, Unit
from holdfast.export.partial import Journal, Row
from holdfast.export.summing import workers_for
from holdfast.export.windows import Windows, stretches_of, windows_of_threads
from holdfast.ondisk import blocks
from holdfast.read.ranges import Verify
from holdfast.read.source import ReadStats
from holdfast.storage.local import disk
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.naming import naming

WORKERS = 3
"""Threads that each copy a unit at a time: while one reads, one sums, and one writes."""

CASTING = 2
"""Threads if tensors are cast: each has a second window then. A third was 5 % faster and took 24 MiB (measured)."""

SYNC = 256 << 20
"""After so many bytes files are synced and units noted: about what a killed process has to do again."""

DIRECT_FROM = 512 << 10
"""Stretches with fewer bytes of whole sectors are written through the page cache."""


Task = TypeVar("Task")
Done = TypeVar("Done")


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
    fresh: list[_Done] = []

    def work(unit: Unit) -> _Done:
        alone = unit.number - 1 not in ours
        done = _copy(checkpoint, unit, windows(), content / unit.path, draft.sums, verify, alone=alone)
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
    with windows_of_threads() as windows:
        for done in in_order(work, units, _workers_for(units)):
            fresh.append(done)
            unsynced += done.unit.nbytes
            if unsynced >= SYNC:
                note()
                unsynced = 0
    note()
    return copied


def products_of(units: Sequence[Unit], *, verify: Verify, stats: ReadStats) -> Iterator[tuple[str, list[float]]]:
    """For each stretch of two sources a and b that units hold: its name, and its parts of a·a, b·b and a·b."""

    def work(unit: Unit) -> tuple[list[tuple[str, list[float]]], ReadStats]:
        counts = ReadStats()
        return list(windows().products(stretches_of(unit, 0), verify, counts)), counts

    with windows_of_threads() as windows:
        for found, counts in in_order(work, units, _workers_for(units)):
            stats.read += counts.read
            yield from found


def _workers_for(units: Sequence[Unit]) -> int:
    leaves = (atom.leaf for unit in units for atom in unit.atoms)
    casts = any(leaf.dtype != leaf.record.dtype for leaf in leaves if not leaf.terms)
    return min(CASTING if casts else WORKERS, workers_for(units))


def in_order(work: Callable[[Task], Done], units: Iterable[Task], workers: int = 0) -> Iterator[Done]:
    """The results of a few threads, in the order of the units; no more are begun than will be waited for soon."""
    workers = workers or WORKERS
    with ThreadPoolExecutor(workers, thread_name_prefix="holdfast-convert") as pool:
        pending: deque[Future[Done]] = deque()
        try:
            for unit in units:
                pending.append(pool.submit(work, unit))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _copy(
    checkpoint: Checkpoint, unit: Unit, windows: Windows, path: Path, sums: Sums, verify: Verify, *, alone: bool
) -> _Done:
    # The image is one of a stretch of the file: what is a whole sector there is one here, as direct writes ask.
    first = unit.atoms[0].offset
    base, image = first // SECTOR * SECTOR, windows.image
    stats = windows.read(checkpoint, stretches_of(unit, image.address - base), verify)
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
