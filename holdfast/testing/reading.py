"""What holds for every store that is read, as tests; and all that holds for one that is only read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from holdfast.storage.store import Got, Store

T = TypeVar("T")


class Reading:
    """What holds for stores that are read; ``store`` and ``there`` say which, and what lies in it."""

    @pytest.fixture
    def store(self) -> Store:
        """The store that is tested."""
        raise NotImplementedError("override the fixture `store`: it returns the Store that is tested")

    @pytest.fixture
    def there(self) -> Mapping[str, bytes]:
        """Files of it: key → content."""
        raise NotImplementedError("override the fixture `there`: it returns keys of the store with their contents")

    def test_url_has_no_slash_at_its_end(self, store: Store) -> None:
        assert store.url and not store.url.endswith("/")

    def test_size_and_content(self, store: Store, there: Mapping[str, bytes]) -> None:
        for key, content in there.items():
            assert store.size(key) == len(content)
            assert content_of(store, key) == content

    def test_ranges(self, store: Store, there: Mapping[str, bytes]) -> None:
        for key, content in there.items():
            n = len(content)
            ends = {0, 1, n // 3, n // 2, n - 1, n, n + 1, 2 * n + 7}
            for begin in sorted(e for e in ends if e >= 0):
                for end in [None, *sorted(e for e in ends if e >= begin)]:
                    got = store.get(key, begin, end)
                    assert bytes_of(got) == content[begin:end], f"bytes {begin}:{end} of {key}, which has {n}"
                    assert got.nbytes == n, f"the size of {key}, as answered with bytes {begin}:{end}"

    def test_what_is_missing(self, store: Store, there: Mapping[str, bytes]) -> None:
        beside = {f"{folder_of(key)}absent-{secrets.token_hex(8)}" for key in there}
        for key in [*beside, *(f"{key}/absent" for key in beside), *self.folders(there)]:
            assert store.size(key) is None
            for begin, end in [(0, None), (0, 0), (5, 10)]:
                with pytest.raises(FileNotFoundError) as caught:
                    store.get(key, begin, end)
                assert store.url in str(caught.value) and key in str(caught.value), "an error says where and what"

    def folders(self, there: Mapping[str, bytes]) -> Iterable[str]:
        """Keys of folders, at which there is no file either. (Web servers answer for theirs in many ways.)"""
        return []

    def test_many_threads_read(self, store: Store, there: Mapping[str, bytes]) -> None:
        def work(n: int) -> None:
            for key, content in there.items():
                assert bytes_of(store.get(key, n, len(content) - n)) == content[n : max(len(content) - n, n)]

        at_once(8, work)


class ReadOnlyContract(Reading):
    """Tests of a `Store` that is only read, as a web server: override the fixtures ``store`` and ``there``."""

    def test_it_lists_or_says_that_it_does_not(self, store: Store, there: Mapping[str, bytes]) -> None:
        for folder in {folder_of(key)[:-1] for key in there}:
            try:
                listing = store.list(folder, deep=False)
            except OSError as error:
                assert getattr(error, "unlisted", False), "an error that says so has an attribute `unlisted`"
                assert store.url in str(error)
                continue
            sizes = {entry.key: entry.nbytes for entry in listing.files}
            assert sizes.items() >= {(key, len(data)) for key, data in there.items() if folder_of(key)[:-1] == folder}

    def test_writing_is_refused(self, store: Store, there: Mapping[str, bytes]) -> None:
        key = f"{folder_of(next(iter(there)))}refused-{secrets.token_hex(8)}"
        writing: list[Callable[[], object]] = [
            lambda: store.create(key, b"data"),
            lambda: store.put(key, [b"data"], 4),
            lambda: store.delete([key]),
        ]
        for verb in writing:
            with pytest.raises(OSError) as caught:
                verb()
            assert store.url in str(caught.value) and key in str(caught.value), "an error says where and what"
        assert store.size(key) is None


def bytes_of(got: Got) -> bytes:
    view = memoryview(got.data)
    assert view.itemsize == view.ndim == 1 and view.contiguous, "bytes in one piece"
    return bytes(view)


def content_of(store: Store, key: str) -> bytes:
    got = store.get(key)
    assert got.nbytes == memoryview(got.data).nbytes
    return bytes_of(got)


def folder_of(key: str) -> str:
    return key[: key.rfind("/") + 1]


def at_once(threads: int, work: Callable[[int], T]) -> list[T]:
    """``work(0)``, ``work(1)``, … in a thread each; what one raises is raised."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads)))
