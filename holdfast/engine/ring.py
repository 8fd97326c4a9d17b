"""A few windows that go round: the staging memory of one save that is waited for, and the threads that write it.

`save` makes one, and whoever takes over the share of lost ranks. Never grows with the state.
"""

from __future__ import annotations

from holdfast.engine.arena import WINDOW, Slot, windows_for
from holdfast.engine.courier import SECTOR
from holdfast.engine.worker import ThreadWorker

WINDOWS = 4

PART, PARTS = 8 << 20, 12
"""Windows for a store: as large as a part of an upload, and so many that latency is hidden; 96 MiB."""


class Ring:
    """A few windows that go round, and threads that write them, for one save."""

    def __init__(self, *, remote: bool = False) -> None:
        self._worker = ThreadWorker()
        self._window, self._most = (PART, PARTS) if remote else (WINDOW, WINDOWS)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def take(self, sizes: list[int], *, pinned: bool) -> Slot:
        """Windows as large as the largest file needs; for a store, as all files need together; no more than a few."""
        largest = max([1, *sizes])
        window = min(self._window, -(-largest // SECTOR) * SECTOR)
        slot = Slot(0, self._worker, window=window)
        slot.reserve(min(self._most, windows_for(sizes if self._window == PART else [largest], window) or 1))
        return slot

    def give(self) -> None:
        """The memory goes with the save."""
