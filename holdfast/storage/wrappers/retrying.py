"""Another attempt after a failure that may pass: exponential backoff with full jitter, logged at debug level.

Put around stores whose errors say ``transient``. Never repeats an upload whose bytes are gone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from time import monotonic, sleep
from typing import TypeVar

from holdfast.errors import StorageError
from holdfast.events import log
from holdfast.storage.store import Buffer, Store
from holdfast.storage.wrappers.wrapper import Wrapper

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


class Retrying(Wrapper):
    """The same `Store`, where each verb has up to ``attempts``: what fails with a ``transient`` error is tried again.

    The wait before the n-th repetition is drawn from zero to ``first * 2**(n-1)`` seconds, at most ``most``, and is
    never shorter than the error's ``retry_after``. A `put` is repeated if its chunks are a Sequence, or none was taken.
    A `create` that may have been done counts as done if the file then holds equal bytes: each writer's data must be
    its own.
    """

    def __init__(self, store: Store, *, attempts: int = 5, first: float = 0.2, most: float = 5.0) -> None:
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {attempts}")
        super().__init__(store)
        self._attempts, self._first, self._most = attempts, first, most
        self._random = random.Random()  # its own: the global one belongs to training

    def create(self, key: str, data: bytes) -> bool:
        doubtful = False  # whether an earlier attempt may have been done, and its answer alone was lost

        def attempt() -> bool:
            nonlocal doubtful
            if doubtful and (content := self._content(key)) is not None:
                return content == data
            try:
                created = self.store.create(key, data)
            except OSError:
                doubtful = True
                raise
            return created or (doubtful and self._content(key) == data)

        try:
            return self._call("create", key, attempt)
        except OSError as error:
            try:
                content = self._content(key) if is_transient(error) else None
            except OSError:
                raise error from None
            if content is None:
                raise
            return content == data

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        if isinstance(chunks, Sequence):
            super().put(key, chunks, nbytes)
        else:
            once = _Once(chunks)
            self._call("put", key, lambda: self.store.put(key, once, nbytes), lambda: once.whole)

    def _content(self, key: str) -> bytes | None:
        try:
            return bytes(self.store.get(key).data)
        except FileNotFoundError:
            return None

    def _call(self, verb: str, key: str, work: Callable[[], T], may_repeat: Callable[[], bool] = lambda: True) -> T:
        began = monotonic()
        for number in count(1):
            try:
                return work()
            except OSError as error:
                if not is_transient(error):
                    raise
                if number == self._attempts or not may_repeat():
                    raise _last(error, number, monotonic() - began, again=may_repeat()) from error
                pause = self._pause(number, error)
                log.debug("%s of %s/%s failed, again in %.2f s: %s", verb, self.url, key, pause, error)
            sleep(pause)
        raise AssertionError("unreachable: there is always a next number")

    def _pause(self, number: int, error: OSError) -> float:
        least = min(float(getattr(error, "retry_after", None) or 0.0), LONGEST_ASKED)
        return max(self._random.uniform(0.0, min(self._most, self._first * 2 ** (number - 1))), least)


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
