"""Throttled: how much goes in how much time, by a clock that the test turns; that threads take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from holdfast.storage.store import Store
from holdfast.storage.wrappers import throttled
from holdfast.storage.wrappers.throttled import Throttled
from holdfast.testing import Memory

_: Store = Throttled(Memory(), 1.0)

RATE = 1000


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(throttled, "monotonic", made.monotonic)
    monkeypatch.setattr(throttled, "sleep", made.sleep)
    return made


def holding(nbytes: int) -> Memory:
    memory = Memory()
    memory.put("f", [bytes(nbytes)], nbytes)
    return memory


@pytest.mark.parametrize("size", [7, 100, 2500])
def test_uploads_go_at_the_rate_chunk_by_chunk(size: int, clock: Clock) -> None:
    began, moments = clock.now, []

    class Watching(Memory):
        def put(self, key: str, chunks: object, nbytes: int) -> None:
            for chunk in chunks:  # type: ignore[attr-defined]
                moments.append((clock.now - began, len(chunk)))

    Throttled(Watching(), RATE).put("f", iter([bytes(size)] * 40), 40 * size)
    done = 0
    for moment, nbytes in moments:
        done += nbytes
        assert done <= RATE * (moment + throttled.BURST) + 1e-6, "never ahead of the rate by more than the burst"
        assert done >= RATE * moment - 1e-6, "and never slower"
    assert done == 40 * size


@pytest.mark.parametrize(("begin", "end"), [(0, None), (0, 10_000), (500, 10_500), (0, 99_999), (10_000, 10_000)])
def test_downloads_go_at_the_rate(begin: int, end: int | None, clock: Clock) -> None:
    store, began, got = Throttled(holding(10_000), RATE), clock.now, 0
    for _ in range(10):
        got += len(store.get("f", begin, end).data)  # type: ignore[arg-type]
    assert clock.now - began == pytest.approx(max(got / RATE - throttled.BURST, 0.0))


def test_both_ways_share_the_rate(clock: Clock) -> None:
    store, began = Throttled(holding(1000), RATE), clock.now
    store.get("f")
    store.put("g", [bytes(1000)], 1000)
    assert clock.now - began == pytest.approx(2.0 - throttled.BURST)


def test_no_more_than_a_burst_is_saved_up_in_a_pause(clock: Clock) -> None:
    store = Throttled(holding(1000), RATE)
    store.get("f")
    clock.now += 3600
    began = clock.now
    store.get("f")
    assert clock.now - began == pytest.approx(1.0 - throttled.BURST)


def test_other_verbs_do_not_wait(clock: Clock) -> None:
    store, began = Throttled(holding(10), 1e-9), clock.now
    store.list("", deep=True)
    store.size("f")
    store.create("g", b"x" * 1000)
    store.delete(["f", "g"])
    assert clock.now == began


def test_a_small_file_does_not_wait_for_a_large_one() -> None:
    """The one chunk of the large one takes an hour; threads take turns, so the small one comes through meanwhile."""
    store, begun = Throttled(holding(10), RATE), threading.Event()

    def chunks() -> Iterator[bytes]:
        begun.set()
        yield bytes(3600 * RATE)

    large = threading.Thread(target=store.put, args=("large", chunks(), 3600 * RATE), daemon=True)
    large.start()
    assert begun.wait(240)
    for _ in range(3):
        assert store.get("f").nbytes == 10
    assert large.is_alive() and store.size("large") is None
    store._rate = 1e12
    large.join(240)
    assert store.size("large") == 3600 * RATE


@pytest.mark.parametrize("rate", [0, -1, float("nan")])
def test_the_rate_is_more_than_nothing(rate: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_second must be more than 0"):
        Throttled(Memory(), rate)
