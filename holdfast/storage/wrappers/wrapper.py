"""What all wrappers share: a `Store` around a `Store`, with one way for all six verbs.

A wrapper overrides `_call`, or the verbs that it is about. Never answers by itself.

We rejected options of one client. A wrapper passes the same contract tests as the stores, and a user's own backend gets
retries, deadlines, hedged reads, a rate limit and the cache as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from holdfast.storage.keys import named
from holdfast.storage.store import Buffer, Got, Listing, Store

T = TypeVar("T")


class Wrapper:
    """The same `Store`."""

    def __init__(self, store: Store) -> None:
        self.store = store

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
        self._call("put", key, lambda: self.store.put(key, chunks, nbytes))

    def delete(self, keys: Sequence[str]) -> None:
        self._call("delete", named(keys), lambda: self.store.delete(keys))

    def _call(self, verb: str, key: str, work: Callable[[], T]) -> T:
        """Do ``work``: the verb of the store within. ``key`` says in errors and logs what it is about."""
        return work()


def nested(store: Store) -> Iterator[Any]:
    """The store, then the one that it is put around, and so on to the innermost."""
    inner: Any = store
    while inner is not None:
        yield inner
        inner = getattr(inner, "store", None)
