"""The protocol between ranks, each rank a thread over one in-memory store: one outcome, known to all, whoever fails.

Deadlines here are short so that a rank that never comes is given up on soon; no test looks at a clock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast import events
from holdfast.errors import Damaged, HoldfastError, Mismatch, RankLost, SaveFailed, StorageError, Unsupported
from holdfast.ranks.ranks import Call, Ranks
from tests.marks import examples

SOON = 1.0
"""A deadline for rounds in which somebody is missing."""

LONG = 240.0
"""A deadline for rounds in which everybody comes."""


class Note(msgspec.Struct, array_like=True):
    rank: int
    text: str = ""


class Fleet:
    """Ranks over one store; `all` runs a function on each in its own thread."""

    def __init__(self, size: int) -> None:
        self.store = dist.HashStore()
        self.ranks = [
            Ranks(r, size, dist.PrefixStore("p", self.store), host=f"host{r}") for r in range(size)
        ]  # fmt: skip

    def all(self, function: Callable[[Ranks], Any], only: Sequence[int] | None = None) -> list[Any]:
        """What the function returned on each rank, or the exception that it raised; of ``only`` those ranks."""
        chosen = self.ranks if only is None else [self.ranks[r] for r in only]

        def attempt(ranks: Ranks) -> Any:
            try:
                return function(ranks)
            except BaseException as error:
                return error

        with ThreadPoolExecutor(len(chosen)) as pool:
            return list(pool.map(attempt, chosen))

    def texts(self, function: Callable[[Ranks], Any], only: Sequence[int] | None = None) -> tuple[type, str]:
        """The one class and text that all ranks raised."""
        found = self.all(function, only)
        assert all(isinstance(error, BaseException) for error in found), found
        assert len({(type(error), str(error)) for error in found}) == 1, found
        return type(found[0]), str(found[0])


def never(notes: list[Any]) -> Any:
    raise AssertionError("must not decide")


def fleet_sum(ranks: Ranks, label: str = "sum", deadline: float = LONG, saving: bool = False) -> int:
    """A call in which everybody tells its rank and learns the sum."""
    with ranks.call(label, deadline=deadline, saving=saving) as call:
        return call.exchange("add", lambda: ranks.rank, sum, int)


def meet(call: Call, work: Callable[[], Any], decide: Callable[[list[Any]], Any] = len, kind: type = int) -> Any:
    return call.settle("write", work, decide, kind)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_one_answer_on_all_ranks(size: int) -> None:
    fleet = Fleet(size)
    seen: list[list[Note]] = []

    def decide(notes: list[Note]) -> list[str]:
        seen.append(notes)
        return [note.text for note in notes]

    def one(ranks: Ranks) -> list[str]:
        with ranks.call("save", deadline=LONG) as call:
            first = call.exchange("plan", lambda: Note(ranks.rank, f"from {ranks.rank}"), decide, list[str])
            second = call.settle("write", lambda: Note(ranks.rank, first[-1]), decide, list[str])
        return [*first, *second]

    expected = [f"from {r}" for r in range(size)] + [f"from {size - 1}"] * size
    assert fleet.all(one) == [expected] * size
    assert len(seen) == 2, "only the first rank decides"
    assert [n.rank for n in seen[0]] == list(range(size)), "notes come in rank order, as what they were"


def test_a_lone_process_needs_no_store() -> None:
    alone = Ranks(0, 1)
    assert fleet_sum(alone) == 0
    with pytest.raises(Mismatch, match="because"), alone.call("x", saving=False) as call:
        meet(call, lambda: 0, raising(Mismatch("because")))
    with pytest.raises(KeyboardInterrupt), alone.call("x") as call:
        meet(call, raising(KeyboardInterrupt()), never)
    assert fleet_sum(alone) == 0


def raising(error: BaseException) -> Callable[..., Any]:
    def function(*args: object) -> Any:
        raise error

    return function


FAILURES = [
    (OSError(28, "No space left on device", "/disk/file"), StorageError),
    (StorageError("the disk is full"), StorageError),
    (Unsupported("model/f is code"), Unsupported),
    (Damaged("file x is altered"), Damaged),
    (ValueError("bad value"), HoldfastError),
    (MemoryError("no memory"), HoldfastError),
    (RuntimeError("CUDA error"), HoldfastError),
]


@pytest.mark.parametrize(("error", "kind"), FAILURES, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.parametrize("bad", [0, 2])
def test_a_failure_on_one_rank_is_raised_on_all(error: Exception, kind: type, bad: int) -> None:
    fleet = Fleet(4)

    def one(ranks: Ranks) -> Any:
        with ranks.call("load x", deadline=LONG) as call:
            return meet(call, raising(error) if ranks.rank == bad else lambda: 1, never)

    found, text = fleet.texts(one)
    assert found is kind
    assert str(error) in text or "No space" in text
    assert f"rank {bad} on host{bad}, phase write" in text
    assert fleet.all(fleet_sum) == [6] * 4, "and the next call works"


def test_the_failure_of_a_rank_without_others_names_the_phase_alone() -> None:
    with pytest.raises(StorageError) as caught, Ranks(0, 1, None).call("save x", deadline=LONG, saving=True) as call:
        meet(call, raising(StorageError("the disk is full")))
    assert str(caught.value).startswith("save failed (phase write): the disk is full. ")
    assert caught.value.rank == 0 and caught.value.host


@pytest.mark.parametrize("text", ["it is gone", "names:\n    a"])
def test_the_failure_of_a_load_without_other_ranks_is_its_message(text: str) -> None:
    with pytest.raises(Mismatch) as caught, Ranks(0, 1, None).call("load x", deadline=LONG) as call:
        meet(call, raising(Mismatch(text)))
    assert str(caught.value) == text and caught.value.phase


def test_where_a_load_failed_is_not_put_behind_the_last_name_of_a_list() -> None:
    def one(ranks: Ranks) -> Any:
        with ranks.call("load x", deadline=LONG) as call:
            return meet(call, raising(Mismatch("names:\n    a")) if ranks.rank == 1 else lambda: 1)

    for error in Fleet(2).all(one):
        assert str(error) == "names:\n    a\n(rank 1 on host1, phase write)"


def test_fields_of_a_failure_travel() -> None:
    def one(ranks: Ranks) -> Any:
        with ranks.call("save x", deadline=LONG, saving=True) as call:
            return meet(call, raising(OSError(28, "full", "/disk/file")) if ranks.rank == 1 else lambda: 1)

    for error in Fleet(3).all(one):
        assert isinstance(error, SaveFailed) and isinstance(error, OSError)
        assert (error.rank, error.host, error.phase, error.file) == (1, "host1", "write", "/disk/file")
        assert error.errno == 28 and "nothing was committed" in str(error).lower()


def test_the_failing_rank_keeps_the_cause() -> None:
    cause = ZeroDivisionError("here")

    def one(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return meet(call, raising(cause) if ranks.rank == 1 else lambda: 1)

    found = Fleet(3).all(one)
    assert [error.__cause__ for error in found] == [None, cause, None]


@pytest.mark.parametrize("error", [Mismatch("no step 45"), HoldfastError("a fault of holdfast")])
def test_a_refusal_is_told_once(error: HoldfastError) -> None:
    """In one traceback: what all ranks raise says all that the rank itself had to say."""
    with pytest.raises(type(error)) as caught, Ranks(0, 1).call("x", deadline=LONG) as call:
        meet(call, raising(error))
    assert caught.value.__cause__ is (None if isinstance(error, Mismatch) else error)
    assert caught.value.__suppress_context__


def test_the_first_of_several_failures_is_told() -> None:
    def one(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return meet(call, raising(Damaged(f"file {ranks.rank}")) if ranks.rank % 2 else lambda: 1, never)

    found, text = Fleet(6).texts(one)
    assert found is Damaged and "file 1" in text and "rank 1" in text


@pytest.mark.parametrize("saving", [False, True])
def test_a_decision_that_fails_is_raised_on_all(saving: bool) -> None:
    fleet = Fleet(4)

    def one(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG, saving=saving) as call:
            return meet(call, lambda: 1, raising(Mismatch("they do not fit")))

    found, text = fleet.texts(one)
    assert issubclass(found, Mismatch) and issubclass(found, SaveFailed) == saving
    assert "they do not fit" in text and "rank 0" in text
    assert fleet.all(fleet_sum) == [6] * 4


def test_an_answer_or_a_note_that_cannot_travel_fails_on_all() -> None:
    fleet = Fleet(3)

    def bad_answer(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return meet(call, lambda: 1, lambda notes: threading.Lock())

    def bad_note(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return meet(call, lambda: 1 << 80 if ranks.rank == 1 else 1)

    assert issubclass(fleet.texts(bad_answer)[0], HoldfastError)
    found, text = fleet.texts(bad_note)
    assert issubclass(found, HoldfastError) and "rank 1" in text
    assert fleet.all(fleet_sum) == [3] * 3


def test_a_word_of_another_version_fails_on_all() -> None:
    fleet = Fleet(3)
    fleet.store.set("p/0/0/word/2", b"something else")
    found, text = fleet.texts(fleet_sum, only=[0, 1])
    assert found is HoldfastError and "rank 0" in text


def test_a_rank_that_never_comes_is_named_on_all_others() -> None:
    for missing in ([3], [0], [0, 2], [1, 2, 3]):
        fleet = Fleet(4)
        there = [r for r in range(4) if r not in missing]
        found, text = fleet.texts(lambda ranks: fleet_sum(ranks, "save step 9", SOON), only=there)
        assert found is RankLost and issubclass(found, TimeoutError)
        for rank in range(4):
            assert (f"rank {rank} (" in text.partition("never came")[0]) == (rank in missing)
        assert "save step 9" in text and "'add'" in text


def test_the_host_of_a_lost_rank_is_named_once_it_is_known() -> None:
    fleet = Fleet(3)
    fleet.all(fleet_sum)
    _, text = fleet.texts(lambda ranks: fleet_sum(ranks, "again", SOON), only=[0, 1])
    assert "rank 2 (host2)" in text


def test_many_lost_ranks_are_counted() -> None:
    _, text = Fleet(64).texts(lambda ranks: fleet_sum(ranks, "x", SOON), only=[0])
    assert "rank 20 (" in text and "rank 21 (" not in text and "and 43 more" in text


def test_a_late_rank_reads_the_same_verdict() -> None:
    fleet = Fleet(4)
    early = fleet.texts(lambda ranks: fleet_sum(ranks, "x", SOON), only=[0, 1, 3])
    assert fleet.texts(lambda ranks: fleet_sum(ranks, "x", SOON), only=[2]) == early
    assert fleet.all(fleet_sum) == [6] * 4, "and all are together again"


def test_a_first_rank_that_is_late_must_not_decide() -> None:
    """The others have declared the round lost: committing now would give two outcomes."""
    fleet = Fleet(4)

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=SOON) as call:
            return meet(call, lambda: 1, never)

    early = fleet.texts(one, only=[1, 2, 3])
    assert early[0] is RankLost and "rank 0" in early[1]
    assert fleet.texts(one, only=[0]) == early
    assert fleet.all(fleet_sum) == [6] * 4


def test_a_first_rank_that_dies_while_it_decides_is_named() -> None:
    fleet = Fleet(3)
    release = threading.Event()

    def decide(notes: list[int]) -> int:
        release.wait(LONG)
        return 1

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=SOON) as call:
            return meet(call, lambda: 1, decide)

    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(one, fleet.ranks[0])
        found, text = fleet.texts(one, only=[1, 2])
        release.set()
        late = stuck.exception()
    assert found is RankLost and "rank 0" in text and "gave no outcome" in text and "alive but stuck" in text
    assert (type(late), str(late)) == (found, text), "the rank itself learns the verdict that stands"
    assert fleet.all(fleet_sum) == [3] * 3


@pytest.mark.timed
def test_a_first_rank_that_decides_for_long_is_waited_for_as_long_as_it_makes_progress() -> None:
    fleet = Fleet(3)

    def decide(notes: list[int]) -> int:
        with events.task("commit", "somewhere") as task:
            for _ in range(40):  # four times the deadline
                time.sleep(SOON / 10)
                task.advance(1)
        return 42

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=SOON) as call:
            return meet(call, lambda: 1, decide)

    assert fleet.all(one) == [42] * 3
    assert fleet.store.num_keys() == 0


def test_a_rank_that_skipped_a_call_catches_up() -> None:
    """Its training code caught an error and skipped one save; the next one it makes with all the others."""
    fleet = Fleet(4)
    fleet.texts(lambda ranks: fleet_sum(ranks, "step 1", SOON), only=[0, 1, 3])
    fleet.texts(lambda ranks: fleet_sum(ranks, "step 2", SOON), only=[0, 1, 3])
    assert fleet.all(lambda ranks: fleet_sum(ranks, "step 3")) == [6] * 4
    assert len({ranks.calls for ranks in fleet.ranks}) == 1


def test_a_first_rank_that_skipped_a_call_catches_up() -> None:
    fleet = Fleet(4)
    fleet.texts(lambda ranks: fleet_sum(ranks, "step 1", SOON), only=[1, 2, 3])
    assert fleet.all(lambda ranks: fleet_sum(ranks, "step 2")) == [6] * 4


def test_different_labels_are_a_mismatch_on_all() -> None:
    fleet = Fleet(4)
    found, text = fleet.texts(lambda ranks: fleet_sum(ranks, "step 8" if ranks.rank == 2 else "step 7"))
    assert found is Mismatch
    assert "rank 0 is at 'step 7'" in text and "rank 2 is at 'step 8'" in text
    assert fleet.all(fleet_sum) == [6] * 4


def test_a_rank_at_its_next_call_while_others_wait_is_a_mismatch_not_a_wait() -> None:
    fleet = Fleet(3)
    fleet.all(fleet_sum)
    found, _ = fleet.texts(lambda ranks: fleet_sum(ranks, f"step {8 if ranks.first else 7}"))
    assert found is Mismatch
    assert fleet.all(fleet_sum) == [3] * 3


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("bad", [0, 2])
def test_an_interrupt_stays_one_and_is_a_failure_elsewhere(kind: type[BaseException], bad: int) -> None:
    fleet = Fleet(4)

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=LONG, saving=True) as call:
            return meet(call, raising(kind("stop")) if ranks.rank == bad else lambda: 1, never)

    found = fleet.all(one)
    assert type(found.pop(bad)) is kind
    assert all(isinstance(error, SaveFailed) and kind.__name__ in str(error) and error.rank == bad for error in found)
    assert fleet.all(fleet_sum) == [6] * 4


def test_an_interrupt_while_deciding_is_told_to_the_others() -> None:
    fleet = Fleet(3)

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=LONG, saving=True) as call:
            return meet(call, lambda: 1, raising(KeyboardInterrupt()))

    found = fleet.all(one)
    assert type(found[0]) is KeyboardInterrupt
    assert all(isinstance(error, SaveFailed) and "KeyboardInterrupt" in str(error) for error in found[1:])
    assert fleet.all(fleet_sum) == [3] * 3


def test_an_error_between_the_rounds_of_a_call() -> None:
    """The rank leaves; the others miss it in the next round, and all meet again in the next call."""
    fleet = Fleet(3)

    def one(ranks: Ranks) -> Any:
        with ranks.call("save", deadline=SOON) as call:
            call.exchange("plan", lambda: 1, sum, int)
            if ranks.rank == 1:
                raise ZeroDivisionError
            return meet(call, lambda: 1)

    found = fleet.all(one)
    assert type(found[1]) is ZeroDivisionError
    assert all(type(found[r]) is RankLost and "rank 1" in str(found[r]) and "'write'" in str(found[r]) for r in (0, 2))
    assert fleet.all(fleet_sum) == [3] * 3


def test_keys_do_not_pile_up() -> None:
    fleet = Fleet(5)
    counts: list[int] = []

    def two_hundred(ranks: Ranks) -> int:
        total = 0
        for number in range(200):
            with ranks.call(f"step {number}", deadline=LONG) as call:
                total += call.exchange("plan", lambda: 1, sum, int)
                if number % 3:
                    total += meet(call, lambda: 1, sum)
            if ranks.first:
                counts.append(fleet.store.num_keys())
        return total

    assert len(set(fleet.all(two_hundred))) == 1
    assert max(counts) <= 4 * (fleet.ranks[0].size + 1), "no more than the rounds under way"


def test_keys_of_failed_and_skipped_calls_go_too() -> None:
    fleet = Fleet(3)

    def fails(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return meet(call, raising(Damaged("x")) if ranks.rank == 1 else lambda: 1)

    for number in range(3):
        fleet.all(fails)
        fleet.texts(lambda ranks, n=number: fleet_sum(ranks, f"skipped {n}", 0.05), only=[0, 1])
        assert fleet.all(fleet_sum) == [3] * 3
    assert fleet.store.num_keys() == 0, "nothing stays in the store"


def test_two_groups_share_a_store() -> None:
    store = dist.HashStore()
    fleets = [Fleet(2), Fleet(3)]
    for name, fleet in zip("ab", fleets, strict=True):
        for ranks in fleet.ranks:
            ranks.store = dist.PrefixStore(name, store)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda fleet: fleet.all(fleet_sum), fleets))
    assert found == [[1] * 2, [3] * 3]


def test_a_store_that_is_gone_is_a_lost_first_rank() -> None:
    class Gone:
        def set(self, key: str, value: object) -> None:
            raise dist.DistNetworkError("Connection reset by peer")

    ranks = Ranks(1, 2, Gone(), host="here")
    with pytest.raises(RankLost, match="Connection reset"):
        fleet_sum(ranks)


def test_calls_of_one_rank_do_not_overlap() -> None:
    """Two threads of each rank call at once: the calls go one after the other, in one order for all."""
    fleet = Fleet(3)
    inside: dict[int, int] = dict.fromkeys(range(3), 0)

    def twice(ranks: Ranks) -> Any:
        def once(_: int) -> int:
            with ranks.call("same", deadline=LONG) as call:
                inside[ranks.rank] += 1
                assert inside[ranks.rank] == 1
                total = call.exchange("add", lambda: ranks.rank, sum, int)
                inside[ranks.rank] -= 1
                return total

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(once, range(2)))

    assert fleet.all(twice) == [[3, 3]] * 3


step = st.one_of(
    st.just(("work",)), st.tuples(st.just("fail"), st.integers(0, 4)), st.just(("decide",)),
    st.tuples(st.just("interrupt"), st.integers(0, 4)), st.tuples(st.just("label"), st.integers(1, 4)),
    st.tuples(st.just("skip"), st.integers(0, 4)),
)  # fmt: skip


@settings(max_examples=examples(25))
@given(st.lists(step, min_size=1, max_size=6))
def test_any_sequence_of_failures_leaves_the_ranks_together(steps: list[tuple[Any, ...]]) -> None:
    """Every step ends in one outcome on every rank that took part; after all of them a plain call works."""
    fleet = Fleet(5)
    for number, (what, *who) in enumerate(steps):
        bad = who[0] if who else -1

        def one(ranks: Ranks) -> Any:
            label = f"step {number}" + (" other" if what == "label" and ranks.rank == bad else "")
            with ranks.call(label, deadline=0.05 if what == "skip" else LONG) as call:
                wrong = {"fail": Damaged("x"), "interrupt": KeyboardInterrupt()}.get(what)
                work = raising(wrong) if wrong and ranks.rank == bad else lambda: ranks.rank
                return meet(call, work, raising(Mismatch("y")) if what == "decide" else sum)

        there = [r for r in range(5) if not (what == "skip" and r == bad)]
        if what == "skip":
            fleet.all(fleet_sum)  # so that nobody still has to catch up when the deadline is this short
        found = dict(zip(there, fleet.all(one, only=there), strict=True))
        if what == "work":
            assert set(found.values()) == {10}
            continue
        if what == "interrupt":
            assert type(found.pop(bad)) is KeyboardInterrupt
        kinds = {"fail": Damaged, "decide": Mismatch, "label": Mismatch, "skip": RankLost, "interrupt": HoldfastError}
        assert {type(error) for error in found.values()} == {kinds[what]}
        assert len({str(error) for error in found.values()}) == 1
    assert fleet.all(lambda ranks: fleet_sum(ranks, "last")) == [10] * 5


# Lanes


def test_lanes_go_on_beside_each_other_in_any_order() -> None:
    """Each rank goes through its lanes in an order of its own, while all make calls in the foreground."""
    fleet = Fleet(3)

    def one(ranks: Ranks) -> Any:
        order = [(lane + ranks.rank) % 3 for lane in range(3)]
        with ThreadPoolExecutor(4) as pool:
            beside = {
                lane: pool.submit(lambda lane=lane: [fleet_sum(ranks.lane(f"{lane}/{n}")) for n in range(20)])
                for lane in order
            }
            found = [fleet_sum(ranks) for _ in range(20)]
            return found, [beside[lane].result() for lane in range(3)]

    assert fleet.all(one) == [([3] * 20, [[3] * 20] * 3)] * 3
    assert fleet.store.num_keys() == 0, "nothing stays in the store"


def test_a_failure_in_one_lane_is_none_in_another() -> None:
    fleet = Fleet(3)

    def one(ranks: Ranks) -> Any:
        def fails() -> Any:
            with ranks.lane("bad").call("x", deadline=LONG) as call:
                return meet(call, raising(Damaged("x")) if ranks.rank == 1 else lambda: 1, never)

        with ThreadPoolExecutor(2) as pool:
            bad, good = pool.submit(fails), pool.submit(fleet_sum, ranks.lane("good"))
            return type(bad.exception()), good.result(), fleet_sum(ranks)

    assert fleet.all(one) == [(Damaged, 3, 3)] * 3


def test_hurrying_ends_waits_in_lanes_too() -> None:
    fleet = Fleet(2)
    ranks = fleet.ranks[0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fleet_sum, ranks.lane("a"), "x", LONG)
        ranks.hurry(0.1)
        assert isinstance(waiting.exception(LONG / 2), RankLost)
    ranks.at_leisure()
    assert ranks.lane("b").limit == ranks.limit == float("inf")


def test_lanes_remember_apart() -> None:
    ranks = Ranks(0, 1)
    ranks.remembered["a"] = 1
    assert ranks.lane("a").remembered == {} and ranks.lane("a").lane("b").main is ranks
