"""A data file read part by part, each proved before it is handed on.

`transfer` copies files so. Never hands out a byte whose sum is wrong, and reads what is wrong twice before it says so.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.ondisk import blocks, datafile
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage.naming import naming_unless_missing
from holdfast.storage.store_place import StorePlace

PART = blocks.BLOCK
"""What is read at once: neighbouring blocks up to so many bytes."""

AHEAD = 4
"""Parts of a file that are read before they are asked for."""


class Stopped(Exception):
    """Another file has failed, and this one is not to be finished."""


class _Block(NamedTuple):
    """Bytes of a data file and their sum; None if the file has none of them."""

    begin: int
    nbytes: int
    sum: str | None


class ProvedFile:
    """A data file at the source, read in parts that are proved."""

    def __init__(self, folder: StorePlace, record: FileRecord, stop: threading.Event) -> None:
        self.record, self.unverified, self._stop = record, 0, stop
        above, sibling = folder.parent, record.path.removeprefix("../")
        self.place = above / sibling if record.path.startswith("../") else folder / record.path

    def whole(self) -> memoryview:
        """All bytes of a small file."""
        return self._proved(0, self.record.bytes, lambda data: self._faults(self._blocks(data), data, 0))

    def header(self) -> tuple[memoryview, list[list[_Block]]]:
        """The header, and the blocks after it, in parts."""
        data = self._proved(0, self.record.header_bytes, self._blocks)
        parts: list[list[_Block]] = []
        for block in self._blocks(data):
            if parts and parts[-1][-1].begin + parts[-1][-1].nbytes + block.nbytes - parts[-1][0].begin <= PART:
                parts[-1].append(block)
            else:
                parts.append([block])
        return data, parts

    def part(self, blocks_here: list[_Block]) -> memoryview:
        """The bytes of neighbouring blocks."""
        begin, end = blocks_here[0].begin, blocks_here[-1].begin + blocks_here[-1].nbytes
        return self._proved(begin, end, lambda data: self._faults(blocks_here, data, begin))

    def _blocks(self, data: memoryview) -> list[_Block]:
        """Where blocks lie, by the header that ``data`` begins with. Raises ValueError if it is not the one."""
        data = data[: self.record.header_bytes]
        if blocks.digest(data) != self.record.header_digest:
            raise ValueError("has an altered header: its digest is not the manifest's")
        header = datafile.parse_header(bytes(data), self.record.bytes)
        listed = []
        for piece in header.pieces.values():
            sums = header.sums.get(piece.key)
            for n, begin in enumerate(range(0, piece.nbytes, blocks.BLOCK)):
                nbytes = min(blocks.BLOCK, piece.nbytes - begin)
                listed.append(_Block(piece.begin + begin, nbytes, sums[n] if sums else None))
        return listed

    def _faults(self, blocks_here: list[_Block], data: memoryview, origin: int) -> None:
        for begin, nbytes, total in blocks_here:
            if total is not None and blocks.block_sum(data[begin - origin : begin - origin + nbytes]) != total:
                raise ValueError(f"is altered: bytes {begin}:{begin + nbytes} have another checksum")
        self.unverified += sum(block.nbytes for block in blocks_here if block.sum is None)

    def _proved(self, begin: int, end: int, check: Callable[[memoryview], object]) -> memoryview:
        """Bytes that ``check`` finds right; what it finds wrong is read once more, as a bit may flip on the way."""
        fault = ""
        for _ in range(2):
            if self._stop.is_set():
                raise Stopped
            try:
                with naming_unless_missing(self.place, "read"):
                    got = self.place.store.get(self.place.key, begin, end)
            except FileNotFoundError:
                raise damaged(self.place, "is missing") from None
            data = memoryview(got.data).cast("B")
            if got.nbytes != self.record.bytes or len(data) != end - begin:
                raise damaged(self.place, f"has {got.nbytes} bytes, the manifest says {self.record.bytes}")
            try:
                check(data)
            except ValueError as error:
                fault = str(error)
                log.info("%s %s; reading it again", self.place, fault)
            else:
                return data
        raise damaged(self.place, fault)


class Parts:
    """A file in parts, some read ahead. No generator: that would keep a part alive until the next is asked for."""

    def __init__(self, source: ProvedFile, readers: ThreadPoolExecutor, progress: Callable[[int], None]) -> None:
        self._source, self._readers, self._progress = source, readers, progress
        self._ahead: deque[Future[memoryview]] = deque()
        self._left: deque[list[_Block]] | None = None

    def __iter__(self) -> Iterator[memoryview]:
        return self

    def __next__(self) -> memoryview:
        if self._left is None:
            header, parts = self._source.header()
            self._left = deque(parts)
            self._fill()
            self._progress(len(header))
            return header
        if not self._ahead:
            raise StopIteration
        part = [self._ahead.popleft().result()]
        self._fill()
        self._progress(len(part[0]))
        return part.pop()

    def _fill(self) -> None:
        while self._left and len(self._ahead) < AHEAD:
            self._ahead.append(self._readers.submit(self._source.part, self._left.popleft()))


def damaged(place: StorePlace, what: str) -> Damaged:
    """The error that names the file, what is wrong with it, and what to do."""
    error = Damaged(f"{place} {what}; nothing was committed: bring this file back from a copy, or copy another step")
    error.file = str(place)
    return error
