"""Every byte of a checkpoint of ours read and compared with its sums, by many threads over all files at once.

`Checkpoint.verify`, `verify`, `repair` and scrubbing call it. Never stops at the first fault, and never takes a store
that does not answer for damage.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate

from holdfast.errors import Damaged, StorageError
from holdfast.ondisk import blocks
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.read.damage import Fault, contents
from holdfast.read.files import DataFiles, Files, is_cell
from holdfast.read.ranges import Range, jobs_of
from holdfast.read.read import AHEAD, READERS, Jobs, altered, is_right, threads_for
from holdfast.read.source import PART, ReadStats, Source, source_of


def _nothing(nbytes: int) -> None:
    pass


def examine(
    files: DataFiles, record: Manifest, stats: ReadStats, *, deep: bool = True, share: tuple[int, int] = (0, 1),
    only: Container[int] | None = None, progress: Callable[[int], None] = _nothing,
    pace: Callable[[int], None] = _nothing, threads: int | None = None, begin: Callable[[], None] = lambda: None,
) -> list[Fault]:  # fmt: skip
    """Check the data files: that they are there, their sizes and headers, what the headers name, and every block.

    ``deep=False`` leaves the blocks out. ``share`` (r, n): the r-th of n parts, even in bytes: all files laid end to
    end are cut into n stretches, and a block is of the stretch in which it begins. ``only``: numbers of the files to be
    looked at, by default all. ``progress`` is called with bytes that are done, ``pace`` with those to be read next, in
    the thread that reads, and may wait or raise; ``begin`` is called once in each such thread.

    Raises StorageError if a store, or a disk but for a failed device, does not let us read.
    """
    r, n = share
    starts = [0, *accumulate(file.bytes for file in record.data_files)]
    low, high = starts[-1] * r // n, starts[-1] * (r + 1) // n
    numbers = [i for i in range(len(starts) - 1) if only is None or i in only]
    own = [i for i in numbers if low <= starts[i] < high]
    mine = [i for i in numbers if starts[i] < high and low < starts[i + 1]] if deep else own
    inside = contents(record, set(own))
    faults: list[Fault] = []
    many = threads or _threads_for(files, mine)
    # The pool is left first: no file is closed while a job may still read it.
    with ExitStack() as stack, ThreadPoolExecutor(many, "holdfast-verify", begin) as pool:
        jobs = Jobs(pool, AHEAD * many, faults.extend)
        for index, header in _headers(files, mine, stats, pool, many):
            if isinstance(header, Damaged):
                faults.append(Fault(index, what=str(header)))
                continue
            for key, (name, box) in inside.get(index, {}).items():
                if not _holds(header.pieces.get(key), record.tensors.get(name), box):
                    what = f"{files.path(index)} does not hold {key} as the manifest says"
                    faults.append(Fault(index, key=key, what=what))
            progress(header.nbytes if index in own else 0)
            if not deep:
                continue
            one = stack.enter_context(ExitStack())
            try:
                opened = one.enter_context(files.opened(index))
            except Damaged as error:  # deleted since its header was read
                faults.append(Fault(index, what=str(error)))
                continue
            source = source_of(files.path(index), opened, stats)
            ranges = _ranges(header, low - starts[index], high - starts[index])
            for job in jobs_of(ranges, gap=source.gap, straight=source.straight):
                jobs.add(_check, source, index, header, job, progress, pace)
            jobs.close_after(one)
        jobs.wait()
    return faults


def _holds(piece: Piece | None, tensor: TensorRecord | None, box: Box | None) -> bool:
    """Whether a piece is there and, if it is of a tensor, is what the manifest says: what loading it asks."""
    return piece is not None and (tensor is None or box is None or is_cell(piece, box, tensor.dtype))


def _headers(
    files: DataFiles, mine: Sequence[int], stats: ReadStats, pool: ThreadPoolExecutor, many: int
) -> Iterator[tuple[int, Header | Damaged]]:
    """The headers in order, read ahead: of a store each is a request."""

    def read(index: int) -> Header | Damaged:
        try:
            return files.header(index, stats)
        except Damaged as error:
            return error
        except StorageError as error:
            if not _is_bad_device(files, index, error):
                raise
            return Damaged(str(error))

    most = 2 * many if files.folder.is_remote else AHEAD
    waiting: deque[tuple[int, Future[Header | Damaged]]] = deque()
    for index in mine:
        waiting.append((index, pool.submit(read, index)))
        if len(waiting) > most:
            first, header = waiting.popleft()
            yield first, header.result()
    for index, header in waiting:
        yield index, header.result()


def _threads_for(files: DataFiles, mine: Sequence[int]) -> int:
    try:
        return threads_for(files, mine)
    except Damaged:  # a link that leads out: reported with its file
        return READERS


def _is_bad_device(files: DataFiles, index: int, error: OSError) -> bool:
    return error.errno == errno.EIO and not files.path(index).is_remote


def _ranges(header: Header, low: int, high: int) -> Iterator[Range]:
    """The blocks that begin in bytes ``low:high`` of the file."""
    for piece in header.pieces.values():
        if piece.begin >= high:
            break
        for number, total in enumerate(header.sums.get(piece.key, ())):
            begin = piece.begin + number * BLOCK
            if low <= begin < high:
                yield Range(begin, min(BLOCK, piece.nbytes - number * BLOCK), total, piece.key)


def _check(
    source: Source, index: int, header: Header, job: list[Range], progress: Callable[[int], None],
    pace: Callable[[int], None],
) -> list[Fault]:  # fmt: skip
    begin, end = job[0].begin, job[-1].begin + job[-1].nbytes
    pace(end - begin)
    wrong = wrong_in(source, job)
    progress(end - begin)
    return [Fault(index, r.begin, r.nbytes, r.key, r.begin - header.pieces[r.key].begin, what) for r, what in wrong]


def wrong_in(source: Source, job: list[Range]) -> list[tuple[Range, str]]:
    """Of neighbouring ranges of a file those whose bytes are not those of their sums, each with what is said of it."""
    begin, end = job[0].begin, job[-1].begin + job[-1].nbytes
    wrong: list[tuple[Range, str]] = []
    for left in reversed(range(source.tries)):
        try:
            wrong = _compared(source, job)
        except Damaged as error:
            wrong = [(r, str(error)) for r in job]
        except StorageError as error:
            if error.errno != errno.EIO or source.path.is_remote:
                raise
            if len(job) > 1:  # which of them it is
                return [one for r in job for one in wrong_in(source, [r])]
            wrong = [(job[0], str(error))]
        if not wrong:
            break
        if left:  # on the way from a store a bit may flip
            source.forget(begin, end - begin)
    return wrong


def _compared(source: Source, job: list[Range]) -> list[tuple[Range, str]]:
    wrong: list[Range] = []
    cached = source.is_cached(job[0].begin, _nbytes(job))
    # What memory has anyway is summed while it is in a core's cache; a disk and a store like long reads.
    for some in jobs_of(job, gap=source.gap, straight=False, span=PART) if cached else [job]:
        begin, nbytes = some[0].begin, _nbytes(some)
        if cached and nbytes > PART:
            total = blocks.running_sum(some[0].sum or "")
            for part in source.parts(begin, nbytes):
                total.update(part)
            wrong += [] if total.hexdigest() == some[0].sum else some
        else:
            view = source.fetch(begin, nbytes, cached=cached).view
            wrong += [r for r in some if not is_right(r, view[r.begin - begin : r.begin - begin + r.nbytes])]
    return [(r, str(altered(source.path, r))) for r in wrong]


def _nbytes(job: list[Range]) -> int:
    return job[-1].begin + job[-1].nbytes - job[0].begin


def check_pieces(
    files: Files, index: int, pieces: Iterable[tuple[Piece, Sequence[str]]], stats: ReadStats
) -> list[str]:
    """Read every block of pieces of one file that has a sum, and compare it: one text for each fault."""
    ranges = (
        Range(piece.begin + n * BLOCK, min(BLOCK, piece.nbytes - n * BLOCK), total, piece.key)
        for piece, sums in pieces
        for n, total in enumerate(sums)
    )
    threads = threads_for(files, [index])
    wrong: list[tuple[Range, str]] = []
    with files.opened(index) as opened, ThreadPoolExecutor(threads) as pool:
        source, queue = source_of(files.path(index), opened, stats), Jobs(pool, AHEAD * threads, wrong.extend)
        for job in jobs_of(ranges, gap=source.gap, straight=source.straight):
            queue.add(wrong_in, source, job)
        queue.wait()
    return [what for _, what in wrong]
