"""What ranks tell each other before a save, with most of them not here: the real `agree`, its messages counted.

Called by the simulator. One rank of each kind runs in a thread of its own, and what it tells is taken for what every
rank of its kind tells; the first rank gets the notes of all, encoded, as over a store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import Any, cast

import msgspec

from benchmarks.scale_states import World
from holdfast.buffers.device import Moments
from holdfast.buffers.memory import no_collection
from holdfast.commit.agree import Agreed, agree
from holdfast.commit.gather import Gathered
from holdfast.commit.job import Job
from holdfast.ranks.messages import Message, short
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state.leaves import layout_of


@dataclass
class Talk:
    """One agreement: bytes of the longest word of a rank, of the answer to each; CPU seconds of ranks.

    ``own_s`` is the most that one rank takes to describe its state, ``first_s`` what the first takes to decode all
    notes and to decide.
    """

    rounds: int = 0
    note_bytes: int = 0
    answer_bytes: int = 0
    own_s: float = 0.0
    first_s: float = 0.0


@dataclass
class Meeting:
    """The ranks of a world that meet for one save after the other, remembering what they have told."""

    world: World
    members: dict[int, Ranks] = field(default_factory=dict)
    stands_for: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        world = self.world
        followers: dict[int, int] = {}
        for rank, index in enumerate(world.layout_of):
            if rank != world.tellers[index]:
                followers.setdefault(index, rank)
        size = world.sharding.world
        chosen = [*world.tellers, *followers.values()]
        self.members = {rank: Ranks(rank, size) for rank in chosen}
        # Only the first rank of a layout ever tells it: all others are like the second.
        self.stands_for = [
            rank if rank in self.members else followers[index] for rank, index in enumerate(world.layout_of)
        ]

    def agree(self) -> tuple[Agreed, Talk]:
        """One save's agreement as the first rank has it."""
        talk = Talk()
        found: dict[int, Agreed | None] = {}
        failed: list[BaseException] = []
        hub = _Hub(self, talk, threading.Barrier(len(self.members)))

        def run(rank: int) -> None:
            try:
                state = self.world.collected(rank)
                call = cast(Call, _Call(hub, self.members[rank]))
                gathered = Gathered(state, layout_of(state), Moments(), {}, [])
                found[rank] = agree(call, Job(self.members[rank], None, None, "0" * 16), gathered)
            except BaseException as error:  # raised below
                failed.append(error)
                hub.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.members]
        with no_collection():
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if failed:
            raise failed[0]
        agreement = found[0]
        if agreement is None:
            raise RuntimeError("the ranks skipped the save")
        return agreement, talk


@dataclass
class _Hub:
    """Where the notes of one round wait for the first rank, and its answer for all."""

    meeting: Meeting
    talk: Talk
    barrier: threading.Barrier
    notes: dict[int, bytes] = field(default_factory=dict)
    answer: bytes = b""
    turn: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class _Call:
    """What `agree` needs of a `Call`; the rounds of all ranks meet in the hub."""

    hub: _Hub
    ranks: Ranks

    def exchange(
        self, phase: str, work: Callable[[], Any], decide: Callable[[list[Any]], Any], answer: type[Any]
    ) -> Any:
        """One round, as `Call.exchange`."""
        hub, talk = self.hub, self.hub.talk
        with hub.turn:  # one at a time, so that nobody's CPU time has waiting for others in it
            began = thread_time()
            note = work()
            data = msgspec.msgpack.encode(note)
            word = msgspec.msgpack.encode(Message(short(f"save {phase}"), data))
            talk.own_s = max(talk.own_s, thread_time() - began)
            talk.note_bytes = max(talk.note_bytes, len(word))
            hub.notes[self.ranks.rank] = data
        hub.barrier.wait()
        if self.ranks.first:
            talk.rounds += 1
            began = thread_time()
            notes = [msgspec.msgpack.decode(hub.notes[rank], type=type(note)) for rank in hub.meeting.stands_for]
            hub.answer = msgspec.msgpack.encode(decide(notes))
            talk.first_s += thread_time() - began
            talk.answer_bytes = max(talk.answer_bytes, len(hub.answer))
        hub.barrier.wait()
        return msgspec.msgpack.decode(hub.answer, type=answer)
