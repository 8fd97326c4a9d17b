"""A limit to how fast a store is read and written, so that training keeps its share of the network.

`copy` and the uploader put it around a store. Never delays listings, small questions or deletions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from time import monotonic, sleep

from holdfast.storage.store import Buffer, Got, Store
from holdfast.storage.wrappers.wrapper import Wrapper, taken

BURST = 0.1
"""Seconds of the rate that may go at once, after a pause; and the slices in which threads take turns."""


class Throttled(Wrapper):
    """The same `Store`, whose `get` and `put` together move at most ``bytes_per_second`` on average.

    A token bucket: threads take turns in small slices, so that a large file does not keep a small one waiting. A
    chunk waits before it is handed on; a `get` waits before it returns, as its size is not known earlier.
    """

    def __init__(self, store: Store, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"bytes_per_second must be more than 0, not {bytes_per_second}")
        super().__init__(store)
        self._rate = float(bytes_per_second)
        self._slice = max(int(self._rate * BURST), 1)
        self._paid_until = 0.0  # by the clock of `monotonic`: before it the line is taken
        self._lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        answer = self.store.get(key, begin, end)
        self._pay(memoryview(answer.data).nbytes)
        return answer

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self.store.put(key, taken(chunks, self._take), nbytes)

    def _take(self, chunks: Iterator[Buffer]) -> Buffer:
        chunk = next(chunks)
        self._pay(memoryview(chunk).nbytes)
        return chunk

    def _pay(self, nbytes: int) -> None:
        """Wait until so many bytes may go; turns are in the order of asking, a slice each."""
        while nbytes > 0:
            part = min(nbytes, self._slice)
            nbytes -= part
            with self._lock:
                now = monotonic()
                self._paid_until = max(self._paid_until, now - BURST) + part / self._rate
                pause = self._paid_until - now
            if pause > 0:
                sleep(pause)
