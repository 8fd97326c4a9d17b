"""Slots: windows are lent once, come back, and never cross from one save to another."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.arena import Slot, windows_for
from holdfast.engine.courier import SECTOR
from holdfast.engine.worker import ThreadWorker, Worker
from holdfast.errors import HoldfastError


@pytest.fixture
def slot(worker: Worker) -> Iterator[Slot]:
    made = Slot(0, worker, window=SECTOR)
    made.reserve(3)
    made.begin()
    yield made
    made.close()


def test_windows_are_apart_and_come_back(slot: Slot) -> None:
    lent = [slot.take(0.0) for _ in range(3)]
    assert sorted(w.start for w in lent if w) == [0, SECTOR, 2 * SECTOR]
    assert slot.take(0.0) is None, "there are no more"
    for number, window in enumerate(lent):
        assert window is not None and window.address % SECTOR == 0
        window.view[:] = bytes([number]) * SECTOR
    assert [bytes(w.view) for w in lent if w] == [bytes([n]) * SECTOR for n in range(3)]
    assert lent[1] is not None
    slot.give(lent[1])
    again = slot.take(0.0)
    assert again is not None and again.start == lent[1].start


def test_nothing_is_reserved_or_begun_while_a_window_is_lent(slot: Slot) -> None:
    window = slot.take(0.0)
    assert window is not None
    for call in (lambda: slot.reserve(1), lambda: slot.reserve(9), slot.begin):
        with pytest.raises(HoldfastError, match="slot 0 is still being written"):
            call()
    slot.give(window)
    slot.reserve(9)
    slot.begin()


def test_a_window_of_an_older_save_is_refused(slot: Slot, worker: Worker) -> None:
    window = slot.take(0.0)
    assert window is not None
    slot.give(window)
    slot.begin()
    with pytest.raises(HoldfastError, match="a window of save 1 came back to slot 0 in save 2"):
        slot.give(window)
    other = slot.take(0.0)
    assert other is not None
    slot.attach(worker)
    with pytest.raises(HoldfastError, match="came back"):
        slot.give(other)


def test_memory_stays_where_it_is_unless_more_is_needed(slot: Slot) -> None:
    def addresses() -> list[int]:
        lent = [slot.take(0.0) for _ in range(slot.count)]
        for window in lent:
            assert window is not None
            slot.give(window)
        return sorted(w.address for w in lent if w)

    before = addresses()
    slot.reserve(2)
    slot.reserve(3, touch=True)
    assert addresses() == before and slot.nbytes == 3 * SECTOR
    slot.reserve(4)
    assert slot.count == 4


def test_touched_memory_is_resident(worker: Worker) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    slot = Slot(0, worker)
    before = resident()
    slot.reserve(4)
    slot.reserve(4, touch=True)
    assert resident() - before > 60 << 20
    slot.close()
    gc.collect()
    assert resident() - before < 8 << 20, "and closing lets it go"


def test_a_closed_slot_lends_nothing(slot: Slot) -> None:
    slot.close()
    with pytest.raises(HoldfastError, match="closed"):
        slot.take(0.0)
    slot.close()


def test_no_descriptor_stays(worker: Worker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        slot = Slot(0, worker, window=SECTOR)
        slot.reserve(1)
        slot.reserve(7)
        slot.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_a_window_that_comes_back() -> None:
    worker = ThreadWorker()
    slot = Slot(0, worker, window=SECTOR)
    slot.reserve(1)
    slot.begin()
    window = slot.take(0.0)
    assert window is not None
    threading.Timer(0.05, slot.give, [window]).start()
    assert slot.take(30.0) is not None
    worker.close()


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["take", "give", "begin", "grow"]), max_size=40))
def test_any_order_of_calls(calls: list[str]) -> None:
    """Never one window twice at the same time, never more than there are, never a change while one is lent."""
    worker = ThreadWorker()
    slot = Slot(0, worker, window=SECTOR)
    slot.reserve(2)
    slot.begin()
    lent = []
    free = 2
    for call in calls:
        if call == "take":
            window = slot.take(0.0)
            assert (window is None) == (free == 0)
            if window is not None:
                assert window.start not in [w.start for w in lent]
                lent.append(window)
                free -= 1
        elif call == "give" and lent:
            slot.give(lent.pop(0))
            free += 1
        elif lent:
            with pytest.raises(HoldfastError):
                slot.begin() if call == "begin" else slot.reserve(slot.count + 1)
        elif call == "begin":
            slot.begin()
            free = slot.count
        elif call == "grow":
            slot.reserve(slot.count + 1)
            slot.begin()
            free = slot.count
    worker.close()


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(1, 5000))
def test_windows_for_files(sizes: list[int], window: int) -> None:
    count = windows_for(sizes, window)
    assert count * window >= sum(sizes)
    assert count <= sum(sizes) // window + len(sizes)
