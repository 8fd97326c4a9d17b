"""The contract, on holdfast's own stores, and each wrapper around one; that it fails for stores that do not keep it."""

from __future__ import annotations

import ast
import ctypes
import inspect
import tempfile
import time
import urllib.parse
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import holdfast
from holdfast.storage.local.local import Local
from holdfast.storage.store import Buffer, Entry, Got, Listing, Store
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.hedged import Hedged
from holdfast.storage.wrappers.retrying import Retrying
from holdfast.storage.wrappers.throttled import Throttled
from holdfast.testing import Failing, Memory, ReadOnlyContract, StoreContract, contract

WRAPPERS: dict[str, Callable[[Store], Store]] = {
    "plain": lambda store: store,
    "retrying": Retrying,
    "throttled": lambda store: Throttled(store, 10e9),
    "deadline": lambda store: Deadline(store, 60.0),
    "hedged": Hedged,
    "failing": Failing,
    "all": lambda store: Retrying(Hedged(Throttled(Deadline(store, 60.0), 10e9))),
    "the other way around": lambda store: Deadline(Throttled(Hedged(Retrying(store)), 10e9), 60.0),
}


class TestMemory(StoreContract):
    @pytest.fixture(params=list(WRAPPERS))
    def store(self, request: pytest.FixtureRequest) -> Store:
        return WRAPPERS[request.param](Memory())


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        # In memory where that can be had: the contract makes thousands of files, each synced.
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            yield Local(Path(folder) / "root")
            assert not list(Path(folder).glob("root/*")), "no temporary file and no empty folder is left"


class Published:
    """A store that is only read, and does not list."""

    url = "memory://published"

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.files = files

    def list(self, prefix: str, *, deep: bool) -> Listing:
        error = OSError(f"{self.url} does not list")
        vars(error)["unlisted"] = True
        raise error

    def size(self, key: str) -> int | None:
        return len(self.files[key]) if key in self.files else None

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if key not in self.files:
            raise FileNotFoundError(f"there is no {self.url}/{key}")
        return Got(self.files[key][begin:end], len(self.files[key]))

    def create(self, key: str, data: bytes) -> bool:
        raise OSError(f"{self.url}/{key} cannot be written")

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        raise OSError(f"{self.url}/{key} cannot be written")

    def delete(self, keys: Sequence[str]) -> None:
        raise OSError(f"{self.url}/{keys[0]} cannot be deleted")


class TestPublished(ReadOnlyContract):
    @pytest.fixture
    def there(self) -> Mapping[str, bytes]:
        return {"a/model.bin": bytes(range(256)) * 9, "a/empty": b"", "top": b"1"}

    @pytest.fixture
    def store(self, there: Mapping[str, bytes]) -> Store:
        return Published(there)


@pytest.mark.parametrize("around", WRAPPERS)
@pytest.mark.parametrize("home", ["memory", "local"])
def test_one_chunk_is_held_at_a_time(around: str, home: str, tmp_path: Path) -> None:
    """Staging memory may have a single window: the next chunk can be made when the one before is let go of."""
    store: Store = WRAPPERS[around](Memory() if home == "memory" else Local(tmp_path))
    memory, lent = bytearray(10), list[weakref.ref[object]]()

    def lend(n: int) -> memoryview:
        assert not [ref for ref in lent if ref() is not None]
        array = (ctypes.c_ubyte * 10).from_buffer(memory)
        lent.append(weakref.ref(array))
        memory[:] = b"%d" % n * 10
        return memoryview(array).cast("B")

    store.put("f", map(lend, range(4)), 40)
    assert bytes(store.get("f").data) == b"0" * 10 + b"1" * 10 + b"2" * 10 + b"3" * 10


# Stores that break one promise each; the test that must find it


class KeepsChunks(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self.kept = list(chunks)
        super().put(key, self.kept, nbytes)


class ReadsChunksLate(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        places = [_place(chunk) for chunk in chunks]
        super().put(key, [ctypes.string_at(*place) for place in places], nbytes)


def _place(chunk: Buffer) -> tuple[int, int]:
    nbytes = memoryview(chunk).nbytes
    return ctypes.addressof((ctypes.c_char * nbytes).from_buffer(chunk)), nbytes


class WritesPieceByPiece(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        data = b""
        for chunk in chunks:
            data += bytes(chunk)
            super().put(key, [data], len(data))
            time.sleep(0.003)


class AppendsToTheOlder(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        data = (self.get(key).data if self.size(key) else b"", *chunks)
        super().put(key, data, sum(memoryview(part).nbytes for part in data))


class ForgetsEmptyFiles(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        if nbytes:
            super().put(key, chunks, nbytes)


class BelievesWhatIsAnnounced(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        data = b"".join(map(bytes, chunks))
        super().put(key, [data], len(data))


class CreatesInTwoSteps(Memory):
    def create(self, key: str, data: bytes) -> bool:
        if self.size(key) is not None:
            return False
        time.sleep(0.2)
        self.put(key, [data], len(data))
        return True


class CreatesOverwriting(Memory):
    def create(self, key: str, data: bytes) -> bool:
        made = super().create(key, data)
        self.put(key, [data], len(data))
        return made


class ListsByLetters(Memory):
    def list(self, prefix: str, *, deep: bool) -> Listing:
        found = [e for e in super().list("", deep=True).files if e.key.startswith(prefix)]
        return Listing(found, []) if deep else super().list(prefix, deep=False)


class ListsOnePage(Memory):
    def list(self, prefix: str, *, deep: bool) -> Listing:
        found = super().list(prefix, deep=deep)
        return Listing(found.files[:1000], found.folders)


class ListsOnePageOfFolders(Memory):
    def list(self, prefix: str, *, deep: bool) -> Listing:
        found = super().list(prefix, deep=deep)
        return Listing(found.files, found.folders[:1000])


class ListsUnsorted(Memory):
    def list(self, prefix: str, *, deep: bool) -> Listing:
        found = super().list(prefix, deep=deep)
        return Listing(found.files[::-1], found.folders)


class ListsTheFolderItself(Memory):
    def list(self, prefix: str, *, deep: bool) -> Listing:
        found = super().list(prefix, deep=deep)
        itself = [Entry(prefix, self.size(prefix) or 0, time.time())] if self.size(prefix) is not None else []
        return Listing(itself + found.files, found.folders)


class ListsLate(Memory):
    seen: Listing | None = None

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.seen, told = super().list(prefix, deep=deep), self.seen
        return self.seen if told is None else told


class HasNoClock(Memory):
    def __init__(self) -> None:
        super().__init__(clock=lambda: 0.0)


class EndsOneByteLate(Memory):
    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        return super().get(key, begin, None if end is None else end + 1)


class RefusesRangesBeyond(Memory):
    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if begin and begin >= (self.size(key) or 0):
            raise OSError("416 Range Not Satisfiable")
        return super().get(key, begin, end)


class TellsTheSizeOfTheRange(Memory):
    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        got = super().get(key, begin, end)
        return Got(got.data, memoryview(got.data).nbytes)


class HasNothingEverywhere(Memory):
    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        return Got(b"", 0) if self.size(key) is None else super().get(key, begin, end)


class SaysNoKey(Memory):
    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if self.size(key) is None:
            raise FileNotFoundError("404 Not Found")
        return super().get(key, begin, end)


class MissesNothing(Memory):
    def size(self, key: str) -> int | None:
        return super().size(key) or 0


class DeletesFolders(Memory):
    def delete(self, keys: Sequence[str]) -> None:
        below = [e.key for key in keys for e in self.list(key, deep=True).files]
        super().delete([*keys, *below])


class DeletesOnePage(Memory):
    def delete(self, keys: Sequence[str]) -> None:
        super().delete(keys[:1000])


class DeletesOnlyWhatIsThere(Memory):
    def delete(self, keys: Sequence[str]) -> None:
        if any(self.size(key) is None for key in keys):
            raise FileNotFoundError("404 Not Found")
        super().delete(keys)


class DecodesKeys(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        super().put(urllib.parse.unquote(key), chunks, nbytes)


class MindsNoCase(Memory):
    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        super().put(key.lower(), chunks, nbytes)


BROKEN: list[tuple[type[Memory], str]] = [
    (KeepsChunks, "test_memory_of_a_chunk_is_let_go_of_and_not_read_after_that"),
    (ReadsChunksLate, "test_memory_of_a_chunk_is_let_go_of_and_not_read_after_that"),
    (WritesPieceByPiece, "test_a_file_is_seen_whole_or_not_at_all"),
    (WritesPieceByPiece, "test_chunks_that_raise_leave_what_was_there"),
    (AppendsToTheOlder, "test_put_replaces"),
    (ForgetsEmptyFiles, "test_put_replaces"),
    (ForgetsEmptyFiles, "test_chunks_of_any_size"),
    (BelievesWhatIsAnnounced, "test_chunks_that_are_not_as_many_bytes_as_announced"),
    (CreatesInTwoSteps, "test_of_many_that_create_at_once_one_wins"),
    (CreatesOverwriting, "test_create_writes_once"),
    (ListsByLetters, "test_listing_goes_by_whole_components"),
    (ListsOnePage, "test_more_files_than_a_page"),
    (ListsOnePageOfFolders, "test_more_files_than_a_page"),
    (ListsUnsorted, "test_listing_goes_by_whole_components"),
    (ListsTheFolderItself, "test_listing_goes_by_whole_components"),
    (ListsLate, "test_what_is_put_is_there_at_once"),
    (HasNoClock, "test_what_is_put_is_there_at_once"),
    (EndsOneByteLate, "test_ranges"),
    (RefusesRangesBeyond, "test_ranges"),
    (TellsTheSizeOfTheRange, "test_ranges"),
    (HasNothingEverywhere, "test_what_is_missing"),
    (SaysNoKey, "test_what_is_missing"),
    (MissesNothing, "test_what_is_missing"),
    (DeletesFolders, "test_delete_leaves_all_else"),
    (DeletesOnePage, "test_more_files_than_a_page"),
    (DeletesOnlyWhatIsThere, "test_delete_leaves_all_else"),
    (DecodesKeys, "test_odd_names"),
    (MindsNoCase, "test_odd_names"),
]


@pytest.mark.parametrize(("kind", "test"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.slow_cases("ReadsChunksLate-test_memory_of_a_chunk_is_let_go_of_and_not_read_after_that")
def test_it_finds_stores_that_break_a_promise(kind: type[Memory], test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind is KeepsChunks:
        monkeypatch.setattr(contract, "LONG", 0.1)
    store, below = kind(), "below"
    there = {f"{below}/few": b"few", f"{below}/inner/many": b"many" * 1000}
    given = {"store": store, "below": below, "there": there, "sizes": [0], "after": 3 << 20, "older": b"older"}
    given["announced"] = 999
    method = getattr(StoreContract(), test)
    wanted = inspect.signature(method).parameters
    if "there" in wanted:
        for key, content in there.items():
            Memory.put(store, key, [content], len(content))
    with pytest.raises((AssertionError, OSError, pytest.fail.Exception)):
        method(**{name: given[name] for name in wanted})


@pytest.mark.slow
def test_the_library_itself_needs_no_pytest() -> None:
    package = Path(holdfast.__file__).parent
    for path in package.rglob("*.py"):
        if path.parent.name == "testing":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [name for name in names if name.startswith(("pytest", "holdfast.testing"))], path
