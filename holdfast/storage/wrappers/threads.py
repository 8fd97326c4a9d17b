"""A call in a daemon thread, for callers that may stop waiting for it.

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
