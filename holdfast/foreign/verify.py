"""Every byte of a foreign checkpoint, read; and compared with the sums that its archives keep.

`Checkpoint.verify` calls it. Never claims to have checked what it only read.
"""

from __future__ import annotations

import zlib
from pathlib import Path

from holdfast import events
from holdfast.engine.read import ReadStats
from holdfast.errors import Damaged
from holdfast.foreign.assemble import Foreign
from holdfast.foreign.sources import Stretch

SPAN = 8 << 20


def verify_foreign(foreign: Foreign, path: Path) -> ReadStats:
    """Read all that the tensors need. Raises Damaged, listing every tensor that is hit.

    Bytes of archive members with a CRC-32 (torch's own files) are checked, others count as ``unverified``.
    """
    stats, faults = ReadStats(), []
    checked: set[tuple[int, int]] = set()
    total = sum(stretch.nbytes for stretch in foreign.files.places.values())
    with events.task("verify", str(path), total=total) as task:
        for (name, box), place in foreign.files.places.items():
            stats.needed += place.nbytes
            try:
                stretch = place.located()
                if stretch.member is None:
                    stats.unverified += stretch.nbytes
                    _read(stretch, stats)
                elif (id(stretch.source), stretch.member.begin) not in checked:
                    checked.add((id(stretch.source), stretch.member.begin))
                    whole = Stretch(stretch.source, stretch.member.begin, stretch.member.nbytes)
                    if _read(whole, stats) != stretch.member.crc32:
                        faults.append(f"{stretch.source.path}: the bytes around {name}{box} have another CRC-32")
            except Damaged as error:
                faults.append(f"{name}: {error}")
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
