"""Every byte of a foreign checkpoint, read; and compared with the sums that its archives keep.

`Foreign.examine` calls it. Never claims to have checked what it only read.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

from holdfast import events
from holdfast.errors import Damaged
from holdfast.formats.places import ForeignFiles
from holdfast.formats.sources import Stretch
from holdfast.ondisk.box import Box
from holdfast.read.damage import Damage
from holdfast.read.files import ASKERS
from holdfast.read.source import ReadStats
from holdfast.storage.place import Place

SPAN = 8 << 20


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
            with lock:  # a member is read once, by whoever comes first; the others wait for what was found
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
    found: list[Damage] = []
    with (
        events.task("verify", str(path), total=sum(stretch.nbytes for _, _, stretch in places)) as task,
        ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool,
    ):
        outcomes = pool.map(lambda place: check(*place), places)
        for (_, _, stretch), (damage, unverified) in zip(places, outcomes, strict=True):
            stats.needed += stretch.nbytes
            stats.unverified += unverified
            found += [] if damage is None else [damage]
            task.advance(stretch.nbytes)
    return found


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
