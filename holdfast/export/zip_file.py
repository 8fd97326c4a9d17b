"""The zip archives that `torch.save` makes: members stored as they are, each beginning at an aligned byte.

Where a member lies is known before its bytes are, and its sum goes behind it, so that headers never wait for data.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from holdfast.storage.local.disk import SECTOR

TOP = "archive"
"""The folder that torch has around all members of a file."""

ALIGN = 64
LARGE = 1 << 20
"""Tensors of this many bytes begin at a whole sector, and are written directly."""

_FAR = 0xFFFFFFFF  # sizes and places from here on stand in a field of 64 bits
_UTF8, _SUM_FOLLOWS = 0x0800, 0x0008


class Member(NamedTuple):
    """Where a member's header and its data begin in the archive, and how long the data is."""

    name: str
    header: int
    data: int
    nbytes: int

    @property
    def end(self) -> int:
        """Where the next header may begin."""
        return self.data + self.nbytes + len(after(self, 0))


def alignment(nbytes: int) -> int:
    """Of what the first byte of a tensor's data is a multiple."""
    return SECTOR if nbytes >= LARGE else ALIGN


def storages(sizes: Iterable[int]) -> tuple[list[Member], int]:
    """Members ``data/0``, ``data/1``, … for tensors of these sizes, and where the last one ends."""
    members, at = [], 0
    for number, nbytes in enumerate(sizes):
        members.append(member(f"data/{number}", at, nbytes, alignment(nbytes)))
        at = members[-1].end
    return members, at


def member(name: str, at: int, nbytes: int, align: int = ALIGN) -> Member:
    """A member whose header begins at ``at`` and whose data begins at the next multiple of ``align``."""
    full = f"{TOP}/{name}"
    # 4 bytes of room for the head of the field that fills up to the data, as torch does it.
    least = at + 30 + len(full) + len(_long_sizes(nbytes)) + 4
    return Member(full, at, -(-least // align) * align, nbytes)


def before(m: Member) -> bytes:
    """The member's header, up to its data."""
    long = _long_sizes(m.nbytes)
    fill = m.data - m.header - 30 - len(m.name) - len(long) - 4
    extra = long + b"FB" + struct.pack("<H", fill) + b"Z" * fill
    shown = _FAR if long else 0
    head = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, _flags(m), 0, 0, 0, 0, shown, shown, len(m.name), len(extra))
    return head + m.name.encode() + extra


def after(m: Member, total: int) -> bytes:
    """What follows the data: its sum and its length. An empty member needs none, as in torch."""
    if not m.nbytes:
        return b""
    return struct.pack("<4sIQQ" if m.nbytes >= _FAR else "<4sIII", b"PK\7\x08", total, m.nbytes, m.nbytes)


def directory(members: Iterable[tuple[Member, int]], at: int) -> bytes:
    """The end of an archive, from byte ``at`` on: all its members with their sums."""
    rows = []
    for m, total in members:
        far = [n for n in (m.nbytes, m.nbytes, m.header) if n >= _FAR]
        extra = struct.pack("<HH", 1, 8 * len(far)) + struct.pack(f"<{len(far)}Q", *far) if far else b""
        short, place = min(m.nbytes, _FAR), min(m.header, _FAR)
        rows.append(
            struct.pack(
                "<4sHHHHHHIIIHHHHHII", b"PK\1\2", 0, 0, _flags(m), 0, 0, 0, total, short, short, len(m.name),
                len(extra), 0, 0, 0, 0, place,
            ) + m.name.encode() + extra
        )  # fmt: skip
    listing = b"".join(rows)
    count, end = len(rows), at + len(listing)
    long = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listing), at)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    few, size, place = min(count, 0xFFFF), min(len(listing), _FAR), min(at, _FAR)
    return listing + long + locator + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, size, place, 0)


class Ending:
    """The bytes of an archive from some place on: members whose data is at hand, then the directory."""

    def __init__(self, at: int, members: Iterable[tuple[Member, int]] = ()) -> None:
        self._at, self._members, self._parts = at, list(members), [b""]

    def add(self, name: str, data: bytes) -> None:
        """One more member."""
        m, total = member(name, self._at, len(data)), crc32(data)
        self._parts += [before(m), data, after(m, total)]
        self._members.append((m, total))
        self._at = m.end

    def close(self) -> bytes:
        """All of it."""
        return b"".join([*self._parts, directory(self._members, self._at)])


def _flags(m: Member) -> int:
    return _UTF8 | _SUM_FOLLOWS if m.nbytes else _UTF8


def _long_sizes(nbytes: int) -> bytes:
    return struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if nbytes >= _FAR else b""


def joined(parts: Iterable[tuple[int, int]]) -> int:
    """The CRC-32 of parts in a row, from the sum and the length of each."""
    total = 0
    for part, nbytes in parts:
        power = 0
        while total and nbytes >> power:
            if nbytes >> power & 1:
                total = _apply(_zeros(power), total)
            power += 1
        total ^= part
    return total


@lru_cache(maxsize=64)
def _zeros(power: int) -> tuple[int, ...]:
    """What 2 ** power zero bytes more do to a sum: the image of each of its 32 bits."""
    half = _zeros(power - 1) if power else _ONE_BIT
    for _ in range(1 if power else 3):
        half = tuple(_apply(half, image) for image in half)
    return half


_ONE_BIT = (0xEDB88320, *(1 << i for i in range(31)))  # a shift, and the polynomial for the bit that falls out


def _apply(matrix: tuple[int, ...], value: int) -> int:
    total, bit = 0, 0
    while value:
        if value & 1:
            total ^= matrix[bit]
        value >>= 1
        bit += 1
    return total
