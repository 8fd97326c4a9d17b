"""A second request for a read that takes unusually long; the faster answer counts.

`load` puts it around stores, which have long tails. Never repeats a read that failed, nor a write.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from time import monotonic

from holdfast.events import log
from holdfast.storage.store import Got, Store
from holdfast.storage.wrappers.retrying import is_transient
from holdfast.storage.wrappers.wrapper import Wrapper, in_thread

KNOWN = 8
"""Answers of a size class from which on it is known what is usual."""

RECENT = 128
"""Answers of a size class that are looked at."""

ALWAYS = 4
"""Hedges that are allowed however few requests there were."""

ABANDONED = 16
"""Stragglers that may be under way, each in a thread of its own, before there are no more hedges."""


class Hedged(Wrapper):
    """The same `Store`, whose `get` sends a second request if the answer takes long, and takes the first answer.

    Long is ``factor`` times the 95th percentile of recent gets of about this size (within a factor of two), and at
    least ``least`` seconds. At most the ``share`` of all gets, and four, are sent twice. ``hedges`` counts them,
    ``wasted`` the bytes that were received twice.
    """

    def __init__(self, store: Store, *, factor: float = 3.0, least: float = 0.5, share: float = 0.05) -> None:
        super().__init__(store)
        self._factor, self._least, self._share = factor, least, share
        self.hedges = self.wasted = 0
        self._gets = self._stragglers = 0
        self._seconds: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=RECENT))
        self._lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        size_class = -1 if end is None else max(end - begin, 0).bit_length()

        def ask() -> Got:
            began = monotonic()
            answer = self.store.get(key, begin, end)
            with self._lock:
                self._seconds[size_class].append(monotonic() - began)
            return answer

        with self._lock:
            self._gets += 1
            patience = self._patience(size_class) if self._may_hedge() else None
        if patience is None:
            return ask()
        first = in_thread(ask, "get")
        wait([first], patience)
        if first.done() or not self._hedge():
            return first.result()
        log.debug("get of %s/%s takes longer than %.2f s: requested again", self.url, key, patience)
        return self._faster([first, in_thread(ask, "get")])

    def _patience(self, size_class: int) -> float | None:
        """Seconds after which a get of this size has taken long; None if it is not known."""
        usual = sorted(self._seconds[size_class])
        if len(usual) < KNOWN:
            return None
        return max(self._factor * usual[math.ceil(0.95 * len(usual)) - 1], self._least)

    def _may_hedge(self) -> bool:
        return self._stragglers < ABANDONED and self.hedges < ALWAYS + self._share * self._gets

    def _hedge(self) -> bool:
        with self._lock:
            may = self._may_hedge()
            self.hedges += may
            return may

    def _faster(self, requests: Sequence[Future[Got]]) -> Got:
        """The first answer, an error that will not pass included; the other is not waited for."""
        pending = set(requests)
        while True:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                if not is_transient(future.exception()):
                    self._leave([other for other in requests if other is not future])
                    return future.result()
            if not pending:
                return requests[0].result()

    def _leave(self, stragglers: Sequence[Future[Got]]) -> None:
        with self._lock:
            self._stragglers += len(stragglers)
        for future in stragglers:
            future.add_done_callback(self._came_late)

    def _came_late(self, future: Future[Got]) -> None:
        with self._lock:
            self._stragglers -= 1
            if future.exception() is None:
                self.wasted += memoryview(future.result().data).nbytes
