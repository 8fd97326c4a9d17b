"""The notices: whoever puts a notice up, whenever, all ranks act on it at the same step, once."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.ranks import notices as module
from holdfast.ranks.notices import Kind, Notice, Notices
from tests.marks import examples


@dataclass
class Training:
    """Ranks that are at most one step apart: nobody begins a step before all have done the last but one."""

    ranks: int
    done: list[int] = field(init=False)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.done = [0] * self.ranks

    def begin(self, step: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: min(self.done) >= step - 2, timeout=240)

    def end(self, rank: int, step: int) -> None:
        with self.changed:
            self.done[rank] = step
            self.changed.notify_all()


@dataclass(frozen=True)
class Post:
    rank: int
    step: int
    kind: Kind
    of: int


posts = st.builds(Post, st.integers(0, 4), st.integers(1, 12), st.sampled_from(["stop", "failed"]), st.integers(1, 3))


def acted(
    ranks: int, poll: int, told: list[Post], seed: int, steps: int, size: int = 1
) -> list[list[tuple[int, Notice]]]:
    """Each rank's notices with the step at which it acted on them."""
    store, training = dist.HashStore(), Training(ranks)

    def train(rank: int) -> list[tuple[int, Notice]]:
        chance = random.Random(seed * ranks + rank)
        notices, found = Notices(store, "notices", poll, rank=rank, size=size), []
        for step in range(1, steps + 1):
            training.begin(step)
            time.sleep(chance.random() * 0.0005)
            for post in told:
                # As the manager does: what a rank knows it puts up again at every step.
                if post.rank == rank and post.step <= step:
                    notices.put(Notice(post.kind, post.of, step))
            found += [(step, notice) for notice in notices.due(step)]
            training.end(rank, step)
        assert not notices.pending
        return found

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(train, range(ranks)))


@settings(max_examples=examples(100))
@given(
    ranks=st.integers(2, 5),
    poll=st.integers(1, 5),
    told=st.lists(posts, min_size=1, max_size=8),
    seed=st.integers(0, 1 << 30),
)
def test_all_ranks_act_on_each_notice_at_the_same_step_once(ranks: int, poll: int, told: list[Post], seed: int) -> None:
    told = [Post(post.rank % ranks, post.step, post.kind, post.of) for post in told]
    found = acted(ranks, poll, told, seed, steps=12 + 2 * poll + 2)
    assert all(one == found[0] for one in found), "the same notices at the same steps in the same order"
    subjects = Counter((n.kind, n.of if n.kind == "failed" else None) for _, n in found[0])
    assert set(subjects) == {(post.kind, post.of if post.kind == "failed" else None) for post in told}
    assert set(subjects.values()) == {1}
    for step, notice in found[0]:
        assert notice.at < step <= notice.at + 2 * poll + 1 and step % poll == 0


@settings(max_examples=examples(50))
@given(
    ranks=st.integers(2, 5),
    poll=st.integers(1, 3),
    turns=st.integers(2, 6),
    told=st.lists(posts, min_size=1, max_size=8),
    seed=st.integers(0, 1 << 30),
)
def test_very_many_ranks_take_turns_to_look(ranks: int, poll: int, turns: int, told: list[Post], seed: int) -> None:
    """These few are ranks of a fleet in which each looks at every ``turns``-th step alone."""
    told = [Post(post.rank % ranks, post.step, post.kind, post.of) for post in told]
    size = module.LOOKS * turns
    found = acted(ranks, poll, told, seed, steps=12 + 2 * poll + turns * poll, size=size)
    assert all(one == found[0] for one in found), "the same notices at the same steps in the same order"
    assert {(n.kind, n.of if n.kind == "failed" else None) for _, n in found[0]} == {
        (post.kind, post.of if post.kind == "failed" else None) for post in told
    }
    for step, notice in found[0]:
        assert notice.at + 1 < step <= notice.at + 1 + turns * poll and step % poll == 0


def test_each_of_very_many_ranks_looks_in_its_turn() -> None:
    class Looked:
        looks = 0

        def check(self, keys: list[str]) -> bool:
            self.looks += 1
            return False

    at: list[int] = []
    for rank in range(16):
        store = Looked()
        notices = Notices(store, "notices", 1, rank=rank, size=8 * module.LOOKS)
        for step in range(80):
            before = store.looks
            notices.due(step)
            at += [step] * (store.looks - before)
    assert Counter(at) == dict.fromkeys(range(80), 2)


def test_alone_a_notice_is_due_at_once() -> None:
    notices = Notices(None, "notices", 5)
    notices.put(Notice("stop", 3, 3, True, True))
    notices.put(Notice("stop", 4, 4))
    assert notices.due(3) == [Notice("stop", 3, 3, True, True)] and notices.due(4) == [] and not notices.pending


def test_the_first_word_of_a_kind_stands() -> None:
    store = dist.HashStore()
    mine, yours = Notices(store, "notices", 1), Notices(store, "notices", 1)
    mine.put(Notice("stop", 7, 7, flying=True))
    yours.put(Notice("stop", 8, 8, hurry=True))
    assert mine.due(9) == yours.due(9) == [Notice("stop", 7, 7, flying=True)]
    assert mine.due(10) == yours.due(10) == []


def test_a_notice_that_was_seen_is_pending_until_it_is_due() -> None:
    store = dist.HashStore()
    mine, yours = Notices(store, "notices", 1), Notices(store, "notices", 1)
    mine.put(Notice("failed", 4, 5))
    assert yours.due(6) == [] and yours.pending == [Notice("failed", 4, 5)]
    assert yours.due(7) == [Notice("failed", 4, 5)] and yours.pending == []


@pytest.mark.parametrize("keys", [("one", "another")])
def test_boards_do_not_hear_each_other(keys: tuple[str, str]) -> None:
    store = dist.HashStore()
    mine, yours = (Notices(store, key, 1) for key in keys)
    mine.put(Notice("stop", 1, 1))
    assert [yours.due(step) for step in (2, 3, 4)] == [[], [], []]
