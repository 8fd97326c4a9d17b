"""Attempts to upload while the store does not take anything: what is logged of them, and how long to wait.

The uploader owns one.
"""

from __future__ import annotations

import threading
import time

from holdfast.events import log
from holdfast.storage.place import Place

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two attempts."""


class Outage:
    """Whether ``store`` takes uploads. Until ``stop`` is set, pauses get longer while it does not."""

    def __init__(self, store: Place, stop: threading.Event) -> None:
        self._store, self._stop = store, stop
        self._since: float | None = None
        self._pause = 0.0

    def failed(self, error: Exception) -> None:
        """An attempt failed: log it, and wait before the next one."""
        if self._stop.is_set():
            return
        if self._since is None:
            self._since = time.monotonic()
            log.warning(
                "uploading to %s failed, and is tried again until it works; steps stay on the fast tier, training goes "
                "on: %s", self._store, error,
            )  # fmt: skip
        else:
            log.debug("uploading to %s failed again: %s", self._store, error)
        self._pause = min(2 * self._pause or FIRST_PAUSE, LONGEST_PAUSE)
        self._stop.wait(self._pause)

    def ended(self) -> None:
        """An attempt succeeded."""
        if self._since is not None:
            log.warning("%s takes uploads again, after %.0f s", self._store, time.monotonic() - self._since)
        self._since, self._pause = None, 0.0
