"""What wrappers of stores share: one way for all six verbs, chunks on their way, and calls that may hang.

A wrapper overrides `_call`, or the verbs that it is about. Never answers by itself, and keeps no chunk.

We rejected options of one client. A wrapper passes the same contract tests as the stores, and a user's own backend gets
retries, deadlines, hedged reads, a rate limit and the cache as well.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar, overload

from holdfast.storage.store import Buffer, Got, Listing, Store, named

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


Take = Callable[[Iterator[Buffer]], Buffer]
"""Takes the next chunk of an iterator, or raises StopIteration as that does."""


def taken(chunks: Iterable[Buffer], take: Take) -> Iterable[Buffer]:
    """The same chunks, each by way of ``take``; from a Sequence a Sequence, so that an upload can still be repeated."""
    return _Again(chunks, take) if isinstance(chunks, Sequence) else _Taken(iter(chunks), take)


class _Taken:
    """An iterator, as a generator would keep each chunk alive until the next one is taken."""

    def __init__(self, chunks: Iterator[Buffer], take: Take) -> None:
        self._chunks, self._take = chunks, take

    def __iter__(self) -> Iterator[Buffer]:
        return self

    def __next__(self) -> Buffer:
        return self._take(self._chunks)


class _Again(Sequence[Buffer]):
    def __init__(self, chunks: Sequence[Buffer], take: Take) -> None:
        self._chunks, self._take = chunks, take

    def __len__(self) -> int:
        return len(self._chunks)

    @overload
    def __getitem__(self, at: int) -> Buffer: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Buffer]: ...
    def __getitem__(self, at: int | slice) -> Buffer | Sequence[Buffer]:
        return self._chunks[at]

    def __iter__(self) -> Iterator[Buffer]:
        return _Taken(iter(self._chunks), self._take)


IDLE = 5.0
"""Seconds for which a thread waits for the next call: a load makes thousands."""


def in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Start ``work`` in a daemon thread. (A `ThreadPoolExecutor` would be joined at exit, also where it hangs.)"""
    future: Future[T] = Future()
    # Taken out before it is set. An error's frames lead back to this one: a future that both hold would close a
    # reference cycle, which would keep alive what the call held until it is collected.
    pending = [future]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - stored, and raised to the caller that asks for the result
            pending.pop().set_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            pending.pop().set_result(result)

    with _lock:
        thread = _idle.pop() if _idle else None
    if thread is None:
        thread = _Thread()
        threading.Thread(target=thread.work, name=f"holdfast-{name}", daemon=True).start()
    thread.calls.put(run)
    return future


class _Thread:
    """A thread that makes one call after the other, until there was none for a while."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def work(self) -> None:
        while True:
            try:
                call = self.calls.get(timeout=IDLE)
            except queue.Empty:
                with _lock:
                    if self in _idle:
                        _idle.remove(self)
                        return
                continue  # a call is just being put here
            call()
            del call  # it holds the chunks of an upload
            with _lock:
                _idle.append(self)


_idle: list[_Thread] = []
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()  # their threads are not in the child


os.register_at_fork(after_in_child=_after_fork)
