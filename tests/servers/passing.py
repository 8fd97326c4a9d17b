"""One request on its way through a proxy, and its answer back: at a pace, and spoiled where a fault says so.

Called by `tests.servers.faults`, in the thread of a connection. Never decides which request has which fault.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tests.servers.http1 import BUFFER, Cut, Head, Piece, Piped, Stream, answer_length, request_length
from tests.servers.rules import Fault

UPLOAD = ("reset_upload", "flip_upload")
BODY = ("reset_body", "truncate", "stall_body", "slow_body", "flip")
# The other side has closed; where poll cannot tell that, only a reset or the end of the proxy is seen.
CLOSED = getattr(select, "POLLRDHUP", 0)


class Reset(Exception):
    """The client's connection ends here, with a reset."""


class Close(Exception):
    """The client's connection ends here, in an orderly way."""


@dataclass
class Exchange:
    """One request that came, and what became of it."""

    number: int
    method: str
    path: str
    query: str
    range: str
    # Bytes of bodies, counted before they are sent on.
    up: int = 0
    down: int = 0
    # 0: the client was sent no answer.
    status: int = 0
    # The kind of the fault that took effect on it.
    fault: str = ""
    # By the clock of time.monotonic(). 0.0: not over; the client may have its answer a moment before it is.
    began: float = 0.0
    ended: float = 0.0


class Pace:
    """At most ``rate`` bytes a second, over all threads; None: no limit."""

    # Less than this is not slept: no clock is that exact, and what is owed is not forgotten.
    GRAIN = 0.002

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._lock = threading.Lock()
        self._free = 0.0

    def take(self, size: int) -> None:
        if self.rate is None:
            return
        with self._lock:
            now = time.monotonic()
            self._free = max(self._free, now) + size / self.rate
            owed = self._free - now
        if owed > self.GRAIN:
            time.sleep(owed)

    @property
    def piece(self) -> int:
        """So many bytes at once: with more, the pace would be a stutter."""
        return BUFFER if self.rate is None else min(BUFFER, max(4096, int(self.rate / 100)))


@dataclass
class Passing:
    """A connection of a client, the one to the server behind it, and the request that is passing."""

    client: Stream
    server: Stream
    up: Pace
    down: Pace
    exchange: Exchange
    fault: Fault | None

    def run(self, head: Head) -> None:
        """Raises Reset or Close when it was the last request of this connection."""
        kind = self.fault.kind if self.fault else ""
        waits = "100-continue" in head.fields.get("expect", "").lower()
        length = request_length(head)
        if kind in ("reset", "stall", "status"):
            self.exchange.fault = kind
        if kind == "reset":
            raise Reset
        if kind == "stall":
            self._silence()
        if self.fault is not None and kind == "status":
            self._refuse(self.fault, 0 if waits else length)
            if waits:
                raise Close
            return
        self.server.sock.sendall(head.raw)
        if waits:
            answer = self._head()
            if int(answer.first[1]) >= 200:
                self._answer(answer)
                raise Close
            self.client.sock.sendall(answer.raw)
        complete = self._upload(length)
        answer = self._head()
        while int(answer.first[1]) < 200:
            self.client.sock.sendall(answer.raw)
            answer = self._head()
        if kind == "reset_after":
            for _ in self.server.body(answer_length(answer, self.exchange.method)):
                pass
            self.exchange.fault = kind
            raise Reset
        self._answer(answer)
        if not complete:
            raise Close

    def _head(self) -> Head:
        answer = self.server.head()
        if answer is None:
            # As without a proxy: the client, too, sees a close and no answer.
            raise Close
        return answer

    def _refuse(self, fault: Fault, length: int) -> None:
        for piece in self.client.body(length, self.up.piece):
            self.exchange.up += piece.size * piece.is_data
            self.up.take(piece.size)
        self.exchange.status = fault.status
        self.client.sock.sendall(fault.answer(self.exchange.method))

    def _upload(self, length: int) -> bool:
        """Pass the request's body; False if the server answered, or closed, before it had all of it."""
        listens = True
        poll = select.poll()
        poll.register(self.server.sock, select.POLLIN)
        for piece in self._pieces(self.client, length, self.up, UPLOAD):
            self.exchange.up += piece.size * piece.is_data
            self.up.take(piece.size)
            if not listens or poll.poll(0):
                # The rest is taken from the client all the same: it would else see a reset before the answer.
                listens = False
                continue
            try:
                piece.send(self.server.sock)
            except (BrokenPipeError, ConnectionResetError):
                listens = False
        return listens

    def _answer(self, head: Head) -> None:
        length = answer_length(head, self.exchange.method)
        self.exchange.status = int(head.first[1])
        self.client.sock.sendall(head.raw)
        for piece in self._pieces(self.server, length, self.down, BODY):
            self.exchange.down += piece.size * piece.is_data
            self.down.take(piece.size)
            piece.send(self.client.sock)

    def _pieces(self, source: Stream, length: int, pace: Pace, kinds: tuple[str, ...]) -> Iterator[Piece | Piped]:
        """The pieces of a body, with the fault in it if it is one of ``kinds``."""
        if self.fault is None or self.fault.kind not in kinds:
            yield from source.body_unseen(length, pace.piece)
            return
        at = self.fault.at
        if at is None and length > 0:
            at = length // 2
        seen = 0
        for view, is_data in source.body(length, pace.piece):
            if is_data and at is None:
                # How long it will be is not known: the middle of its first piece.
                at = len(view) // 2
            here = len(view) if at is None else at - seen
            if is_data and self.fault.kind == "slow_body":
                yield from self._trickle(view, self.fault)
            elif is_data and 0 <= here < len(view):
                self.exchange.fault = self.fault.kind
                if self.fault.kind in ("flip", "flip_upload"):
                    view[here] ^= 1
                    yield Piece(view, True)
                else:
                    yield Piece(view[:here], True)
                    self._end()
            else:
                yield Piece(view, is_data)
            seen += len(view) * is_data

    def _trickle(self, view: memoryview, fault: Fault) -> Iterator[Piece]:
        self.exchange.fault = fault.kind
        size = max(1, fault.rate // 50)
        for start in range(0, len(view), size):
            time.sleep(size / fault.rate)
            yield Piece(view[start : start + size], True)

    def _end(self) -> None:
        """In the middle of a body."""
        assert self.fault is not None
        if self.fault.kind == "stall_body":
            self._silence()
        if self.fault.kind == "truncate":
            raise Close
        raise Reset

    def _silence(self) -> None:
        """Until the client goes, or the proxy is stopped, which shuts the socket down."""
        poll = select.poll()
        poll.register(self.client.sock, CLOSED)
        poll.poll()
        raise Reset


def is_next(client: Stream, server: socket.socket) -> bool:
    """Wait for the client's next request; False if one side closes instead, which the other is to see."""
    if not client.is_empty:
        return True
    poll = select.poll()
    poll.register(client.sock, select.POLLIN)
    poll.register(server, select.POLLIN)
    return client.sock.fileno() in {fd for fd, _ in poll.poll()}


__all__ = ["Close", "Cut", "Exchange", "Pace", "Passing", "Reset", "is_next"]
