"""The seam to whatever keeps files: six verbs, no more than every object store has.

`StorePlace`, the wrappers beside this file and a user's own backend speak it. Never a tensor, a rank or a format.

We rejected locks in a store: leases cost requests for as long as a save lasts, and need clocks. File names hold the id
of their save, so two saves never collide, and one conditional `create` of the manifest decides which of them is
committed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

if sys.version_info >= (3, 12):
    from collections.abc import Buffer as Buffer
else:
    from typing_extensions import Buffer as Buffer


class Entry(NamedTuple):
    """One file: its key, its size, and when it was last written (seconds since the epoch, by the store's clock).

    ``content`` differs for other content, where a store knows such a sum of it.
    """

    key: str
    nbytes: int
    modified: float
    content: str = ""


class Listing(NamedTuple):
    """What lies below a prefix: files, and (if not ``deep``) the keys of the folders one level down; both sorted."""

    files: list[Entry]
    folders: list[str]


class Got(NamedTuple):
    """Bytes of a file, and how long the whole file is."""

    data: Buffer
    nbytes: int


class Store(Protocol):
    """A flat space of keys (``run/step-7/manifest.json``: parts joined by ``/``, none empty, ``.`` or ``..``).

    Verbs may be called from any thread, also at once. A file is seen whole or not at all, and once it is written every
    reader sees it. What fails raises OSError with a text that says why; an attribute ``transient`` that is True says
    that another attempt may succeed. ``url`` is what errors call the store, without a trailing ``/``.
    """

    @property
    def url(self) -> str: ...

    def list(self, prefix: str, *, deep: bool) -> Listing:
        """Files below ``prefix`` (a folder's key; ``""`` is all): all of them, or with ``deep=False`` one level.

        Empty for a prefix below which there is nothing.
        """

    def size(self, key: str) -> int | None:
        """Bytes of a file; None if there is none of this key."""

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        """Bytes ``begin:end`` of a file, clipped to its end; all by default. Raises FileNotFoundError."""

    def create(self, key: str, data: bytes) -> bool:
        """Write a small file if there is none of this key: False, and nothing is changed, if there is one.

        Of several callers at once exactly one gets True; each has other ``data`` (the same bytes are taken for a
        repeated call whose first answer was lost).
        """

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        """Write a file of ``nbytes`` from ``chunks`` in order, whole or not at all; an older one is replaced.

        Durable on return. The memory of a chunk may be used again as soon as nothing refers to the chunk: a store
        drops each when its bytes are on their way for good. What ``chunks`` raises ends the upload, leaves nothing
        behind, and is raised; chunks that do not add up to ``nbytes`` end it too.
        """

    def delete(self, keys: Sequence[str]) -> None:
        """Delete files; those that are not there are passed over."""


def check_key(url: str, key: str) -> str:
    """The key, if it is one: parts joined by ``/``, none empty, ``.`` or ``..``. Raises ValueError for all else."""
    if any(part in ("", ".", "..") for part in key.split("/")) or "\0" in key:
        raise ValueError(
            f"{key!r} is no key for {url}: a key is names joined by '/', none of them empty, '.' or '..', as a/b.bin"
        )
    return key


def listing(entries: Iterable[Entry], prefix: str, *, deep: bool) -> Listing:
    """What of ``entries`` lies below ``prefix``, as `Store.list` tells it."""
    above = f"{prefix}/" if prefix else ""
    below = sorted(entry for entry in entries if entry.key.startswith(above))
    if deep:
        return Listing(below, [])
    folders = {above + entry.key[len(above) :].partition("/")[0] for entry in below if "/" in entry.key[len(above) :]}
    return Listing([entry for entry in below if "/" not in entry.key[len(above) :]], sorted(folders))


def named(keys: Sequence[str]) -> str:
    """The keys of a verb, for an error that speaks of one file or of many."""
    return f"{keys[0]} and {len(keys) - 1} more" if len(keys) > 1 else "".join(keys)


def clipped(begin: int, end: int | None, nbytes: int) -> tuple[int, int]:
    """The range ``begin:end`` of a file of ``nbytes`` as far as the file goes; ``begin`` is never after ``end``."""
    end = nbytes if end is None else min(end, nbytes)
    return min(begin, end), end
