"""A conversion that is killed in its middle, as a power cut would; tests then make the same call again."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import holdfast
from holdfast.export import copying
from tests.patience import wait_until


def killed_in_its_middle(target: str, convert: Callable[[], object]) -> None:
    """Convert window by window, and be killed when the second is written and the first is noted."""
    copying.SYNC = copying.WORKERS = 1
    written: list[holdfast.events.Event] = []

    def kill(event: holdfast.events.Event) -> None:
        if event.kind == "advance":
            written.append(event)
        if len(written) > 1:
            journals = Path(f"{target}.partial", "journal")
            wait_until(lambda: any(journal.stat().st_size for journal in journals.iterdir()))
            os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.events.listen(kill):
        convert()
