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
    """Convert window by window, and be killed once half of the bytes are written and all windows but the last noted."""
    copying.SYNC = copying.WORKERS = 1
    written: list[holdfast.events.Event] = []

    def kill(event: holdfast.events.Event) -> None:
        if event.kind == "advance":
            written.append(event)
        if len(written) > 1 and 2 * event.done >= event.total:
            journal = Path(f"{target}.partial", "journal", f"{event.rank:05d}")
            wait_until(lambda: len(journal.read_bytes().splitlines()) >= len(written) - 1)
            os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.events.listen(kill):
        convert()
