"""Processes and their descendants, watched from outside: processor seconds and memory.

The memory is watched by the stall bench, in its own process; processor seconds are asked for by each rank.
Never counts memory that processes share twice, nor pages of files.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as they live."""
    found = [pid]
    for parent in found:  # which grows meanwhile
        with suppress(OSError):
            for thread in Path(f"/proc/{parent}/task").iterdir():
                with suppress(OSError):
                    found += map(int, (thread / "children").read_text().split())
    return found


def cpu_seconds(pid: int) -> float:
    """User and system seconds of a process, its descendants, and those of them that have ended."""
    ticks = 0
    for member in family(pid):
        with suppress(OSError):
            fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, and both of the children that ended
    return ticks / _TICK


def memory_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants: each one's own, and once what they share."""
    own, shared = 0, 0
    for member in family(pid):
        with suppress(OSError):
            found = dict(line.split(":", 1) for line in Path(f"/proc/{member}/status").read_text().splitlines())
            own += _kilobytes(found, "RssAnon") + _kilobytes(found, "HugetlbPages")
            shared = max(shared, _kilobytes(found, "RssShmem"))
    return own + shared


def _kilobytes(status: dict[str, str], field: str) -> int:
    return int(status.get(field, "0").split()[0]) << 10


class Watch:
    """Looks at the memory of some processes every tenth of a second, until it is left."""

    def __init__(self, pids: list[int]) -> None:
        self.peaks = dict.fromkeys(pids, 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            for pid, peak in self.peaks.items():
                self.peaks[pid] = max(peak, memory_bytes(pid))
