"""Slots: windows are lent once, come back, and never cross from one save to another."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from holdfast.storage.local.disk import SECTOR
from holdfast.write.arena import Slot, Window, room_for
from holdfast.write.jobs import Worker
from holdfast.write.worker import ThreadWorker


@pytest.fixture
def slot(worker: Worker) -> Iterator[Slot]:
    made = Slot(0, worker, window=SECTOR)
    made.reserve(3 * SECTOR)
    made.begin()
    yield made
    made.close()


def test_windows_are_apart_and_come_back(slot: Slot) -> None:
    lent = [slot.take(SECTOR, 0.0) for _ in range(3)]
    assert sorted(w.start for w in lent if w) == [0, SECTOR, 2 * SECTOR]
    assert slot.take(SECTOR, 0.0) is None, "there are no more"
    for number, window in enumerate(lent):
        assert window is not None and window.address % SECTOR == 0
        window.view[:] = bytes([number]) * SECTOR
    assert [bytes(w.view) for w in lent if w] == [bytes([n]) * SECTOR for n in range(3)]
    assert lent[1] is not None
    slot.give(lent[1])
    again = slot.take(SECTOR, 0.0)
    assert again is not None and again.start == lent[1].start


def test_nothing_is_reserved_or_begun_while_a_window_is_lent(slot: Slot) -> None:
    window = slot.take(SECTOR, 0.0)
    assert window is not None
    for call in (lambda: slot.reserve(SECTOR), lambda: slot.reserve(9 * SECTOR), slot.begin):
        with pytest.raises(HoldfastError, match="slot 0 is still being written"):
            call()
    slot.give(window)
    slot.reserve(9 * SECTOR)
    slot.begin()


def test_a_window_of_an_older_save_is_refused(slot: Slot, worker: Worker) -> None:
    window = slot.take(SECTOR, 0.0)
    assert window is not None
    slot.give(window)
    slot.begin()
    with pytest.raises(HoldfastError, match="a window of save 1 came back to slot 0 in save 2"):
        slot.give(window)
    other = slot.take(SECTOR, 0.0)
    assert other is not None
    slot.attach(worker)
    with pytest.raises(HoldfastError, match="came back"):
        slot.give(other)


def test_memory_stays_where_it_is_unless_more_is_needed(slot: Slot) -> None:
    def addresses() -> list[int]:
        lent = [slot.take(SECTOR, 0.0) for _ in range(slot.nbytes // SECTOR)]
        for window in lent:
            assert window is not None
            slot.give(window)
        return sorted(w.address for w in lent if w)

    before = addresses()
    slot.reserve(2 * SECTOR)
    slot.reserve(3 * SECTOR, touch=True)
    assert addresses() == before and slot.nbytes == 3 * SECTOR
    slot.reserve(3 * SECTOR + 1)
    assert slot.nbytes == 4 * SECTOR


def test_touched_memory_is_resident(worker: Worker) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    slot = Slot(0, worker)
    before = resident()
    slot.reserve(64 << 20)
    slot.reserve(64 << 20, touch=True)
    assert resident() - before > 60 << 20
    slot.close()
    gc.collect()
    assert resident() - before < 8 << 20, "and closing lets it go"


def test_a_closed_slot_lends_nothing(slot: Slot) -> None:
    slot.close()
    with pytest.raises(HoldfastError, match="closed"):
        slot.take(SECTOR, 0.0)
    slot.close()


def test_no_descriptor_stays(worker: Worker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        slot = Slot(0, worker, window=SECTOR)
        slot.reserve(SECTOR)
        slot.reserve(7 * SECTOR)
        slot.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_a_window_that_comes_back() -> None:
    worker = ThreadWorker()
    slot = Slot(0, worker, window=SECTOR)
    slot.reserve(SECTOR)
    slot.begin()
    window = slot.take(SECTOR, 0.0)
    assert window is not None
    threading.Timer(0.05, slot.give, [window]).start()
    assert slot.take(SECTOR, 30.0) is not None
    worker.close()


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["take", "give", "begin", "grow"]), max_size=40))
def test_any_order_of_calls(calls: list[str]) -> None:
    """Never one window twice at the same time, never more than there are, never a change while one is lent."""
    worker = ThreadWorker()
    slot = Slot(0, worker, window=SECTOR)
    slot.reserve(2 * SECTOR)
    slot.begin()
    lent = []
    free = 2
    for call in calls:
        if call == "take":
            window = slot.take(SECTOR, 0.0)
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
                slot.begin() if call == "begin" else slot.reserve(slot.nbytes + SECTOR)
        elif call == "begin":
            slot.begin()
            free = slot.nbytes // SECTOR
        elif call == "grow":
            slot.reserve(slot.nbytes + SECTOR)
            slot.begin()
            free = slot.nbytes // SECTOR
    worker.close()


sizes = st.lists(st.integers(0, 60_000), max_size=20)


@settings(max_examples=200)
@given(sizes, st.integers(1, 4), st.randoms(use_true_random=False))
def test_room_for_files_holds_them_all_at_once_in_any_order(sizes: list[int], sectors: int, random: Random) -> None:
    """A store's files wait in memory until their headers are known: with too little they would wait for ever."""
    window = sectors * SECTOR
    worker = ThreadWorker()
    slot = Slot(0, worker, window=window)
    slot.reserve(room_for(sizes, window))
    slot.begin()
    assert slot.nbytes <= sum(sizes) + len(sizes) * SECTOR
    left = [size for size in sizes if size]
    lent: list[Window] = []
    while left:  # files take turns, as they may be staged in any order
        at = random.randrange(len(left))
        got = slot.take(left[at], 0.0)
        assert got is not None and 0 < got.nbytes <= window and got.start % SECTOR == got.nbytes % SECTOR == 0
        lent.append(got)
        left[at] -= got.nbytes
        left = [size for size in left if size > 0]
    taken = sorted((w.start, w.start + w.nbytes) for w in lent)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken)), "no byte is lent twice"
    random.shuffle(lent)
    for one in lent:
        slot.give(one)
    slot.begin()
    worker.close()


@settings(max_examples=200)
@given(sizes, st.integers(1, 3), st.integers(2, 5), st.randoms(use_true_random=False))
def test_less_memory_than_files_goes_round(sizes: list[int], sectors: int, windows: int, random: Random) -> None:
    """Whatever comes back first: what is not lent can be taken again, up to the last byte."""
    window = sectors * SECTOR
    worker = ThreadWorker()
    slot = Slot(0, worker, window=window)
    slot.reserve(windows * window)
    slot.begin()
    lent: list[Window] = []
    for size in sizes:
        while size > 0:
            got = slot.take(size, 0.0)
            if got is None:
                assert lent, "everything is back, and nothing can be taken"
                slot.give(lent.pop(random.randrange(len(lent))))
                continue
            assert all(got.start >= w.start + w.nbytes or w.start >= got.start + got.nbytes for w in lent)
            lent.append(got)
            size -= got.nbytes
    for one in lent:
        slot.give(one)
    slot.begin()
    whole = [slot.take(window, 0.0) for _ in range(windows)]
    assert all(w is not None and w.nbytes == window for w in whole)
    worker.close()


def test_small_files_share_a_window_and_large_ones_have_their_own(worker: Worker) -> None:
    slot = Slot(0, worker)
    slot.reserve(room_for([300] * 1000 + [16 << 20]))
    assert slot.nbytes == (16 << 20) + 1000 * SECTOR
    slot.begin()
    small, large, next_small = slot.take(300, 0.0), slot.take(16 << 20, 0.0), slot.take(300, 0.0)
    assert small and large and next_small
    assert (small.nbytes, large.nbytes) == (SECTOR, 16 << 20)
    assert next_small.start == small.start + SECTOR
    slot.close()
