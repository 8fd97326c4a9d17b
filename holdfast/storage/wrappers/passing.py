"""A store that passes every verb on to another one.

What is put around a store begins from it, and changes the verbs that it is about. Never answers by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from holdfast.storage.store import Buffer, Got, Listing, Store


class Passing:
    """The same `Store`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    @property
    def url(self) -> str:
        return self.store.url

    def list(self, prefix: str, *, deep: bool) -> Listing:
        return self.store.list(prefix, deep=deep)

    def size(self, key: str) -> int | None:
        return self.store.size(key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        return self.store.get(key, begin, end)

    def create(self, key: str, data: bytes) -> bool:
        return self.store.create(key, data)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self.store.put(key, chunks, nbytes)

    def delete(self, keys: Sequence[str]) -> None:
        self.store.delete(keys)
