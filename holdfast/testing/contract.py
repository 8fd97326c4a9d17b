"""What every store keeps, as tests: inherit the class, return your store, and pytest runs them on it."""

from __future__ import annotations

import ctypes
import random
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier, Event

import pytest

from holdfast.storage.store import Store
from holdfast.testing.reading import Reading, at_once, bytes_of, content_of, folder_of

LONG = 60.0
"""Seconds after which a test no longer waits for another thread."""

MANY = 1001
"""More files than stores tell of, or delete, in one request."""

ODD = (
    "with space", "per%cent", "slash%2Fcoded", "plus+equals=", "at@colon", "[brackets]", "{braces}", "é-ü-語", "#?&;~'",
    ".hidden", "dots..dots", "UPPER", "upper", "l" * 200,
)  # fmt: skip
"""Names that stores have been seen to mistake."""


class StoreContract(Reading):
    """Tests of a `Store`: override one fixture.

    ::

        class TestMine(StoreContract):
            @pytest.fixture
            def store(self) -> Store:
                return MyStore("scratch")

    Each test writes below a fresh folder ``holdfast-contract/…`` and deletes what is there at the end, so one bucket
    serves all, at once too.
    """

    @pytest.fixture
    def below(self, store: Store) -> Iterator[str]:
        """A folder of the test's own."""
        prefix = f"holdfast-contract/{secrets.token_hex(8)}"
        yield prefix
        store.delete([entry.key for entry in store.list(prefix, deep=True).files])

    @pytest.fixture
    def there(self, store: Store, below: str) -> Mapping[str, bytes]:
        made = {f"{below}/few": b"few", f"{below}/none": b"", f"{below}/inner/many": secrets.token_bytes(70_001)}
        for key, content in made.items():
            store.put(key, [content], len(content))
        return made

    def folders(self, there: Mapping[str, bytes]) -> Iterable[str]:
        return {folder_of(key)[:-1] for key in there}

    def test_what_is_put_is_there_at_once(self, store: Store, below: str) -> None:
        for n in range(5):
            content, began = secrets.token_bytes(n * 100), time.time()
            store.put(f"{below}/f{n}", [content], len(content))
            assert store.size(f"{below}/f{n}") == len(content)
            assert content_of(store, f"{below}/f{n}") == content
            for deep in (True, False):
                listing = store.list(below, deep=deep)
                assert [entry.key for entry in listing.files] == [f"{below}/f{m}" for m in range(n + 1)]
                assert [entry.nbytes for entry in listing.files] == [m * 100 for m in range(n + 1)]
                assert listing.folders == []
            assert abs(listing.files[n].modified - began) < 600, "unix seconds, by a clock that is about right"

    def test_put_replaces(self, store: Store, below: str) -> None:
        for content in (b"a" * 1000, b"b" * 10, b"", b"c" * 2000, secrets.token_bytes(1 << 20)):
            store.put(f"{below}/f", [content], len(content))
            assert content_of(store, f"{below}/f") == content
            assert [entry.nbytes for entry in store.list(below, deep=True).files] == [len(content)]

    @pytest.mark.parametrize("sizes", [[], [0], [1], [0, 0], [0, 7, 0], [3] * 1000, range(0, 3000, 17)], ids=str)
    def test_chunks_of_any_size(self, store: Store, below: str, sizes: Iterable[int]) -> None:
        kinds = (bytes, bytearray, memoryview, lambda data: memoryview(b"xx" + data)[2:])
        parts = [secrets.token_bytes(n) for n in sizes]
        chunks = [kinds[n % len(kinds)](part) for n, part in enumerate(parts)]
        for key, given in ((f"{below}/list", chunks), (f"{below}/iterator", iter(chunks))):
            store.put(key, given, sum(map(len, parts)))
            assert content_of(store, key) == b"".join(parts)

    def test_a_large_file(self, store: Store, below: str) -> None:
        content = _random(20 << 20)
        cuts = [0, 1, 5 << 20, (5 << 20) + 3, 11 << 20, 19_999_999, len(content)]
        chunks = (memoryview(content)[begin:end] for begin, end in pairwise(cuts))
        store.put(f"{below}/large", chunks, len(content))
        assert store.size(f"{below}/large") == len(content)
        assert _same(content_of(store, f"{below}/large"), content)
        for begin, end in [((8 << 20) - 5, (8 << 20) + 5), (0, 1 << 20), (len(content) - 3, None)]:
            assert _same(bytes_of(store.get(f"{below}/large", begin, end)), content[begin:end])

    def test_memory_of_a_chunk_is_let_go_of_and_not_read_after_that(self, store: Store, below: str) -> None:
        # As staging memory does it: what was let go of is filled with other bytes at once, while others are under way.
        memory = [bytearray(_random(1 << 20)) for _ in range(24)]
        content = b"".join(memory)
        lent: list[weakref.finalize[..., object]] = []

        def lend(buffer: bytearray) -> memoryview:
            array = (ctypes.c_ubyte * len(buffer)).from_buffer(buffer)
            lent.append(weakref.finalize(array, _spoil, buffer))
            return memoryview(array).cast("B")

        store.put(f"{below}/f", map(lend, memory), len(content))  # a generator would hold the last one itself
        assert len(lent) == len(memory)
        assert _soon(lambda: not any(one.alive for one in lent)), "a chunk is still referred to after its upload"
        assert _same(content_of(store, f"{below}/f"), content)

    @pytest.mark.parametrize("older", [None, b"older"])
    @pytest.mark.parametrize("after", [0, 1000, 12 << 20])
    def test_chunks_that_raise_leave_what_was_there(
        self, store: Store, below: str, older: bytes | None, after: int
    ) -> None:
        if older is not None:
            store.put(f"{below}/f", [older], len(older))

        def chunks() -> Iterator[bytes]:
            for begin in range(0, after, 1 << 20):
                yield bytes(min(1 << 20, after - begin))
            raise _Broken("no more of it")

        with pytest.raises(_Broken, match="no more of it"):
            store.put(f"{below}/f", chunks(), after + 1000)
        self._has(store, below, {} if older is None else {f"{below}/f": older})

    @pytest.mark.parametrize("announced", [0, 999, 1001, 20 << 20])
    def test_chunks_that_are_not_as_many_bytes_as_announced(self, store: Store, below: str, announced: int) -> None:
        for chunks in ([bytes(1000)], iter([bytes(500), bytes(500)])):
            with pytest.raises((ValueError, OSError)):
                store.put(f"{below}/f", chunks, announced)
            self._has(store, below, {})

    def test_a_file_is_seen_whole_or_not_at_all(self, store: Store, below: str) -> None:
        versions = [bytes([n]) * (100_000 + 1000 * n) for n in range(12)]
        done = Event()

        def work(n: int) -> int:
            if n == 0:
                try:
                    for version in versions:
                        chunks = [version[begin : begin + 30_000] for begin in range(0, len(version), 30_000)]
                        store.put(f"{below}/f", iter(chunks), len(version))
                finally:
                    done.set()
                return 0
            looks = 0
            while not done.is_set() or not looks:
                looks += 1
                sizes = [store.size(f"{below}/f"), *(e.nbytes for e in store.list(below, deep=True).files)]
                assert {len(version) for version in versions} >= {size for size in sizes if size is not None}
                try:
                    assert content_of(store, f"{below}/f") in versions
                except FileNotFoundError:
                    continue  # before the first one
            return looks

        assert all(at_once(3, work)[1:])

    # Creating

    def test_create_writes_once(self, store: Store, below: str) -> None:
        for key, content in ((f"{below}/f", b"first"), (f"{below}/none", b"")):
            assert store.create(key, content) is True
            assert store.create(key, b"second") is False
            assert content_of(store, key) == content
        store.put(f"{below}/put", [b"put"], 3)
        assert store.create(f"{below}/put", b"created") is False
        store.put(f"{below}/f", [b"replaced"], 8)
        store.delete([f"{below}/none"])
        assert store.create(f"{below}/none", b"again") is True
        self._has(store, below, {f"{below}/f": b"replaced", f"{below}/none": b"again", f"{below}/put": b"put"})

    def test_of_many_that_create_at_once_one_wins(self, store: Store, below: str) -> None:
        for turn in range(3):
            ready = Barrier(16)

            def work(n: int) -> bool:
                ready.wait(LONG)
                return store.create(f"{below}/{turn}", b"%d" % n)

            won = at_once(16, work)
            assert won.count(True) == 1 and won.count(False) == 15
            assert content_of(store, f"{below}/{turn}") == b"%d" % won.index(True)

    def test_listing_goes_by_whole_components(self, store: Store, below: str) -> None:
        names = ["a", "b/c", "b/d/e", "b/d/f", "b/d.e/f", "b/d-e", "bc/x", "b.c", "B/x", "z/b/c"]
        for name in names:
            store.put(f"{below}/{name}", [name.encode()], len(name))

        def names_in(prefix: str, *, deep: bool) -> tuple[list[str], list[str]]:
            listing = store.list(f"{below}{prefix}", deep=deep)
            assert all(entry.nbytes == len(entry.key) - len(below) - 1 for entry in listing.files)
            return [e.key[len(below) + 1 :] for e in listing.files], [
                folder[len(below) + 1 :] for folder in listing.folders
            ]

        assert names_in("", deep=True) == (sorted(names), [])
        assert names_in("", deep=False) == (["a", "b.c"], ["B", "b", "bc", "z"])
        assert names_in("/b", deep=True) == (["b/c", "b/d-e", "b/d.e/f", "b/d/e", "b/d/f"], [])
        assert names_in("/b", deep=False) == (["b/c", "b/d-e"], ["b/d", "b/d.e"])
        assert names_in("/b/d", deep=False) == (["b/d/e", "b/d/f"], [])
        for nothing in ("/absent", "/a", "/b/c", "/b/d/e/f", "/z/b/c/d"):
            assert names_in(nothing, deep=True) == names_in(nothing, deep=False) == ([], [])
        everything = store.list("", deep=False)
        assert "holdfast-contract" in everything.folders

    def test_more_files_than_a_page(self, store: Store, below: str) -> None:
        keys = [f"{below}/{n:05d}/f" for n in range(MANY)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, [b"x"], 1), keys))
        assert [entry.key for entry in store.list(below, deep=True).files] == keys
        listing = store.list(below, deep=False)
        assert listing.files == [] and listing.folders == [key[:-2] for key in keys]
        store.delete([f"{below}/absent", *keys[1:]])
        assert [entry.key for entry in store.list(below, deep=True).files] == keys[:1]
        assert store.list(below, deep=False).folders == [keys[0][:-2]], "an empty folder is none"

    def test_delete_leaves_all_else(self, store: Store, below: str, there: Mapping[str, bytes]) -> None:
        store.delete([])
        store.delete([f"{below}/absent", f"{below}/absent/too", f"{below}/inner", f"{below}/fe"])
        self._has(store, below, there)
        store.delete([f"{below}/few", f"{below}/absent"])
        self._has(store, below, {key: data for key, data in there.items() if key != f"{below}/few"})
        assert store.size(f"{below}/few") is None
        with pytest.raises(FileNotFoundError):
            store.get(f"{below}/few")

    def test_odd_names(self, store: Store, below: str) -> None:
        made = {f"{below}/{name}/{name}.bin": name.encode() for name in ODD}
        for n, (key, content) in enumerate(made.items()):
            if n % 2:
                assert store.create(key, content) is True
            else:
                store.put(key, [content], len(content))
        assert {key: store.size(key) for key in made} == {key: len(content) for key, content in made.items()}
        self._has(store, below, made)
        assert store.list(below, deep=False).folders == sorted(f"{below}/{name}" for name in ODD)
        for name in ODD:
            assert [e.key for e in store.list(f"{below}/{name}", deep=False).files] == [f"{below}/{name}/{name}.bin"]
        for key in made:
            store.delete([key])
            assert store.size(key) is None
        self._has(store, below, {})

    def test_all_verbs_from_many_threads(self, store: Store, below: str) -> None:
        def work(n: int) -> None:
            own = f"{below}/{n}"
            for turn in range(4):
                content = bytes([n, turn]) * 5000
                store.put(f"{own}/f", [content[:999], content[999:]], len(content))
                assert store.create(f"{own}/once", b"%d" % n) is (turn == 0)
                self._has(store, own, {f"{own}/f": content, f"{own}/once": b"%d" % n})
                store.delete([f"{own}/f"])
                assert store.size(f"{own}/f") is None

        at_once(8, work)

    def _has(self, store: Store, prefix: str, files: Mapping[str, bytes]) -> None:
        """Below a prefix there are these files and nothing else."""
        listing = store.list(prefix, deep=True)
        assert [(e.key, e.nbytes) for e in listing.files] == sorted((key, len(data)) for key, data in files.items())
        if not files:
            assert store.list(prefix, deep=False) == ([], [])
        assert {key: content_of(store, key) for key in files} == dict(files)


class _Broken(Exception):
    """What a test's chunks raise."""


def _random(nbytes: int) -> bytes:
    return random.Random(nbytes).randbytes(nbytes)


def _spoil(buffer: bytearray) -> None:
    buffer[:] = b"\xee" * len(buffer)


def _same(data: bytes, content: bytes) -> bool:
    """Whether these megabytes are equal. Of ``==`` in an assert, pytest makes a diff for minutes where CI is set."""
    return data == content


def _soon(true: Callable[[], bool]) -> bool:
    """Whether it comes true; a client may let go of the last memory a moment after it has answered."""
    until = time.monotonic() + LONG
    while not true() and time.monotonic() < until:
        time.sleep(0.01)
    return true()
