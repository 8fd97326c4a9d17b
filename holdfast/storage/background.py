"""A background thread: the lowest priority for processor and disk, and a limit of bytes a second.

Scrubbing runs in such threads. Never changes the priority of another thread.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable
from time import monotonic

from holdfast.events import log

_libc = ctypes.CDLL(None, use_errno=True)
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "riscv64": 30, "ppc64le": 273, "s390x": 282}
_THIS_THREAD, _IDLE = 1, 3 << 13
_NICEST = 19

LOOK = 0.2
"""Seconds between looks whether others are still busy."""

BURST = 1.0
"""Seconds of the rate that may go at once, after a pause."""


class Stopped(Exception):
    """Raised in a thread that is asked to stop while it waits."""


def lower_priority() -> None:
    """Give this thread the lowest priority for processor and disk, as far as the system lets it."""
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None and _libc.syscall(number, _THIS_THREAD, 0, _IDLE) != 0:
        log.debug("no idle priority for the disk: %s", os.strerror(ctypes.get_errno()))
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICEST)
    except OSError as error:  # it works all the same, beside others
        log.debug("no low priority for the processor: %s", error)


class Pace:
    """Called with bytes that are to be read: waits while others are ``busy``, and so that ``rate`` is kept."""

    def __init__(self, rate: float, busy: Callable[[], bool], stop: threading.Event) -> None:
        if not rate > 0:
            raise ValueError(f"rate={rate} must be more than 0 bytes a second")
        self._rate, self._busy, self._stop = rate, busy, stop
        self._paid_until = 0.0  # by the clock of `monotonic`

    def __call__(self, nbytes: int) -> None:
        """Wait until so many bytes may be read. Raises Stopped."""
        while self._busy() and not self._stop.wait(LOOK):
            pass
        now = monotonic()
        self._paid_until = max(self._paid_until, now - BURST) + nbytes / self._rate
        if self._stop.wait(max(self._paid_until - now, 0.0)):
            raise Stopped
