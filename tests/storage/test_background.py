"""A background thread: it has the lowest priority, keeps its rate, and stands back while others are busy."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from holdfast.storage import background
from holdfast.storage.background import Pace, Stopped, lower_priority


def test_only_the_thread_itself_is_lowered() -> None:
    found: list[int] = []

    def run() -> None:
        lower_priority()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        found.append(int(stat.read_text().rsplit(")", 1)[1].split()[16]))

    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [19, 19]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


class Clock(threading.Event):
    """Time passes only while somebody waits."""

    now = 100.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += timeout or 0.0
        return self.is_set()


def test_no_more_than_the_rate_and_a_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(background, "monotonic", lambda: clock.now)
    pace = Pace(1e6, lambda: False, clock)
    for _ in range(30):
        pace(50_000)
    assert clock.now == pytest.approx(100.5), "1.5 MB at 1 MB/s, of which 1 MB may go at once"


def test_it_stands_back_and_can_be_stopped() -> None:
    stop = threading.Event()
    asked: list[bool] = []

    def busy() -> bool:
        asked.append(True)
        return len(asked) < 3

    Pace(1e9, busy, stop)(1)
    assert len(asked) == 3
    stop.set()
    with pytest.raises(Stopped):
        Pace(1e9, lambda: True, stop)(1)
    with pytest.raises(ValueError, match="more than 0"):
        Pace(0, busy, stop)
