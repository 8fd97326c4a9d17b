"""A store place: that it answers as a Path does, for whatever tree of files; reading in any order."""

from __future__ import annotations

import io
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.storage.local.local import Local
from holdfast.storage.store import Store
from holdfast.storage.store_place import StorePlace
from holdfast.testing import Failing, Memory
from tests.marks import examples

NAMES = ["a", "b.c", "b", "model.tar.gz", ".hidden", "step-1"]
keys = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map("/".join)


def filled(store: Store, *there: str) -> Store:
    for key in there:
        store.put(key, [key.encode()], len(key.encode()))
    return store


# By the key alone


@given(keys, keys)
def test_words_about_the_key_are_those_of_a_path(key: str, other: str) -> None:
    place, path = StorePlace(Memory(), key), PurePosixPath(key)
    for word in ("name", "stem", "suffix", "suffixes", "parts"):
        assert getattr(place, word) == getattr(path, word), word
    assert (place / other).key == place.joinpath(other).key == str(path / other)
    assert place.with_name("new").key == str(path.with_name("new"))
    assert place.with_suffix(".x").key == str(path.with_suffix(".x"))
    assert (place / other).relative_to(place) == PurePosixPath(other)
    assert place.parent.key == ("" if str(path.parent) == "." else str(path.parent))
    assert (place / PurePosixPath(other)).key == str(path / other)


@pytest.mark.parametrize(
    ("below", "key"), [("", "a"), (".", "a"), ("b/", "a/b"), ("/b", "a/b"), ("b//c/./d", "a/b/c/d"), ("../b", "b")]
)
def test_joined_keys_are_keys(below: str, key: str) -> None:
    assert (StorePlace(Memory(), "a") / below).key == key


def test_the_top_of_a_store() -> None:
    top = StorePlace(filled(Memory(), "a/f"), "")
    assert str(top) == top.store.url and str(top / "a") == f"{top.store.url}/a"
    assert top.parent == top and top.name == "" and (top / "a").parent == top
    assert top.is_dir() and not top.is_file() and top.exists()
    assert [place.key for place in top.iterdir()] == ["a"]


def test_places_are_equal_where_they_are_the_same_file() -> None:
    store = Memory()
    a, b = StorePlace(store, "a"), StorePlace(store, "b")
    assert a == StorePlace(store, "a") == StorePlace(Failing(store), "a") and hash(a) == hash(StorePlace(store, "a"))
    assert a != b and a != StorePlace(Memory(), "a") and a != "a" and len({a, b, StorePlace(store, "a")}) == 2
    assert sorted([b, a]) == [a, b] and a < b <= b
    with pytest.raises(ValueError):
        a.relative_to(b)


# What the store knows

trees = st.lists(keys, max_size=8).map(
    # No file that is a folder too: a disk cannot have it.
    lambda found: [key for key in dict.fromkeys(found) if not any(other.startswith(f"{key}/") for other in found)]
)


@settings(max_examples=examples(30))
@given(trees, st.lists(keys, max_size=4))
def test_it_answers_as_a_path_does(tmp_path_factory: pytest.TempPathFactory, there: list[str], also: list[str]) -> None:
    root = tmp_path_factory.mktemp("tree")
    for store in (filled(Local(root), *there), filled(Memory(), *there)):
        for key in ["", *there, *also, *(str(PurePosixPath(key).parent) for key in there)]:
            place, path = StorePlace(store, "") / key, root / key
            assert place.is_file() == path.is_file()
            assert place.is_dir() == (path.is_dir() and any(path.iterdir())), "a store has no empty folders"
            assert place.exists() == (place.is_file() or place.is_dir())
            assert not place.is_symlink()
            assert {child.name for child in place.iterdir()} == _names(path)
            for pattern in ("*", "b*", "*.c", "*/b", "a/*", "step-[0-9]"):
                assert _keys(place.glob(pattern)) == _below(root, path.glob(pattern)), pattern
            for pattern in ("*", "b*", "model.tar.gz"):
                assert _keys(place.rglob(pattern)) == _below(root, (p for p in path.rglob(pattern) if p.is_file()))
            if path.is_file():
                assert place.read_bytes() == path.read_bytes() and place.read_text() == path.read_text()
                assert place.stat().st_size == path.stat().st_size and stat.S_ISREG(place.stat().st_mode)
                assert place.open().read() == path.read_bytes()
            elif place.is_dir():
                assert stat.S_ISDIR(place.stat().st_mode)
            elif key:
                for read in (place.read_bytes, place.read_text, place.stat, place.open):
                    with pytest.raises(FileNotFoundError):
                        read()


def _names(path: Path) -> set[str]:
    return {child.name for child in path.iterdir()} if path.is_dir() else set()


def _keys(places: Any) -> list[str]:
    return sorted(place.key for place in places)


def _below(root: Path, paths: Any) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in paths)


def test_it_keeps_nothing_that_it_has_seen() -> None:
    store = Memory()
    place = StorePlace(store, "a/f")
    assert not place.exists()
    filled(store, "a/f")
    assert place.exists() and place.parent.is_dir()
    store.delete(["a/f"])
    assert not place.exists() and not place.parent.is_dir()


# Streams


@pytest.mark.parametrize("buffering", [0, 1, 1 << 20])
def test_a_stream_reads_and_seeks_as_one_of_a_file(buffering: int) -> None:
    content = random.Random(5).randbytes(300_000)
    store = Memory()
    store.put("f", [content], len(content))
    numbers = random.Random(buffering)
    with StorePlace(store, "f").open(buffering=buffering) as stream, io.BytesIO(content) as model:
        assert stream.readable() and stream.seekable() and not stream.writable()
        for _ in range(300):
            do: Callable[[Any], object] = numbers.choice(_steps(numbers))
            assert do(stream) == do(model)
            assert stream.tell() == model.tell()


def _steps(numbers: random.Random) -> list[Callable[[Any], object]]:
    n, at = numbers.randrange(150_000), numbers.randrange(310_000)
    return [
        lambda stream: _exactly(stream, n),
        lambda stream: _exactly(stream, 5),
        lambda stream: stream.seek(at),
        lambda stream: stream.seek(-min(n, stream.tell()), os.SEEK_CUR),
        lambda stream: stream.seek(-n, os.SEEK_END),
    ]


def _exactly(stream: Any, nbytes: int) -> bytes:
    """As much as there is: a stream without a buffer may read less at a time."""
    parts = []
    while nbytes and (part := stream.read(nbytes)):
        parts.append(part)
        nbytes -= len(part)
    return b"".join(parts)


def test_small_reads_are_few_requests() -> None:
    store = Failing(Memory())
    store.put("f", [bytes(100_000)], 100_000)
    before = store.count
    with StorePlace(store, "f").open() as stream:
        while stream.read(100):
            pass
    assert store.count - before == 2, "the size, and one get"


@pytest.mark.parametrize("mode", ["wb", "r", "ab", "r+b", "xb"])
def test_a_stream_is_for_reading_alone(mode: str) -> None:
    store = filled(Memory(), "f")
    with pytest.raises(ValueError, match="can be opened with mode 'rb' only"):
        StorePlace(store, "f").open(mode)
    assert store.get("f").nbytes == 1
