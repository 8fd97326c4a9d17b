"""A store in the memory of this process, for tests and examples; `holdfast.testing` gives it to users.

For code that needs a store without a server. Never writes anything to a disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from holdfast.storage.store import Buffer, Entry, Got, Listing, check_key, clipped, listing

_numbers = count(1)


class Memory:
    """A `Store` that lives as long as the object does. ``clock()`` gives the times of files, in seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._url = f"memory://{next(_numbers)}"
        self._clock = clock
        self._files: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return self._url

    def list(self, prefix: str, *, deep: bool) -> Listing:
        if prefix:
            check_key(self._url, prefix)
        with self._lock:
            entries = [Entry(key, len(data), modified) for key, (data, modified) in self._files.items()]
        return listing(entries, prefix, deep=deep)

    def size(self, key: str) -> int | None:
        file = self._files.get(check_key(self._url, key))
        return None if file is None else len(file[0])

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        file = self._files.get(check_key(self._url, key))
        if file is None:
            raise FileNotFoundError(f"there is no file {self._url}/{key}")
        data = file[0]
        first, last = clipped(begin, end, len(data))
        return Got(memoryview(data)[first:last], len(data))

    def create(self, key: str, data: bytes) -> bool:
        file = (bytes(data), self._clock())
        with self._lock:
            return self._files.setdefault(check_key(self._url, key), file) is file

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        check_key(self._url, key)
        data = bytearray()
        for chunk in chunks:
            data += chunk
            del chunk  # the next one may need its memory
        if len(data) != nbytes:
            raise ValueError(f"cannot write {self._url}/{key}: {nbytes} bytes were announced, {len(data)} given")
        with self._lock:
            self._files[key] = (bytes(data), self._clock())

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self._url, key)
        with self._lock:
            for key in keys:
                self._files.pop(key, None)
