"""Buffers: chunks are lent once, come back, and never cross from one save to another."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.buffers import memory
from holdfast.errors import HoldfastError
from holdfast.storage.local.disk import SECTOR
from holdfast.write.buffer import Chunk, StagingBuffer, room_for
from holdfast.write.jobs import Worker
from holdfast.write.worker import ThreadWorker
from tests.marks import examples


@pytest.fixture
def buffer(worker: Worker) -> Iterator[StagingBuffer]:
    made = StagingBuffer(0, worker, chunk_bytes=SECTOR)
    made.reserve(3 * SECTOR)
    made.begin()
    yield made
    made.close()


def test_chunks_are_apart_and_come_back(buffer: StagingBuffer) -> None:
    lent = [buffer.take(SECTOR, 0.0) for _ in range(3)]
    assert sorted(w.start for w in lent if w) == [0, SECTOR, 2 * SECTOR]
    assert buffer.take(SECTOR, 0.0) is None, "there are no more"
    for number, chunk in enumerate(lent):
        assert chunk is not None and chunk.address % SECTOR == 0
        chunk.view[:] = bytes([number]) * SECTOR
    assert [bytes(w.view) for w in lent if w] == [bytes([n]) * SECTOR for n in range(3)]
    assert lent[1] is not None
    buffer.give(lent[1])
    again = buffer.take(SECTOR, 0.0)
    assert again is not None and again.start == lent[1].start


def test_nothing_is_reserved_or_begun_while_a_chunk_is_lent(buffer: StagingBuffer) -> None:
    chunk = buffer.take(SECTOR, 0.0)
    assert chunk is not None
    for call in (lambda: buffer.reserve(SECTOR), lambda: buffer.reserve(9 * SECTOR), buffer.begin):
        with pytest.raises(HoldfastError, match="buffer 0 is still being written"):
            call()
    buffer.give(chunk)
    buffer.reserve(9 * SECTOR)
    buffer.begin()


def test_a_chunk_of_an_older_save_is_refused(buffer: StagingBuffer, worker: Worker) -> None:
    chunk = buffer.take(SECTOR, 0.0)
    assert chunk is not None
    buffer.give(chunk)
    buffer.begin()
    with pytest.raises(HoldfastError, match="a chunk of save 1 came back to buffer 0 in save 2"):
        buffer.give(chunk)
    other = buffer.take(SECTOR, 0.0)
    assert other is not None
    buffer.attach(worker)
    with pytest.raises(HoldfastError, match="came back"):
        buffer.give(other)


def test_memory_stays_where_it_is_unless_more_is_needed(buffer: StagingBuffer) -> None:
    def addresses() -> list[int]:
        lent = [buffer.take(SECTOR, 0.0) for _ in range(buffer.nbytes // SECTOR)]
        for chunk in lent:
            assert chunk is not None
            buffer.give(chunk)
        return sorted(w.address for w in lent if w)

    before = addresses()
    buffer.reserve(2 * SECTOR)
    buffer.reserve(3 * SECTOR, touch=True)
    assert addresses() == before and buffer.nbytes == 3 * SECTOR
    buffer.reserve(3 * SECTOR + 1)
    assert buffer.nbytes == 4 * SECTOR


def test_touched_memory_is_resident(worker: Worker) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")

    buffer = StagingBuffer(0, worker)
    before = resident()
    buffer.reserve(64 << 20)
    buffer.reserve(64 << 20, touch=True)
    assert resident() - before > 60 << 20
    buffer.close()
    gc.collect()
    assert resident() - before < 8 << 20, "and closing lets it go"


@pytest.mark.parametrize("kernel", ["this one", "one without the call"])
def test_populated_memory_has_its_pages(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = memory.buffer(5 << 20)
    wanted = (4 << 20) + mmap.PAGESIZE

    def resident() -> int:
        pages = (ctypes.c_ubyte * (5 * (1 << 20) // mmap.PAGESIZE))()
        assert memory._libc.mincore(ctypes.c_void_p(made.address), ctypes.c_size_t(5 << 20), pages) == 0
        return sum(page & 1 for page in pages) * mmap.PAGESIZE

    if kernel != "this one":
        monkeypatch.setattr(memory, "_POPULATE", -1)
    monkeypatch.setattr(memory, "_STRETCH", 1 << 20)  # several threads
    assert resident() == 0
    memory.populate(made.address, wanted)
    assert resident() >= wanted


def test_a_closed_buffer_lends_nothing(buffer: StagingBuffer) -> None:
    buffer.close()
    with pytest.raises(HoldfastError, match="closed"):
        buffer.take(SECTOR, 0.0)
    buffer.close()


def test_no_descriptor_stays(worker: Worker) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        buffer = StagingBuffer(0, worker, chunk_bytes=SECTOR)
        buffer.reserve(SECTOR)
        buffer.reserve(7 * SECTOR)
        buffer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_waiting_for_a_chunk_that_comes_back() -> None:
    worker = ThreadWorker()
    buffer = StagingBuffer(0, worker, chunk_bytes=SECTOR)
    buffer.reserve(SECTOR)
    buffer.begin()
    chunk = buffer.take(SECTOR, 0.0)
    assert chunk is not None
    threading.Timer(0.05, buffer.give, [chunk]).start()
    assert buffer.take(SECTOR, 30.0) is not None
    worker.close()


@settings(max_examples=examples(50))
@given(st.lists(st.sampled_from(["take", "give", "begin", "grow"]), max_size=40))
def test_any_order_of_calls(calls: list[str]) -> None:
    """Never one chunk twice at the same time, never more than there are, never a change while one is lent."""
    worker = ThreadWorker()
    buffer = StagingBuffer(0, worker, chunk_bytes=SECTOR)
    buffer.reserve(2 * SECTOR)
    buffer.begin()
    lent = []
    free = 2
    for call in calls:
        if call == "take":
            chunk = buffer.take(SECTOR, 0.0)
            assert (chunk is None) == (free == 0)
            if chunk is not None:
                assert chunk.start not in [w.start for w in lent]
                lent.append(chunk)
                free -= 1
        elif call == "give" and lent:
            buffer.give(lent.pop(0))
            free += 1
        elif lent:
            with pytest.raises(HoldfastError):
                buffer.begin() if call == "begin" else buffer.reserve(buffer.nbytes + SECTOR)
        elif call == "begin":
            buffer.begin()
            free = buffer.nbytes // SECTOR
        elif call == "grow":
            buffer.reserve(buffer.nbytes + SECTOR)
            buffer.begin()
            free = buffer.nbytes // SECTOR
    worker.close()


sizes = st.lists(st.integers(0, 60_000), max_size=20)


@settings(max_examples=examples(200))
@given(sizes, st.integers(1, 4), st.randoms(use_true_random=False))
def test_room_for_files_holds_them_all_at_once_in_any_order(sizes: list[int], sectors: int, random: Random) -> None:
    """A store's files wait in memory until their headers are known: with too little they would wait for ever."""
    chunk = sectors * SECTOR
    worker = ThreadWorker()
    buffer = StagingBuffer(0, worker, chunk_bytes=chunk)
    buffer.reserve(room_for(sizes, chunk))
    buffer.begin()
    assert buffer.nbytes <= sum(sizes) + len(sizes) * SECTOR
    left = [size for size in sizes if size]
    lent: list[Chunk] = []
    while left:  # files take turns, as they may be staged in any order
        at = random.randrange(len(left))
        got = buffer.take(left[at], 0.0)
        assert got is not None and 0 < got.nbytes <= chunk and got.start % SECTOR == got.nbytes % SECTOR == 0
        lent.append(got)
        left[at] -= got.nbytes
        left = [size for size in left if size > 0]
    taken = sorted((w.start, w.start + w.nbytes) for w in lent)
    assert all(end <= start for (_, end), (start, _) in pairwise(taken)), "no byte is lent twice"
    random.shuffle(lent)
    for one in lent:
        buffer.give(one)
    buffer.begin()
    worker.close()


@settings(max_examples=examples(200))
@given(sizes, st.integers(1, 3), st.integers(2, 5), st.randoms(use_true_random=False))
def test_less_memory_than_files_goes_round(sizes: list[int], sectors: int, chunks: int, random: Random) -> None:
    """Whatever comes back first: what is not lent can be taken again, up to the last byte."""
    chunk = sectors * SECTOR
    worker = ThreadWorker()
    buffer = StagingBuffer(0, worker, chunk_bytes=chunk)
    buffer.reserve(chunks * chunk)
    buffer.begin()
    lent: list[Chunk] = []
    for size in sizes:
        while size > 0:
            got = buffer.take(size, 0.0)
            if got is None:
                assert lent, "everything is back, and nothing can be taken"
                buffer.give(lent.pop(random.randrange(len(lent))))
                continue
            assert all(got.start >= w.start + w.nbytes or w.start >= got.start + got.nbytes for w in lent)
            lent.append(got)
            size -= got.nbytes
    for one in lent:
        buffer.give(one)
    buffer.begin()
    whole = [buffer.take(chunk, 0.0) for _ in range(chunks)]
    assert all(w is not None and w.nbytes == chunk for w in whole)
    worker.close()


def test_small_files_share_a_chunk_and_large_ones_have_their_own(worker: Worker) -> None:
    buffer = StagingBuffer(0, worker)
    buffer.reserve(room_for([300] * 1000 + [16 << 20]))
    assert buffer.nbytes == (16 << 20) + 1000 * SECTOR
    buffer.begin()
    small, large, next_small = buffer.take(300, 0.0), buffer.take(16 << 20, 0.0), buffer.take(300, 0.0)
    assert small and large and next_small
    assert (small.nbytes, large.nbytes) == (SECTOR, 16 << 20)
    assert next_small.start == small.start + SECTOR
    buffer.close()
