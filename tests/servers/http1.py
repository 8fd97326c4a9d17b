"""HTTP/1.1 as a proxy needs it: where a head ends, how long the body is, and the bytes of it as they come.

Called by `tests.servers.faults`. Never holds a whole body, never changes a byte that it is not told to.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

BUFFER = 1 << 20
# Of what is read in search of the end of a head: more would be the body, and is copied for nothing.
HEAD = 16 << 10
# A shorter body is not worth a pipe.
PIPED = 64 << 10
NO_BODY = 0
CHUNKED = -1
UNTIL_CLOSE = -2


class Cut(Exception):
    """The other side closed in the middle of a message."""


class Head(NamedTuple):
    """The first line and the fields of a request or an answer, as they came."""

    raw: bytes
    first: tuple[str, str, str]
    fields: dict[str, str]

    def without(self, names: Collection[str]) -> Head:
        """Without these fields, named in lower case."""
        lines = self.raw[:-4].split(b"\r\n")
        kept = [lines[0], *(line for line in lines[1:] if line.split(b":", 1)[0].decode().lower() not in names)]
        return parsed(b"\r\n".join(kept) + b"\r\n\r\n")


def parsed(raw: bytes) -> Head:
    lines = raw[:-4].decode("latin-1").split("\r\n")
    words = lines[0].split(" ", 2)
    fields = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        fields[name.strip().lower()] = value.strip()
    return Head(raw, (words[0], words[1], words[2] if len(words) > 2 else ""), fields)


class Piece(NamedTuple):
    """Some bytes of a body: its data, or the lines around the chunks of it. Good until the next piece is asked for."""

    view: memoryview
    is_data: bool

    @property
    def size(self) -> int:
        return len(self.view)

    def send(self, to: socket.socket) -> None:
        to.sendall(self.view)


@dataclass
class Piped:
    """Some bytes of a body in a pipe: they go from socket to socket inside the kernel, and nobody sees them."""

    reader: int
    size: int
    left: int
    is_data: bool = True

    def send(self, to: socket.socket) -> None:
        while self.left:
            self.left -= os.splice(self.reader, to.fileno(), self.left)

    def drop(self) -> None:
        """What was not sent."""
        while self.left:
            self.left -= len(os.read(self.reader, self.left))


class Stream:
    """A socket that is read message by message."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._view = memoryview(bytearray(BUFFER))
        self._from = self._to = 0

    @property
    def is_empty(self) -> bool:
        """Nothing was read ahead."""
        return self._from == self._to

    def _more(self) -> bool:
        """Read behind what is there; False at the end."""
        if self._from and self._to == BUFFER:
            left = bytes(self._view[self._from : self._to])
            self._view[: len(left)] = left
            self._from, self._to = 0, len(left)
        if self._to == BUFFER:
            raise Cut(f"a head or a line longer than {BUFFER} bytes")
        got = self.sock.recv_into(self._view[self._to : self._to + HEAD])
        self._to += got
        return got > 0

    def _through(self, end: bytes) -> bytes | None:
        """The bytes up to and with ``end``; None if the other side closed before the first one."""
        searched = 0
        while True:
            found = bytes(self._view[self._from : self._to]).find(end, searched)
            if found >= 0:
                taken = bytes(self._view[self._from : self._from + found + len(end)])
                self._from += len(taken)
                return taken
            searched = max(0, self._to - self._from - len(end) + 1)
            if not self._more():
                if self._from == self._to:
                    return None
                raise Cut("in the middle of a line")

    def head(self) -> Head | None:
        """The next head; None if the other side has closed."""
        raw = self._through(b"\r\n\r\n")
        return parsed(raw) if raw else None

    def _some(self, limit: int) -> memoryview:
        if self._from == self._to:
            self._from = 0
            self._to = self.sock.recv_into(self._view[: min(limit, BUFFER)])
        view = self._view[self._from : min(self._to, self._from + limit)]
        self._from += len(view)
        return view

    def _exactly(self, size: int, limit: int) -> Iterator[Piece]:
        while size:
            view = self._some(min(size, limit))
            if not view:
                raise Cut(f"{size} bytes before the end of a body")
            size -= len(view)
            yield Piece(view, True)

    def _line(self) -> bytes:
        line = self._through(b"\r\n")
        if line is None:
            raise Cut("between two chunks of a body")
        return line

    def body(self, length: int, limit: int = BUFFER) -> Iterator[Piece]:
        """The body of the message whose head was read last, of `request_length` or `answer_length`."""
        if length >= 0:
            yield from self._exactly(length, limit)
        elif length == UNTIL_CLOSE:
            while view := self._some(limit):
                yield Piece(view, True)
        else:
            while True:
                line = self._line()
                yield Piece(memoryview(line), False)
                size = int(line.split(b";")[0], 16)
                if not size:
                    break
                yield from self._exactly(size, limit)
                yield Piece(memoryview(self._line()), False)
            while line != b"\r\n":
                line = self._line()
                yield Piece(memoryview(line), False)

    def body_unseen(self, length: int, limit: int = BUFFER) -> Iterator[Piece | Piped]:
        """The same, when nobody has to look at its bytes: at half the price, where there is a way (Linux)."""
        ahead = self._to - self._from
        if length - ahead < PIPED or not hasattr(os, "splice"):
            yield from self.body(length, limit)
            return
        yield from self._exactly(ahead, limit)
        size = length - ahead
        reader, writer = os.pipe()
        try:
            with contextlib.suppress(PermissionError):
                # A user may have so many wide pipes and no more; narrow ones work, too.
                fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, BUFFER)
            while size:
                got = os.splice(self.sock.fileno(), writer, min(size, limit))
                if not got:
                    raise Cut(f"{size} bytes before the end of a body")
                size -= got
                piece = Piped(reader, got, got)
                yield piece
                piece.drop()
        finally:
            os.close(reader)
            os.close(writer)


def _length(fields: dict[str, str], otherwise: int) -> int:
    if "chunked" in fields.get("transfer-encoding", "").lower():
        return CHUNKED
    return int(fields["content-length"]) if "content-length" in fields else otherwise


def request_length(head: Head) -> int:
    """Bytes of the body of a request, or CHUNKED."""
    return _length(head.fields, NO_BODY)


def answer_length(head: Head, method: str) -> int:
    """Bytes of the body of an answer to ``method``, or CHUNKED, or UNTIL_CLOSE."""
    status = int(head.first[1])
    if method == "HEAD" or status < 200 or status in (204, 304):
        return NO_BODY
    return _length(head.fields, UNTIL_CLOSE)
