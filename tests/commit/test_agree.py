"""What ranks tell each other before a save: little when nothing is new, the same on all of them whatever one forgot."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.buffers.device import Moments
from holdfast.commit.agree import Agreed, agree, plan_for
from holdfast.commit.gather import Gathered
from holdfast.commit.job import Job
from holdfast.errors import Mismatch
from holdfast.plan.layout import Layout, TensorLayout
from holdfast.plan.spread import Placed, Split
from holdfast.ranks.messages import tree_of
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state import Collected
from holdfast.state.leaves import layout_of
from tests.fleets import Counting, Fleet, one_text
from tests.marks import examples

LONG = 240.0


def sharded(ranks: Ranks, *names: str, stages: int = 1) -> Layout:
    """What one rank of a fully sharded model tells, whose layers are spread over pipeline stages."""
    stage, each = ranks.rank * stages // ranks.size, ranks.size // stages
    spread = Placed(tuple(range(stage * each, (stage + 1) * each)), (each,), (Split(0),))
    tensors = [TensorLayout(f"model/{stage}.{name}", "float32", (4096, 64), 0, None, False) for name in names]
    return Layout(tensors, [spread], {}, {}, [], {})


def gathered(state: Collected, layout: Layout) -> Gathered:
    return Gathered(state, layout, Moments(), {}, [])


def save(
    ranks: Ranks, layout: Layout, *, step: int = 0, owned: dict[str, Any] | None = None, busy: bool = False
) -> Agreed | None:
    collected = Collected()
    collected.values["step"] = step
    collected.owned.update(owned or {})
    with ranks.call("save", deadline=LONG, saving=True) as call:
        return agree(call, Job(ranks, None, step, "0" * 16), gathered(collected, layout), busy=busy)


def values_of(ranks: Ranks, values: dict[str, Any]) -> dict[str, Any]:
    collected = Collected(values=dict(values))
    with ranks.call("save", deadline=LONG, saving=True) as call:
        agreed = agree(call, Job(ranks, None, None, "0" * 16), gathered(collected, sharded(ranks, "w")))
    assert agreed is not None
    return agreed.values


def counted(fleet: Fleet) -> list[Counting]:
    for ranks in fleet.ranks:
        ranks.store = Counting(ranks.store)
    return [ranks.store for ranks in fleet.ranks]


def same(found: dict[int, Any]) -> Agreed:
    first = found[0]
    assert isinstance(first, Agreed), first
    for other in found.values():
        assert (other.save, other.plan, other.layouts, other.layout_of) == (
            first.save, first.plan, first.layouts, first.layout_of
        )  # fmt: skip
    return first


@pytest.mark.parametrize(("size", "fan_in"), [(8, 8), (64, 64), (96, 12)])
@pytest.mark.parametrize("stages", [1, 4])
def test_a_known_state_costs_64_bytes_a_rank(size: int, fan_in: int, stages: int) -> None:
    fleet = Fleet(size, fan_in)
    names = [f"layer{i}.weight" for i in range(50)]
    first = same(fleet.all(lambda ranks: save(ranks, sharded(ranks, *names, stages=stages))))
    assert len(first.layouts) == stages and first.layout_of == [rank * stages // size for rank in range(size)]
    stores = counted(fleet)
    again = same(fleet.all(lambda ranks: save(ranks, sharded(ranks, *names, stages=stages), step=1)))
    assert (again.plan, again.layouts, again.layout_of) == (first.plan, first.layouts, first.layout_of)
    assert again.save != first.save
    for rank, store in enumerate(stores):
        assert store.largest <= 64 * fan_in ** len(tree_of(size, fan_in).led_by(rank))
    plans = fleet.all(lambda ranks: plan_for(ranks, again), [0, size - 1])
    assert all(list(plan.tensors) == list(plans[0].tensors) for plan in plans.values())


def test_a_busy_rank_makes_all_skip() -> None:
    fleet = Fleet(5)
    found = fleet.all(lambda ranks: save(ranks, sharded(ranks, "w"), busy=ranks.rank == 3))
    assert set(found.values()) == {None}


def test_values_that_differ_are_told_again_and_named() -> None:
    fleet = Fleet(6)
    same(fleet.all(lambda ranks: save(ranks, sharded(ranks, "w"))))
    kind, text = one_text(fleet.all(lambda ranks: save(ranks, sharded(ranks, "w"), step=int(ranks.rank == 4))))
    assert issubclass(kind, Mismatch) and "step differs between ranks: 0 on rank 0, 1 on rank 4" in text
    same(fleet.all(lambda ranks: save(ranks, sharded(ranks, "w"))))


def test_every_rank_knows_the_values_that_any_has() -> None:
    """Whichever rank has to commit: the first one may be lost."""
    fleet = Fleet(4)
    for _ in range(2):
        found = fleet.all(lambda ranks: values_of(ranks, {"step": 1, f"of {ranks.rank // 2}": ranks.rank // 2}))
        assert list(found.values()) == [{"step": 1, "of 0": 0, "of 1": 1}] * 4


def test_owned_values_of_a_known_plan_are_joined_anew() -> None:
    fleet = Fleet(4)

    def one(ranks: Ranks) -> Any:
        own = {f"optimizer/{ranks.rank // 2}": ranks.rank // 2}
        return [save(ranks, sharded(ranks, "w", stages=2), owned=own) for _ in range(2)]

    found = fleet.all(one)
    for agreement in found[0]:
        assert agreement.owned.values == {"optimizer/0": 0, "optimizer/1": 1}


def test_owned_values_that_are_known_are_not_told_again() -> None:
    fleet = Fleet(4)

    def one(ranks: Ranks, rate: float) -> Any:
        own = {"optimizer/stage": ranks.rank // 2, "optimizer/lr": rate} if ranks.rank < 2 else {"optimizer/lr": rate}
        return save(ranks, sharded(ranks, "w", stages=2), owned=own)

    real = Call.exchange

    for rate, rounds in ((0.1, {"plan", "layout"}), (0.1, {"plan"}), (0.2, {"plan", "layout"}), (0.2, {"plan"})):
        phases: set[str] = set()

        def exchange(call: Call, phase: str, *args: Any, phases: set[str] = phases) -> Any:
            phases.add(phase)
            return real(call, phase, *args)

        with patch.object(Call, "exchange", exchange):
            found = fleet.all(lambda ranks, rate=rate: one(ranks, rate))
        assert found[0].owned.values == {"optimizer/stage": 0, "optimizer/lr": rate}
        assert phases == rounds, "two rounds only where something is new"


def test_a_rank_that_forgot_makes_all_tell_again() -> None:
    """Interrupted in a save that the others finished, it remembers something else."""
    fleet = Fleet(6)

    def one(ranks: Ranks) -> Any:
        return save(ranks, sharded(ranks, "w", "v", stages=2))

    before = same(fleet.all(one))
    fleet.ranks[4].remembered.clear()
    after = same(fleet.all(one))
    assert (after.plan, after.layouts, after.layout_of) == (before.plan, before.layouts, before.layout_of)
    stores = counted(fleet)
    same(fleet.all(one))
    assert max(store.largest for store in stores[1:]) <= 64


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=1, max_size=25), st.integers(0, 1 << 30))
def test_whatever_is_forgotten_the_plan_follows_from_what_ranks_have(saves: list[tuple[int, bool]], seed: int) -> None:
    chance, fleet = random.Random(seed), Fleet(4)
    for state, forgets in saves:
        if forgets:
            chance.choice(fleet.ranks).remembered.clear()

        def one(ranks: Ranks, state: int = state) -> Any:
            return save(ranks, sharded(ranks, f"w{state // 2}", stages=1 + state % 2))

        agreement = same(fleet.all(one))
        for ranks in fleet.ranks:
            own = sharded(ranks, f"w{state // 2}", stages=1 + state % 2)
            assert agreement.layouts[agreement.layout_of[ranks.rank]] == own


def test_nothing_at_all_is_a_state() -> None:
    fleet = Fleet(3)
    assert len(same(fleet.all(lambda ranks: save(ranks, layout_of(Collected())))).layouts) == 1
