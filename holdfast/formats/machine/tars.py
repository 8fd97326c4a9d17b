"""Tar archives as byte ranges: where each member lies, from the headers alone.

`tarfile` reads the headers but does not walk: it accepts an archive that is cut off or broken at a later header.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from typing import NamedTuple, Protocol

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.sources import Stretch
from holdfast.storage.place import Place

BLOCK = tarfile.BLOCKSIZE
MAX_MEMBERS = 1_000_000
MAX_EXTENSION = 1 << 20
"""Bytes of a long name or of extended attributes. A name has at most 4096."""

_KINDS = {
    b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device", b"6": "a pipe",
    b"S": "a sparse file", b"M": "a part of a file of several volumes", b"V": "a volume's label",
}  # fmt: skip
_ATTRIBUTE = re.compile(rb"([1-9][0-9]{0,7}) ([^=\n]+)=")


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


class PlainStream(Stream):
    """An archive that is not compressed: skipping costs nothing."""

    def __init__(self, archive: Stretch) -> None:
        self.archive, self.at = archive, 0

    def read(self, nbytes: int) -> bytes:
        data = self.archive.read(self.at, min(nbytes, self.archive.nbytes - self.at))
        self.at += len(data)
        return data

    def skip(self, nbytes: int) -> None:
        self.at = min(self.at + nbytes, self.archive.nbytes)


def is_tar(head: bytes) -> bool:
    """Whether an archive begins with these bytes, 512 at least."""
    try:
        return bool(tarfile.TarInfo.frombuf(head[:BLOCK], "utf-8", "replace"))
    except tarfile.HeaderError:
        return False


def members(archive: Stretch) -> dict[str, Stretch]:
    """The regular files of a plain archive by name. Raises Damaged, Unsupported."""
    return {
        entry.name: archive.part(entry.begin, entry.nbytes)
        for entry in entries(PlainStream(archive), archive.source.path)
    }


def entries(stream: Stream, where: Place) -> Iterator[Entry]:
    """The regular files of an archive, in order. The caller may read the bytes of each before it asks for the next.

    Raises Damaged if it is no archive, is cut off, or has names that lead out of it; Unsupported for links, devices
    and sparse files.
    """
    names: set[str] = set()
    extended: dict[str, str] = {}
    while header := _header(stream, where):
        kind = header.type
        if kind in (b"L", b"K", b"x", b"g"):
            data = _extension(stream, header.size, where)
            if kind == b"L":
                extended["path"] = data.split(b"\0", 1)[0].decode("utf-8", "replace")
            elif kind == b"x":
                extended.update(_attributes(data, where))
            continue
        name = extended.get("path", header.name)
        nbytes = _size(extended["size"], where) if "size" in extended else header.size
        if any(key.startswith("GNU.sparse") for key in extended):
            kind = b"S"
        extended = {}
        if kind == tarfile.DIRTYPE or name.endswith("/"):
            continue
        if kind not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE):
            raise Unsupported(
                f"{where}: its member {name[:200]!r} is {_KINDS.get(kind, f'of kind {kind!r}')}, and only plain files "
                "are read: unpack it and pack it again without (tar --dereference --hard-dereference)"
            )
        name = _inside(name, where)
        if name in names or len(names) >= MAX_MEMBERS:
            raise Damaged(f"{where} holds {name[:200]!r} twice" if name in names else f"{where}: too many members")
        names.add(name)
        begin, end = stream.at, stream.at + nbytes
        yield Entry(name, begin, nbytes)
        if stream.at > end:
            raise Damaged(f"{where}: more of a member was read than it has")
        stream.skip(end - stream.at)
        if stream.at < end:
            raise Damaged(f"{where} ends within a member: it is truncated")
        stream.skip(-nbytes % BLOCK)


def _header(stream: Stream, where: Place) -> tarfile.TarInfo | None:
    """The next header, or None at the mark that ends the archive."""
    data = stream.read(BLOCK)
    if len(data) < BLOCK:
        raise Damaged(f"{where} ends without the mark of an archive's end: it is truncated")
    if not any(data):
        return None
    try:
        header = tarfile.TarInfo.frombuf(data, "utf-8", "replace")
    except tarfile.HeaderError:
        raise Damaged(f"{where}: no valid header of a tar archive at byte {stream.at - BLOCK}") from None
    if header.size < 0:
        raise Damaged(f"{where}: a member of {header.size} bytes")
    return header


def _size(text: str, where: Place) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", text):
        raise Damaged(f"{where}: {text[:40]!r} is no size of a member")
    return int(text)


def _extension(stream: Stream, nbytes: int, where: Place) -> bytes:
    if nbytes > MAX_EXTENSION:
        raise Damaged(f"{where}: a name or attributes of {nbytes} bytes")
    data = stream.read(nbytes)
    if len(data) < nbytes:
        raise Damaged(f"{where} ends within a member's header: it is truncated")
    stream.skip(-nbytes % BLOCK)
    return data


def _attributes(data: bytes, where: Place) -> dict[str, str]:
    """Extended attributes: each is its own length, a space, key=value and a newline. `tarfile` ignores broken ones."""
    attributes, at = {}, 0
    while at < len(data) and data[at]:
        match = _ATTRIBUTE.match(data, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise Damaged(f"{where}: a member's extended attributes are broken")
        value = data[match.end() : end - 1]
        attributes[match[2].decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        at = end
    return attributes


def _inside(name: str, where: Place) -> str:
    while name.startswith("./"):
        name = name[2:]
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise Damaged(f"{where}: its member {name[:200]!r} has a name that no file in an archive can have")
    return name
