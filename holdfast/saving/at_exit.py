"""Savers that nobody has closed: an interpreter that ends waits for their saves, and a forked child leaves them alone.

A Saver adds itself to `open_savers` and leaves it when it is closed. Never keeps a Saver alive.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Protocol

from holdfast.events import log


class _Saver(Protocol):
    def close(self) -> None: ...

    def _stay_behind(self) -> None: ...


open_savers: weakref.WeakSet[_Saver] = weakref.WeakSet()


@atexit.register
def _finish_last_saves() -> None:
    for saver in list(open_savers):
        try:
            saver.close()
        except Exception as error:  # noqa: BLE001 - nobody is left to raise it to
            log.error("the last save failed: %s", error)


def _after_fork() -> None:
    for saver in list(open_savers):
        saver._stay_behind()
    open_savers.clear()


os.register_at_fork(after_in_child=_after_fork)
