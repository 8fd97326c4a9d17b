"""A store that fails when it is told to: for tests of what becomes of a save or a load then.

Tests of holdfast and of its users put it around `Memory`. Never fails by chance.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from holdfast.storage.keys import named
from holdfast.storage.store import Buffer, Got, Listing, Store
from holdfast.storage.wrappers.chunks import taken

T = TypeVar("T")
When = Literal["before", "within", "after"]


class Failing:
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
        self.store = store
        self._failing = range(nth, nth + times) if nth else range(0)
        self._when, self._error = when, error
        self._lock = threading.Lock()
        self.count = 0

    @property
    def url(self) -> str:
        return self.store.url

    def list(self, prefix: str, *, deep: bool) -> Listing:
        return self._call("list", prefix, lambda: self.store.list(prefix, deep=deep))

    def size(self, key: str) -> int | None:
        return self._call("size", key, lambda: self.store.size(key))

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        return self._call("get", key, lambda: self.store.get(key, begin, end))

    def create(self, key: str, data: bytes) -> bool:
        return self._call("create", key, lambda: self.store.create(key, data))

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

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete", named(keys), lambda: self.store.delete(keys))

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
