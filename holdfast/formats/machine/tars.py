"""Tar archives as byte ranges: where each member lies, told by the headers alone.

`composer` lists plain archives with `members`, `scratch` walks unpacked ones with `entries`. Never makes a path of a
member's name, and follows no link of an archive.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.sources import Stretch
from holdfast.storage.place import Place

BLOCK = 512
MAX_MEMBERS = 1_000_000
MAX_EXTENSION = 1 << 20
"""Bytes of a long name or of extended attributes; names end at 4096."""

_KINDS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
    b"S": "a sparse file", b"M": "a part of a file of several volumes", b"V": "a volume's label",
}  # fmt: skip


class Entry(NamedTuple):
    """A regular file in an archive: its name, and where its bytes are, counted from the archive's beginning."""

    name: str
    begin: int
    nbytes: int


class Stream(Protocol):
    """Bytes that are read forwards. ``at``: how many were read or skipped."""

    at: int

    def read(self, nbytes: int) -> bytes:
        """The next bytes; fewer only at the end."""

    def skip(self, nbytes: int) -> None:
        """Pass over bytes."""


class Lying(Stream):
    """An archive that lies as it is: skipping costs nothing."""

    def __init__(self, archive: Stretch) -> None:
        self.archive, self.at = archive, 0

    def read(self, nbytes: int) -> bytes:
        found = self.archive.read(self.at, min(nbytes, self.archive.nbytes - self.at))
        self.at += len(found)
        return found

    def skip(self, nbytes: int) -> None:
        self.at = min(self.at + nbytes, self.archive.nbytes)


def is_tar(head: bytes) -> bool:
    """Whether an archive begins with these bytes, 512 at least."""
    return len(head) >= BLOCK and any(head[:BLOCK]) and _sum_fits(head[:BLOCK])


def members(archive: Stretch) -> dict[str, Stretch]:
    """The regular files of a plain archive by name. Raises Damaged, Unsupported."""
    found = {}
    for entry in entries(Lying(archive), archive.source.path):
        found[entry.name] = archive.part(entry.begin, entry.nbytes)
    return found


def entries(stream: Stream, where: Place) -> Iterator[Entry]:
    """The regular files of an archive, in order; of each the caller may read its bytes before asking for the next.

    Raises Damaged for what is no archive, is cut off, or names something outside of itself; Unsupported for links,
    devices and sparse files.
    """
    names: set[str] = set()
    extended: dict[str, str] = {}
    while header := _header(stream, where):
        kind, nbytes = header[156:157], _number(header[124:136], where)
        if kind in (b"L", b"K", b"x", b"g"):
            data = _extension(stream, nbytes, where)
            if kind == b"L":
                extended["path"] = _text(data)
            elif kind == b"x":
                extended.update(_attributes(data, where))
            continue
        name, nbytes = extended.get("path", _name(header)), _size(extended, nbytes, where)
        if any(key.startswith("GNU.sparse") for key in extended):
            kind = b"S"
        extended = {}
        if kind == b"5" or name.endswith("/"):
            continue
        if kind not in (b"0", b"\0", b"7"):
            raise Unsupported(
                f"{where}: its member {name[:200]!r} is {_KINDS.get(kind, f'of kind {kind!r}')}, and only plain files "
                "are read: unpack it and pack it again without (tar --dereference --hard-dereference)"
            )
        name = _inside(name, where)
        if name in names or len(names) >= MAX_MEMBERS:
            raise Damaged(f"{where} holds {name[:200]!r} twice" if name in names else f"{where}: too many members")
        names.add(name)
        begin = stream.at
        yield Entry(name, begin, nbytes)
        _skip_to(stream, begin + nbytes, where)
        stream.skip(-nbytes % BLOCK)


def _header(stream: Stream, where: Place) -> bytes:
    """The next header; none at the mark of the end."""
    header = stream.read(BLOCK)
    if len(header) < BLOCK:
        raise Damaged(f"{where} ends without the mark of an archive's end: it is truncated")
    if not any(header):
        return b""
    if not _sum_fits(header):
        raise Damaged(f"{where}: no valid header of a tar archive at byte {stream.at - BLOCK}")
    return header


def _sum_fits(header: bytes) -> bool:
    told = re.fullmatch(rb"[ \0]*([0-7]{1,8})[ \0]*", header[148:156])
    if told is None:
        return False
    rest = header[:148] + b" " * 8 + header[156:]
    signed = sum(struct.unpack(f"{BLOCK}b", rest))  # some old archivers
    return int(told[1], 8) in (sum(rest), signed)


def _number(field: bytes, where: Place) -> int:
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    told = re.fullmatch(rb"[ \0]*([0-7]*)[ \0]*", field)
    if told is None:
        raise Damaged(f"{where}: {field!r} is no size of a member")
    return int(told[1] or b"0", 8)


def _size(extended: dict[str, str], nbytes: int, where: Place) -> int:
    told = extended.get("size")
    if told is None:
        return nbytes
    if not re.fullmatch(r"[0-9]{1,19}", told):
        raise Damaged(f"{where}: {told[:40]!r} is no size of a member")
    return int(told)


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("utf-8", "replace")


def _name(header: bytes) -> str:
    name = _text(header[:100])
    prefix = _text(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _extension(stream: Stream, nbytes: int, where: Place) -> bytes:
    if nbytes > MAX_EXTENSION:
        raise Damaged(f"{where}: a name or attributes of {nbytes} bytes")
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise Damaged(f"{where} ends within a member's header: it is truncated")
    stream.skip(-nbytes % BLOCK)
    return data


def _attributes(data: bytes, where: Place) -> dict[str, str]:
    """Extended attributes: each is its own length, a space, key=value and a line's end."""
    found, at = {}, 0
    while at < len(data) and data[at]:
        told = re.compile(rb"([1-9][0-9]{0,7}) ([^=\n]+)=").match(data, at)
        end = at + int(told[1]) if told else 0
        if told is None or not told.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise Damaged(f"{where}: a member's extended attributes are broken")
        found[told[2].decode("utf-8", "replace")] = data[told.end() : end - 1].decode("utf-8", "replace")
        at = end
    return found


def _inside(name: str, where: Place) -> str:
    while name.startswith("./"):
        name = name[2:]
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Damaged(f"{where}: its member {name[:200]!r} is named as nothing inside of an archive is")
    return name


def _skip_to(stream: Stream, end: int, where: Place) -> None:
    if stream.at > end:
        raise Damaged(f"{where}: more of a member was read than it has")
    stream.skip(end - stream.at)
    if stream.at < end:
        raise Damaged(f"{where} ends within a member: it is truncated")
