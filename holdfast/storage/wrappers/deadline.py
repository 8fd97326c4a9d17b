"""An end to every wait for a store, also for one that never answers.

Put around stores whose client may hang. Never stops what hangs: it is left behind in a daemon thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import wait
from time import monotonic
from typing import TypeVar

from holdfast.storage.store import Buffer, Store
from holdfast.storage.wrappers.retrying import transient
from holdfast.storage.wrappers.wrapper import Wrapper, in_thread, taken

T = TypeVar("T")


class Deadline(Wrapper):
    """The same `Store`, where each verb ends within ``seconds``, if need be with a ``transient`` OSError(ETIMEDOUT).

    For `put` they count from the last chunk that the store took, and stand still while the next one is made. Verbs run
    in threads of their own, and chunks are made there too. After the end a hanging `put` is given no more chunks, but
    it holds on to those that it has; whether a `create`, `put` or `delete` was done is then not known.
    """

    def __init__(self, store: Store, seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds must be more than 0, not {seconds}")
        super().__init__(store)
        self.seconds = float(seconds)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        watch = _Watch(self.seconds)
        timed = taken(chunks, watch.take)
        self._call("put", key, lambda: self.store.put(key, timed, nbytes), watch)

    def _call(self, verb: str, key: str, work: Callable[[], T], watch: _Watch | None = None) -> T:
        watch = watch or _Watch(self.seconds)
        future = in_thread(work, verb)
        try:
            while not future.done():
                left = watch.left()
                if left <= 0:
                    raise transient(OSError(errno.ETIMEDOUT, self._text(verb, key)))
                wait([future], left)
            return future.result()
        finally:
            watch.stop()
            del future  # an error of it refers to this frame: a circle that would keep chunks alive

    def _text(self, verb: str, key: str) -> str:
        since = " since it took the last chunk" if verb == "put" else ""
        return f"{verb} of {self.url}/{key} did not end: the store has not answered for {self.seconds:g} s{since}"


class _Watch:
    """How long the store has been waited for; too long, and it is given no more chunks."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = monotonic()  # None while a chunk is made: that is not waiting for the store
        self._stopped = False
        self._lock = threading.Lock()

    def left(self) -> float:
        """Seconds until it is too late; at 0 or less it is, for good."""
        with self._lock:
            left = self._seconds if self._since is None else self._since + self._seconds - monotonic()
            self._stopped |= left <= 0
            return left

    def stop(self) -> None:
        with self._lock:
            self._stopped = True

    def take(self, chunks: Iterator[Buffer]) -> Buffer:
        with self._lock:
            if self._stopped:
                raise OSError(errno.ECANCELED, "the upload was given up, as it took too long or was interrupted")
            self._since = None
        try:
            return next(chunks)
        finally:
            with self._lock:
                self._since = monotonic()
