"""Every byte of a foreign checkpoint, read; and compared with the sums that its archives keep.

`Checkpoint.verify` calls it. Never claims to have checked what it only read.
"""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

from holdfast import events
from holdfast.engine.read import ASKERS
from holdfast.engine.source import ReadStats
from holdfast.engine.stores.place import Location, Place
from holdfast.errors import Damaged
from holdfast.foreign.assemble import Foreign
from holdfast.foreign.sources import Stretch
from holdfast.ondisk.box import Box

SPAN = 8 << 20


def verify_foreign(foreign: Foreign, path: Location) -> ReadStats:
    """Read all that the tensors need. Raises Damaged, listing every tensor that is hit.

    Bytes of archive members with a CRC-32 (torch's own files) are checked, others count as ``unverified``.
    """
    stats, faults = ReadStats(), []
    checked: set[tuple[int, int]] = set()
    lock = threading.Lock()

    def check(name: str, box: Box, place: Stretch) -> tuple[str, int]:
        """What is wrong, and how many bytes have no sum."""
        try:
            stretch = foreign.files.located(place)
            if stretch.member is None:
                _read(stretch, stats)
                return "", stretch.nbytes
            key = (id(stretch.source), stretch.member.begin)
            with lock:
                known = key in checked
                checked.add(key)
            whole = Stretch(stretch.source, stretch.member.begin, stretch.member.nbytes)
            # On the way from a store a bit may flip: what is wrong is read once more.
            tries = 2 if isinstance(path, Place) else 1
            if known or any(_read(whole, stats) == stretch.member.crc32 for _ in range(tries)):
                return "", 0
            return f"{stretch.source.path}: the bytes around {name}{box} have another CRC-32", 0
        except Damaged as error:
            return f"{name}: {error}", 0

    places = foreign.files.places
    threads = ASKERS if isinstance(path, Place) else 1
    with (
        events.task("verify", str(path), total=sum(stretch.nbytes for stretch in places.values())) as task,
        ThreadPoolExecutor(threads, thread_name_prefix="holdfast-verify") as pool,
    ):
        found = pool.map(lambda item: check(item[0][0], item[0][1], item[1]), places.items())
        for place, (fault, unverified) in zip(places.values(), found, strict=True):
            stats.needed += place.nbytes
            stats.unverified += unverified
            faults += [fault] if fault else []
            task.advance(place.nbytes)
    if faults:
        raise Damaged("\n".join([f"{path} is damaged:", *dict.fromkeys(faults)]))
    return stats


def _read(stretch: Stretch, stats: ReadStats) -> int:
    crc = 0
    for begin in range(0, stretch.nbytes, SPAN):
        data = stretch.read(begin, min(SPAN, stretch.nbytes - begin))
        crc = zlib.crc32(data, crc)
        stats.add(len(data))
    return crc
