"""Where the pieces of a checkpoint lie: the data files of one, their headers read once and proved.

`read_boxes` asks for pieces. Never reads a byte of a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Protocol

from holdfast.errors import Damaged, HoldfastError
from holdfast.ondisk import blocks, datafile, dtypes, manifest, names
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Header, Piece
from holdfast.ondisk.manifest import FileRecord, Manifest, origin_of, own_path
from holdfast.ondisk.signature import Signature, SignedFile
from holdfast.read.source import Descriptors, ReadStats, damaged, forget
from holdfast.read.wanted import Wanted
from holdfast.storage.place import Place
from holdfast.storage.storage import LinkCheck, as_store
from holdfast.storage.store_place import StorePlace

ASKERS = 16
"""Threads that ask a store: with 8 MiB a request this hides tens of milliseconds of latency."""


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

    def is_made(self, name: str) -> bool:
        """Whether a tensor is made of others under a map: no file holds it as it is."""

    def origins(self, name: str, record: TensorRecord) -> Sequence[tuple[str, TensorRecord]]:
        """The saved tensors that hold the elements of a tensor: itself, or those that it is made of."""

    def expanded(self, wanted: Iterable[Wanted]) -> Iterable[Wanted]:
        """The same with boxes of the tensors that others are made of, in the place of boxes of those.

        The names are those of `stored`. Nothing is read, and no memory is changed.
        """

    def stored(self, manifest: Manifest) -> Manifest:
        """The manifest of the tensors that are read: this one, or that of the checkpoint before the map."""


class AsStored:
    """What `Files` of a checkpoint without a map answer about it."""

    def is_made(self, name: str) -> bool:
        return False

    def origins(self, name: str, record: TensorRecord) -> Sequence[tuple[str, TensorRecord]]:
        return ((name, record),)

    def expanded(self, wanted: Iterable[Wanted]) -> Iterable[Wanted]:
        return wanted

    def stored(self, manifest: Manifest) -> Manifest:
        return manifest


class DataFiles(AsStored):
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
        self._links = LinkCheck(folder)
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

    def _paths(self, index: int) -> Place:
        if index not in self._proved:
            self._proved[index] = self._links.path(self.records[index].path)
        return self._proved[index]

    def plain(self, index: int) -> Place | None:
        path = self.path(index)
        return None if path.is_remote else path

    def _in(self, beside: Place, record: FileRecord) -> Place:
        # What lies in the one folder may be reused from the other.
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
        if not (self.folder.is_remote or (self._beside is not None and self._beside.is_remote)):
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
        reused = origin_of(record, self.folder.name)
        if size is None:
            return damaged(path, f"is missing{reused}", self.folder)
        return damaged(path, f"has {size} bytes, the manifest says {record.bytes}{reused}", self.folder)

    def header(self, index: int, stats: ReadStats | None = None) -> Header:
        """The header of a file. Raises Damaged if the file is missing, has another size or another header."""
        header = self._headers.get(index)
        if header is None:  # two threads may both read it: that costs less than to keep all others waiting
            header = self._headers[index] = self._read_header(index)
            if stats is not None:
                stats.add(self.records[index].header_bytes)
        return header

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
                raise damaged(path, f"{_whose(data, record)}{origin_of(record, self.folder.name)}", self.folder)
            forget(as_store(path), 0, record.header_bytes)
        try:
            header = datafile.parse_header(data, size)
            return header if self._signature is None else _signed(header, data, self._signature.files[index])
        except ValueError as error:
            raise damaged(path, f"cannot be read: {error}", self.folder) from None

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats
    ) -> tuple[int, Piece, Sequence[str]]:
        header = self._headers.get(index) or self.header(index, stats)
        key = datafile.key_of(names.in_section(name), cell, record.shape)
        piece = header.pieces.get(key)
        if piece is None or not is_cell(piece, cell, record.dtype):
            raise damaged(self.path(index), f"does not hold {key} as the manifest says", self.folder)
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
            raise damaged(path, f"is missing{origin_of(self.records[index], self.folder.name)}", self.folder) from None
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
            f"is a file of rank {metadata.get('rank')}, section {metadata.get('section')!r}, as its header says, under "
            "another one's name"
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
