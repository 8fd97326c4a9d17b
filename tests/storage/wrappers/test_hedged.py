"""Hedged: when it asks twice, whose answer it takes, and that neither requests nor threads get out of hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from holdfast.storage.store import Got, Store
from holdfast.storage.wrappers import hedged
from holdfast.storage.wrappers.hedged import ABANDONED, ALWAYS, KNOWN, Hedged
from holdfast.storage.wrappers.retrying import transient
from holdfast.storage.wrappers.wrapper import in_thread
from holdfast.testing import Memory
from tests.patience import wait_until

_: Store = Hedged(Memory())


@dataclass
class Ask:
    """One get that waits for its answer."""

    key: str
    answer: Callable[[], Got] | None = None
    given: threading.Event = field(default_factory=threading.Event)

    def give(self, answer: Callable[[], Got]) -> None:
        self.answer = answer
        self.given.set()


class Slow(Memory):
    """Keys that begin with ``slow`` are answered when the test says so; ``asked`` are these gets, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Ask] = []
        self.put("fast", [bytes(100)], 100)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        if not key.startswith("slow"):
            return super().get(key, begin, end)
        ask = Ask(key)
        self.asked.append(ask)
        ask.given.wait()
        assert ask.answer is not None
        return ask.answer()


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    for ask in made.asked:
        ask.give(lambda: Got(b"", 0))


def knowing(store: Store, *, share: float = 0.0) -> Hedged:
    """A Hedged that knows, from a hundred of them, that gets of 100 bytes are usually fast."""
    made = Hedged(store, factor=1.0, least=3600.0, share=share)
    for _ in range(100):
        made.get("fast", 0, 100)
    assert made.hedges == made.wasted == 0
    made._least = 0.05
    return made


class InThread:
    """A get in a thread, which may have to wait."""

    def __init__(self, store: Hedged, key: str) -> None:
        self.result: Got | BaseException | None = None

        def run() -> None:
            try:
                self.result = store.get(key, 0, 100)
            except BaseException as error:
                self.result = error

        threading.Thread(target=run, daemon=True).start()

    def outcome(self) -> Got | BaseException | None:
        wait_until(lambda: self.result is not None)
        return self.result


def test_the_second_answer_is_taken_if_the_first_does_not_come(slow: Slow) -> None:
    store = knowing(slow)
    getting = InThread(store, "slow")
    wait_until(lambda: len(slow.asked) == 2)
    slow.asked[1].give(lambda: Got(b"second", 6))
    assert getting.outcome() == Got(b"second", 6)
    assert (store.hedges, store.wasted) == (1, 0)
    slow.asked[0].give(lambda: Got(b"first!!", 7))
    wait_until(lambda: store.wasted == 7)


def test_the_first_answer_is_taken_if_it_comes_before_the_second(slow: Slow) -> None:
    store = knowing(slow)
    getting = InThread(store, "slow")
    wait_until(lambda: len(slow.asked) == 2)
    slow.asked[0].give(lambda: Got(b"first", 5))
    assert getting.outcome() == Got(b"first", 5)
    slow.asked[1].give(lambda: Got(b"second", 6))
    wait_until(lambda: store.wasted == 6)


def test_nothing_is_asked_for_twice_before_it_is_known_what_is_usual(slow: Slow) -> None:
    store, size_class = Hedged(slow, least=3600.0), (100).bit_length()
    for _ in range(3 * KNOWN):
        store.get("fast", 0, 10_000)  # of another size: it says nothing of this one
        store.get("fast")
    for _ in range(KNOWN):
        assert store._patience(size_class) is None
        store.get("fast", 0, 100)
    assert store._patience(size_class) == 3600.0


def test_usual_is_what_recent_gets_of_the_size_took(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the test turns: 100 gets of 1 s to 100 s, then as many of 0.01 s, which make those forgotten."""
    now = [0.0]
    monkeypatch.setattr(hedged, "monotonic", lambda: now[0])
    seconds = iter([*map(float, range(1, 101)), *[0.01] * hedged.RECENT])

    class Timed(Slow):
        def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
            now[0] += next(seconds)
            return super().get(key, begin, end)

    store = Hedged(Timed(), factor=3.0, least=0.5)
    size_class = (100).bit_length()
    for _ in range(100):
        store.get("fast", 0, 100)
    assert store._patience(size_class) == 3.0 * 95.0
    for _ in range(hedged.RECENT):
        store.get("fast", 0, 100)
    assert store._patience(size_class) == 0.5


def test_an_error_that_will_not_pass_is_an_answer(slow: Slow) -> None:
    getting = InThread(knowing(slow), "slow")
    wait_until(lambda: len(slow.asked) == 2)
    slow.asked[1].give(lambda: _raise(FileNotFoundError("gone")))
    assert isinstance(getting.outcome(), FileNotFoundError)


@pytest.mark.parametrize("failing", [0, 1])
def test_after_an_error_that_may_pass_the_other_answer_is_taken(failing: int, slow: Slow) -> None:
    getting = InThread(knowing(slow), "slow")
    wait_until(lambda: len(slow.asked) == 2)
    slow.asked[failing].give(lambda: _raise(transient(OSError("503"))))
    time.sleep(0.2)  # for the failure to be heard of first; the outcome must be the same if it is not
    slow.asked[1 - failing].give(lambda: Got(b"good", 4))
    assert getting.outcome() == Got(b"good", 4)


def test_if_both_fail_the_first_error_is_raised(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked_at_once(work: Callable[[], Got], name: str) -> Future[Got]:
        before = len(slow.asked)
        future = in_thread(work, name)
        wait_until(lambda: len(slow.asked) > before)
        return future

    store = knowing(slow)
    monkeypatch.setattr(hedged, "in_thread", asked_at_once)
    getting = InThread(store, "slow")
    wait_until(lambda: len(slow.asked) == 2)
    slow.asked[1].give(lambda: _raise(transient(OSError("second"))))
    slow.asked[0].give(lambda: _raise(transient(OSError("first"))))
    outcome = getting.outcome()
    assert isinstance(outcome, OSError) and str(outcome) == "first"


def test_what_fails_is_not_asked_for_again() -> None:
    store = knowing(Slow())
    with pytest.raises(FileNotFoundError):
        store.get("absent", 0, 100)
    assert store.hedges == 0


def test_only_a_share_is_asked_for_twice(slow: Slow) -> None:
    store = knowing(slow, share=0.1)
    getting = [InThread(store, f"slow{n}") for n in range(30)]
    # Four repeats and a tenth of the gets are allowed: more than 14 after 101 gets, 17 after all 130. How many it will
    # be depends on which threads begin first.
    wait_until(lambda: len({ask.key for ask in [*slow.asked]}) == 30 and len(slow.asked) >= 30 + ALWAYS + 11)
    for ask in list(slow.asked):
        ask.give(lambda: Got(b"", 0))
    for one in getting:
        one.outcome()
    assert ALWAYS + 11 <= store.hedges <= ALWAYS + 13


@pytest.mark.slow
def test_stragglers_that_never_come_end_the_hedging(slow: Slow) -> None:
    store = knowing(slow, share=1.0)
    for n in range(ABANDONED):
        getting = InThread(store, "slow")
        wait_until(lambda: len(slow.asked) == 2 * n + 2)
        slow.asked[-1].give(lambda: Got(b"x", 1))
        assert getting.outcome() == Got(b"x", 1)
    assert store.hedges == ABANDONED
    before = threading.active_count()
    getting = InThread(store, "slow")
    wait_until(lambda: len(slow.asked) == 2 * ABANDONED + 1)
    assert threading.active_count() <= before + 1, "the get is in its caller's thread"
    slow.asked[-1].give(lambda: Got(b"y", 1))
    assert getting.outcome() == Got(b"y", 1) and store.hedges == ABANDONED
    # Once one has come after all, there is room for another.
    slow.asked[0].give(lambda: Got(b"late", 4))
    wait_until(lambda: store.wasted == 4)
    getting = InThread(store, "slow")
    wait_until(lambda: len(slow.asked) == 2 * ABANDONED + 3)
    slow.asked[-1].give(lambda: Got(b"z", 1))
    assert getting.outcome() == Got(b"z", 1) and store.hedges == ABANDONED + 1


def _raise(error: Exception) -> Got:
    raise error
