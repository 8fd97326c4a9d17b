"""Faults of a disk: the n-th call fails, a write is torn, a bit flips, everything is slow."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

from holdfast.storage.local import disk
from holdfast.testing.orders import Hit, Order, Ordered, Tally, verbs_of

Verbs = str | Collection[str]
"""One call or several, as in `holdfast.storage.local.disk.Call`, or a group of them: "any", "change", "look", …"""


class Faults:
    """What an order has met so far. Valid after its ``with`` block too."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._closed: tuple[int, list[Hit]] | None = None

    @property
    def count(self) -> int:
        """How many calls fitted: with ``nth`` from 1 to this, a sweep leaves none out."""
        return self._tally.count if self._closed is None else self._closed[0]

    @property
    def hits(self) -> list[Hit]:
        """The calls that were hit: verb, path, offset in the file, number among those that fitted, process."""
        return self._tally.hits if self._closed is None else self._closed[1]

    def _close(self) -> None:
        self._closed = self.count, self.hits
        self._tally.close()


def faults(
    verbs: Verbs = "change", *, nth: int = 1, times: int = 1, error: int | str = errno.EIO,
    under: str | os.PathLike[str] | None = None, rank: int | None = None, done: bool = False,
) -> AbstractContextManager[Faults]:  # fmt: skip
    """Inside the block the ``nth`` call of these ``verbs`` (the first is 1) fails with ``error``.

    Of this process, in any thread, and of its writer process: they are counted together, by each rank for itself.
    ``times`` calls in a row fail, with 0 all from the nth on. ``error`` is a number or a name, as ``"ENOSPC"``.
    ``under``: calls on paths at or below it alone. Those on a manager's journal (``.journal`` in the root of a run) are
    neither counted nor hit unless ``under`` names that folder or a file in it: a thread of its own makes them, at any
    moment. ``rank``: those of that rank alone, wherever the block stands.
    ``done``: the call is carried out and fails all the same, as a network file system may do. Raises ValueError.
    """
    number = getattr(errno, error, None) if isinstance(error, str) else error
    if not isinstance(number, int):
        raise ValueError(f"{error!r} is no error of a system: take a number, or a name of the module errno")
    return _ordered(_order("fail", verbs, nth, times, under, rank, error=number, done=done))


def torn_writes(
    *, nth: int = 1, times: int = 1, error: int = errno.EIO, under: str | os.PathLike[str] | None = None,
    rank: int | None = None,
) -> AbstractContextManager[Faults]:  # fmt: skip
    """Inside the block the ``nth`` write stops in its middle, and fails with ``error``."""
    return _ordered(_order("tear", "write", nth, times, under, rank, error=error))


def short_writes(
    *, nth: int = 1, times: int = 0, under: str | os.PathLike[str] | None = None, rank: int | None = None
) -> AbstractContextManager[Faults]:
    """Inside the block writes write the first half of what they are given, and say so: no failure, and no loss."""
    return _ordered(_order("shorten", "write", nth, times, under, rank))


def flip(
    verbs: Verbs = "write", *, nth: int = 1, times: int = 1, seed: int = 0,
    under: str | os.PathLike[str] | None = None, rank: int | None = None,
) -> AbstractContextManager[Faults]:  # fmt: skip
    """Inside the block one bit of what the ``nth`` write has written, or read has brought, is another; nobody says so.

    ``verbs`` is "write" or "read".
    """
    if not set(verbs_of(verbs)) <= {"write", "read"}:
        raise ValueError(f'what flips is what a "write" or a "read" moves, not {verbs!r}')
    return _ordered(_order("flip", verbs, nth, times, under, rank, seed=seed))


def slow(
    verbs: Verbs = "any", *, seconds_per_call: float = 0.0, bytes_per_second: float = 0.0, nth: int = 1, times: int = 0,
    under: str | os.PathLike[str] | None = None, rank: int | None = None,
) -> AbstractContextManager[Faults]:  # fmt: skip
    """Inside the block each call takes so many seconds more, and those that move bytes the time of so many more."""
    order = _order("slow", verbs, nth, times, under, rank, seconds=seconds_per_call, rate=bytes_per_second)
    return _ordered(order)


def count_calls(
    verbs: Verbs = "any", *, under: str | os.PathLike[str] | None = None, rank: int | None = None
) -> AbstractContextManager[Faults]:
    """Nothing fails; ``count`` and ``hits`` say how many calls there were, and which."""
    return _ordered(_order("count", verbs, 1, 0, under, rank))


def this_rank() -> int:
    """The global rank of this process; what a launcher says before the process group is made, 0 without one."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        return int(dist.get_rank())
    return int(os.environ.get("RANK", "0"))


def _order(
    what: str, verbs: Verbs, nth: int, times: int, under: str | os.PathLike[str] | None, rank: int | None, *,
    error: int = errno.EIO, done: bool = False, seconds: float = 0.0, rate: float = 0.0, seed: int = 0,
) -> Order:  # fmt: skip
    if nth < 1 or times < 0:
        raise ValueError(f"nth={nth} counts from 1, and times={times} from 0, which stands for all")
    root = "" if under is None else os.path.abspath(under)
    return Order(what, verbs_of(verbs), nth, times, root, rank, error, done, seconds, rate, seed)


@contextmanager
def _ordered(order: Order) -> Iterator[Faults]:
    met = Faults(Tally())
    try:
        with disk.hooked(Ordered(order, met._tally, this_rank)):
            yield met
    finally:
        met._close()
