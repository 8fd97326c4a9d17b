"""The reader: from boxes wanted to exactly the byte ranges that hold them, summed on the way.

`load` and `Checkpoint` call `read_boxes`. Cached pages come at memory speed, cold ones directly; memory stays bounded.
Never reads a block that nobody wants, and never hands out a whole block whose sum is wrong.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from holdfast.buffers.memory import move
from holdfast.buffers.scatter import Streams, narrowed, ready_for_threads, scatter
from holdfast.buffers.stage import host_view
from holdfast.errors import Damaged, HoldfastError
from holdfast.ondisk import blocks, datafile, dtypes, manifest, names
from holdfast.ondisk.box import Box, intersect, relative
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.cited import origin_of, own_path
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import FileRecord
from holdfast.ondisk.signature import Signature, SignedFile
from holdfast.read.ranges import Range, Share, Verify, is_straight, jobs_of, ranges_of, rounds_up
from holdfast.read.source import Descriptors, Fetched, ReadStats, Source, damaged, forget, source_of
from holdfast.storage.links import LinkCheck
from holdfast.storage.place import Place
from holdfast.storage.storage import as_store
from holdfast.storage.store_place import StorePlace

STRIDE = 1 << 20
"""Bytes that are summed and then moved."""

READERS = 4
"""Threads that read a local disk: more add nothing (measured)."""

ASKERS = 16
"""Threads that ask a store: with 8 MiB a request this hides tens of milliseconds of latency."""


class Wanted(NamedTuple):
    """A box of a saved tensor and the memory that takes it; ``view`` has the box's lengths as shape.

    ``name`` is the saved name. A view of another dtype, on a device or scattered is filled a window at a time.
    ``cell``: the box counts elements of this saved cell, in the order in which they lie in the file; ``record`` has the
    cell as its one axis then, and the tensor's own record comes with the cell.
    """

    name: str
    record: TensorRecord
    box: Box
    view: torch.Tensor
    cell: tuple[Box, TensorRecord] | None = None


class Files(Protocol):
    """Where the pieces of a checkpoint lie: what the reader asks of our data files, and of foreign ones."""

    def path(self, index: int) -> Place:
        """The file of that number, for errors."""

    def plain(self, index: int) -> Place | None:
        """The local file whose bytes the pieces of that number are, if it is one and nothing is unpacked."""

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        """Read together what `piece` will need to know of these files."""

    def prove(self, indices: Iterable[int]) -> None:
        """Raise Damaged unless these files are there, each as long as it is said to be."""

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[int, Piece, Sequence[str]]:
        """The bytes of one cell of a tensor, and the sums of their blocks (none, if the format has none).

        With the number of the file that they are in: not ``index`` where they turn out to need unpacking.
        """

    def opened(self, index: int) -> AbstractContextManager[Descriptors | StorePlace]:
        """What a file is read from: its descriptors, or its place in a store."""


class DataFiles:
    """The data files of one checkpoint: headers read once and proved.

    What ``folder`` lacks, or has in another size, is taken from the folder ``beside``, if there is one: a data file is
    named with its save, so the same name is the same file.

    With a ``signature``, checked already, headers and blocks have to be what was signed: every sum is a SHA-256.
    """

    def __init__(
        self, folder: Place, records: Sequence[FileRecord], beside: Place | None = None, *,
        signature: Signature | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.records, self._beside = folder, records, beside
        self._signature = signature
        self._inside = LinkCheck(folder)
        self._headers: dict[int, Header] = {}
        self._elsewhere: dict[int, Place] = {}
        self._proved: dict[int, Place] = {}
        self._named_beside: dict[str, str] | None = None

    def path(self, index: int) -> Place:
        record = self.records[index]
        if self._beside is None:
            return self._paths(index)
        if index not in self._elsewhere:
            own = self._paths(index)
            self._elsewhere[index] = own if own.size() == record.bytes else self._in(self._beside, record)
        return self._elsewhere[index]

    def named(self, index: int) -> Place:
        """Where the file of that number is said to lie, to name it: nothing is looked at, and nothing refused."""
        return self.folder / self.records[index].path

    def _paths(self, index: int) -> Place:
        found = self._proved.get(index)
        if found is None:
            found = self._proved[index] = self._inside.path(self.records[index].path)
        return found

    def plain(self, index: int) -> Place | None:
        path = self.path(index)
        return None if path.is_remote else path

    def _in(self, beside: Place, record: FileRecord) -> Place:
        # What lies in the one folder may be cited from the other.
        if self._named_beside is None:
            try:
                target = beside / manifest.FILE_NAME
                files = manifest.decode(target.read_small(), str(target)).data_files
            except (HoldfastError, OSError):  # then names have to do
                files = []
            self._named_beside = {own_path(file.path): file.path for file in files}
        own = own_path(record.path)
        return beside / self._named_beside.get(own, own)

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        if not self.folder.is_remote and (self._beside is None or (self._beside is None or not self._beside.is_remote)):
            return
        lacking = sorted(i for i in set(indices) - set(self._headers) if self.path(i).is_remote)
        if len(lacking) > 1:
            with ThreadPoolExecutor(min(ASKERS, len(lacking)), thread_name_prefix="holdfast-read") as pool:
                for index, header in zip(lacking, pool.map(self._read_header, lacking), strict=True):
                    self._headers[index] = header
                    stats.add(self.records[index].header_bytes)

    def prove(self, indices: Iterable[int]) -> None:
        unknown = [index for index in indices if index not in self._headers]
        self.prepare(unknown, ReadStats())
        for index in unknown:
            path = self.path(index)
            if path.is_remote:
                self.header(index)
                continue
            size = path.size()
            if size != self.records[index].bytes:
                raise self._of_size(index, size)

    def _of_size(self, index: int, size: int | None) -> Damaged:
        record, path = self.records[index], self.path(index)
        borrowed = origin_of(record, self.folder.name)
        if size is None:
            return damaged(path, f"is missing{borrowed}")
        return damaged(path, f"has {size} bytes, the manifest says {record.bytes}{borrowed}")

    def header(self, index: int, stats: ReadStats | None = None) -> Header:
        """The header of a file. Raises Damaged if the file is missing, has another size or another header."""
        found = self._headers.get(index)
        if found is None:  # two threads may both read it: that costs less than to keep all others waiting
            found = self._headers[index] = self._read_header(index)
            if stats is not None:
                stats.add(self.records[index].header_bytes)
        return found

    def _read_header(self, index: int) -> Header:
        record, path = self.records[index], self.path(index)
        for last in (False, True):
            try:
                data, size = path.read_start(record.header_bytes)
            except FileNotFoundError:
                raise self._of_size(index, None) from None
            if size != record.bytes:
                raise self._of_size(index, size)
            if blocks.digest(data) == record.header_digest:
                break
            if last or not path.is_remote:  # on the way from a store a bit may flip
                raise damaged(path, f"{_whose(data, record)}{origin_of(record, self.folder.name)}")
            forget(as_store(path), 0, record.header_bytes)
        try:
            header = datafile.parse_header(data, size)
            return header if self._signature is None else _signed(header, data, self._signature.files[index])
        except ValueError as error:
            raise damaged(path, f"cannot be read: {error}") from None

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[int, Piece, Sequence[str]]:
        header = self.header(index, stats)
        key = datafile.key_of(names.in_section(name), cell, record.shape)
        piece = header.pieces.get(key)
        if piece is None or not is_cell(piece, cell, record.dtype):
            raise damaged(self.path(index), f"does not hold {key} as the manifest says")
        return index, piece, header.sums.get(key, ())

    @contextmanager
    def opened(self, index: int) -> Iterator[Descriptors | StorePlace]:
        path = self.path(index)
        if path.is_remote:
            yield as_store(path)
            return
        try:
            cached, direct = path.open_to_read()
        except FileNotFoundError:
            raise damaged(path, f"is missing{origin_of(self.records[index], self.folder.name)}") from None
        try:
            yield cached, direct
        finally:
            os.close(cached)
            if direct is not None:
                os.close(direct)


def _whose(data: bytes, record: FileRecord) -> str:
    """What is wrong with a header that is not the one in the manifest: an accident, or another save's file."""
    altered = "has an altered header: its digest is not the manifest's"
    try:
        metadata = datafile.metadata_of(data)
    except ValueError:
        return altered
    expected, save = datafile.save_of(own_path(record.path)), metadata.get("save")
    if save is not None and expected is not None and save != expected:
        return f"is a file of another save, as its header says: {save}, not {expected}"
    if not datafile.is_named(own_path(record.path), metadata):
        return (
            f"is a file of rank {metadata.get('rank')}, section {metadata.get('section')!r}, under another one's name"
        )
    return altered


def _signed(header: Header, data: bytes, signed: SignedFile) -> Header:
    """The header with the sums that a signature covers in place of its own. Raises ValueError if there are none."""
    if blocks.strong_sum(data) != signed.header:
        raise ValueError("its header is not the one that was signed")
    text = header.metadata.get("sha256") if signed.sums is None else signed.sums
    if text is None:
        raise ValueError("the signature has no sums of it")
    return replace(header, sums=datafile.strong_sums(text, header))


def is_cell(piece: Piece, cell: Box, dtype: str) -> bool:
    """Whether a piece of a file can be this cell of a tensor."""
    fits = piece.lengths == cell.lengths or piece.nbytes == cell.size * dtypes.itemsize(piece.dtype)
    return fits and piece.dtype == dtype


def read_boxes(
    files: Files, wanted: Iterable[Wanted], *, verify: Verify = True, progress: Callable[[int], None] | None = None
) -> ReadStats:
    """Fill every view. Raises Damaged, naming file and tensor, for a missing, short or altered file.

    ``verify``: True checks every block that is read whole, and reads blocks that are wanted in part whole as long
    as that adds less than 4 % in all (the rest is counted as unverified); ``"blocks"`` reads and checks whole blocks
    always; False checks none.
    """
    stats = ReadStats()
    plans, round_up = shares_of(files, wanted, verify, stats)
    pending: deque[Future[None]] = deque()
    opened: deque[tuple[int, ExitStack]] = deque()  # each with the number of jobs after which it is not needed
    finished = 0
    streams = Streams()

    def settle(left: int) -> None:
        nonlocal finished
        while len(pending) > left:
            pending.popleft().result()
            finished += 1
        while opened and opened[0][0] <= finished:
            opened.popleft()[1].close()

    threads = threads_for(files, plans)
    ready_for_threads()
    # The pool is left first: no file is closed while a job may still read it.
    with ExitStack() as stack, ThreadPoolExecutor(threads, thread_name_prefix="holdfast-read") as pool:
        for index in sorted(plans):
            one = stack.enter_context(ExitStack())
            source = source_of(files.path(index), one.enter_context(files.opened(index)), stats)
            for job in jobs_for(plans[index], verify, round_up=round_up, gap=source.gap, straight=source.straight):
                for r in job:
                    if verify and r.sum is None:
                        stats.unverified += r.wanted
                    if r.share is not None:
                        streams.note(r.share.view.device)
                    elif r.buffer is not None:
                        streams.note(r.buffer.device)
                settle(4 * threads - 1)  # bounded: no more windows alive than are being filled
                pending.append(pool.submit(_run, source, job, progress, streams))
            opened.append((finished + len(pending), one))
            settle(4 * threads - 1)  # closes a file of which nothing is read, too
        settle(0)
    return stats


def shares_of(
    files: Files, wanted: Iterable[Wanted], verify: Verify, stats: ReadStats
) -> tuple[dict[int, list[Share]], bool]:
    """What is taken from each file, and whether blocks that are wanted in part are read whole; headers are read."""
    wanted = list(wanted)
    found: dict[int, list[Share]] = {}
    files.prepare((index for want in wanted for _, index in want.record.touching(want.box)), stats)
    for want in wanted:
        stats.needed += want.view.numel() * dtypes.itemsize(want.record.dtype)
        for share in _shares(files, want, stats):
            found.setdefault(share.file, []).append(share)
    return found, rounds_up((share for shares in found.values() for share in shares), verify, stats.needed)


def jobs_for(
    shares: Iterable[Share], verify: Verify, *, round_up: bool, gap: int, straight: bool
) -> Iterator[list[Range]]:  # fmt: skip
    """The requests that bring the shares of one file, in its order."""
    ordered = sorted(shares, key=lambda share: share.piece.begin)
    ranges = (r for share in ordered for r in ranges_of(share, verify, round_up=round_up, gap=gap))
    return jobs_of(ranges, gap=gap, straight=straight)


def threads_for(files: Files, indices: Iterable[int]) -> int:
    """How many threads read these files best."""
    return ASKERS if any(files.path(index).is_remote for index in indices) else READERS


def _shares(files: Files, want: Wanted, stats: ReadStats) -> list[Share]:
    record, box = want.record, want.box
    found = []
    for cell, index in record.touching(box):
        index, piece, sums = files.piece(index, want.name, *(want.cell or (cell, record)), stats)
        if cell is box or cell == box:
            found.append(Share(index, piece, sums, box, box, want.view, record.dtype))
            continue
        share = intersect(cell, box)
        if share is None:
            continue
        view = narrowed(want.view, relative(share, box))
        found.append(Share(index, piece, sums, share, cell, view, record.dtype))
    return found


def _run(source: Source, job: list[Range], progress: Callable[[int], None] | None, streams: Streams) -> None:
    first = job[0]
    if source.straight and len(job) == 1 and is_straight(first):
        memory = host_view(first.address, first.nbytes)
        source.read(first.begin, memory, first.address)
        if not is_right(first, memory):
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
        wrong = []
        for r in job:
            at, nbytes = r.begin - begin, r.nbytes
            if r.share is None and nbytes <= STRIDE:  # the short way for many small tensors
                if r.sum is None or blocks.is_sum(view[at : at + nbytes], r.sum):
                    move(r.address, address + at + r.start, r.wanted)
                else:
                    wrong.append(r)
            elif not _moved(r, fetched, at, streams):
                wrong.append(r)
        if not wrong:
            _land(job, streams)
            return
        if not left:
            raise altered(source.path, wrong[0])
        source.forget(begin, end - begin)


def _moved(r: Range, fetched: Fetched, at: int, streams: Streams) -> bool:
    """Move what is wanted of a range that lies at ``at`` of what was fetched; False if its sum is wrong."""
    if r.sum is None or r.share is not None or r.wanted != r.nbytes:
        if not is_right(r, fetched.view[at : at + r.nbytes]):
            return False
        if r.share is None:
            move(r.address, fetched.address + at + r.start, r.wanted)
            return True
        share = r.share
        inner, first = relative(share.box, share.cell), r.begin - share.piece.begin
        with streams.current():
            scatter(fetched.address + at, first, r.nbytes, share.cell.lengths, inner, share.view, share.dtype)
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
    """The error of a block whose bytes have another sum."""
    return damaged(path, f"is altered: bytes {r.begin}:{r.begin + r.nbytes}, in {r.key}, have another sum")
