"""Keys, and what follows from them alone: which are well formed, and which lie below a folder.

Stores that keep keys themselves call these (`memory.py`, `local.py`). Never asks a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.storage.store import Entry, Listing


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
