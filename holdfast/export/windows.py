"""One thread's memory for copying: an image of a stretch of a file, filled as it is, cast, or summed.

`copying` has one for each of its threads. Never writes a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from holdfast.buffers.memory import Buffer, buffer
from holdfast.buffers.stage import host_tensor
from holdfast.checkpoint import Checkpoint
from holdfast.export.draft import WINDOW, Stretch, Unit
from holdfast.export.summing import Fetch, fill, products, room_for
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes
from holdfast.ondisk.cells import TensorRecord
from holdfast.read.ranges import Verify
from holdfast.read.read import Readers, read_boxes
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted
from holdfast.storage.local.disk import SECTOR

_SECTION = "state"  # any section: a piece's key is its name without one


class Windows:
    """The memory of one thread: the image, and rooms for what does not go there at once."""

    def __init__(self, readers: Readers) -> None:
        self.image = buffer(WINDOW + SECTOR)
        self._readers = readers
        self._rooms: dict[str, Buffer] = {}

    def _room(self, name: str, nbytes: int) -> int:
        """The address of at least so many bytes; what was there before under this name is lost."""
        memory = self._rooms.get(name)
        if memory is None or len(memory.view) < nbytes:
            memory = self._rooms[name] = buffer(-(-max(nbytes, 1) // WINDOW) * WINDOW)
        return memory.address

    def read(self, checkpoint: Checkpoint, stretches: Sequence[Stretch], verify: Verify) -> ReadStats:
        """Read stretches into memory: as they are, cast by way of another room, or summed from several sources."""
        stats = ReadStats()
        of_one = [stretch for stretch in stretches if not stretch.leaf.terms]
        summed = [stretch for stretch in stretches if stretch.leaf.terms]
        if of_one:
            self._read_of_one(checkpoint, of_one, verify, stats)
        if summed:
            fill(summed, self._room, self._once(verify, stats))
        return stats

    def products(
        self, stretches: Sequence[Stretch], verify: Verify, stats: ReadStats
    ) -> Iterator[tuple[str, list[float]]]:
        """For each stretch of two sources a and b: its name, and its parts of a·a, b·b and a·b."""
        for leaf, parts in products(stretches, self._room, self._once(verify, stats)):
            yield leaf.name, parts

    def _read_of_one(
        self, checkpoint: Checkpoint, stretches: Sequence[Stretch], verify: Verify, stats: ReadStats
    ) -> None:
        sizes = [room_for(s.leaf.record.dtype, s.size) if s.leaf.dtype != s.leaf.record.dtype else 0 for s in stretches]
        raw = self._room("raw", sum(sizes)) if any(sizes) else 0
        parts, casts = [], []
        for stretch, nbytes in zip(stretches, sizes, strict=True):
            if nbytes:
                casts.append((stretch, raw))
            parts.append(stretch._replace(address=raw) if nbytes else stretch)
            raw += nbytes
        # Of runs each block is read whole and proved; of boxes in many pieces that might be many times their bytes.
        self._fetch(checkpoint, parts, "blocks" if verify is True else verify, verify, stats)
        for stretch, address in casts:
            leaf = stretch.leaf
            saved = host_tensor(address, stretch.size * dtypes.itemsize(leaf.record.dtype))
            target = host_tensor(stretch.address, stretch.size * leaf.itemsize)
            target.view(dtypes.torch_dtype(leaf.dtype)).copy_(saved.view(dtypes.torch_dtype(leaf.record.dtype)))

    def _once(self, verify: Verify, stats: ReadStats) -> Fetch:
        """Reads each byte once: a block of which windows have parts is proved with verify="blocks" alone."""
        return lambda checkpoint, stretches: self._fetch(checkpoint, stretches, verify, verify, stats)

    def _fetch(
        self, checkpoint: Checkpoint, stretches: Sequence[Stretch], of_runs: Verify, of_boxes: Verify, stats: ReadStats
    ) -> None:
        """Read stretches as they were saved; those that are runs are checked in another way than others."""
        runs: list[Wanted] = []
        boxes: list[Wanted] = []
        for stretch in stretches:
            (boxes if stretch.leaf.runs is None else runs).extend(_wanted(stretch, stretch.address))
        sealed = stretches[0].leaf.sealed
        for wanted, how in ((runs, of_runs), (boxes, of_boxes if sealed else False)):
            if wanted:
                counts = read_boxes(checkpoint.files, wanted, verify=how, readers=self._readers)
                stats.read += counts.read
                stats.unverified += counts.unverified if sealed or not of_boxes else counts.needed


@contextmanager
def windows_of_threads() -> Iterator[Callable[[], Windows]]:
    """Gives each thread that asks windows of its own. They share the threads that read."""
    local = threading.local()
    with Readers() as readers:

        def windows() -> Windows:
            if not hasattr(local, "windows"):
                local.windows = Windows(readers)
            own: Windows = local.windows
            return own

        yield windows


def stretches_of(unit: Unit, origin: int) -> list[Stretch]:
    """The atoms of a unit joined by spans. ``origin``: the address for the first byte of the file."""
    spans = (list(atoms) for _, atoms in groupby(unit.atoms, key=lambda atom: atom.span))
    return [Stretch(a[0].leaf, a[0].start, a[-1].stop, origin + a[0].offset) for a in spans]


def _wanted(stretch: Stretch, at: int) -> Iterator[Wanted]:
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
