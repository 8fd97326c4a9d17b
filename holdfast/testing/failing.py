"""A store that fails at chosen calls: for tests of what becomes of a save or a load then."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar

from holdfast.storage.store import Buffer, Store
from holdfast.storage.wrappers.wrapper import Wrapper, taken

T = TypeVar("T")
When = Literal["before", "within", "after"]


class Failing(Wrapper):
    """The same `Store`, whose verbs from the ``nth`` on (the first is 1) fail, ``times`` of them.

    With ``"before"`` nothing is done, with ``"after"`` all of it and the answer is lost, with ``"within"`` an upload
    breaks off after its first chunk (other verbs: before). ``count`` is how many verbs were called: with ``nth=0``
    none fails, and ``count`` says for which ``nth`` to try. ``error`` makes what is raised; EIO by default.
    """

    def __init__(
        self,
        store: Store,
        nth: int = 0,
        *,
        times: int = 1,
        when: When = "before",
        error: Callable[[], OSError] | None = None,
    ) -> None:
        super().__init__(store)
        self._failing = range(nth, nth + times) if nth else range(0)
        self._when, self._error = when, error
        self._lock = threading.Lock()
        self.count = 0

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        def broken() -> None:
            given = 0

            def take(rest: Iterator[Buffer]) -> Buffer:
                nonlocal given
                given += 1
                chunk = next(rest, None) if given == 1 else None
                if chunk is None:
                    raise self._fault("put", key)
                return chunk

            self.store.put(key, taken(chunks, take), nbytes)
            raise self._fault("put", key)

        self._call("put", key, lambda: self.store.put(key, chunks, nbytes), broken)

    def _call(self, verb: str, key: str, work: Callable[[], T], broken: Callable[[], T] | None = None) -> T:
        with self._lock:
            self.count += 1
            fails = self.count in self._failing
        if not fails:
            return work()
        if self._when == "within" and broken is not None:
            return broken()
        if self._when == "after":
            work()
        raise self._fault(verb, key)

    def _fault(self, verb: str, key: str) -> OSError:
        return self._error() if self._error else OSError(errno.EIO, f"{verb} of {self.url}/{key} was made to fail")
