"""What ranks send each other in a round, as it lies in the store: messages go up, verdicts come down.

`Call` makes and reads them, and a `Round` carries them. Never touches a store.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import xxhash

from holdfast.errors import Failure, Mismatch

NAMED = 20  # ranks that an error names at the most
_SMALL = 64  # bytes up to which nothing is compressed

Kind = TypeVar("Kind")


class Message(msgspec.Struct, array_like=True):
    """A rank's ``body``, or the ``failure`` that it has in its place. ``host`` is sent while it is news."""

    label: bytes
    body: bytes | None
    failure: Failure | None = None
    host: str | None = None


class Verdict(msgspec.Struct, array_like=True):
    """The one outcome of a round. ``absent``: ranks that did not come. ``hosts``, sent once: each and its ranks."""

    label: bytes
    answer: bytes | None
    failure: Failure | None
    absent: list[int]
    hosts: list[tuple[str, int]] | None = None
    settled: bool = True


def short(label: str) -> bytes:
    """Eight bytes that stand for a label, which tells calls apart."""
    return xxhash.xxh3_64_digest(label.encode())


def encode(message: object) -> bytes:
    """A list, or a struct like one, as it lies in the store."""
    data = msgspec.msgpack.encode(message)
    return data if len(data) <= _SMALL else zlib.compress(data, 1)


def decode(data: bytes, kind: type[Kind]) -> Kind:
    """The reverse of `encode`. Raises zlib.error or msgspec.MsgspecError."""
    if data[:1] == b"\x78":  # zlib begins so, a list in msgpack never
        data = zlib.decompress(data)
    return msgspec.msgpack.decode(data, type=kind)


def messages_of(data: bytes, levels: int) -> list[Message]:
    """The messages of all ranks, in order, from those of a block of so many ``levels``. Raises as `decode` does."""
    parts = [data]
    for _ in range(levels):
        parts = [part for block in parts for part in decode(block, list[bytes])]
    distinct = {part: decode(part, Message) for part in set(parts)}  # often they are few
    return [distinct[part] for part in parts]


def check_labels(messages: Sequence[Message], own: str, ask: Callable[[list[int]], dict[int, str]]) -> None:
    """Raise Mismatch if the labels differ; ``own`` is that of the first rank, and ``ask`` gets those of others."""
    first_with = {message.label: rank for rank, message in reversed(list(enumerate(messages)))}
    if len(first_with) == 1:
        return
    others = sorted(rank for rank in first_with.values() if rank)[:NAMED]
    labels = {0: own, **ask(others)}
    texts = [f"rank {r} is at {labels[r]!r}" if r in labels else f"rank {r} at something else" for r in [0, *others]]
    raise Mismatch(f"the ranks do different things: {', '.join(texts)}")
