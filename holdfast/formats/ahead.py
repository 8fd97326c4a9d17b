"""What a store has to be asked about, asked for many at once: where tensors lie, and what is in many files.

`assemble.ForeignFiles` looks for tensors with it, and so do formats of many files for these. Never keeps a byte: the
store around which `detect` put a memory does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from holdfast.errors import HoldfastError
from holdfast.formats.sources import Stretch, file
from holdfast.read.files import ASKERS
from holdfast.storage.place import Place

BATCH = 64
"""Files that are glanced at together: what is read of them is kept until they are opened."""

MOST = 4 * ASKERS

T = TypeVar("T")


class Ahead:
    """Stretches in the order in which they are likely to be wanted."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        found = (s for s in stretches if type(s) is not Stretch and s.source.path.is_remote)
        self._order = [*dict.fromkeys(found)]
        self._at = {stretch: i for i, stretch in enumerate(self._order)}
        self._asked: set[int] = set()
        self._looked_for: set[int] = set()
        self._lock = threading.Lock()

    def located(self, stretch: Stretch) -> Stretch:
        """The stretch at its true place. The more have been asked for, the more that follow are looked for with it."""
        at = self._at.get(stretch)
        with self._lock:
            if at is not None:
                self._asked.add(at)
                if at not in self._looked_for:
                    self._look_from(at)
        return stretch.located()

    def _look_from(self, at: int) -> None:
        count = min(2 * len(self._asked) - len(self._looked_for), MOST)
        following = (i for i in range(at, len(self._order)) if i not in self._looked_for)
        batch = [*islice(following, count)]
        self._looked_for.update(batch)
        with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-look") as pool:
            list(pool.map(lambda i: _try_to_locate(self._order[i]), batch))


def _try_to_locate(stretch: Stretch) -> None:
    with suppress(HoldfastError, OSError):  # whoever wants that one is told
        stretch.located()


def glanced(items: Iterable[T], path_of: Callable[[T], Place]) -> Iterator[T]:
    """The items; of the files of those in a store both ends are read before, of many at once."""
    waiting = iter(items)
    while batch := [*islice(waiting, BATCH)]:
        if len(batch) > 1 and path_of(batch[0]).is_remote:
            with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-look") as pool:
                list(pool.map(_glance, map(path_of, batch)))
        yield from batch


def _glance(path: Place) -> None:
    with suppress(HoldfastError, OSError):  # whoever opens it is told
        found = file(path)
        for begin in (0, found.nbytes - 1):
            found.read(max(begin, 0), 1)
