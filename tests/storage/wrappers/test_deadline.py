"""Deadline: that every verb ends, what it says then, and what becomes of an upload that is given up."""

from __future__ import annotations

import ctypes
import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait

import pytest

from holdfast.storage.store import Buffer, Got, Listing, Store
from holdfast.storage.wrappers import deadline
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.retrying import Retrying, is_transient
from holdfast.testing import Failing, Memory
from tests.patience import wait_until

_: Store = Deadline(Memory(), 1.0)

SHORT = 0.05


class Hanging(Memory):
    """Answers nothing until it is let go; an upload hangs after some chunks, or at its end."""

    def __init__(self, chunks: int | None = 0) -> None:
        super().__init__()
        self.go = threading.Event()
        self.chunks = chunks
        self.ended: BaseException | str | None = None
        self.hung = threading.Event()

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.go.wait()
        return super().list(prefix, deep=deep)

    def size(self, key: str) -> int | None:
        self.go.wait()
        return super().size(key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        self.go.wait()
        return super().get(key, begin, end)

    def create(self, key: str, data: bytes) -> bool:
        self.go.wait()
        return super().create(key, data)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        def hanging() -> Iterator[Buffer]:
            for n, chunk in enumerate(chunks):
                if n == self.chunks:
                    self.hang()
                yield chunk
            if self.chunks is None:
                self.hang()

        if self.chunks == 0:
            self.hang()
        try:
            super().put(key, hanging(), nbytes)
            self.ended = "done"
        except BaseException as error:
            self.ended = error

    def delete(self, keys: Sequence[str]) -> None:
        self.go.wait()

    def hang(self) -> None:
        self.hung.set()
        self.go.wait()


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    made = Hanging()
    yield made
    made.go.set()


@pytest.mark.parametrize(
    ("verb", "key", "call"),
    [
        ("list", "a", lambda store: store.list("a", deep=True)),
        ("size", "a/f", lambda store: store.size("a/f")),
        ("get", "a/f", lambda store: store.get("a/f")),
        ("create", "a/f", lambda store: store.create("a/f", b"x")),
        ("put", "a/f", lambda store: store.put("a/f", [b"x"], 1)),
        ("delete", "a/f", lambda store: store.delete(["a/f"])),
        ("delete", "a/f and 2 more", lambda store: store.delete(["a/f", "b", "c"])),
    ],
)
def test_every_verb_ends(verb: str, key: str, call: Callable[[Store], object], hanging: Hanging) -> None:
    with pytest.raises(OSError, match=f"{verb} of {hanging.url}/{key} did not end: .* for 0.05 s") as caught:
        call(Deadline(hanging, SHORT))
    assert caught.value.errno == errno.ETIMEDOUT and is_transient(caught.value)


def test_answers_and_errors_come_through_as_they_are() -> None:
    plain = Memory()
    store = Deadline(plain, 60.0)
    store.put("a/f", [b"content"], 7)
    assert store.list("", deep=True) == plain.list("", deep=True)
    assert bytes(store.get("a/f", 2, 4).data) == b"nt"
    with pytest.raises(FileNotFoundError):
        store.get("absent")
    error = OSError("its own")
    for call in (lambda s: s.size("f"), lambda s: s.put("f", [b"x"], 1)):
        with pytest.raises(OSError) as caught:
            call(Deadline(Failing(Memory(), 1, error=lambda: error), 60.0))
        assert caught.value is error


def test_a_timeout_inside_is_not_taken_for_its_own() -> None:
    with pytest.raises(TimeoutError) as caught:
        Deadline(Failing(Memory(), 1, error=lambda: TimeoutError("from below")), 60.0).size("f")
    assert str(caught.value) == "from below"


# Uploads


def test_seconds_of_an_upload_count_from_the_last_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test turns: 0.9 of the limit for each of ten chunks, by the store and by their maker."""
    now = [0.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])

    class Slow(Memory):
        def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
            super().put(key, self.slowly(chunks), nbytes)

        def slowly(self, chunks: Iterable[Buffer]) -> Iterator[Buffer]:
            for chunk in chunks:
                now[0] += 27.0
                yield chunk

    def made_slowly() -> Iterator[bytes]:
        for n in range(10):
            now[0] += 1000.0  # training has the processor; nobody waits for the store
            yield b"%d" % n

    store = Slow()
    Deadline(store, 30.0).put("f", made_slowly(), 10)
    assert bytes(store.get("f").data) == b"0123456789"


def test_time_in_which_a_chunk_is_made_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(deadline, "monotonic", lambda: now[0])
    watch = deadline._Watch(30.0)

    def made_slowly() -> Iterator[bytes]:
        now[0] += 1000.0
        assert watch.left() == 30.0
        yield b"x"

    now[0] += 20.0
    assert watch.left() == 10.0
    assert watch.take(made_slowly()) == b"x"
    assert watch.left() == 30.0
    now[0] += 30.0
    assert watch.left() == 0.0
    with pytest.raises(OSError, match="given up"):
        watch.take(iter([b"y"]))


@pytest.mark.parametrize("hangs_after", [1, 3, None])
def test_an_upload_that_hangs_is_given_no_more_chunks(hangs_after: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends when it asks for the next one; nothing of it is seen, and nothing keeps its chunks."""
    store = Hanging(hangs_after)
    monkeypatch.setattr(deadline, "monotonic", lambda: 100.0 if store.hung.is_set() else 0.0)
    monkeypatch.setattr(deadline, "wait", lambda futures, seconds: wait(futures, 0.01))
    lent: list[weakref.ref[object]] = []

    def lend(n: int) -> memoryview:
        array = (ctypes.c_ubyte * 10)(n)
        lent.append(weakref.ref(array))
        return memoryview(array).cast("B")

    with pytest.raises(OSError, match="since it took the last chunk"):
        Deadline(store, 30.0).put("f", map(lend, range(6)), 60)
    taken = 6 if hangs_after is None else hangs_after + 1
    assert len(lent) == taken
    store.go.set()
    wait_until(lambda: store.ended is not None)
    assert len(lent) == taken
    if hangs_after is None:
        assert store.ended == "done", "all chunks were taken: that it is not done cannot be promised"
    else:
        assert isinstance(store.ended, OSError) and store.ended.errno == errno.ECANCELED
        assert Memory.size(store, "f") is None
        store.ended = None
    wait_until(lambda: not any(ref() for ref in lent))


def test_an_interrupted_upload_is_given_no_more_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    store, given = Hanging(2), []

    def chunks() -> Iterator[bytes]:
        for n in range(6):
            given.append(n)
            yield b"x"

    def interrupted(futures: object, seconds: float) -> None:
        wait_until(lambda: len(given) == 3)
        raise KeyboardInterrupt

    monkeypatch.setattr(deadline, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Deadline(store, 60.0).put("f", chunks(), 6)
    store.go.set()
    wait_until(lambda: store.ended is not None)
    assert isinstance(store.ended, OSError) and given == [0, 1, 2] and Memory.size(store, "f") is None


def test_a_failed_upload_keeps_no_chunk_once_its_error_is_gone() -> None:
    lent: list[weakref.ref[object]] = []

    def lend(n: int) -> memoryview:
        array = (ctypes.c_ubyte * 10)(n)
        lent.append(weakref.ref(array))
        return memoryview(array).cast("B")

    class Refusing(Memory):
        def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
            chunk = next(iter(chunks))
            raise OSError(f"refused with {memoryview(chunk).nbytes} bytes in hand")

    gc.disable()  # what is freed only by it keeps staging memory for long
    try:
        with pytest.raises(OSError, match="refused with 10"):
            Deadline(Refusing(), 60.0).put("f", map(lend, range(6)), 60)
        assert lent
        wait_until(lambda: not any(ref() for ref in lent))
    finally:
        gc.enable()


def test_a_list_of_chunks_stays_one_that_can_be_sent_again() -> None:
    plain = Memory()
    failing = Failing(plain, 1, when="within", error=lambda: _transient())
    Deadline(Retrying(failing, first=0.0), 60.0).put("f", [b"ab", b"cd"], 4)
    assert bytes(plain.get("f").data) == b"abcd" and failing.count == 2


def _transient() -> OSError:
    error = OSError("503")
    vars(error)["transient"] = True
    return error


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_the_limit_is_more_than_nothing(seconds: float) -> None:
    with pytest.raises(ValueError, match="seconds must be more than 0"):
        Deadline(Memory(), seconds)
