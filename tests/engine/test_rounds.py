"""Rounds of many ranks: whoever dies in whatever phase, the others get one verdict, which names the right rank.

Each rank is a thread over one in-memory store. The trees here are deep and narrow, so that few ranks make all levels;
the largest fleet has the widths of a real one. No test looks at a clock: a rank that was left waiting would meet the
deadline of the whole fleet, which is far beyond that of any round.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine import ranks as ranks_module
from holdfast.engine import rounds
from holdfast.engine.ranks import Ranks
from holdfast.engine.tree import FAN_IN, Node, tree_of
from holdfast.errors import HoldfastError, Mismatch, RankLost

LONG = 60.0
"""A deadline for rounds in which everybody comes."""

SOON = 2.0
"""A deadline for rounds in which somebody is missing; for very many threads a longer one."""

PATIENCE = 120.0
"""Seconds after which a rank counts as left waiting."""


class Dead(BaseException):
    """What ends a rank's thread in the middle of a round: it says and does nothing more."""


class Deadly:
    """A rank's view of the store, in which it dies (or stops for a while) when it comes to a certain operation."""

    def __init__(self, store: Any, at: Callable[[str, str], bool], pause: threading.Event | None = None) -> None:
        self._store, self._at, self._pause = store, at, pause

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)

        def operation(key: Any, *args: Any) -> Any:
            name = key if isinstance(key, str) else key[0] if key else ""
            if self._at is not None and self._at(verb, name):
                if self._pause is None:
                    raise Dead
                self._at = lambda verb, name: False
                self._pause.wait(PATIENCE)
            return method(key, *args)

        return operation


class Counting:
    """A store that counts operations but for idle looks, and the largest message, of one rank."""

    def __init__(self, store: Any) -> None:
        self._store, self.operations, self.looks, self.largest = store, 0, 0, 0

    def __getattr__(self, verb: str) -> Any:
        method = getattr(self._store, verb)

        def operation(key: Any, *args: Any) -> Any:
            found = method(key, *args)
            if verb == "check" and not found:
                self.looks += 1
            else:
                self.operations += 1
            messages = [*args, found] if verb != "check" else []
            self.largest = max([self.largest, *(len(m) for m in messages if isinstance(m, bytes))])
            return found

        return operation


@dataclass
class Fleet:
    """Ranks of one tree over one store, each with a thread of its own while it works."""

    size: int
    fan_in: int = FAN_IN
    store: Any = field(default_factory=dist.HashStore)
    ranks: list[Ranks] = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = [
            Ranks(r, self.size, dist.PrefixStore("p", self.store), host=f"host{r // 8}", fan_in=self.fan_in)
            for r in range(self.size)
        ]

    def start(self, function: Callable[[Ranks], Any], only: Iterable[int]) -> dict[int, Future[Any]]:
        found: dict[int, Future[Any]] = {}
        go = threading.Event()  # so that no rank is late only because its thread has to be made
        for rank in only:
            future = found[rank] = Future[Any]()
            threading.Thread(target=_attempt, args=(future, go, function, self.ranks[rank]), daemon=True).start()
        go.set()
        return found

    def all(self, function: Callable[[Ranks], Any], only: Iterable[int] | None = None) -> dict[int, Any]:
        """What the function returned on each of these ranks, or the exception that it raised."""
        return _outcomes(self.start(function, range(self.size) if only is None else only))

    def dies(self, rank: int, verb: str, key: str) -> None:
        """Let a rank die when it comes to this operation."""
        self.ranks[rank].store = Deadly(self.ranks[rank].store, _comes_to(verb, key))


def _comes_to(verb: str, key: str) -> Callable[[str, str], bool]:
    return lambda v, k: v == verb and key in f"{k}/"


def _attempt(future: Future[Any], go: threading.Event, function: Callable[[Ranks], Any], ranks: Ranks) -> None:
    go.wait()
    try:
        future.set_result(function(ranks))
    except BaseException as error:
        future.set_result(error)


def _outcomes(started: dict[int, Future[Any]]) -> dict[int, Any]:
    _, waiting = wait(started.values(), PATIENCE)
    assert not waiting, f"{len(waiting)} ranks were left waiting"
    return {rank: future.result() for rank, future in started.items()}


def one_text(found: dict[int, Any]) -> tuple[type, str]:
    """The one class and text that all of these ranks raised."""
    assert all(isinstance(error, Exception) for error in found.values()), found
    assert len({(type(error), str(error)) for error in found.values()}) == 1, {str(e) for e in found.values()}
    return next((type(error), str(error)) for error in found.values())


def add(ranks: Ranks, label: str = "sum", deadline: float = LONG) -> int:
    """A call in which everybody tells its rank and learns the sum."""
    with ranks.call(label, deadline=deadline) as call:
        return call.settle("add", lambda: ranks.rank, sum, int)


def soon(ranks: Ranks) -> int:
    return add(ranks, "save step 9", SOON if ranks.size < 1000 else 4 * SOON)


@pytest.fixture(autouse=True)
def a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share one interpreter: let them look less often, and give up on a claim sooner."""
    monkeypatch.setattr(ranks_module, "COMMIT_GRACE", 1.0)
    monkeypatch.setattr(rounds, "_MANY_FIRST", 2e-4)
    monkeypatch.setattr(rounds, "_MANY_LONGEST", 4e-4)


@pytest.fixture(autouse=True)
def small_stacks() -> Iterable[None]:
    before = threading.stack_size(512 << 10)
    yield
    threading.stack_size(before)


SIZES = [
    pytest.param(64, 4, id="64-in-3-levels"),
    pytest.param(128, 12, id="128-in-2-levels"),
    pytest.param(1024, FAN_IN, id="1024", marks=pytest.mark.slow),
]


# The tree


@given(st.integers(1, 3000), st.integers(2, 40))
def test_every_rank_is_in_one_block_of_each_level(size: int, fan_in: int) -> None:
    tree = tree_of(size, fan_in)
    assert tree.width <= fan_in or tree.levels == 1
    blocks = [tree.root]
    for level in reversed(range(tree.levels)):
        above, below = set(blocks), [child for block in blocks for child in tree.children(block)]
        assert all(child.level == level and tree.parent(child) in above for child in below)
        assert len(set(below)) == len(below)
        blocks = below
    assert blocks == [Node(0, rank) for rank in range(size)]
    led = [node for rank in range(size) for node in tree.led_by(rank)]
    assert len(led) == len(set(led)) and tree.led_by(0)[-1] == tree.root
    for rank in range(1, size):
        highest = (tree.led_by(rank) or [Node(0, rank)])[-1]
        assert tree.heard_by(rank) == tree.parent(highest) not in tree.led_by(rank)


def test_real_fleets() -> None:
    shapes = {size: (tree_of(size).levels, tree_of(size).width) for size in (2, 64, 65, 1024, 4096, 16384, 100_000)}
    assert shapes == {
        2: (1, 2), 64: (1, 64), 65: (2, 9), 1024: (2, 32), 4096: (2, 64), 16384: (2, 128), 100_000: (3, 47),
    }  # fmt: skip


# Rounds in which all is well


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
def test_one_answer_on_all_ranks_and_nothing_left(size: int, fan_in: int) -> None:
    fleet = Fleet(size, fan_in)
    total = size * (size - 1) // 2
    for _ in range(2):
        assert set(fleet.all(add).values()) == {total}
    assert fleet.store.num_keys() == 0
    assert fleet.ranks[size - 1].hosts == [f"host{r // 8}" for r in range(size)]


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
def test_no_rank_does_more_than_its_share(size: int, fan_in: int) -> None:
    """From the second round on: operations of any rank, idle looks aside, and bytes of any message."""
    fleet = Fleet(size, fan_in)
    fleet.all(add)
    for ranks in fleet.ranks:
        ranks.store = Counting(ranks.store)
    fleet.all(add)
    tree, stores = tree_of(size, fan_in), [ranks.store for ranks in fleet.ranks]
    for rank, store in enumerate(stores):
        led = len(tree.led_by(rank))
        # A word, a verdict and their ends; for each block that is led words, joined, passed on, taken away.
        assert store.operations <= 12 + (tree.width + 12) * max(led, 1)
        assert store.largest <= 64 if not led else store.largest <= 64 * tree.width**led
    assert max(store.operations for store in stores) < 600


def test_the_first_failure_is_told_to_all() -> None:
    fleet = Fleet(64, 4)

    def one(ranks: Ranks) -> Any:
        with ranks.call("x", deadline=LONG) as call:
            return call.settle("write", lambda: 1 // (0 if ranks.rank in (37, 55) else 1), sum, int)

    kind, text = one_text(fleet.all(one))
    assert kind is HoldfastError and "rank 37 on host4" in text and "ZeroDivisionError" in text
    assert set(fleet.all(add).values()) == {2016}


def test_labels_are_told_in_full_only_when_they_differ() -> None:
    fleet = Fleet(64, 4)
    kind, text = one_text(fleet.all(lambda ranks: add(ranks, f"step {8 if ranks.rank in (41, 42) else 7}")))
    assert kind is Mismatch
    assert "rank 0 is at 'step 7', rank 41 is at 'step 8'" in text and "rank 42" not in text
    assert set(fleet.all(add).values()) == {2016}
    assert fleet.store.num_keys() == 0


# Ranks that die


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
@pytest.mark.parametrize("who", ["member", "leader", "first", "several"])
def test_a_rank_that_dies_before_its_word_is_named_alone(size: int, fan_in: int, who: str) -> None:
    """Not those whose words a dead leader did not pass on."""
    fleet, width = Fleet(size, fan_in), tree_of(size, fan_in).width
    dead = {"member": [width + 1], "leader": [2 * width], "first": [0], "several": [0, 1, width, width + 1, size - 1]}
    fleet.all(add)
    there = [rank for rank in range(size) if rank not in dead[who]]
    kind, text = one_text(fleet.all(soon, there))
    assert kind is RankLost
    named = text.partition(" never came")[0]
    assert named == ", ".join(f"rank {rank} (host{rank // 8})" for rank in dead[who])
    # Whoever comes late reads the same verdict, and all are together again.
    assert one_text(fleet.all(soon, dead[who])) == (kind, text)
    assert set(fleet.all(add).values()) == {size * (size - 1) // 2}
    assert fleet.store.num_keys() == 0


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
@pytest.mark.parametrize(
    ("verb", "key"),
    [("compare_set", "word/"), ("set", "words/1."), ("set", "verdict/1."), ("check", "verdict/"), ("add", "read/")],
    ids=["before it gathers", "after it has gathered", "before it passes on", "while it waits", "at the end"],
)
def test_a_leader_that_dies_after_its_word_only_delays_the_others(size: int, fan_in: int, verb: str, key: str) -> None:
    fleet, leader = Fleet(size, fan_in), 2 * tree_of(size, fan_in).width
    fleet.dies(leader, verb, key)
    found = fleet.all(soon)
    assert isinstance(found.pop(leader), Dead)
    assert set(found.values()) == {size * (size - 1) // 2}


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
def test_a_first_rank_that_dies_before_its_claim_is_named(size: int, fan_in: int) -> None:
    fleet = Fleet(size, fan_in)
    fleet.ranks[0].store = Deadly(
        fleet.ranks[0].store, lambda verb, key: verb == "compare_set" and key.endswith("verdict")
    )
    found = fleet.all(soon)
    assert isinstance(found.pop(0), Dead)
    kind, text = one_text(found)
    assert kind is RankLost and "rank 0 (" in text and "came to, but never decided," in text and "rank 1 " not in text


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
@pytest.mark.parametrize("told", [False, True])
def test_a_first_rank_that_dies_after_its_claim_is_named(size: int, fan_in: int, told: bool) -> None:
    """Before it has told its own block that it decides, or after."""
    fleet = Fleet(size, fan_in)
    fleet.all(add)
    key = "1/0/verdict/" if not told else "1/0/word/"
    fleet.dies(0, "set" if not told else "compare_set", key)
    if told:  # the words of its own block are gathered before the claim; those of the others after it
        store, seen = fleet.ranks[0].store._store, []
        fleet.ranks[0].store = Deadly(
            store, lambda verb, key: seen.append(key) or any(k.endswith("verdict/1.0") for k in seen[:-1])
        )
    found = fleet.all(soon)
    assert isinstance(found.pop(0), Dead)
    kind, text = one_text(found)
    assert kind is RankLost and "rank 0 (host0) began to decide but gave no outcome" in text


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
def test_a_first_rank_that_dies_after_the_decision_is_not_missed(size: int, fan_in: int) -> None:
    """The verdict stands; its own block reads it there."""
    fleet = Fleet(size, fan_in)
    decided = threading.Event()

    def at(verb: str, key: str) -> bool:
        if verb == "set" and key.endswith("0/0/verdict"):
            decided.set()
            return False
        return decided.is_set()

    fleet.ranks[0].store = Deadly(fleet.ranks[0].store, at)
    found = fleet.all(soon)
    assert isinstance(found.pop(0), Dead)
    assert set(found.values()) == {size * (size - 1) // 2}


def test_whoever_names_the_absent_may_die_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_NAMING", 0.5)
    fleet = Fleet(64, 4)
    for ranks in fleet.ranks[:60]:  # whoever it is that comes to set down the names of the absent
        ranks.store = Deadly(ranks.store, lambda verb, key: False)
    once = threading.Lock()

    def at(seen: list[str], verb: str, key: str) -> bool:
        seen.append(verb) if key.endswith("verdict") and verb == "compare_set" else None
        return len(seen) == 2 and once.acquire(blocking=False)

    for ranks in fleet.ranks[:60]:
        seen: list[str] = []
        ranks.store = Deadly(ranks.store._store, lambda verb, key, seen=seen: at(seen, verb, key))
    found = fleet.all(soon, range(63))
    dead = [rank for rank, error in found.items() if isinstance(error, Dead)]
    assert len(dead) == 1
    found.pop(dead[0])
    kind, text = one_text(found)
    assert kind is RankLost and text.startswith("rank 63 (")


# Ranks that are slow


@pytest.mark.parametrize("slow", [0, 4, 16, 5])
def test_a_frozen_rank_that_wakes_reads_what_stands(slow: int) -> None:
    """It stops after its word; if it is the first one the others give the round up, else they go on without it."""
    fleet = Fleet(64, 4)
    wake = threading.Event()
    fleet.ranks[slow].store = Deadly(fleet.ranks[slow].store, _comes_to("check", "/"), wake)
    started = fleet.start(soon, range(64))
    found = _outcomes({rank: future for rank, future in started.items() if rank != slow})
    wake.set()
    late = _outcomes({slow: started[slow]})
    if slow == 0:
        assert one_text({**found, **late})[0] is RankLost
    else:
        assert set({**found, **late}.values()) == {2016}
    fleet.ranks[slow].store = fleet.ranks[slow].store._store
    assert set(fleet.all(add).values()) == {2016}
    assert fleet.store.num_keys() == 0


def test_a_leader_that_skipped_two_calls_catches_up() -> None:
    fleet = Fleet(64, 4)
    there = [rank for rank in range(64) if rank != 16]
    for step in range(2):
        assert one_text(fleet.all(lambda ranks, n=step: add(ranks, f"step {n}", 0.5), there))[0] is RankLost
    assert set(fleet.all(lambda ranks: add(ranks, "step 3")).values()) == {2016}
    assert len({ranks.calls for ranks in fleet.ranks}) == 1
    assert fleet.store.num_keys() == 0


def test_giving_up_and_hurrying_end_waits_of_a_tree() -> None:
    fleet = Fleet(64, 4)
    started = fleet.start(lambda ranks: add(ranks.lane("x")), range(60))
    fleet.ranks[5].hurry(0.2)
    kind, text = one_text(_outcomes(started))
    assert kind is RankLost and all(f"rank {rank} (" in text for rank in range(60, 64)) and "rank 59 (" not in text
    fleet.ranks[5].at_leisure()
    assert set(fleet.all(add).values()) == {2016}


plan = st.tuples(st.sampled_from(["well", "dies", "late", "never"]), st.floats(0, 1))


@settings(max_examples=20, deadline=None)
@given(size=st.integers(5, 30), fan_in=st.integers(2, 5), odd=st.lists(plan, max_size=4), seed=st.integers(0, 1 << 30))
def test_random_deaths_and_delays_leave_one_verdict(
    size: int, fan_in: int, odd: list[tuple[str, float]], seed: int
) -> None:
    """Whatever happens to some ranks at whatever operation, all that live get one verdict."""
    chance, fleet = random.Random(seed), Fleet(size, fan_in)
    fate = dict(zip(chance.sample(range(size), min(len(odd), size)), odd, strict=False))
    wake = threading.Event()
    for rank, (what, when) in fate.items():
        if what in ("dies", "late"):
            left = [int(when * 12)]

            def at(verb: str, key: str, left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] < 0

            fleet.ranks[rank].store = Deadly(fleet.ranks[rank].store, at, wake if what == "late" else None)

    def one(ranks: Ranks) -> int:
        return add(ranks, "step", 0.4)

    never = {rank for rank, (what, _) in fate.items() if what == "never"}
    late = {rank for rank, (what, _) in fate.items() if what == "late"}
    started = fleet.start(one, [rank for rank in range(size) if rank not in never])
    found = _outcomes({rank: future for rank, future in started.items() if rank not in late})
    wake.set()
    found |= _outcomes({rank: started[rank] for rank in late})
    found = {rank: outcome for rank, outcome in found.items() if not isinstance(outcome, Dead)}
    # A claim whose outcome never came is the one thing that may look different to those who left and those who stayed.
    told = {str(o) for o in found.values() if "gave no outcome" not in str(o)}
    assert len(told) <= 1, told
    if not fate:
        assert told == {str(size * (size - 1) // 2)}
