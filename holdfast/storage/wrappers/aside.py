"""A call in another thread, which whoever started it may stop waiting for.

`deadline.py` and `hedged.py` call it. Never waits, and never keeps the interpreter from ending.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

IDLE = 5.0
"""Seconds for which a thread waits for the next call: a load makes thousands."""


def aside(work: Callable[[], T], name: str) -> Future[T]:
    """Start ``work`` in a daemon thread. (A `ThreadPoolExecutor` would be joined at exit, also where it hangs.)"""
    future: Future[T] = Future()
    # Taken out before it is set: the frames of an error lead back to this one, and a future that both hold would close
    # a circle, which would keep alive what the call held until it is collected.
    told = [future]

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - stored, and raised by whoever asks for the result
            told.pop().set_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        else:
            told.pop().set_result(result)

    with _lock:
        hand = _idle.pop() if _idle else None
    if hand is None:
        hand = _Hand()
        threading.Thread(target=hand.work, name=f"holdfast-{name}", daemon=True).start()
    hand.calls.put(run)
    return future


class _Hand:
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


_idle: list[_Hand] = []
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _idle.clear()  # their threads are not in the child


os.register_at_fork(after_in_child=_after_fork)
