"""Clocks that are brought together: by questions and answers over a store, and by what was written down of them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from holdfast.ranks.ranks import Ranks
from holdfast.report import clocks
from holdfast.report.clocks import Clocks, Measured
from holdfast.report.parts import Part, common_clock
from holdfast.report.recording import Header
from tests.fleets import Fleet


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no reason to measure nothing."""
    monkeypatch.setattr(clocks, "GRACE", 60.0)
    monkeypatch.setattr(clocks, "ALONE", 60.0)


def _measure(fleet: Fleet, kind: Callable[[int], str], only: list[int] | None = None) -> dict[int, list[Measured]]:
    """What each rank has measured once all have ended."""
    told: dict[int, list[Measured]] = {rank: [] for rank in range(fleet.size)}
    made = {}
    for ranks in [ranks for ranks in fleet.ranks if only is None or ranks.rank in only]:
        clock = made[ranks.rank] = Clocks(f"part{ranks.rank}", told[ranks.rank].append)
        clock.kind = kind(ranks.rank)
        clock.measure(ranks)
    for clock in made.values():
        clock.close()
    return told


def test_of_the_ranks_of_one_clock_one_asks() -> None:
    told = _measure(Fleet(5), lambda rank: "same")
    assert told[0] == []
    found = [(m.to, m.offset, m.error) for rank in range(1, 5) for m in told[rank]]
    assert found in ([], [("part0", 0.0, 0.0)])  # none, if the first rank came first
    told = _measure(Fleet(9), lambda rank: "ab"[rank // 5])
    assert [len(told[rank]) for rank in range(5, 9)].count(1) == 1 and not any(len(of) > 1 for of in told.values())


def test_ranks_of_other_clocks_measure() -> None:
    told = _measure(Fleet(5), str)
    for rank in range(1, 5):
        (measured,) = told[rank]
        assert measured.to == "part0" and abs(measured.offset) <= measured.error  # the same in truth


def test_nothing_is_left_in_the_store() -> None:
    fleet = Fleet(4)
    before = fleet.store.num_keys()
    _measure(fleet, str)
    assert fleet.store.num_keys() == before


def test_who_gets_no_answer_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank has no timeline; nobody waits for the others' questions either."""
    monkeypatch.setattr(clocks, "GRACE", 0.01)
    assert not any(_measure(Fleet(3), str, only=[1, 2]).values())
    assert not any(_measure(Fleet(3), str, only=[0]).values())


@pytest.mark.parametrize("rank", [0, 1])
def test_who_waits_for_others_asks_the_store_seldom(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand ranks wait for their turn, and the store has to carry the save meanwhile."""
    asked: list[str] = []

    class Counting:
        def compare_set(self, key: str, *_: object) -> bytes:
            asked.append(key)
            return b"?"

        def check(self, keys: list[str]) -> bool:
            asked.extend(keys)
            return False

        def add(self, key: str, more: int) -> int:
            asked.append(key)
            return more

        def set(self, *_: object) -> None: ...

        def delete_key(self, *_: object) -> None: ...

    monkeypatch.setattr(clocks, "PATIENCE", 0.6)
    monkeypatch.setattr(clocks, "GRACE", 60.0)
    clock = Clocks("part", lambda measured: None)
    clock.measure(Ranks(rank, 2, Counting()))
    clock.close()
    assert 1 <= len(asked) < 50


def test_a_lone_process_measures_nothing() -> None:
    clock = Clocks("part", lambda measured: None)
    clock.measure(Ranks(0, 1))
    clock.close()
    assert not any(thread.name == "holdfast-clock" for thread in threading.enumerate())


def test_a_store_that_is_gone_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "GRACE", 0.01)

    class Gone:
        def compare_set(self, *_: object) -> bytes:
            raise RuntimeError("connection reset by peer")

        set = check = add = delete_key = compare_set

    told: list[Measured] = []
    clock = Clocks("part", told.append)
    clock.measure(Ranks(1, 2, dist.PrefixStore("p", dist.HashStore())))
    clock.close()
    clock = Clocks("part", told.append)
    clock.measure(Ranks(1, 2, Gone()))
    clock.close()
    assert not told


def _part(rank: int, clock: str, *, wall: float = 0.0, monotonic: float = 0.0) -> Part:
    return Part(Header(f"part{rank}", "host", 1, clock, wall, monotonic, rank), rank)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(0, 1e6), st.data())
def test_moments_are_the_same_on_one_clock(offsets: list[float], moment: float, data: st.DataObject) -> None:
    """Whoever measured whom, as long as all are connected."""
    shown = [0.0, *offsets]  # by each clock at the true moment 0
    parts = [_part(rank, f"clock{rank}", wall=1e9 * rank) for rank in range(len(shown))]
    for rank in range(1, len(shown)):
        to = data.draw(st.integers(0, rank - 1))
        here, there = (rank, to) if data.draw(st.booleans()) else (to, rank)
        parts[here].measured.append(Measured(f"part{there}", shown[there] - shown[here], 1e-4, shown[here]))
    clock = common_clock(parts)
    assert [clock(part, shown[i] + moment) for i, part in enumerate(parts)] == pytest.approx(
        [moment] * len(parts), abs=1e-6
    )


def test_clocks_that_drift_are_followed() -> None:
    first, second = _part(0, "a"), _part(1, "b", wall=5.0)
    for at in (0.0, 1000.0, 2000.0):  # b goes slow by a millisecond in a second
        second.measured.append(Measured("part0", at * 1e-3, 1e-4, at))
    clock = common_clock([first, second])
    assert clock(second, 1500.0) == pytest.approx(1501.5) and clock(second, 3000.0) == pytest.approx(3002.0)
    second.measured.append(Measured("part0", 50.0, 1.0, 1500.0))  # far less exact than the others
    assert common_clock([first, second])(second, 1500.0) == pytest.approx(1501.5)


def test_the_time_of_day_where_nothing_was_measured() -> None:
    first, second = _part(0, "a", wall=100.0, monotonic=7.0), _part(1, "b", wall=101.0, monotonic=1000.0)
    clock = common_clock([first, second])
    assert clock(first, 7.0) == 7.0 and clock(second, 1000.0) == pytest.approx(8.0)
