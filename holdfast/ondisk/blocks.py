"""Blocks: the unit of checksum, repair and retry.

Called by the writer, the reader and the data file. Never reads a file; sums come in and go out as text.
"""

from __future__ import annotations

import hashlib
from typing import Any

import xxhash

BLOCK = 8 << 20
"""A piece is cut into blocks of this many bytes from its start; the last one is shorter."""

STRONG = 64
"""Hex digits of a sum that cannot be forged."""

Bytes = Any  # anything with the buffer protocol


def count(nbytes: int) -> int:
    """How many blocks a piece of ``nbytes`` has; an empty piece has none."""
    return -(-nbytes // BLOCK)


def block_sum(data: Bytes) -> str:
    """XXH3-64 of one block as 16 hex digits."""
    return xxhash.xxh3_64_hexdigest(data)


def running_sum(known: str = "") -> Any:
    """The sum of bytes that come one after the other: ``update`` takes them, ``hexdigest`` returns it.

    Of the kind of a ``known`` one, to be compared with: by default XXH3-64.
    """
    return hashlib.sha256() if len(known) == STRONG else xxhash.xxh3_64()


def is_sum(data: Bytes, known: str) -> bool:
    """Whether ``known``, which by its length is an XXH3-64 or a SHA-256, is the sum of one block."""
    if len(known) == STRONG:
        return strong_sum(data) == known
    return xxhash.xxh3_64_hexdigest(data) == known


def strong_sum(data: Bytes) -> str:
    """SHA-256 as 64 hex digits, which cannot be forged, where a signature has to cover it."""
    return hashlib.sha256(data).hexdigest()


def digest(data: Bytes) -> str:
    """XXH3-128 as 32 hex digits: headers, manifests and attachments."""
    return xxhash.xxh3_128_hexdigest(data)
