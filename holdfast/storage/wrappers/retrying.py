"""Another attempt after what may pass: exponential backoff with full jitter, told in the log.

Put around stores whose errors say ``transient``. Never repeats an upload whose bytes are gone, nor what may be done.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from time import monotonic, sleep
from typing import TypeVar

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.keys import named
from holdfast.storage.store import Buffer, Got, Listing, Store

LONGEST_ASKED = 60.0
"""Seconds that a store may ask for (``retry_after`` of an error) and gets."""

T = TypeVar("T")
E = TypeVar("E", bound=OSError)


def transient(error: E, *, retry_after: float | None = None) -> E:
    """Mark an error as one after which another attempt may succeed, at the earliest in ``retry_after`` seconds."""
    vars(error)["transient"] = True
    if retry_after is not None:
        vars(error)["retry_after"] = retry_after
    return error


def is_transient(error: BaseException | None) -> bool:
    """Whether another attempt may succeed."""
    return bool(getattr(error, "transient", False))


class Retrying:
    """The same `Store`, where each verb has up to ``attempts``: what fails with a ``transient`` error is tried again.

    The wait before the n-th repetition is drawn from zero to ``first * 2**(n-1)`` seconds, at most to ``most``, and is
    never shorter than the error's ``retry_after``. A `put` is repeated if its chunks are a Sequence, or none was taken.
    A `create` that may have been done counts as done if the file then holds equal bytes: its data must differ from
    everybody else's.
    """

    def __init__(self, store: Store, *, attempts: int = 5, first: float = 0.2, most: float = 5.0) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        self.store = store
        self._attempts, self._first, self._most = attempts, first, most
        self._random = random.Random()  # its own: the global one belongs to training

    @property
    def url(self) -> str:
        return self.store.url

    def list(self, prefix: str, *, deep: bool) -> Listing:
        return self._repeat("list", prefix, lambda: self.store.list(prefix, deep=deep))

    def size(self, key: str) -> int | None:
        return self._repeat("size", key, lambda: self.store.size(key))

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        return self._repeat("get", key, lambda: self.store.get(key, begin, end))

    def create(self, key: str, data: bytes) -> bool:
        doubtful = False  # whether an earlier attempt may have been done, and its answer alone was lost

        def attempt() -> bool:
            nonlocal doubtful
            if doubtful and (there := self._content(key)) is not None:
                return there == data
            try:
                made = self.store.create(key, data)
            except OSError:
                doubtful = True
                raise
            return made or (doubtful and self._content(key) == data)

        try:
            return self._repeat("create", key, attempt)
        except OSError as error:
            try:
                there = self._content(key) if is_transient(error) else None
            except OSError:
                raise error from None
            if there is None:
                raise
            return there == data

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        if isinstance(chunks, Sequence):
            self._repeat("put", key, lambda: self.store.put(key, chunks, nbytes))
        else:
            once = _Once(chunks)
            self._repeat("put", key, lambda: self.store.put(key, once, nbytes), lambda: once.whole)

    def delete(self, keys: Sequence[str]) -> None:
        self._repeat("delete", named(keys), lambda: self.store.delete(keys))

    def _content(self, key: str) -> bytes | None:
        try:
            return bytes(self.store.get(key).data)
        except FileNotFoundError:
            return None

    def _repeat(self, verb: str, key: str, attempt: Callable[[], T], may: Callable[[], bool] = lambda: True) -> T:
        began = monotonic()
        for number in count(1):
            try:
                return attempt()
            except OSError as error:
                if not is_transient(error):
                    raise
                if number == self._attempts or not may():
                    raise _last(error, number, monotonic() - began, again=may()) from error
                pause = self._pause(number, error)
                log.debug("%s of %s/%s failed, again in %.2f s: %s", verb, self.url, key, pause, error)
            sleep(pause)
        raise AssertionError("unreachable: there is always a next number")

    def _pause(self, number: int, error: OSError) -> float:
        asked = min(float(getattr(error, "retry_after", None) or 0.0), LONGEST_ASKED)
        return max(self._random.uniform(0.0, min(self._most, self._first * 2 ** (number - 1))), asked)


class _Once:
    """Chunks that can be taken once; ``whole`` as long as none was asked for. Keeps no chunk alive."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = iter(chunks)
        self.whole = True

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        self.whole = False
        return next(self._chunks)


def _last(error: OSError, attempts: int, seconds: float, *, again: bool) -> StorageError:
    text = f"{error} (after {attempts} attempt{'s' if attempts > 1 else ''} over {seconds:.1f} s"
    if not again:
        text += "; not tried again, as chunks of it were taken, and their memory may hold other bytes by now"
    failed = transient(StorageError(f"{text})"), retry_after=getattr(error, "retry_after", None))
    failed.errno, failed.file = error.errno, getattr(error, "file", None)
    return failed
