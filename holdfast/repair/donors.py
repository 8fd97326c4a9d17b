"""Other checkpoints that hold the same file, or a block with the same sum; every byte they give is checked.

A sum and a length identify a block, so a frozen layer is recognised however it was cut into files.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from holdfast.errors import HoldfastError
from holdfast.events import log
from holdfast.ondisk import blocks
from holdfast.ondisk.blocks import BLOCK
from holdfast.ondisk.manifest import FileRecord, Manifest, own_path
from holdfast.read.files import DataFiles
from holdfast.read.source import ReadStats, source_of
from holdfast.storage.place import Place

ALIKE = 4
"""The most places of one checkpoint that are tried for a block: a block of zeros may stand in thousands."""


@dataclass
class Donor:
    """A checkpoint that may have what another lacks."""

    where: Place
    record: Manifest
    files: DataFiles
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @cached_property
    def _by_proof(self) -> dict[tuple[str, int, str], int]:
        return {_proof(file): index for index, file in enumerate(self.record.data_files)}

    @cached_property
    def _by_sum(self) -> dict[tuple[str, int], list[tuple[int, int]]]:
        """The files and offsets of blocks, by sum and size: every header is read once."""
        by_sum: dict[tuple[str, int], list[tuple[int, int]]] = {}
        for index in range(len(self.record.data_files)):
            try:
                header = self.files.header(index)
            except HoldfastError as error:
                log.debug("cannot give anything: %s", error)
                continue
            for piece in header.pieces.values():
                for number, total in enumerate(header.sums.get(piece.key, ())):
                    nbytes = min(BLOCK, piece.nbytes - number * BLOCK)
                    places = by_sum.setdefault((total, nbytes), [])
                    if len(places) < ALIKE:
                        places.append((index, piece.begin + number * BLOCK))
        return by_sum

    def same_file(self, file: FileRecord) -> int | None:
        """The number of the same file in this checkpoint, by its name, size and header."""
        return self._by_proof.get(_proof(file))

    def places_of(self, total: str, nbytes: int) -> Sequence[tuple[int, int]]:
        """The file and the first byte of each block of this sum."""
        with self._lock:
            return self._by_sum.get((total, nbytes), ())

    def read(self, index: int, begin: int, nbytes: int) -> bytes:
        """Bytes of a file, not checked. Raises HoldfastError."""
        with self.files.opened(index) as opened:
            return bytes(source_of(self.files.path(index), opened, ReadStats()).fetch(begin, nbytes).view)


def _proof(file: FileRecord) -> tuple[str, int, str]:
    return own_path(file.path), file.bytes, file.header_digest


@dataclass(frozen=True)
class Gift:
    """Checked bytes, and the file that they came from."""

    data: bytes
    source: str


class Donors:
    """All checkpoints that may help, in the order in which they are searched."""

    def __init__(self, donors: Sequence[Donor]) -> None:
        self._donors = donors

    def header(self, file: FileRecord) -> Gift | None:
        """The header of a file of the damaged checkpoint, checked by the digest in its manifest."""
        for donor in self._donors:
            index = donor.same_file(file)
            if index is None:
                continue
            try:
                path = donor.files.path(index)
                data, _ = path.read_start(file.header_bytes)
            except (HoldfastError, FileNotFoundError) as error:
                log.debug("cannot give a header: %s", error)
                continue
            if blocks.digest(data) == file.header_digest:
                return Gift(data, str(path))
        return None

    def block(self, file: FileRecord, begin: int, nbytes: int, total: str) -> Gift | None:
        """A block, checked by its sum: of the same file elsewhere, or else of any file that has an equal one."""
        for donor, index, at in self._candidates(file, begin, nbytes, total):
            try:
                data = donor.read(index, at, nbytes)
            except HoldfastError as error:  # another donor may have it; what none has is reported
                log.info("%s cannot give %d bytes: %s", donor.where, nbytes, error)
                continue
            if blocks.is_sum(data, total):
                return Gift(data, str(donor.files.path(index)))
        return None

    def as_it_is(self, file: FileRecord, begin: int, nbytes: int) -> bytes:
        """Bytes of the damaged checkpoint, the first of the donors; not checked. Raises HoldfastError."""
        itself = self._donors[0]
        return itself.read(itself.record.data_files.index(file), begin, nbytes)

    def _candidates(self, file: FileRecord, begin: int, nbytes: int, total: str) -> Iterator[tuple[Donor, int, int]]:
        for donor in self._donors:
            index = donor.same_file(file)
            if index is not None:
                yield donor, index, begin
        for donor in self._donors:
            for index, at in donor.places_of(total, nbytes):
                yield donor, index, at

    def attachment(self, nbytes: int, digest: str) -> Gift | None:
        """An attached file of this digest."""
        for donor in self._donors:
            for path, size, known in donor.record.attachments:
                if (size, known) != (nbytes, digest):
                    continue
                try:
                    data = (donor.where / path).read_small()
                except (HoldfastError, FileNotFoundError) as error:
                    log.debug("cannot give an attachment: %s", error)
                    continue
                if blocks.digest(data) == digest:
                    return Gift(data, str(donor.where / path))
        return None
