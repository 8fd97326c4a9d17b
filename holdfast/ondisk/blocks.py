"""Blocks: the unit of checksum, repair and retry.

Called by the writer, the reader and the data file. Never reads a file; sums come in and go out as text.
"""

from __future__ import annotations

from typing import Any

import xxhash

BLOCK = 8 << 20
"""A piece is cut into blocks of this many bytes from its start; the last one is shorter."""

Buffer = Any  # anything with the buffer protocol


def count(nbytes: int) -> int:
    """How many blocks a piece of ``nbytes`` has; an empty piece has none."""
    return -(-nbytes // BLOCK)


def block_sum(data: Buffer) -> str:
    """XXH3-64 of one block as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def running_sum() -> Any:
    """The same sum of bytes that come one after the other: ``update`` takes them, ``hexdigest`` tells it."""
    return xxhash.xxh3_64()


def digest(data: Buffer) -> str:
    """XXH3-128 as 32 hex digits: headers, manifests and attachments."""
    return xxhash.xxh3_128_hexdigest(data)
