"""The cache of a node: each byte fetched once, whoever asks, killed or not; never a wrong byte; bounded on disk."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.storage.local.local import Local
from holdfast.storage.store import Got, Store
from holdfast.storage.wrappers.cached import CHUNK, LEAST, Cached
from holdfast.storage.wrappers.retrying import is_transient

SAVE = "7c1e09ab52d3f410"
KEY = f"run/step-1/model/00000-of-00001.{SAVE}.safetensors"
OTHER = f"run/step-1/optimizer/00000-of-00001.{SAVE}.safetensors"
BLOCK = 8 << 20


class Noting(Local):
    """Notes each get in a file that all processes share; may stop in the middle of one, or wait in the first one."""

    def __init__(
        self, root: Path, log: Path, *, stops: Connection | None = None, waits: Connection | None = None
    ) -> None:
        super().__init__(root)
        self.log, self.stops, self.waits = log, stops, waits

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if self.stops is not None:
            self.stops.send("fetching")
            threading.Event().wait()
        if self.waits is not None:
            self.waits.send("fetching")
            self.waits.recv()
            self.waits = None
        got = super().get(key, begin, end)
        fd = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(fd, f"{key} {begin} {begin + len(memoryview(got.data))}\n".encode())
        os.close(fd)
        return got


@lru_cache
def content(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


class Home:
    """A store of two data files with a cache, and what was fetched."""

    def __init__(self, path: Path, nbytes: int = 3 * BLOCK + 12_345) -> None:
        self.root, self.folder, self.log = path / "store", path / "cache", path / "log"
        self.data = {KEY: content(nbytes), OTHER: content(nbytes, 1)}
        for key, data in self.data.items():
            (self.root / key).parent.mkdir(parents=True)
            (self.root / key).write_bytes(data)

    def store(self, **options: Any) -> Noting:
        return Noting(self.root, self.log, **options)

    def cached(self, store: Store | None = None, **options: Any) -> Cached:
        return Cached(store or self.store(), self.folder, **options)

    def fetched(self) -> list[tuple[str, int, int]]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [(key, int(begin), int(end)) for key, begin, end in (line.split() for line in lines)]

    def fetched_bytes(self) -> int:
        return sum(end - begin for _, begin, end in self.fetched())

    def chunks(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file() and path.name not in ("usage", "lock"))

    def read(self, cache: Store, key: str, begin: int, end: int | None) -> None:
        got = cache.get(key, begin, end)
        assert bytes(got.data) == self.data[key][begin:end]
        assert got.nbytes == len(self.data[key])

    def disk(self) -> int:
        return sum(path.stat().st_blocks * 512 for path in self.chunks())


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def disjoint(fetched: list[tuple[str, int, int]]) -> bool:
    ends: dict[str, int] = {}
    for key, begin, end in sorted(fetched):
        if begin < ends.get(key, 0):
            return False
        ends[key] = end
    return True


def test_large_reads_cost_one_request_and_hardly_more_bytes(home: Home) -> None:
    cache = home.cached()
    home.read(cache, KEY, 4096 + BLOCK, 4096 + 2 * BLOCK)  # a block, which begins and ends within chunks
    assert len(home.fetched()) == 1 and home.fetched_bytes() == BLOCK + CHUNK
    home.read(cache, KEY, 4096, 4096 + BLOCK)
    home.read(cache, KEY, 4096 + 2 * BLOCK, len(home.data[KEY]))
    assert len(home.fetched()) == 3 and home.fetched_bytes() == len(home.data[KEY])
    assert cache.fetched == home.fetched_bytes() and cache.served == 2 * CHUNK  # the chunks at the borders


def test_a_small_read_fetches_a_chunk(home: Home) -> None:
    cache = home.cached()
    for _ in range(2):
        home.read(cache, KEY, 0, 8)
        home.read(cache, KEY, 100, 5000)
    assert home.fetched() == [(KEY, 0, CHUNK)]


def test_a_second_start_reads_nothing_from_the_store(home: Home) -> None:
    home.read(home.cached(), KEY, 0, None)
    before = home.fetched()
    again = home.cached()
    home.read(again, KEY, 0, None)
    home.read(again, KEY, 5, 20_000_000)
    assert home.fetched() == before and again.fetched == 0 and again.served > len(home.data[KEY])


@pytest.mark.slow
def test_any_range_is_what_the_store_has(home: Home) -> None:
    rng, size = random.Random(3), len(home.data[KEY])
    cache = home.cached()
    for _ in range(200):
        begin = rng.randrange(size + 100_000)
        length = rng.choice([0, 1, 100, 70_000, 3_000_000, 20_000_000])
        home.read(cache, rng.choice([KEY, OTHER]), begin, rng.choice([begin + length, begin + length, None]))
    assert disjoint([f for f in home.fetched() if f[2] > f[1]]), "no byte came twice"


def test_a_range_that_is_there_in_part(home: Home) -> None:
    cache = home.cached()
    for begin in (10 * CHUNK, 45 * CHUNK, 20 * CHUNK + 7):
        home.read(cache, KEY, begin, begin + 100)
    home.read(cache, KEY, 0, 60 * CHUNK)
    assert disjoint(home.fetched()) and home.fetched_bytes() == 60 * CHUNK
    home.read(home.cached(), KEY, 0, 60 * CHUNK)
    assert home.fetched_bytes() == 60 * CHUNK


def test_what_may_change_is_asked_for_each_time(home: Home) -> None:
    cache, store = home.cached(), home.store()
    for key in ("run/step-1/manifest.json", "run/step-1/attachments/config.json", "run/latest"):
        for text in (b"one", b"two!"):
            store.put(key, [text], len(text))
            cache.list("run/step-1", deep=True)
            assert bytes(cache.get(key).data) == text
    assert not home.chunks()


def test_large_files_of_other_formats_are_kept_as_of_a_listing(home: Home) -> None:
    store, key = home.store(), "hf/model-00001-of-00002.safetensors"
    old, new = content(2_000_000, 5), content(2_000_000, 6)
    store.put(key, [old], len(old))
    os.utime(home.root / key, (1, 1))
    for _ in range(2):
        assert bytes(home.cached().get(key).data) == old
    assert not home.chunks(), "what was never listed is not kept"

    def start(expected: bytes) -> int:
        before, cache = home.fetched_bytes(), home.cached()
        cache.list("hf", deep=False)
        assert bytes(cache.get(key, 1000, 1_900_000).data) == expected[1000:1_900_000]
        return home.fetched_bytes() - before

    assert start(old) > 0 and start(old) == 0
    store.put(key, [new], len(new))  # as many bytes, written later
    assert start(new) > 0 and start(new) == 0


def test_a_file_that_is_not_what_it_was_is_not_mixed(home: Home) -> None:
    cache = home.cached()
    home.read(cache, KEY, 0, 100)
    home.data[KEY] = home.data[OTHER] + b"more"
    home.store().put(KEY, [home.data[KEY]], len(home.data[KEY]))
    with pytest.raises(OSError, match="changes while it is read") as caught:
        cache.get(KEY, 0, BLOCK)
    assert is_transient(caught.value)
    home.read(cache, KEY, 0, BLOCK)


def test_what_is_missing_is_missing(home: Home) -> None:
    gone = f"run/step-1/model/00001-of-00002.{SAVE}.safetensors"
    with pytest.raises(FileNotFoundError):
        home.cached().get(gone, 0, 100)
    assert home.cached().size(gone) is None


def test_deleted_and_forgotten_files_are_not_kept(home: Home) -> None:
    cache = home.cached()
    home.read(cache, KEY, 0, None)
    home.read(cache, OTHER, 0, None)
    before = home.fetched_bytes()
    cache.forget(KEY, BLOCK, BLOCK + 10)  # the chunk with these bytes, and no other
    home.read(cache, KEY, 0, None)
    assert home.fetched_bytes() - before == CHUNK
    cache.delete([KEY])
    assert not any(home.data[KEY][:CHUNK] in path.read_bytes() for path in home.chunks()) and home.chunks()
    with pytest.raises(FileNotFoundError):
        cache.get(KEY)
    cache.put(KEY, [home.data[OTHER]], len(home.data[OTHER]))
    assert bytes(cache.get(KEY).data) == home.data[OTHER]


def test_stores_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    one, two = Home(tmp_path / "one"), Home(tmp_path / "two")
    two.store().put(KEY, [two.data[OTHER]], len(two.data[OTHER]))
    for _ in range(2):
        for home, data in ((one, one.data[KEY]), (two, two.data[OTHER])):
            assert bytes(Cached(home.store(), tmp_path / "cache").get(KEY).data) == data
    assert disjoint(one.fetched()) and disjoint(two.fetched())


# Many at once


def read_all(home: Home, pipe: Connection, order: int) -> None:
    cache = home.cached(home.store(waits=pipe), patience=3600)
    begins = list(range(4096, len(home.data[KEY]), 1 << 20))
    first = begins[order * len(begins) // 4]
    random.Random(order).shuffle(begins)
    for begin in (first, *begins):
        home.read(cache, KEY, begin, begin + (1 << 20))
    pipe.send((cache.fetched, cache.served))


def read_one(home: Home, pipe: Connection) -> None:
    """Stop in the middle of fetching the second block, and of the chunk before it."""
    Cached(home.store(stops=pipe), home.folder).get(KEY, BLOCK - 10, 2 * BLOCK)


def started(target: Any, *args: Any) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")  # which imports once, for all the processes to be killed
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(args[0], theirs, *args[1:]), daemon=True)
    process.start()
    theirs.close()
    return process, ours


@pytest.fixture
def stuck(home: Home) -> Iterator[BaseProcess]:
    process, pipe = started(read_one, home)
    assert pipe.recv() == "fetching"
    yield process
    process.kill()
    process.join()


def test_four_processes_fetch_each_chunk_once(home: Home) -> None:
    four = [started(read_all, home, order) for order in range(4)]
    for _, pipe in four:
        assert pipe.recv() == "fetching", "all at the same time"
    for _, pipe in four:
        pipe.send("go")
    told = [pipe.recv() for _, pipe in four]
    for process, _ in four:
        process.join()
    size = len(home.data[KEY])
    assert disjoint(home.fetched()) and home.fetched_bytes() == size
    assert sum(fetched for fetched, _ in told) == size
    assert all(fetched > 0 for fetched, _ in told), "the work was shared"


def test_threads_that_read_neighbouring_blocks_fetch_at_the_same_time(home: Home) -> None:
    class Together(Noting):
        """Answers only once three ask at the same time."""

        barrier = threading.Barrier(3, timeout=240)

        def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
            if end is not None and end - begin > BLOCK // 2:
                self.barrier.wait()
            return super().get(key, begin, end)

    cache = home.cached(Together(home.root, home.log))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda n: home.read(cache, KEY, 4096 + n * BLOCK, 4096 + (n + 1) * BLOCK), range(3)))
    assert disjoint(home.fetched())


def test_a_killed_fetcher_keeps_nobody_waiting(home: Home, stuck: BaseProcess) -> None:
    cache = home.cached(patience=3600)
    home.read(cache, KEY, 0, BLOCK - CHUNK)  # what it does not hold is not waited for
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(home.read, cache, KEY, BLOCK, 2 * BLOCK) for _ in range(2)]
        assert stuck.pid is not None
        os.kill(stuck.pid, signal.SIGKILL)
        for one in both:
            one.result()
    assert disjoint(home.fetched())


def test_a_hanging_fetcher_is_passed_by(home: Home, stuck: BaseProcess) -> None:
    cache = home.cached(patience=0.1)
    home.read(cache, KEY, BLOCK, 2 * BLOCK)
    home.read(home.cached(patience=3600), KEY, BLOCK, 2 * BLOCK)
    assert home.fetched() == [(KEY, BLOCK, 2 * BLOCK)], "fetched once, and kept although another holds the locks"


def read_at_random(home: Home, pipe: Connection, seed: int) -> None:
    rng, cache = random.Random(seed), home.cached(limit=LEAST, patience=60)
    pipe.send("reading")
    while True:
        begin = rng.randrange(len(home.data[KEY]))
        home.read(cache, rng.choice([KEY, OTHER]), begin, begin + rng.choice([10, 100_000, 9_000_000]))


@pytest.mark.slow
def test_kills_at_any_moment_leave_a_cache_that_is_right(home: Home) -> None:
    rng = random.Random(11)
    for seed in range(4):
        three = [started(read_at_random, home, 10 * seed + n) for n in range(3)]
        for process, pipe in three:
            assert pipe.recv() == "reading"
        time.sleep(rng.uniform(0.05, 0.4))
        for process, _ in three:
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "it read no wrong byte until then"
    cache = home.cached(patience=3600)
    for key in (KEY, OTHER):
        home.read(cache, key, 0, None)
    assert cache.served > 0


# A disk that is not what it was


@pytest.mark.parametrize("harm", ["flip", "truncate", "head", "sum", "empty", "garbage"])
def test_a_damaged_chunk_is_fetched_again(harm: str, home: Home, caplog: pytest.LogCaptureFixture) -> None:
    home.read(home.cached(), KEY, 0, None)
    first = next(path for path in home.chunks() if path.name == "5")
    data = bytearray(first.read_bytes())
    if harm == "flip":
        data[16 + 1017] ^= 4
    elif harm == "truncate":
        del data[16 + 100_005 :]
    elif harm == "head":
        data[1] ^= 1
    elif harm == "sum":
        data[9] ^= 1
    else:
        data[:] = b"" if harm == "empty" else b"x" * 999
    first.write_bytes(data)
    before = home.fetched_bytes()
    with caplog.at_level(logging.WARNING, "holdfast"):
        home.read(home.cached(), KEY, 0, None)
    assert home.fetched_bytes() - before == CHUNK and len(caplog.records) == 1
    home.read(home.cached(), KEY, 0, None)
    assert home.fetched_bytes() - before == CHUNK


def test_a_chunk_of_another_file_is_not_taken_for_one(home: Home) -> None:
    home.read(home.cached(), KEY, 0, CHUNK)
    home.read(home.cached(), OTHER, 0, CHUNK)
    one, two = home.chunks()
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    home.read(home.cached(), KEY, 0, CHUNK)
    home.read(home.cached(), OTHER, 0, CHUNK)


def test_a_full_disk_is_told_once_and_the_store_serves(small_disk: Path, tmp_path: Path, caplog: Any) -> None:
    home = Home(tmp_path)
    home.folder = small_disk / "cache"
    cache = home.cached(limit=1 << 30)
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(2):
            home.read(cache, KEY, 0, None)
            home.read(cache, OTHER, 0, 10_000)
    assert len(caplog.records) == 1 and "No space left" in caplog.text and str(home.folder) in caplog.text
    assert home.fetched()[-1] == (OTHER, 0, 10_000), "for a while it is not tried again, and nobody waits for others"


def test_a_cache_as_large_as_the_disk_allows(small_disk: Path, tmp_path: Path, caplog: Any) -> None:
    home = Home(tmp_path)
    home.folder = small_disk / "cache"
    cache = home.cached()
    with caplog.at_level(logging.WARNING, "holdfast"):
        for begin in range(0, len(home.data[KEY]), 1 << 20):
            home.read(cache, KEY, begin, begin + (1 << 20))
    assert not caplog.records and 0 < home.disk() < 6 << 20, "without a limit it takes less than there is"


def test_a_disk_that_refuses_everything(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    cache = home.cached()
    home.folder.rmdir()
    home.folder.write_text("a file")
    for _ in range(3):
        home.read(cache, KEY, 0, 100_000)
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    with pytest.raises(StorageError, match="local disk"):
        home.cached()


# Bounded


def test_it_stays_below_its_limit_and_what_was_used_longest_ago_goes(home: Home) -> None:
    limit = 2 * LEAST
    cache = home.cached(limit=limit)
    (home.folder / "notes.txt").write_text("mine")
    (home.folder / ("0" * 32)).write_text("mine too")
    home.read(cache, OTHER, 0, 100)
    for begin in range(0, len(home.data[KEY]), 1 << 20):
        home.read(cache, KEY, begin, begin + (1 << 20))
        home.read(cache, OTHER, 0, 100)  # used again and again
        assert home.disk() <= limit
    home.read(cache, OTHER, BLOCK, 3 * BLOCK)
    assert home.disk() <= limit
    before = home.fetched_bytes()
    home.read(cache, OTHER, 0, 100)
    assert home.fetched_bytes() == before
    home.read(cache, KEY, 0, 100)
    assert home.fetched_bytes() > before, "the first of that file had gone"
    assert (home.folder / "notes.txt").read_text() == "mine" and (home.folder / ("0" * 32)).exists()


@pytest.mark.slow
def test_reading_goes_on_while_others_are_evicted(home: Home) -> None:
    cache = home.cached(limit=LEAST)

    def read(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(30):
            begin = rng.randrange(len(home.data[KEY]))
            home.read(cache, rng.choice([KEY, OTHER]), begin, begin + 4_000_000)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(read, range(4)))
    assert home.disk() <= LEAST + 4 * 5_000_000, "what four had begun to write may still come on top"


def test_a_lost_count_is_counted_again(home: Home) -> None:
    limit = 3 * LEAST // 2
    home.read(home.cached(limit=limit), KEY, 0, None)
    for noted in (b"", b"\xff" * 8, b"xyz"):
        (home.folder / "usage").write_bytes(noted)
        home.read(home.cached(limit=limit), OTHER, 0, None)
        home.read(home.cached(limit=limit), KEY, 0, None)
        assert home.disk() <= limit


def test_a_limit_without_sense(home: Home) -> None:
    with pytest.raises(ValueError, match="too small"):
        home.cached(limit=1 << 20)
