"""Retrying: what is tried again, what never, how long it waits, and what the last failure says."""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Iterator
from typing import Literal

import pytest

from holdfast.errors import StorageError
from holdfast.storage.store import Buffer, Store
from holdfast.storage.wrappers import retrying
from holdfast.storage.wrappers.retrying import Retrying, is_transient, transient
from holdfast.testing import Failing, Memory

_: Store = Retrying(Memory())


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been waited."""
    pauses: list[float] = []
    monkeypatch.setattr(retrying, "sleep", pauses.append)
    return pauses


def busy() -> OSError:
    return transient(OSError(errno.EBUSY, "503 Slow Down"))


VERBS: dict[str, Callable[[Store], object]] = {
    "list": lambda store: store.list("a", deep=True),
    "size": lambda store: store.size("a/f"),
    "get": lambda store: store.get("a/f", 1, 3),
    "create": lambda store: store.create("a/new", b"new"),
    "put": lambda store: store.put("a/f", [b"new", b"er"], 5),
    "delete": lambda store: store.delete(["a/f", "a/g"]),
}


def holding() -> Memory:
    memory = Memory(clock=lambda: 7.0)
    memory.put("a/f", [b"older"], 5)
    return memory


def content(store: Store) -> dict[str, bytes]:
    return {entry.key: bytes(store.get(entry.key).data) for entry in store.list("", deep=True).files}


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_tried_until_it_succeeds(
    verb: str, when: Literal["before", "within", "after"], slept: list[float]
) -> None:
    plain, expected = holding(), holding()
    answer = VERBS[verb](Retrying(Failing(plain, 1, times=3, when=when, error=busy)))
    assert answer == VERBS[verb](expected)
    assert content(plain) == content(expected)
    assert len(slept) == 3 if (verb, when) != ("create", "after") else len(slept) >= 1


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_not_transient_is_raised_as_it_is(verb: str, slept: list[float]) -> None:
    error = OSError(errno.EACCES, "403 Forbidden")
    store = Failing(holding(), 1, times=9, error=lambda: error)
    with pytest.raises(OSError) as caught:
        VERBS[verb](Retrying(store))
    assert caught.value is error and store.count == 1 and not slept


def test_a_missing_file_is_not_looked_for_again() -> None:
    store = Failing(Memory())
    with pytest.raises(FileNotFoundError):
        Retrying(store).get("absent")
    assert store.count == 1


@pytest.mark.parametrize("verb", VERBS)
def test_the_last_failure_says_how_often_it_was_tried(verb: str, caplog: pytest.LogCaptureFixture) -> None:
    store = Failing(holding(), 1, times=99, error=busy)
    with caplog.at_level(logging.DEBUG, "holdfast"), pytest.raises(StorageError) as caught:
        VERBS[verb](Retrying(store, attempts=4))
    assert "503 Slow Down (after 4 attempts over 0." in str(caught.value)
    assert caught.value.errno == errno.EBUSY and is_transient(caught.value)
    retried = [record for record in caplog.records if "again in" in record.message]
    assert len(retried) == 3 and all(record.levelno == logging.DEBUG for record in retried)
    assert all(record.message.startswith(f"{verb} of {store.url}/a") for record in retried)


def test_waits_grow_and_are_drawn_at_random(slept: list[float]) -> None:
    for _ in range(200):
        with pytest.raises(StorageError):
            Retrying(Failing(holding(), 1, times=99, error=busy), attempts=8, first=0.2, most=5.0).size("a/f")
    for number, limit in enumerate([0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]):
        drawn = slept[number::7]
        assert 0 <= min(drawn) < 0.2 * limit and 0.8 * limit < max(drawn) <= limit
        assert len(set(drawn)) > 100


def test_the_random_numbers_of_training_are_left_alone() -> None:
    state = random.getstate()
    Retrying(Failing(holding(), 1, times=3, error=busy)).size("a/f")
    assert random.getstate() == state


@pytest.mark.parametrize(("asked", "waited"), [(30.0, 30.0), (1e9, 60.0), (None, 0.0)])
def test_a_store_that_asks_for_time_gets_it(asked: float | None, waited: float, slept: list[float]) -> None:
    error = transient(OSError("429"), retry_after=asked)
    assert Retrying(Failing(holding(), 1, error=lambda: error), first=0.0).size("a/f") == 5
    assert slept == [waited]


# Uploads


class OneByOne:
    """Chunks that can be taken once."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = list(chunks)

    def __iter__(self) -> Iterator[Buffer]:
        while self.chunks:
            yield self.chunks.pop(0)


def test_an_upload_is_not_repeated_with_chunks_that_are_gone(slept: list[float]) -> None:
    plain = holding()
    store = Failing(plain, 1, times=9, when="within", error=busy)
    for chunks in (iter([b"new", b"er"]), OneByOne(b"new", b"er")):
        with pytest.raises(StorageError, match=r"503 Slow Down \(after 1 attempt .*chunks of it were taken") as caught:
            Retrying(store).put("a/f", chunks, 5)
        assert is_transient(caught.value)
    assert store.count == 2 and not slept and content(plain) == {"a/f": b"older"}


def test_an_upload_is_repeated_if_no_chunk_was_taken(slept: list[float]) -> None:
    plain = holding()
    Retrying(Failing(plain, 1, times=2, error=busy)).put("a/f", iter([b"new", b"er"]), 5)
    assert content(plain) == {"a/f": b"newer"} and len(slept) == 2


def test_what_chunks_raise_is_no_failure_of_the_store() -> None:
    error = busy()

    def chunks() -> Iterator[bytes]:
        yield from ()
        raise error

    store = Failing(holding())
    with pytest.raises(OSError, match="503"):
        Retrying(store).put("a/f", chunks(), 5)
    assert store.count == 1


# Creating: the answer may be lost


class Answers(Memory):
    """Calls of `create` go as is said: what is done first, and what is raised then."""

    def __init__(self, *calls: tuple[Callable[[Memory], object], OSError | None]) -> None:
        super().__init__()
        self.calls = list(calls)

    def create(self, key: str, data: bytes) -> bool:
        if not self.calls:
            return super().create(key, data)
        done, error = self.calls.pop(0)
        done(self)
        if error is not None:
            raise error
        return super().create(key, data)


def ours(store: Memory) -> None:
    store.put("key", [b"ours"], 4)


def theirs(store: Memory) -> None:
    store.put("key", [b"theirs"], 6)


def nothing(store: Memory) -> None:
    pass


@pytest.mark.parametrize(
    ("calls", "expected", "left"),
    [
        ([(ours, busy())], True, b"ours"),
        ([(nothing, busy())], True, b"ours"),
        ([(nothing, busy()), (ours, busy())], True, b"ours"),
        ([(theirs, busy())], False, b"theirs"),
        ([(nothing, busy()), (ours, None)], True, b"ours"),  # the first came late: between the look and the second
        ([(nothing, busy()), (theirs, None)], False, b"theirs"),
        ([(ours, None)], False, b"ours"),  # equal bytes, and no attempt of ours before
        ([(nothing, busy())] * 2 + [(ours, busy())], True, b"ours"),  # the last one, and no answer
        ([(nothing, busy())] * 2 + [(theirs, busy())], False, b"theirs"),
    ],
)
def test_a_create_is_ours_if_our_bytes_are_there(
    calls: list[tuple[Callable[[Memory], object], OSError | None]], expected: bool, left: bytes
) -> None:
    store = Answers(*calls)
    assert Retrying(store, attempts=3).create("key", b"ours") is expected
    assert content(store) == {"key": left}


def test_nothing_is_created_over_what_is_there() -> None:
    """Also in a store that minds no condition: what is there is looked at first."""

    class Overwriting(Answers):
        def create(self, key: str, data: bytes) -> bool:
            super().create(key, data)
            self.put(key, [data], len(data))
            return True

    store = Overwriting((theirs, busy()))
    assert Retrying(store).create("key", b"ours") is False
    assert content(store) == {"key": b"theirs"}


def test_a_create_that_never_was_done_fails() -> None:
    store = Answers(*[(nothing, busy())] * 3)
    with pytest.raises(StorageError, match="after 3 attempts"):
        Retrying(store, attempts=3).create("key", b"ours")
    assert content(store) == {}


@pytest.mark.parametrize("nth", range(1, 8))
@pytest.mark.parametrize("when", ["before", "after"])
def test_looking_whether_it_was_done_may_fail_too(nth: int, when: Literal["before", "after"]) -> None:
    """Every verb of the sequence fails once in its turn, and the outcome is the same."""
    plain = Answers((nothing, busy()), (nothing, busy()))
    assert Retrying(Failing(plain, nth, when=when, error=busy)).create("key", b"ours") is True
    assert content(plain) == {"key": b"ours"}


def test_there_is_at_least_one_attempt() -> None:
    with pytest.raises(ValueError, match="attempts must be at least 1, not 0"):
        Retrying(Memory(), attempts=0)
