"""What ranks send each other in a round, and the tree of blocks of neighbours by which it reaches the first rank.

`Call` makes and reads messages, and a `Round` carries them. Touches no store. Every rank works out the same tree from
the number of ranks alone, so the tree never depends on what a rank may have missed.

We rejected blocks by host, because every rank would have to know the same hosts before the tree stands, and a rank that
missed a round does not. We rejected a small store on each node, because a leader that freezes would freeze the members
of its block inside a call to its store.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

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


FLAT = 64
"""Ranks up to which the first one hears each of them itself."""

FAN_IN = 128
"""Blocks, or ranks, that one rank hears at the most."""


class Node(NamedTuple):
    """A block of neighbours, the ``number``-th of its level; on level 0 a rank by itself. Its first rank leads it."""

    level: int
    number: int


@dataclass(frozen=True)
class Tree:
    """Blocks of ``width`` blocks each, on so many ``levels`` that the topmost, the root, holds all ranks."""

    size: int
    width: int
    levels: int

    @property
    def root(self) -> Node:
        return Node(self.levels, 0)

    def children(self, node: Node) -> list[Node]:
        """The blocks, or ranks, that the leader of a block hears."""
        first, reach = node.number * self.width, self.width ** (node.level - 1)
        end = min(first + self.width, -(-self.size // reach))
        return [Node(node.level - 1, number) for number in range(first, end)]

    def parent(self, node: Node) -> Node:
        return Node(node.level + 1, node.number // self.width)

    def led_by(self, rank: int) -> list[Node]:
        """The blocks that a rank leads, from the smallest to the largest."""
        levels = range(1, self.levels + 1)
        return [Node(level, rank // self.width**level) for level in levels if rank % self.width**level == 0]

    def heard_by(self, rank: int) -> Node:
        """The block from whose leader a rank hears the verdict; the root itself for the first rank."""
        led = self.led_by(rank)
        highest = led[-1] if led else Node(0, rank)
        return highest if highest == self.root else self.parent(highest)


@lru_cache(maxsize=64)
def tree_of(size: int, fan_in: int = FAN_IN) -> Tree:
    """The tree with the fewest levels, of blocks as equal as can be. ``fan_in`` is at least 2."""
    if size <= min(fan_in, FLAT):
        return Tree(size, max(size, 2), 1)
    levels = 2
    while fan_in**levels < size:
        levels += 1
    width = next(width for width in range(2, fan_in + 1) if width**levels >= size)
    return Tree(size, width, levels)
