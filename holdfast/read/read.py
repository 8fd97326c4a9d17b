"""The reader: from boxes wanted to exactly the byte ranges that hold them, summed on the way.

`load` and `Checkpoint` call `read_boxes`. Cached pages come at memory speed, cold ones directly; memory stays bounded.
Never reads a block that nobody wants, and never hands out a whole block whose sum is wrong.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

from holdfast.buffers.memory import move
from holdfast.buffers.scatter import Streams, narrowed, ready_for_threads, scatter, scatter_small
from holdfast.buffers.stage import host_view
from holdfast.errors import Damaged
from holdfast.ondisk import blocks, dtypes, names
from holdfast.ondisk.box import intersect, relative
from holdfast.read.files import ASKERS, Files
from holdfast.read.ranges import Overlap, Range, Verify, is_straight, jobs_of, ranges_of, rounds_up
from holdfast.read.source import STRIDE, Fetched, ReadStats, Source, damaged, source_of
from holdfast.read.wanted import Wanted
from holdfast.storage.place import Place

READERS, AHEAD = 4, 4
"""Threads that read a local disk: more add nothing (measured); and jobs for each thread that wait for it."""


class Readers:
    """The threads that read, and the buffers that each has, for several calls of `read_boxes`."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}

    def pool(self, threads: int) -> ThreadPoolExecutor:
        """So many of them. They start when they are needed, and end when the block is left."""
        return self._pools.setdefault(threads, ThreadPoolExecutor(threads, thread_name_prefix="holdfast-read"))

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def read_boxes(
    files: Files, wanted: Iterable[Wanted], *, verify: Verify = True, progress: Callable[[int], None] | None = None,
    readers: Readers | None = None,
) -> ReadStats:  # fmt: skip
    """Fill every view. Raises Damaged, naming file and tensor, for a missing, short or altered file.

    ``verify``: True checks every block that is read whole, and reads blocks that are wanted in part whole as long
    as that adds less than 4 % in all (the rest is counted as unverified); ``"blocks"`` reads and checks whole blocks
    always; False checks none. ``readers``: threads that several calls share; by default it has its own.
    """
    stats = ReadStats()
    plans, round_up = overlaps_of(files, wanted, verify, stats)
    streams, threads = Streams(), threads_for(files, plans)
    ready_for_threads()
    # The jobs end first: no file is closed while one may still read it.
    with ExitStack() as opened, ExitStack() as ending:
        pool = (readers or ending.enter_context(Readers())).pool(threads)
        jobs = Jobs(pool, AHEAD * threads)  # bounded: no more windows alive than are being filled
        ending.callback(jobs.end)
        for index in sorted(plans):
            one = opened.enter_context(ExitStack())
            source = source_of(files.path(index), one.enter_context(files.opened(index)), stats)
            for job in jobs_for(plans[index], verify, round_up=round_up, gap=source.gap, straight=source.straight):
                for r in job:
                    if verify and r.sum is None:
                        stats.unverified += r.wanted
                    if r.overlap is not None:
                        streams.note(r.overlap.view.device)
                    elif r.buffer is not None:
                        streams.note(r.buffer.device)
                jobs.add(_run, source, job, progress, streams)
            jobs.close_after(one)
        jobs.wait()
    return stats


class Jobs:
    """What a pool has to do: at most so many jobs at once, and a file is closed once no job reads it any more."""

    def __init__(
        self, pool: ThreadPoolExecutor, most: int, take: Callable[[Any], object] = lambda result: None
    ) -> None:
        self._pool, self._most, self._take = pool, most, take
        self._pending: deque[Future[Any]] = deque()
        self._opened: deque[tuple[int, ExitStack]] = deque()  # each with the number of jobs after which it is closed
        self._finished = 0

    def add(self, work: Callable[..., object], *args: object) -> None:
        """Call ``work`` in the pool. Results are taken in the order of the calls. Raises what an earlier job raised."""
        self.wait(self._most - 1)
        self._pending.append(self._pool.submit(work, *args))

    def close_after(self, file: ExitStack) -> None:
        """Close a file once all jobs so far have ended."""
        self._opened.append((self._finished + len(self._pending), file))
        self.wait(self._most)  # a file of which nothing is read is closed at once

    def wait(self, left: int = 0) -> None:
        """Wait until no more jobs than these are left."""
        while len(self._pending) > left:
            self._take(self._pending.popleft().result())
            self._finished += 1
        while self._opened and self._opened[0][0] <= self._finished:
            self._opened.popleft()[1].close()

    def end(self) -> None:
        """Drop the jobs that have not begun, and wait for the others, whatever becomes of them."""
        for future in self._pending:
            future.cancel()
        wait(self._pending)


def overlaps_of(
    files: Files, wanted: Iterable[Wanted], verify: Verify, stats: ReadStats
) -> tuple[dict[int, list[Overlap]], bool]:
    """What is taken from each file, and whether blocks that are wanted in part are read whole; headers are read."""
    wanted = _unfilled(files.expanded(wanted))
    by_file: defaultdict[int, list[Overlap]] = defaultdict(list)
    files.prepare((index for want in wanted for _, index in want.touching()), stats)
    for want in wanted:
        box, dtype = want.box, want.record.dtype
        stats.needed += want.view.numel() * dtypes.itemsize(dtype)
        for cell, index in want.touching():
            saved_cell, record = want.cell or (cell, want.record)
            index, piece, sums = files.piece(index, want.name, saved_cell, record, stats)
            if cell is box or cell == box:
                by_file[index].append(Overlap(index, piece, sums, cell, cell, want.view, dtype))
            elif (both := intersect(cell, box)) is not None:
                view = narrowed(want.view, relative(both, box))
                by_file[index].append(Overlap(index, piece, sums, both, cell, view, dtype))
    return by_file, rounds_up((overlap for overlaps in by_file.values() for overlap in overlaps), verify, stats.needed)


def _unfilled(wanted: Iterable[Wanted]) -> list[Wanted]:
    """What is to be read; what takes one number has it."""
    everything = list(wanted)
    for want in everything:
        if want.fill is not None:
            want.view.fill_(want.fill)
    return [want for want in everything if want.fill is None]


def jobs_for(
    overlaps: Iterable[Overlap], verify: Verify, *, round_up: bool, gap: int, straight: bool
) -> Iterator[list[Range]]:  # fmt: skip
    """The requests that bring the overlaps of one file, in its order."""
    ordered = sorted(overlaps, key=attrgetter("piece.begin"))
    ranges = (r for overlap in ordered for r in ranges_of(overlap, verify, round_up=round_up, gap=gap))
    return jobs_of(ranges, gap=gap, straight=straight)


def threads_for(files: Files, indices: Iterable[int]) -> int:
    """How many threads read these files best."""
    return ASKERS if any(files.path(index).is_remote for index in indices) else READERS


def _run(source: Source, job: list[Range], progress: Callable[[int], None] | None, streams: Streams) -> None:
    first = job[0]
    if source.straight and len(job) == 1 and is_straight(first):
        memory = host_view(first.address, first.nbytes)
        total = None if first.sum is None else blocks.running_sum(first.sum)
        source.read(first.begin, memory, first.address, None if total is None else total.update)
        if total is not None and total.hexdigest() != first.sum:
            raise altered(source.path, first)
        _land(job, streams)
    else:
        _gather(source, job, streams)
    if progress is not None:
        progress(sum(r.wanted for r in job))


def _land(job: list[Range], streams: Streams) -> None:
    buffers = [r.buffer for r in job if r.buffer is not None]
    if buffers:
        with streams.current():
            for buffer in buffers:
                buffer.arrived()


def _gather(source: Source, job: list[Range], streams: Streams) -> None:
    """Fetch a stretch, check the blocks in it, and move what is wanted of it."""
    begin, end = job[0].begin, job[-1].begin + job[-1].nbytes
    for left in reversed(range(source.tries)):
        fetched = source.fetch(begin, end - begin)
        view, address = fetched.view, fetched.address
        wrong, small = [], []
        for r in job:
            at, nbytes = r.begin - begin, r.nbytes
            if r.overlap is None and nbytes <= STRIDE:  # the short way for many small tensors
                if r.sum is None or blocks.is_sum(view[at : at + nbytes], r.sum):
                    move(r.address, address + at + r.start, r.wanted)
                else:
                    wrong.append(r)
            elif r.is_small_on_device:
                small.append(r)
                if not is_right(r, view[at : at + nbytes]):
                    wrong.append(r)
            elif not _moved(r, fetched, at, streams):
                wrong.append(r)
        if not wrong:
            if small:
                parts = [(r.begin - begin, r.overlap.view) for r in small if r.overlap is not None]
                with streams.current():
                    scatter_small(address, parts)
            _land(job, streams)
            return
        if not left:
            raise altered(source.path, wrong[0])
        source.forget(begin, end - begin)


def _moved(r: Range, fetched: Fetched, at: int, streams: Streams) -> bool:
    """Move what is wanted of a range that lies at ``at`` of what was fetched; False if its sum is wrong."""
    if r.sum is None or r.overlap is not None or r.wanted != r.nbytes:
        if not is_right(r, fetched.view[at : at + r.nbytes]):
            return False
        if r.overlap is None:
            move(r.address, fetched.address + at + r.start, r.wanted)
            return True
        overlap = r.overlap
        inner, first = relative(overlap.box, overlap.cell), r.begin - overlap.piece.begin
        with streams.current():
            scatter(fetched.address + at, first, r.nbytes, overlap.cell.lengths, inner, overlap.view, overlap.dtype)
        return True
    # All of a block goes to one place: summed and moved a stride at a time, while that is in the processor's cache.
    total = blocks.running_sum(r.sum)
    for done in range(0, r.nbytes, STRIDE):
        n = min(STRIDE, r.nbytes - done)
        total.update(fetched.view[at + done : at + done + n])
        move(r.address + done, fetched.address + at + done, n)
    return bool(total.hexdigest() == r.sum)


def is_right(r: Range, data: memoryview) -> bool:
    """Whether these are the bytes of a range, as far as it has a sum."""
    return r.sum is None or blocks.is_sum(data, r.sum)


def altered(path: Place, r: Range) -> Damaged:
    """The error of a block whose bytes have another sum, in a file of a section, its folder: only ours have sums."""
    name = names.from_section(path.parent.name, r.key)
    what = f"is altered: bytes {r.begin}:{r.begin + r.nbytes}, in {name}, have another checksum"
    return damaged(path, what, path.parent.parent)
