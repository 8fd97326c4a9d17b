"""`Listed`: what it answers, how few requests that takes, and what it does where a store does not list."""

from __future__ import annotations

import errno
import json
import random
import threading
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.storage.memory import Memory
from holdfast.storage.store import Got, Listing
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers import listed
from holdfast.storage.wrappers.listed import CHUNK, SMALL, Listed


class Counting(Memory):
    """A store that notes what it is asked; ``lists``: whether it does, or is a web server."""

    def __init__(self, files: dict[str, bytes], *, lists: bool = True) -> None:
        super().__init__()
        for key, data in files.items():
            self.put(key, [data], len(data))
        self.lists = lists
        self.asked: list[tuple[Any, ...]] = []

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.asked.append(("list", prefix, deep))
        if not self.lists:
            error = OSError(errno.ENOSYS, "a web server lists nothing")
            error.unlisted = True  # type: ignore[attr-defined]
            raise error
        return super().list(prefix, deep=deep)

    def size(self, key: str) -> int | None:
        self.asked.append(("size", key))
        return super().size(key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        got = super().get(key, begin, end)
        self.asked.append(("get", key, begin, len(memoryview(got.data))))
        return got

    def counts(self) -> Counter[str]:
        return Counter(kind for kind, *_ in self.asked)


def files(*keys: str, nbytes: int = 3) -> dict[str, bytes]:
    return {key: bytes(nbytes) for key in keys}


def keys_in(found: Listing) -> list[str]:
    return [entry.key for entry in found.files]


# What there is


def test_a_flat_folder_takes_one_listing_whatever_is_asked_of_it() -> None:
    store = Counting(files("run/a", "run/b", "run/c.json", "other/x"))
    found = StorePlace(Listed(store, "run"), "run")
    assert found.is_dir() and not found.is_file()
    assert sorted(path.name for path in found.iterdir()) == ["a", "b", "c.json"]
    assert (found / "a").stat().st_size == 3 and not (found / "a").is_dir()
    assert not (found / "absent").exists() and not (found / "model" / "config.json").exists()
    assert store.asked == [("list", "run", False)]


def test_a_few_folders_are_listed_alone_and_many_all_at_once() -> None:
    store = Counting(files(*(f"run/step-{i}/deep/{j}" for i in range(20) for j in range(3))))
    seen = Listed(store, "run")
    for i in range(20):
        assert keys_in(seen.list(f"run/step-{i}/deep", deep=False)) == [f"run/step-{i}/deep/{j}" for j in range(3)]
        assert seen.size(f"run/step-{i}/deep/1") == 3 and seen.size(f"run/step-{i}/1") is None
    assert store.asked == [
        ("list", "run", False), ("list", "run/step-0", True), ("list", "run/step-1", True),
        ("list", "run/step-2", True), ("list", "run", True),
    ]  # fmt: skip


def test_it_says_what_the_store_says() -> None:
    choose = random.Random(7)
    for _ in range(60):
        keys = {"/".join(choose.choice("abc") for _ in range(choose.randint(1, 4))) for _ in range(8)}
        keys = {key for key in keys if not any(other.startswith(f"{key}/") for other in keys)}
        store = Counting(files(*keys))
        prefix = choose.choice(["", "a", "a/b", "c", "b/c/a"])
        seen = Listed(store, prefix)
        for _ in range(40):
            key = "/".join(choose.choice("abc") for _ in range(choose.randint(1, 4)))
            asked = choose.randrange(3)
            if asked == 0:
                assert seen.size(key) == Memory.size(store, key), (keys, prefix, key)
            else:
                deep = asked == 1
                assert seen.list(key, deep=deep) == Memory.list(store, key, deep=deep), (keys, prefix, key, deep)
        assert seen.list("", deep=True) == Memory.list(store, "", deep=True)


def test_of_a_file_the_folder_around_it_is_listed_one_level_deep() -> None:
    store = Counting(files("models/a.pt", "models/b.pt", "models/old/1", "models/old/2"))
    file = StorePlace(Listed(store, "models/a.pt"), "models/a.pt")
    assert file.is_file() and not file.is_dir()
    assert {path.name for path in file.parent.iterdir()} == {"a.pt", "b.pt", "old"}
    assert (file.parent / "b.pt").is_file() and not (file.parent / "c.pt").is_file()
    assert store.counts() == {"list": 2, "size": 1}
    assert ("list", "models", False) in store.asked


def test_an_empty_file_that_stands_for_a_folder_is_none() -> None:
    store = Counting({"run/sub": b"", "run/sub/a": b"1", "run/empty": b"", "run": b""})
    found = StorePlace(Listed(store, "run"), "run")
    assert not found.is_file() and not (found / "sub").is_file() and (found / "sub").is_dir()
    assert (found / "empty").is_file()


def test_a_store_that_lists_more_than_it_was_asked_for() -> None:
    store = Counting(files("run/a/b", "run/ab/c", "running/a", "other"))
    plain = store.list
    store.list = lambda prefix, deep: plain("", deep=deep) if deep else plain(prefix, deep=deep)  # type: ignore
    assert keys_in(Listed(store, "run").list("run/a", deep=False)) == ["run/a/b"]


def test_a_bucket_of_everything_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "MAX_ENTRIES", 50)
    store = Counting(files(*(f"run/{i}" for i in range(60))))
    with pytest.raises(OSError, match="more than 50 files lie below memory://.*/run: name the folder of one"):
        Listed(store, "run").list("run", deep=False)


# Bytes


def test_every_read_has_the_bytes_of_the_file() -> None:
    choose = random.Random(3)
    for nbytes in (0, 1, CHUNK, SMALL, SMALL + 1, 5 * CHUNK, 7 * CHUNK + 17, 12 * CHUNK - 1):
        data = choose.randbytes(nbytes)
        seen = Listed(Counting({"f": data}), "")
        assert bytes(seen.get("f").data) == data
        seen = Listed(Counting({"f": data}), "")
        for _ in range(200):
            begin = choose.randint(0, nbytes)
            end = choose.choice([None, begin + choose.choice([0, 1, 100, CHUNK - 1, CHUNK, 3 * CHUNK])])
            got = seen.get("f", begin, end)
            assert bytes(got.data) == data[begin:end] and got.nbytes == nbytes
    with pytest.raises(FileNotFoundError, match="nothing at memory://.*/g"):
        seen.get("g")


def test_small_reads_share_requests_and_large_ones_pass_through() -> None:
    store = Counting({"f": bytes(20 * CHUNK + 100)})
    seen = Listed(store, "f")
    for at in range(0, 3000, 10):
        seen.get("f", at, at + 10)
    for at in (-22, -600, 1 - CHUNK):  # as a zip's end is read
        seen.get("f", 20 * CHUNK + 100 + at, 20 * CHUNK + 100)
    seen.get("f", 5 * CHUNK - 5, 5 * CHUNK + 5)
    seen.get("f", 100, 100 + 4 * CHUNK)
    assert [tuple(asked[2:]) for asked in store.asked if asked[0] == "get"] == [
        (0, CHUNK), (19 * CHUNK, CHUNK + 100), (4 * CHUNK, CHUNK), (5 * CHUNK, CHUNK), (100, 4 * CHUNK),
    ]  # fmt: skip


def test_a_file_that_was_read_whole_is_not_read_again() -> None:
    store = Counting({"index": bytes(4 << 20), "small": bytes(SMALL)})
    seen = Listed(store, "")
    seen.get("index"), seen.get("index"), seen.get("index", 7, 9)
    seen.get("small", 9, 10), seen.get("small", SMALL - 1), seen.get("small")
    assert store.counts()["get"] == 2


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listed, "KEPT", 8 * CHUNK)
    store = Counting({"f": bytes(100 * CHUNK)})
    seen = Listed(store, "")
    for _ in range(2):
        for at in range(100):
            seen.get("f", at * CHUNK, at * CHUNK + 1)
        assert sum(len(data.result()) for data in seen._chunks.values()) <= 8 * CHUNK
    assert store.counts()["get"] == 200
    seen.get("f", 99 * CHUNK + 5, 99 * CHUNK + 6)
    assert store.counts()["get"] == 200


def test_threads_that_want_the_same_share_one_request() -> None:
    store, begun, go = Counting({"f": bytes(range(256)) * 10}), threading.Event(), threading.Event()
    plain = store.get

    def slow(key: str, begin: int = 0, end: int | None = None) -> Got:
        begun.set()
        assert go.wait(240)
        return plain(key, begin, end)

    store.get = slow  # type: ignore[method-assign]
    seen = Listed(store, "")
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(seen.get, "f", n, n + 1) for n in range(8)]
        assert begun.wait(240)
        go.set()
        assert [bytes(got.result().data)[0] for got in found] == [*range(8)]
    assert store.counts()["get"] == 1


def test_a_request_that_failed_is_made_again() -> None:
    store = Counting({"f": b"abc"})
    plain, fails = store.get, [OSError("once"), OSError("twice")]

    def failing(key: str, begin: int = 0, end: int | None = None) -> Got:
        if fails:
            raise fails.pop(0)
        return plain(key, begin, end)

    store.get = failing  # type: ignore[method-assign]
    seen = Listed(store, "")
    for text in ("once", "twice"):
        with pytest.raises(OSError, match=text):
            seen.get("f")
    assert bytes(seen.get("f").data) == b"abc"


def test_it_writes_nothing() -> None:
    store = Counting({"f": b"abc"})
    seen = Listed(store, "")
    for verb in (lambda: seen.create("g", b""), lambda: seen.put("g", [], 0), lambda: seen.delete(["f"])):
        with pytest.raises(OSError, match="opened for reading"):
            verb()
    assert Memory.size(store, "f") == 3 and Memory.size(store, "g") is None


# Stores that do not list


def of_server(names: Iterable[str], index: bytes = b"{}") -> Counting:
    at = "org/model/resolve/main"
    found = {f"{at}/{name}": b"12345" for name in names}
    return Counting({**found, f"{at}/model.safetensors.index.json": index}, lists=False)


def test_where_nothing_is_listed_the_usual_names_are_tried() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[1], "c": "../../secret"}}).encode()
    store = of_server([*shards, "config.json", "unusual.bin"], index)
    found = StorePlace(Listed(store, "org/model/resolve/main"), "org/model/resolve/main")
    assert found.is_dir() and not found.is_file()
    assert {path.name for path in found.iterdir()} == {*shards, "config.json", "model.safetensors.index.json"}
    assert (found / "unusual.bin").is_file() and not (found / "sub" / "config.json").exists()
    asked = store.counts()
    assert {path.name for path in found.iterdir()} >= {"unusual.bin", *shards}
    assert store.counts() == asked and asked["list"] == 1
    assert not any("secret" in key for _, key, *_ in store.asked)


def test_one_file_of_a_server() -> None:
    store = of_server(["a.pt"])
    file = StorePlace(Listed(store, "org/model/resolve/main/a.pt"), "org/model/resolve/main/a.pt")
    assert file.is_file() and not file.is_dir() and file.read_bytes() == b"12345"
    assert store.counts() == {"list": 1, "size": 1, "get": 1}


def test_a_server_that_fails_for_folders_is_asked_for_files() -> None:
    for names, raised in ((["config.json"], False), ([], True)):
        store = Counting({f"m/{name}": b"1" for name in names}, lists=False)
        plain = store.size

        def size(key: str, plain: Any = plain) -> int | None:
            if key == "m":
                raise OSError("403 Forbidden")
            found: int | None = plain(key)
            return found

        store.size = size  # type: ignore[method-assign]
        found = StorePlace(Listed(store, "m"), "m")
        if raised:
            with pytest.raises(OSError, match="403"):
                found.is_dir()
        else:
            assert found.is_dir() and not found.is_file()
