"""A checkpoint of another library, opened: a `Reader`, where its bytes lie, and how its sums are checked."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

from holdfast import events
from holdfast.errors import Damaged, HoldfastError
from holdfast.formats.simplified import materialized
from holdfast.formats.sources import File, Source, Stretch, opened
from holdfast.ondisk.box import Box
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import Manifest
from holdfast.read.damage import Damage, Findings
from holdfast.read.files import ASKERS, AsStored
from holdfast.read.ranges import Verify
from holdfast.read.source import Descriptors, ReadStats
from holdfast.storage.place import Place
from holdfast.storage.store_place import StorePlace

MOST = 4 * ASKERS

SPAN = 8 << 20


class _Ahead:
    """Stretches in the order in which they are likely to be wanted."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._order = [*dict.fromkeys(s for s in stretches if type(s) is not Stretch and s.source.path.is_remote)]
        self._at = {stretch: i for i, stretch in enumerate(self._order)}
        self._asked: set[int] = set()
        self._looked_for: set[int] = set()
        self._lock = threading.Lock()

    def located(self, stretch: Stretch) -> Stretch:
        """The stretch at its true place. The more have been asked for, the more that follow are looked for with it."""
        at = self._at.get(stretch)
        with self._lock:
            if at is not None:
                self._asked.add(at)
                if at not in self._looked_for:
                    count = min(2 * len(self._asked) - len(self._looked_for), MOST)
                    following = (i for i in range(at, len(self._order)) if i not in self._looked_for)
                    batch = [*islice(following, count)]
                    self._looked_for.update(batch)
                    with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-look") as pool:
                        list(pool.map(lambda i: _try_to_locate(self._order[i]), batch))
        return stretch.located()


def _try_to_locate(stretch: Stretch) -> None:
    with suppress(HoldfastError, OSError):  # raised again when that stretch is read
        stretch.located()


class ForeignFiles(AsStored):
    """Where each piece of each tensor lies; the same three questions that our own data files answer."""

    def __init__(self, sources: list[Source], places: dict[tuple[str, Box], Stretch]) -> None:
        self.sources, self.places = sources, places
        self.located = _Ahead(places.values()).located
        self._unpacked: dict[Source, int] = {}
        self._lock = threading.Lock()

    def path(self, index: int) -> Place:
        return self.sources[index].path

    def plain(self, index: int) -> Place | None:
        """The local file whose bytes the pieces of that number are; None for those in memory or to be unpacked."""
        source = self.sources[index]
        return source.path if isinstance(source, File) and source.path.has_descriptors else None

    def prove(self, indices: Iterable[int]) -> None:
        """Every stretch was checked against its file when it was made."""

    def prepare(self, indices: Iterable[int], stats: ReadStats) -> None:
        """All is known that the reader asks for."""

    def piece(
        self, index: int, name: str, cell: Box, record: TensorRecord, stats: ReadStats | None = None
    ) -> tuple[int, Piece, tuple[str, ...]]:
        """Where the bytes of a cell lie; foreign files keep no sums of blocks."""
        stretch = self.located(self.places[name, cell])
        if stretch.source != self.sources[index]:  # it has to be unpacked
            with self._lock:
                index = self._unpacked.setdefault(stretch.source, len(self.sources))
                if index == len(self.sources):
                    self.sources.append(stretch.source)
        return index, Piece(name, record.dtype, cell.lengths, stretch.nbytes, stretch.begin), ()

    def opened(self, index: int) -> AbstractContextManager[Descriptors | StorePlace]:
        return opened(self.sources[index])


def verify_foreign(
    files: ForeignFiles, path: Place, stats: ReadStats, *, share: tuple[int, int] = (0, 1)
) -> list[Damage]:
    """Read all that the tensors need, or the r-th of n even parts of it (``share``); what is wrong of each tensor.

    Bytes of archive members with a CRC-32 (torch's own files) are checked, others count as ``unverified``.
    """
    checked: dict[tuple[int, int], Future[bool]] = {}
    lock = threading.Lock()

    def is_right(whole: Stretch, crc32: int) -> bool:
        # On the way from a store a bit may flip: what is wrong is read once more.
        tries = 2 if path.is_remote else 1
        return any(_read(whole, stats) == crc32 for _ in range(tries))

    def check(name: str, box: Box, place: Stretch) -> tuple[Damage | None, int]:
        """What is wrong, and how many bytes have no sum."""
        try:
            stretch = files.located(place)
            if stretch.member is None:
                _read(stretch, stats)
                return None, stretch.nbytes
            key = (id(stretch.source), stretch.member.begin)
            with lock:  # a member is read once, by whoever comes first; the others wait for the outcome
                first = key not in checked
                outcome = checked.setdefault(key, Future())
            if first:
                try:
                    whole = Stretch(stretch.source, stretch.member.begin, stretch.member.nbytes)
                    outcome.set_result(is_right(whole, stretch.member.crc32))
                except BaseException as error:
                    outcome.set_exception(error)
                    raise
            if outcome.result():
                return None, 0
            what = f"{stretch.source.path}: the bytes around {name}{box} have another CRC-32"
            return Damage(str(stretch.source.path), what, name, box, begin=stretch.begin, nbytes=stretch.nbytes), 0
        except Damaged as error:
            return Damage(str(place.source.path), f"{name}: {error}", name, box), 0

    places = _part_of(files.places, *share)
    threads = ASKERS if path.is_remote else 1
    damages: list[Damage] = []
    with (
        events.task("verify", str(path), total=sum(stretch.nbytes for _, _, stretch in places)) as task,
        ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool,
    ):
        outcomes = pool.map(lambda place: check(*place), places)
        for (_, _, stretch), (damage, unverified) in zip(places, outcomes, strict=True):
            stats.needed += stretch.nbytes
            stats.unverified += unverified
            damages += [] if damage is None else [damage]
            task.advance(stretch.nbytes)
    return damages


def _part_of(places: Mapping[tuple[str, Box], Stretch], r: int, n: int) -> list[tuple[str, Box, Stretch]]:
    """The places that begin in the r-th of n stretches of all bytes; those without bytes go with the one before."""
    listed = [(name, box, stretch) for (name, box), stretch in places.items()]
    starts = [0, *accumulate(stretch.nbytes for _, _, stretch in listed)]
    low, high = starts[-1] * r // n, starts[-1] * (r + 1) // n
    last = r == n - 1
    return [place for place, start in zip(listed, starts, strict=False) if low <= start and (start < high or last)]


def _read(stretch: Stretch, stats: ReadStats) -> int:
    crc = 0
    for begin in range(0, stretch.nbytes, SPAN):
        data = stretch.read(begin, min(SPAN, stretch.nbytes - begin))
        crc = zlib.crc32(data, crc)
        stats.add(len(data))
    return crc


@dataclass(frozen=True)
class Foreign:
    """A `Reader` of a foreign checkpoint.

    ``values``: those of each rank, by path. ``attached``: files beside the state, by name.
    """

    path: Place
    format: str
    reading: str
    manifest: Manifest
    files: ForeignFiles
    values: Mapping[str, tuple[Any, ...]]
    attached: Mapping[str, Place]
    left_out: Mapping[str, str]
    signed_by: str | None = None

    @property
    def attachments(self) -> Mapping[str, int]:
        return {name: path.stat().st_size for name, path in self.attached.items()}

    def stored_name(self, name: str) -> str:
        return self.manifest.aliases.get(name, name)

    def attachment(self, name: str) -> bytes:
        if name not in self.attached:
            raise KeyError(f"{self.path} has no attachment {name!r}; it has {sorted(self.attached)}")
        return self.attached[name].read_small()

    def per_rank(self, path: str, rank: int) -> Any:
        return materialized(self.values[path][rank], self.path)

    def verifying(self, verify: Verify) -> Verify:
        return verify

    def examine(self, *, deep: bool = True, share: tuple[int, int] = (0, 1)) -> Findings:
        stats = ReadStats()
        damages = verify_foreign(self.files, self.path, stats, share=share) if deep else []
        return Findings(self.manifest.save, stats.needed, stats.read, stats.unverified, [], damages)
