"""Mends one damaged data file: writes bad blocks in place, or the whole file again under its name."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.errors import Damaged, StorageError
from holdfast.events import log
from holdfast.ondisk import datafile, names
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.datafile import Header
from holdfast.ondisk.manifest import FileRecord
from holdfast.read.damage import Fault
from holdfast.repair.donors import Donors, Gift
from holdfast.storage.local import disk
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.store import Buffer
from holdfast.storage.store_place import StorePlace

READERS = 4
"""Blocks that are searched at once."""


class Mended(NamedTuple):
    """``nbytes`` from byte ``begin`` of ``file`` on, and the file that they were taken from."""

    file: str
    begin: int
    nbytes: int
    source: str


class _Block(NamedTuple):
    begin: int
    nbytes: int
    key: str
    at: int
    sum: str


@dataclass
class Mending:
    """The result for one file: what was mended, or with ``dry_run`` could be, and the faults that no donor can mend."""

    mended: list[Mended] = field(default_factory=list)
    left: list[Fault] = field(default_factory=list)


def mend_file(
    at: StorePlace, path: Place, index: int, file: FileRecord, header: Header | None, faults: Sequence[Fault],
    donors: Donors, *, dry_run: bool,
) -> Mending:  # fmt: skip
    """Mend one data file at ``path``, which as a place in a store is ``at``. No byte is written that was not checked.

    If the file has its size, only bad blocks and a bad header are overwritten, in place: checkpoints that share the
    file by a hard link are mended with it, and a crash leaves nothing worse. If it is missing, has another size, lies
    in a store or behind a symbolic link, or if the disk refuses to write there, all of it is written to a temporary
    file, synced, and renamed. A file with holes never takes the name: its size would be right.

    ``header`` is None if the file has none that is right. ``dry_run`` looks for everything, and writes nothing. Raises
    StorageError if the file cannot be written.
    """
    done = Mending([], [fault for fault in faults if fault.key and not fault.nbytes])  # named, and not in the header
    # The target of a link may lie outside of the checkpoint: the link is replaced by a file, or nothing is written.
    linked = path.is_symlink()
    fits = not linked and path.size() == file.bytes
    first = None
    if header is None or not fits:
        first = donors.header(file)
        if first is None:
            return Mending([], list(faults))
        header = datafile.parse_header(first.data, file.bytes)
    hit = None if first else {fault.begin for fault in faults}
    blocks = [block for block in _blocks(header) if hit is None or block.begin in hit]
    work = _Work(index, file, str(path), donors, done)
    if fits and path.has_descriptors:
        try:
            work.in_place(path, first, blocks, dry_run=dry_run)
            return done
        except StorageError as error:
            if error.errno != errno.EIO or dry_run:
                raise
            log.warning("%s: the disk refuses the place of bad bytes, so all of it is written again: %s", path, error)
            done.mended.clear()
    work.rewrite(at, path, header, fits=fits, dry_run=dry_run)
    return done


def _blocks(header: Header) -> Iterator[_Block]:
    for piece in header.pieces.values():
        for number, total in enumerate(header.sums.get(piece.key, ())):
            at = number * BLOCK
            yield _Block(piece.begin + at, min(BLOCK, piece.nbytes - at), piece.key, at, total)


@dataclass
class _Work:
    index: int
    file: FileRecord
    name: str
    donors: Donors
    done: Mending

    def in_place(self, path: Place, first: Gift | None, blocks: Iterable[_Block], *, dry_run: bool) -> None:
        """Overwrite bad bytes by good ones; durable on return."""
        with _no_writer() if dry_run else _writer(path) as write:
            if first is not None:
                self._take(0, first, write)
            for block, gift in self._searched(blocks):
                if gift is None:
                    self._leave(block)
                elif gift.source != self.name:  # else it is right where it lies
                    self._take(block.begin, gift, write)

    def rewrite(self, at: StorePlace, path: Place, header: Header, *, fits: bool, dry_run: bool) -> None:
        """Write the whole file again under its name. If its size is wrong, every block of it must be there."""
        chunks = self._chunks(path, header, fits=fits)
        try:
            with closing(chunks):
                if dry_run:
                    deque(chunks, maxlen=0)
                else:
                    with naming(at, "write"):
                        at.store.put(at.key, chunks, self.file.bytes)
                    if path.has_descriptors:
                        with _writer(path):  # writes nothing: the next reads come from the disk
                            pass
            if not self.done.mended:  # what was too long had all of it
                self.done.mended.append(Mended(self.name, 0, self.file.bytes, self.name))
        except _Lacking as lacking:
            self.done.mended.clear()
            self.done.left.append(Fault(self.index, what=str(lacking)))

    def _chunks(self, path: Place, header: Header, *, fits: bool) -> Generator[Buffer, None, None]:
        first = self.donors.header(self.file)
        if first is None:  # it was there a moment ago
            raise _Lacking(f"{path} has no header any more")
        self._note(0, first)
        yield first.data
        for block, gift in self._searched(_blocks(header)):
            if gift is not None:
                self._note(block.begin, gift)
                yield gift.data
            elif not fits:
                raise _Lacking(f"{path} cannot be brought back: nobody has bytes {block.begin}:{_end(block)} of it")
            else:
                self._leave(block)
                yield self.donors.as_it_is(self.file, block.begin, block.nbytes)

    def _searched(self, blocks: Iterable[_Block]) -> Iterator[tuple[_Block, Gift | None]]:
        """Blocks with their good bytes, or None; some are searched ahead."""
        waiting: deque[tuple[_Block, Future[Gift | None]]] = deque()
        with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-mend") as pool:
            for block in blocks:
                look = pool.submit(self.donors.block, self.file, block.begin, block.nbytes, block.sum)
                waiting.append((block, look))
                if len(waiting) == READERS:
                    first, gift = waiting.popleft()
                    yield first, gift.result()
            for block, gift in waiting:
                yield block, gift.result()

    def _take(self, begin: int, gift: Gift, write: Callable[[int, bytes], None]) -> None:
        write(begin, gift.data)
        self._note(begin, gift)

    def _note(self, begin: int, gift: Gift) -> None:
        if gift.source != self.name:
            self.done.mended.append(Mended(self.name, begin, len(gift.data), gift.source))

    def _leave(self, block: _Block) -> None:
        name = names.from_section(self.file.path.split("/")[-2], block.key)
        what = f"{self.name} is altered: bytes {block.begin}:{_end(block)}, in {name}, and no source has them"
        self.done.left.append(Fault(self.index, block.begin, block.nbytes, block.key, block.at, what))


class _Lacking(Damaged):
    """A missing file cannot be made again: no donor has some of its bytes."""


def _end(block: _Block) -> int:
    return block.begin + block.nbytes


@contextmanager
def _no_writer() -> Iterator[Callable[[int, bytes], None]]:
    yield lambda begin, data: None


@contextmanager
def _writer(path: Place) -> Iterator[Callable[[int, bytes], None]]:
    """A function that writes into an existing file. At the end it is durable, and dropped from the page cache."""
    with naming(path, "open"):
        fd = disk.open(path, os.O_WRONLY | os.O_NOFOLLOW)

    def write(begin: int, data: bytes) -> None:
        with naming(path, "write"):
            disk.write_all(fd, data, begin, path)

    try:
        yield write
        with naming(path, "sync"):
            disk.sync(fd, path)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
