"""How far the ranks of a node are, sent to the first of them as datagrams over a local socket, for its progress bar.

`progress` makes a `Hearing` while it shows a bar, and on all other ranks a `Telling`. Nothing of it touches a file,
waits for another rank, or costs more than a few calls a second; a rank that is not heard is not shown.

We rejected the heartbeats in the store, because they can be half a minute apart. We rejected a file in shared memory,
because it stays behind when its ranks are killed.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

PAUSE = 0.2
"""Seconds between two words of a rank."""

_LARGEST = 1 << 13  # bytes of a word


class Share(NamedTuple):
    """Bytes that one rank has done, of how many."""

    done: int
    total: int


class _Word(msgspec.Struct, array_like=True):
    rank: int
    name: str
    done: int
    total: int


def _address() -> bytes:
    """A name in the system's own name space: no file, gone with its socket. Alike on the ranks of one start."""
    parts = [os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")]
    return b"\0" + "/".join(["holdfast-progress", str(os.getuid()), *parts]).encode()[:100]


def _socket() -> socket.socket:
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    opened.setblocking(False)
    return opened


class Telling:
    """Tells the first rank of this node how far this one is."""

    def __init__(self, rank: int) -> None:
        self._rank, self._socket, self._address = rank, _socket(), _address()
        self._told: dict[str, float] = {}

    def tell(self, name: str, share: Share, *, last: bool = False) -> None:
        """This much of a task is done; most words in between are left out."""
        now = time.monotonic()
        if last:
            if self._told.pop(name, None) is None:
                return
        elif now - self._told.get(name, -PAUSE) < PAUSE:
            return
        else:
            self._told[name] = now
        with suppress(OSError, UnicodeError):  # nobody listens, or is behind; or a path that is no text
            self._socket.sendto(msgspec.msgpack.encode(_Word(self._rank, name, *share)), self._address)


class Hearing:
    """Calls ``heard(rank, name, share)`` for what the others tell, from a thread of its own, until it is closed."""

    def __init__(self, heard: Callable[[int, str, Share], None]) -> None:
        self._heard, self._socket = heard, _socket()
        self._closed = False
        with suppress(OSError):  # another bar of this user listens there: then this one shows its own share
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(_address())
            self._socket.settimeout(PAUSE)
            threading.Thread(target=self._run, name="holdfast-progress", daemon=True).start()

    def close(self) -> None:
        """Listen no more; does not wait for the thread."""
        self._closed = True
        self._socket.close()

    def _run(self) -> None:
        while not self._closed:
            try:
                data, credentials, _, _ = self._socket.recvmsg(_LARGEST, socket.CMSG_SPACE(12))
            except TimeoutError:
                continue
            except OSError:  # it is closed
                return
            if not _of_this_user(credentials):  # the name space is everybody's
                continue
            with suppress(msgspec.MsgspecError, UnicodeError):  # of another version
                word = msgspec.msgpack.decode(data, type=_Word)
                self._heard(word.rank, word.name, Share(word.done, word.total))


def _of_this_user(ancillary: list[tuple[int, int, bytes]]) -> bool:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return bool(struct.unpack("3i", data[:12])[1] == os.getuid())
    return False
