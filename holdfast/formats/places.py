"""Where each piece of the tensors of a foreign checkpoint lies.

`assemble` makes a `ForeignFiles`, and the reader asks it what it asks of our data files. Never reads a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager

from holdfast.formats.ahead import Ahead
from holdfast.formats.sources import File, Source, Stretch, opened
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.read.source import Descriptors, ReadStats
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace


class ForeignFiles:
    """Where each piece of each tensor lies; the same three questions that our own data files answer."""

    def __init__(self, sources: list[Source], places: dict[tuple[str, Box], Stretch]) -> None:
        self.sources, self.places = sources, places
        self._ahead = Ahead(places.values())
        self._unpacked: dict[Source, int] = {}
        self._lock = threading.Lock()

    def path(self, index: int) -> Place:
        return self.sources[index].path

    def plain(self, index: int) -> Place | None:
        """The local file whose bytes the pieces of that number are; None for those in memory or to be unpacked."""
        source = self.sources[index]
        return source.path if isinstance(source, File) and source.path.has_descriptors else None

    def prove(self, indices: Iterable[int]) -> None:
        """Every stretch was found to lie within its file when it was made."""

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        """All is known that the reader asks for."""

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats | None = None
    ) -> tuple[int, Piece, tuple[str, ...]]:
        """Where the bytes of a cell lie; foreign files keep no sums of blocks."""
        stretch = self.located(self.places[name, cell])
        if stretch.source != self.sources[index]:  # it was found to need unpacking
            with self._lock:
                index = self._unpacked.setdefault(stretch.source, len(self.sources))
                if index == len(self.sources):
                    self.sources.append(stretch.source)
        return index, Piece(name, record.dtype, cell.lengths, stretch.nbytes, stretch.begin), ()

    def located(self, stretch: Stretch) -> Stretch:
        """One of the stretches at its true place."""
        return self._ahead.located(stretch)

    def opened(self, index: int) -> AbstractContextManager[Descriptors | StorePlace]:
        return opened(self.sources[index])
