"""Signs of life and progress: who is slow is waited for, who is stuck or gone is named, who is quick writes nothing.

Each rank is a thread over one in-memory store. Deadlines are short, and no test looks at a clock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from holdfast import events
from holdfast.errors import RankLost
from holdfast.ranks import heartbeat
from holdfast.ranks.heartbeat import Watch, amount, at_work
from holdfast.ranks.ranks import Ranks
from tests.fleets import Fleet, one_text
from tests.patience import wait_until

SOON = 1.0


def call(ranks: Ranks, work: Callable[[], int], deadline: float = SOON) -> Any:
    with ranks.call("save", deadline=deadline) as made:
        return made.settle("write", work, sum, int)


def slowly(seconds: float) -> int:
    """Work that makes progress all the time."""
    with events.task("save", "somewhere") as task:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            task.advance(100_000_000)
            time.sleep(0.02)
    return 1


def stuck(seconds: float) -> int:
    """Work that makes some progress, and then none."""
    with events.task("save", "somewhere") as task:
        task.advance(12_300_000_000)
        time.sleep(seconds)
    return 1


@pytest.mark.timed
@pytest.mark.parametrize(("size", "fan_in"), [(4, 64), (16, 3)])
@pytest.mark.parametrize("slow", [0, 3])
def test_a_rank_that_makes_progress_is_waited_for(
    slow: int, size: int, fan_in: int, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(size, fan_in)
    with caplog.at_level(logging.INFO, "holdfast"):
        found = fleet.all(lambda ranks: call(ranks, lambda: slowly(3 * SOON) if ranks.rank == slow else 1))
    assert set(found.values()) == {size}
    assert fleet.store.num_keys() == 0
    told = [record.getMessage() for record in caplog.records if "waiting on" in record.getMessage()]
    assert told and all(f"rank {slow} is still at work" in text and "GB done" in text for text in told)
    assert len(told) < size, "once on each rank that watches"


@pytest.mark.timed
@pytest.mark.parametrize(("size", "fan_in"), [(4, 64), (16, 3)])
def test_a_rank_that_is_stuck_is_named_and_a_slow_one_is_not(size: int, fan_in: int) -> None:
    fleet = Fleet(size, fan_in)

    def work(rank: int) -> int:
        if rank == 2:
            return slowly(5 * SOON)
        return stuck(5 * SOON) if rank == size - 1 else 1

    kind, text = one_text(fleet.all(lambda ranks: call(ranks, lambda: work(ranks.rank))))
    assert kind is RankLost and text.startswith(f"rank {size - 1} (") and "rank 2 (" not in text
    assert "12.3 GB done, alive but stuck" in text
    assert set(fleet.all(lambda ranks: call(ranks, lambda: 1, 60.0)).values()) == {size}, "and all are together again"
    assert fleet.store.num_keys() == 0


@pytest.mark.timed
def test_a_rank_that_goes_on_and_dies_is_named_without_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(3)
    kept = heartbeat.Work.write_sign
    frozen = threading.Event()
    is_frozen = lambda work: frozen.is_set() and work.key.endswith("/1")  # noqa: E731
    monkeypatch.setattr(heartbeat.Work, "write_sign", lambda work: None if is_frozen(work) else kept(work))

    def work() -> int:
        slowly(2 * SOON)
        frozen.set()
        return stuck(3 * SOON)

    kind, text = one_text(fleet.all(lambda ranks: call(ranks, work if ranks.rank == 1 else lambda: 1)))
    assert kind is RankLost and text.startswith("rank 1 (") and "and no sign of life since" in text


def test_quick_phases_write_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(heartbeat.Work, "write_sign", lambda work: told.append(work.key))
    fleet = Fleet(5)
    for _ in range(20):
        assert set(fleet.all(lambda ranks: call(ranks, lambda: 1, 60.0)).values()) == {5}
    assert not told


def test_signs_of_a_store_that_fails_disturb_nobody() -> None:
    class Gone:
        def set(self, key: str, value: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

        def delete_key(self, key: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    store = dist.HashStore()
    with at_work(Gone(), 0, 0.1, lambda: 0), at_work(store, 1, 0.1, lambda: 7):
        wait_until(lambda: store.check([heartbeat.key_of(1)]))
    assert store.num_keys() == 0


def test_signs_go_on_in_a_forked_process() -> None:
    store = dist.HashStore()
    with at_work(store, 0, 0.1, lambda: 0):
        wait_until(lambda: store.check([heartbeat.key_of(0)]))
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with at_work(store, 1, 0.1, lambda: 0):
                wait_until(lambda: store.check([heartbeat.key_of(1)]))
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_watch_takes_change_for_progress_and_nothing_else() -> None:
    store, count = dist.HashStore(), [0]
    watch = Watch(store, 10.0)
    watch.expect([1], 0.0)
    work = heartbeat.Work(store, heartbeat.key_of(1), 1.0, lambda: count[0])
    work.write_sign()
    watch.look([1])
    assert watch.silent(1, 5.0) == 5.0, "it lives, and has not moved"
    count[0] = 3
    work.write_sign()
    watch.look([1])
    assert watch.silent(1, 5.0) < 5.0
    assert watch.progress(1) == "3 bytes done" and "alive" in watch.described(1)


def test_amounts() -> None:
    assert [amount(n) for n in (0, 999, 1000, 12_345_678_901, 5 * 10**15)] == [
        "0 bytes", "999 bytes", "1.0 kB", "12.3 GB", "5000.0 TB",
    ]  # fmt: skip
