"""Zip archives as byte ranges: where each member lies, without reading it. torch's files are zips of stored members.

`zipfile` does not say where a member's bytes begin, and accepts members that overlap. All sizes are checked here.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import BinaryIO, NamedTuple

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.sources import File, Member, Stretch, Unpacked, all_of

_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
MAX_DIRECTORY = 1 << 30
MAX_DEFLATION = 1032
"""What deflate can reach."""

_SPAN = 1 << 20


def is_zip(archive: Stretch) -> bool:
    """Whether it begins as a zip archive does."""
    return archive.nbytes >= 22 and archive.read(0, 4) in (_LOCAL, _END)


class Entry(NamedTuple):
    """What the directory says of a member. Its local header begins at ``begin``; nothing of it is beyond ``end``."""

    raw_name: bytes
    method: int
    packed: int
    nbytes: int
    crc32: int
    begin: int
    end: int


class Archive:
    """The members of an archive by name, each a stretch that is looked up when it is requested."""

    def __init__(self, archive: Stretch) -> None:
        self.archive = archive
        self._entries = _directory(archive)
        self._begins: dict[str, int] = {}
        self._remote = isinstance(archive.source, File) and archive.source.place is not None

    @property
    def names(self) -> list[str]:
        """Names of the members, in the order of the directory."""
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def nbytes(self, name: str) -> int:
        """Unpacked size of a member."""
        return self._entries[name].nbytes

    def member(self, name: str) -> Stretch:
        """The bytes of a member. Raises KeyError, Damaged; in a store not before they are read."""
        entry = self._entries[name]
        if self._remote and entry.method == 0:  # a request for each header would take minutes
            at = self.archive.begin + entry.begin
            member = Member(at, entry.nbytes, entry.crc32) if entry.crc32 else None
            return _Unlocated(self.archive.source, at, entry.nbytes, member, archive=self, name=name)
        begin = self.begin(name)
        part = self.archive.part(begin, entry.packed)
        if entry.method:
            packed = part
            source = Unpacked(part.source.path, entry.nbytes, lambda target: _inflate(packed, name, entry, target))
            part = all_of(source)
        # A sum of 0 stands for none: torch can leave them out.
        member = Member(part.begin, part.nbytes, entry.crc32) if entry.crc32 else None
        return Stretch(part.source, part.begin, part.nbytes, member)

    def begin(self, name: str) -> int:
        """Where the bytes of a member begin, by its own header. Raises KeyError, Damaged."""
        if name not in self._begins:  # two threads that look find the same
            self._begins[name] = self._begin_of(name, self._entries[name])
        return self._begins[name]

    def _begin_of(self, name: str, entry: Entry) -> int:
        header = self.archive.read(entry.begin, 30 + len(entry.raw_name))
        flags, method = struct.unpack("<HH", header[6:10])
        lengths = struct.unpack("<HH", header[26:30])
        if header[:4] != _LOCAL or header[30:] != entry.raw_name or lengths[0] != len(entry.raw_name):
            raise _damaged(self.archive, f"member {name[:200]!r} does not begin at {entry.begin}")
        if flags & 1 or method != entry.method:
            raise _damaged(self.archive, f"the two headers of member {name[:200]!r} differ")
        begin: int = entry.begin + 30 + sum(lengths)
        if begin + entry.packed > entry.end:
            raise _damaged(self.archive, f"member {name[:200]!r} reaches into the next")
        return begin


@dataclass(frozen=True)
class _Unlocated(Stretch):
    """Bytes of a member whose header is still unread: ``begin`` counts from there, as does the ``member``'s."""

    archive: Archive = field(kw_only=True, compare=False, repr=False)
    name: str = field(kw_only=True)
    skip: int = field(kw_only=True, default=0)

    def part(self, begin: int, nbytes: int) -> Stretch:
        super().part(begin, nbytes)  # its checks
        return replace(self, begin=self.begin + begin, nbytes=nbytes, skip=self.skip + begin)

    def located(self) -> Stretch:
        begin = self.archive.archive.begin + self.archive.begin(self.name)
        member = self.member._replace(begin=begin) if self.member is not None else None
        return Stretch(self.source, begin + self.skip, self.nbytes, member)


def _inflate(packed: Stretch, name: str, entry: Entry, target: BinaryIO) -> None:
    stream, written, crc, at, rest = zlib.decompressobj(-15), 0, 0, 0, b""
    try:
        while not stream.eof:
            if not rest and at < packed.nbytes:
                rest = packed.read(at, min(_SPAN, packed.nbytes - at))
                at += len(rest)
            exhausted = not rest
            out = stream.decompress(rest, _SPAN)
            rest = stream.unconsumed_tail
            if exhausted and not out:
                break
            written += len(out)
            if written > entry.nbytes:
                raise _damaged(packed, f"member {name[:200]!r} unpacks to more than its {entry.nbytes} bytes")
            crc = zlib.crc32(out, crc)
            target.write(out)
    except zlib.error as error:
        raise _damaged(packed, f"member {name[:200]!r} cannot be unpacked ({error})") from None
    if written != entry.nbytes or (entry.crc32 and crc != entry.crc32):
        raise _damaged(packed, f"member {name[:200]!r} unpacks to other bytes than were packed")


def _damaged(archive: Stretch, what: str) -> Damaged:
    error = Damaged(
        f"{archive.source.path}: {what}: the archive is truncated or was altered; bring it back from a copy"
    )
    error.file = str(archive.source.path)
    return error


def _directory(archive: Stretch) -> dict[str, Entry]:
    begin, nbytes, count = _find_directory(archive)
    if nbytes > MAX_DIRECTORY or count > nbytes // 46:
        raise _damaged(archive, f"its directory claims {count} members in {nbytes} bytes")
    data = archive.read(begin, nbytes)
    listed: list[Entry] = []
    at = 0
    for _ in range(count):
        if data[at : at + 4] != _ENTRY or len(data) < at + 46:
            raise _damaged(archive, "its directory is broken")
        flags, method, _, crc, packed, size, n, m, k, disk, _, _, local = _CENTRAL.unpack_from(data, at + 8)
        name, extra = data[at + 46 : at + 46 + n], data[at + 46 + n : at + 46 + n + m]
        packed, size, local = _wide(extra, [size, packed, local], archive)
        if flags & 1:
            raise Unsupported(f"{archive.source.path} is encrypted; unpack it first")
        if method not in (0, 8):
            raise Unsupported(f"{archive.source.path}: member {name[:200]!r} is packed by method {method}; repack it")
        if disk not in (0, 0xFFFF):
            raise Unsupported(f"{archive.source.path} is one of several parts of an archive; join them first")
        if size != packed if method == 0 else size > MAX_DEFLATION * packed + 64:
            raise _damaged(archive, f"member {name[:200]!r} claims to unpack {packed} bytes to {size}")
        listed.append(Entry(name, method, packed, size, crc, local, begin))
        at += 46 + n + m + k
    if at != nbytes:
        raise _damaged(archive, f"its directory has {nbytes} bytes instead of {at}")
    return _apart(archive, listed)


_CENTRAL = struct.Struct("<HHIIIIHHHHHII")


def _apart(archive: Stretch, listed: list[Entry]) -> dict[str, Entry]:
    """The members by name, none sharing bytes with another: a few bytes that many members claim are a bomb."""
    ends = dict(pairwise(sorted({entry.begin for entry in listed})))
    entries: dict[str, Entry] = {}
    taken: set[int] = set()
    for entry in listed:
        name = entry.raw_name.decode("utf-8", "surrogateescape")
        entry = entry._replace(end=ends.get(entry.begin, entry.end))
        if entry.begin in taken or entry.begin + 30 + len(entry.raw_name) + entry.packed > entry.end:
            raise _damaged(archive, f"member {name[:200]!r} shares bytes with another, or lies outside")
        if name in entries:
            raise _damaged(archive, f"it has two members {name[:200]!r}")
        entries[name] = entry
        taken.add(entry.begin)
    return entries


def _wide(extra: bytes, values: list[int], archive: Stretch) -> tuple[int, int, int]:
    # Numbers that do not fit 32 bits follow in an extra field, in the order size, packed size, offset.
    at = 0
    while at + 4 <= len(extra) and 0xFFFFFFFF in values:
        tag, n = struct.unpack_from("<HH", extra, at)
        if tag == 1:
            field, used = extra[at + 4 : at + 4 + n], 0
            for i, value in enumerate(values):
                if value == 0xFFFFFFFF:
                    if used + 8 > len(field):
                        raise _damaged(archive, "its directory is broken")
                    values[i] = struct.unpack_from("<Q", field, used)[0]
                    used += 8
            break
        at += 4 + n
    size, packed, local = values
    return packed, size, local


def _find_directory(archive: Stretch) -> tuple[int, int, int]:
    # The record and its wide form: only a comment at the end makes them lie further up.
    for reach in (22 + 20 + 56, 22 + 0xFFFF):
        begin = max(0, archive.nbytes - reach)
        tail = archive.read(begin, archive.nbytes - begin)
        at = tail.rfind(_END)
        while at >= 0:
            # The signature may stand in a comment: the true record's comment ends where the archive does.
            if at + 22 <= len(tail) and at + 22 + struct.unpack_from("<H", tail, at + 20)[0] == len(tail):
                return _described(archive, tail, begin, at)
            at = tail.rfind(_END, 0, at)
    raise _damaged(archive, "it has no directory at its end")


def _described(archive: Stretch, tail: bytes, begin: int, at: int) -> tuple[int, int, int]:
    count, nbytes, offset = struct.unpack_from("<HII", tail, at + 10)
    end = begin + at
    locator = archive.read(end - 20, 20) if end >= 20 else b""
    if locator[:4] == _LOCATOR64:  # torch always writes the wide record, for small archives too
        end = struct.unpack_from("<Q", locator, 8)[0]
        record = archive.read(end, 56) if end + 56 <= begin + at - 20 else b""
        if record[:4] != _END64:
            raise _damaged(archive, "its directory is broken")
        count, nbytes, offset = struct.unpack_from("<QQQ", record, 32)
    if offset + nbytes != end:
        raise _damaged(archive, "its directory does not lie where it says")
    return offset, nbytes, count
