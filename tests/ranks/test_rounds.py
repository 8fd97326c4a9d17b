"""Rounds of many ranks: whoever dies in whatever phase, the others get one verdict, which names the right rank.

Each rank is a thread over one in-memory store. The trees here are deep and narrow, so that few ranks make all levels;
the largest fleet has the widths of a real one. No test looks at a clock: if a rank is left waiting, `outcomes_of`
gives up on the fleet after `PATIENCE` seconds, and the test fails.
"""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, Mismatch, RankLost
from holdfast.ranks import messages, rounds
from holdfast.ranks.messages import FAN_IN, Node, tree_of
from holdfast.ranks.ranks import Ranks
from tests.fleets import PATIENCE, Counting, Dead, Deadly, Fleet, comes_to, one_text, outcomes_of
from tests.marks import examples

LONG = 240.0
"""A deadline for rounds in which everybody comes."""

SOON = 2.0
"""A deadline for rounds in which somebody is missing, for up to 50 ranks; a larger fleet has a longer one.

All ranks that are there have to come within it, on a busy machine too; at calm they come in a twentieth of it or less.
"""


def add(ranks: Ranks, label: str = "sum", deadline: float = LONG) -> int:
    """A call in which everybody tells its rank and learns the sum."""
    with ranks.call(label, deadline=deadline) as call:
        return call.settle("add", lambda: ranks.rank, sum, int)


def soon(ranks: Ranks) -> int:
    return add(ranks, "save step 9", SOON * max(1, ranks.size / 50))


@pytest.fixture(autouse=True)
def a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks share one interpreter: let them look less often."""
    monkeypatch.setattr(rounds, "_MANY_FIRST", 2e-4)
    monkeypatch.setattr(rounds, "_MANY_LONGEST", 4e-4)


DEEP = pytest.param(64, 4, id="64-in-3-levels")
WIDE = pytest.param(128, 12, id="128-in-2-levels")
SIZES = [DEEP, WIDE, pytest.param(1024, FAN_IN, id="1024", marks=pytest.mark.slow)]


def cases(*, deep: list[str], wide: list[str], large: str) -> list[Any]:
    """What happens to which fleet; to the largest one thing alone, as each takes long."""
    made = [pytest.param(64, 4, case, id=f"{case}-64-in-3-levels") for case in deep]
    made += [pytest.param(128, 12, case, id=f"{case}-128-in-2-levels") for case in wide]
    return [*made, pytest.param(1024, FAN_IN, large, id=f"{large}-1024", marks=pytest.mark.slow)]


# The tree


@given(st.integers(1, 700), st.integers(2, 30))
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


@pytest.mark.slow
def test_two_blocks_of_16384_ranks() -> None:
    """The words of all other blocks lie there, joined; what the ranks of these two do is what each rank would."""
    size, here = 16384, [*range(128), *range(640, 768)]
    fleet = Fleet(size)
    tree, note = tree_of(size), msgspec.msgpack.encode(bytes(range(44)))
    sent = [messages.encode(messages.Message(messages.short("sum"), note)) for _ in range(128)]
    for child in tree.children(tree.root):
        if child.number not in (0, 5):
            fleet.store.set(f"p/0/0/words/1.{child.number}", messages.encode(sent))
    for rank in here:
        fleet.ranks[rank].store = Counting(fleet.ranks[rank].store)
        fleet.ranks[rank].hosts = ["known"] * size

    def one(ranks: Ranks) -> int:
        with ranks.call("sum", deadline=LONG) as call:
            return call.exchange("plan", lambda: bytes(range(44)), lambda notes: sum(map(len, notes)), int)

    assert set(fleet.all(one, here).values()) == {44 * size}
    for rank in here:
        store = fleet.ranks[rank].store
        assert store.operations < (600 if rank == 0 else 300 if rank == 640 else 12)
        assert store.largest <= (64 * 128 if rank in (0, 640) else 64)


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["TCPStore", "FileStore"])
def test_other_stores(kind: str, tmp_path: Path) -> None:
    """Each rank has a client of its own; a leader dies, a rank is missing and comes late."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) if kind == "TCPStore" else None
    fleet = Fleet(18, 3)
    for ranks in fleet.ranks:
        if server is not None:
            client = dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        else:
            client = dist.FileStore(str(tmp_path / "store"), 18)
        ranks.store = dist.PrefixStore("p", client)
    assert set(fleet.all(add).values()) == {153}
    kind_, text = one_text(fleet.all(soon, [rank for rank in range(18) if rank != 9]))
    assert kind_ is RankLost and text.startswith("rank 9 (host1) never came")
    assert one_text(fleet.all(soon, [9])) == (kind_, text)
    kind_, text = one_text(fleet.all(lambda ranks: add(ranks, f"step {ranks.rank // 17}")))
    assert kind_ is Mismatch and "rank 17 is at 'step 1'" in text
    fleet.dies(3, "set", "words/1.")
    found = fleet.all(add)
    assert isinstance(found.pop(3), Dead) and set(found.values()) == {153}


@pytest.mark.parametrize("kind", ["HashStore", "TCPStore", "FileStore"])
def test_looking_at_a_key_that_somebody_takes_away_does_not_wait(kind: str, tmp_path: Path) -> None:
    """What `Round` relies on to read words: comparing with what no word is tells what is there, and sets nothing."""
    stores = {
        "HashStore": dist.HashStore,
        "TCPStore": lambda: dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
    }
    store = dist.PrefixStore("p", stores[kind]())
    assert bytes(store.compare_set("key", b"?", b"?")) == b"?" and not store.check(["key"])
    store.set("key", b"\x91\x00\xff")
    assert bytes(store.compare_set("key", b"?", b"?")) == b"\x91\x00\xff" == bytes(store.get("key"))


# Ranks that die


@pytest.mark.parametrize(
    ("size", "fan_in", "who"), cases(deep=["leader", "first", "several"], wide=["member"], large="several")
)
@pytest.mark.fast_cases("leader-64-in-3-levels")
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


DEATHS = {
    "before it gathers": ("compare_set", "word/"),
    "after it has gathered": ("set", "words/1."),
    "before it passes on": ("set", "verdict/1."),
    "while it waits": ("check", "verdict/"),
    "at the end": ("add", "read/"),
}


@pytest.mark.parametrize(
    ("size", "fan_in", "when"),
    cases(deep=list(DEATHS), wide=["after it has gathered", "while it waits"], large="after it has gathered"),
)
@pytest.mark.slow_cases("while it waits-128-in-2-levels", "after it has gathered-128-in-2-levels")
def test_a_leader_that_dies_after_its_word_only_delays_the_others(size: int, fan_in: int, when: str) -> None:
    fleet, leader = Fleet(size, fan_in), 2 * tree_of(size, fan_in).width
    fleet.dies(leader, *DEATHS[when])
    found = fleet.all(add)
    assert isinstance(found.pop(leader), Dead)
    assert set(found.values()) == {size * (size - 1) // 2}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "fan_in"), [DEEP, SIZES[-1]])
def test_a_first_rank_that_dies_before_its_claim_is_named(size: int, fan_in: int) -> None:
    fleet = Fleet(size, fan_in)
    fleet.ranks[0].store = Deadly(
        fleet.ranks[0].store, lambda verb, key: verb == "compare_set" and key.endswith("verdict")
    )
    found = fleet.all(soon)
    assert isinstance(found.pop(0), Dead)
    kind, text = one_text(found)
    assert kind is RankLost and "rank 0 (" in text and "came to, but never decided," in text and "rank 1 " not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "fan_in", "when"), cases(deep=["before it tells", "told"], wide=["told"], large="told")
)
def test_a_first_rank_that_dies_after_its_claim_is_named(size: int, fan_in: int, when: str) -> None:
    """Before it has told its own block that it decides, or after."""
    fleet = Fleet(size, fan_in)
    fleet.all(add)
    seen: list[str] = []

    def at(verb: str, key: str) -> bool:
        told = any(k.endswith("verdict/1.0") for k in seen)
        seen.append(key if verb == "set" else "")
        return told if when == "told" else verb == "set" and key.endswith("verdict/1.0")

    fleet.ranks[0].store = Deadly(fleet.ranks[0].store, at)
    found = fleet.all(soon)
    assert isinstance(found.pop(0), Dead)
    kind, text = one_text(found)
    assert kind is RankLost and "rank 0 (host0) began to decide but gave no outcome" in text


@pytest.mark.parametrize(("size", "fan_in"), SIZES)
@pytest.mark.slow_cases("128-in-2-levels")
def test_a_first_rank_that_dies_after_the_decision_is_not_missed(size: int, fan_in: int) -> None:
    """The verdict stands; its own block reads it there."""
    fleet = Fleet(size, fan_in)
    claimed, decided = threading.Event(), threading.Event()

    def at(verb: str, key: str) -> bool:
        if verb == "compare_set" and key.endswith("0/0/verdict"):  # first the claim, then the decision
            if claimed.is_set():
                decided.set()
            claimed.set()
            return False
        return decided.is_set()

    fleet.ranks[0].store = Deadly(fleet.ranks[0].store, at)
    found = fleet.all(add)
    assert isinstance(found.pop(0), Dead)
    assert set(found.values()) == {size * (size - 1) // 2}


@pytest.mark.slow
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
@pytest.mark.fast_cases("4", "16", "5")
def test_a_frozen_rank_that_wakes_reads_what_stands(slow: int) -> None:
    """It stops after its word; if it is the first one the others give the round up, else they go on without it."""
    fleet = Fleet(64, 4)
    wake = threading.Event()
    fleet.ranks[slow].store = Deadly(fleet.ranks[slow].store, comes_to("check", "/"), wake)
    started = fleet.start(soon, range(64))
    found = outcomes_of({rank: future for rank, future in started.items() if rank != slow})
    wake.set()
    late = outcomes_of({slow: started[slow]})
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
    fleet.store.wait([f"p/x/0/0/word/{rank}" for rank in range(60)], timedelta(seconds=PATIENCE))
    fleet.ranks[5].hurry(0.2)
    kind, text = one_text(outcomes_of(started))
    assert kind is RankLost and all(f"rank {rank} (" in text for rank in range(60, 64)) and "rank 59 (" not in text
    fleet.ranks[5].at_leisure()
    assert set(fleet.all(add).values()) == {2016}


plan = st.tuples(st.sampled_from(["well", "dies", "late", "never"]), st.floats(0, 1))


@settings(max_examples=examples(20), deadline=None)
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
    found = outcomes_of({rank: future for rank, future in started.items() if rank not in late})
    wake.set()
    found |= outcomes_of({rank: started[rank] for rank in late})
    found = {rank: outcome for rank, outcome in found.items() if not isinstance(outcome, Dead)}
    # A claim whose outcome never came is the one thing that may look different to those who left and those who stayed.
    told = {str(o) for o in found.values() if "gave no outcome" not in str(o)}
    assert len(told) <= 1, told
    if not fate:
        assert told == {str(size * (size - 1) // 2)}
