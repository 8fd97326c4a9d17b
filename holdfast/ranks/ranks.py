"""The two verbs between ranks: `exchange` and `settle`, over the process group's store, never over a collective.

Save, load and the manager call them, in any thread. Never waits without a deadline, and never leaves two ranks with
different verdicts: the answer of a round is written once, and ranks that come late read the same one.

We rejected collectives: if one rank never joins, the others hang, and nothing names that rank. A round over the store
has a deadline, runs beside the collectives of training, and works for groups without a CPU backend.
"""

from __future__ import annotations

import math
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from holdfast import events
from holdfast.errors import Failure, HoldfastError, Mismatch, RankLost, cause_to_show, error_from, failure_of
from holdfast.ondisk.blocks import digest
from holdfast.ranks.heartbeat import Vigil, Watch, Work, at_work
from holdfast.ranks.messages import FAN_IN, NAMED, Message, Verdict, check_labels, messages_of, short, tree_of
from holdfast.ranks.rounds import Round

DEADLINE = 600.0
"""Seconds after which a rank that others wait for, and that makes no progress, is lost."""

_PAUSE = 0.05  # seconds between two looks of a rank that is late

meetings: list[Callable[[Ranks], None]] = []
"""Called with the ranks when a call of theirs begins, in its thread: for clocks of timelines. They must not raise."""

Body = TypeVar("Body")
Answer = TypeVar("Answer")


@dataclass
class Ranks:
    """The ranks of one process group as one of them sees it.

    ``global_ranks[i]`` is the global rank of member i; ``store`` is None for a lone process. Made by `ranks_of`; tests
    make many over one in-memory store, a thread each. ``remembered`` is for what callers keep between calls. ``main``
    knows the ``hosts`` of all ranks after the first round. ``fan_in``: how many ranks one rank hears directly.
    ``numbers``: of a part of a group, the ranks of its members in the whole group, which errors name.
    """

    rank: int
    size: int
    store: Any = None
    global_ranks: tuple[int, ...] = ()
    host: str = field(default_factory=socket.gethostname)
    hosts: list[str] | None = None
    calls: int = 0
    remembered: dict[str, Any] = field(default_factory=dict)
    above: Ranks | None = None
    fan_in: int = FAN_IN
    numbers: tuple[int, ...] = ()
    _limit: float = math.inf
    _caller: int | None = None
    _one_call: threading.Lock = field(default_factory=threading.Lock)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def lane(self, name: str) -> Ranks:
        """The same ranks with calls of their own, in any order beside all others: for work in the background.

        ``name`` must be equal on every rank and never used before.
        """
        store = None if self.store is None else _PrefixStore(name, self.store)
        return Ranks(self.rank, self.size, store, self.global_ranks, self.host, above=self, fan_in=self.fan_in)

    def among(self, members: Sequence[int], name: str) -> Ranks:
        """Some of these ranks, this one among them, with calls of their own, as of a lane; errors name them as here.

        The first of them decides. ``members`` ascend, and are equal on each of them.
        """
        hosts, known = self.main.hosts, self.global_ranks
        return Ranks(
            members.index(self.rank), len(members), _PrefixStore(name, self.store), tuple(known[m] for m in members),
            self.host, None if hosts is None else [hosts[m] for m in members], above=self, fan_in=self.fan_in,
            numbers=tuple(members),
        )  # fmt: skip

    def post(self, key: str, message: bytes) -> None:
        """Leave a message for ranks that may come late, or never. Raises RuntimeError if the store is gone."""
        self.store.set(key, message)

    def find(self, key: str, deadline: float) -> bytes | None:
        """The message under ``key``; None if it is not there within ``deadline`` seconds. Raises as `post` does."""
        until = time.monotonic() + deadline
        while not self.store.check([key]):
            if time.monotonic() > min(until, self.limit):
                return None
            time.sleep(_PAUSE)
        return bytes(self.store.get(key))

    def number(self, rank: int) -> int:
        """The rank by which errors name a member."""
        return self.numbers[rank] if self.numbers else rank

    def where(self, rank: int) -> str:
        """The host of a member, or what is known in its place."""
        hosts, known = self.main.hosts, self.global_ranks
        if hosts is not None and hosts[rank]:
            return hosts[rank]
        return f"global rank {known[rank]}, host not known yet" if known else "host not known yet"

    @property
    def main(self) -> Ranks:
        """The ranks that a lane was made from in the end; these ranks themselves if they are no lane."""
        return self if self.above is None or self.numbers else self.above.main

    @property
    def limit(self) -> float:
        """The moment, by `time.monotonic`, that no wait outlasts."""
        return min(self._limit, self.above.limit if self.above is not None else math.inf)

    def hurry(self, seconds: float) -> None:
        """From now on no wait of this process lasts longer than ``seconds`` from now; safe in a signal handler."""
        self.main._limit = min(self.main._limit, time.monotonic() + seconds)

    def give_up(self) -> None:
        """End all waits of this lane, and of the lanes made from it, now."""
        self._limit = -math.inf

    def at_leisure(self) -> None:
        """Take `hurry` back."""
        self.main._limit = math.inf

    @contextmanager
    def call(self, label: str, *, deadline: float = DEADLINE, saving: bool = False) -> Iterator[Call]:
        """One joint piece of work (a save, a load). All ranks make the same calls in the same order.

        ``label`` must be equal on every rank, and is checked to be. ``saving`` makes failures SaveFailed.
        """
        if self._caller == threading.get_ident():
            raise HoldfastError(f"{label} was called from inside another save or load of the same group")
        with self._one_call:
            try:
                self._caller = threading.get_ident()
                for listener in list(meetings):
                    listener(self)
                yield Call(self, label, deadline, saving)
            finally:
                self._caller = None
                self.calls += 1


@dataclass
class Call:
    """The rounds of one joint piece of work."""

    ranks: Ranks
    label: str
    deadline: float
    saving: bool
    _round: int = 0
    _watch: Watch = field(init=False)
    _work: Work | None = None
    _deciding: Round | None = None

    def __post_init__(self) -> None:
        self._watch = Watch(self.ranks.store, self.deadline)

    def exchange(
        self, phase: str, work: Callable[[], Body], decide: Callable[[list[Body]], Answer], answer: type[Answer]
    ) -> Answer:
        """Each rank sends the first rank a small message, and the first rank answers all of them.

        ``work()`` makes this rank's message, a plain msgspec struct or builtin; if it raises, every rank raises the
        same error. ``decide(messages)`` runs on the first rank alone and returns an ``answer``. Raises RankLost
        (SaveFailed while saving) on every rank if a rank does not come and makes no progress within the deadline. Bytes
        of the tasks (`events.task`) that ``work()`` begins count as progress.
        """
        ranks, moved = self.ranks, events.moved()
        before = moved.done
        kind: type[Body]
        errors: list[BaseException] = []  # what this rank itself failed with, at work or when it decided
        message = Message(short(self.label), None, host=ranks.host if ranks.main.hosts is None else None)

        def decided(messages: list[Message]) -> Answer:
            return decide([msgspec.msgpack.decode(m.body or b"", type=kind) for m in messages])

        def conclude(round_: Round, data: bytes) -> Verdict:
            self._deciding = round_
            try:
                messages = messages_of(data, round_.tree.levels)
            except (zlib.error, msgspec.MsgspecError) as error:  # another version of holdfast on some rank
                return Verdict(message.label, None, self._failure_of(error, phase), [])
            return self._conclude(messages, phase, decided, errors, round_.ask)

        with at_work(ranks.store, ranks.rank, self.deadline, lambda: moved.done - before) as self._work:
            try:
                body = work()
                kind, message.body = type(body), msgspec.msgpack.encode(body)
            except BaseException as error:  # noqa: BLE001 - kept here, sent to every rank, raised below
                errors.append(error)
                message.failure = self._failure_of(error, phase)
            if not ranks.first:
                self._work.stop()  # nobody waits for this rank now; but all wait for the first until it has decided
            if ranks.store is None:
                verdict = self._conclude([message], phase, decided, errors, lambda ranks: {})
            else:
                verdict = self._meet_over_store(message, phase, conclude)
        try:
            if any(not isinstance(error, Exception) for error in errors):  # an interrupt stays what it is
                raise next(error for error in errors if not isinstance(error, Exception))
            if verdict.failure is not None:
                absent = [ranks.number(rank) for rank in verdict.absent]
                number, alone = verdict.failure.rank, ranks.size == 1 and verdict.failure.rank == 0
                raise error_from(
                    verdict.failure, saving=self.saving, settled=verdict.settled, absent=absent, alone=alone
                ) from cause_to_show(errors if number == ranks.number(ranks.rank) else [])
        finally:
            errors.clear()  # an error and this frame would keep each other, and with them the state
        return msgspec.msgpack.decode(verdict.answer or b"", type=answer)

    def settle(
        self, phase: str, work: Callable[[], Body], decide: Callable[[list[Body]], Answer], answer: type[Answer]
    ) -> Answer:
        """`exchange` under the name that says that an outcome becomes final here, as when the first rank commits."""
        return self.exchange(phase, work, decide, answer)

    def confirm(self) -> None:
        """On the first rank while it decides, right before what cannot be undone: raise RankLost if it is given up."""
        self._tick()
        if self._deciding is not None and not self._deciding.confirm():
            raise RankLost(f"the other ranks have given up {self.label!r}, as this one took too long to decide")

    def vigil(self, others: Sequence[int]) -> Vigil:
        """For a wait inside of ``work()`` for other ranks that are at the same work."""
        return Vigil(self._watch, [rank for rank in others if rank != self.ranks.rank], self._tick)

    def _tick(self) -> None:
        if self._work is not None:
            self._work.tick()

    def _failure_of(self, error: BaseException, phase: str) -> Failure:
        ranks = self.ranks
        if not isinstance(error, HoldfastError):
            events.log.debug("rank %d failed in phase %s", ranks.rank, phase, exc_info=error)
        return failure_of(error, rank=ranks.number(ranks.rank), host=ranks.host, phase=phase)

    def _conclude(
        self, messages: list[Message], phase: str, decide: Callable[[list[Message]], object],
        errors: list[BaseException], ask: Callable[[list[int]], dict[int, str]],
    ) -> Verdict:  # fmt: skip
        """The first rank's verdict on all the messages; its own failure to decide counts like any other failure."""
        failure = next((m.failure for m in messages if m.failure is not None), None)
        verdict = Verdict(short(self.label), None, failure, [])
        if any(m.host is not None for m in messages):
            known = self.ranks.main.hosts or [""] * len(messages)
            hosts = [k if m.host is None else m.host for k, m in zip(known, messages, strict=True)]
            verdict.hosts = [(host, len(list(same))) for host, same in groupby(hosts)]
        if verdict.failure is None:
            try:
                check_labels(messages, self.label, ask)
                verdict.answer = msgspec.msgpack.encode(decide(messages))
            except BaseException as error:  # noqa: BLE001 - kept, sent to every rank, raised by `exchange`
                errors.append(error)
                verdict.failure = self._failure_of(error, phase)
                verdict.settled = getattr(error, "settled", True)
        return verdict

    def _meet_over_store(self, message: Message, phase: str, conclude: Callable[[Round, bytes], Verdict]) -> Verdict:
        ranks = self.ranks
        try:
            while True:
                round_ = Round(
                    ranks.store, tree_of(ranks.size, ranks.fan_in), ranks.rank, f"{ranks.calls}/{self._round}",
                    self.label, self.deadline, lambda: ranks.limit, conclude, partial(self._lost, phase), self._watch,
                    self._tick,
                )  # fmt: skip
                verdict = round_.meet(message)
                self._watch.forget()
                round_.forget()
                if verdict.label == message.label or ranks.rank not in verdict.absent:
                    break
                # This rank missed a whole call (its training code caught an error and skipped a save, say): it finds
                # that call's verdict, under another label, naming it as absent. It catches up with the others.
                ranks.calls += 1
        except RuntimeError as error:  # what torch's stores raise when their server is gone
            gone = f"the store of the process group does not answer: the process that serves it is gone ({error})"
            failure = Failure(ranks.number(0), ranks.where(0), phase, RankLost.__name__, gone)
            return Verdict(message.label, None, failure, [], settled=False)
        self._round += 1
        if verdict.hosts is not None:
            ranks.main.hosts = [host for host, count in verdict.hosts for _ in range(count)]
        return verdict

    def _lost(
        self, phase: str, named: list[int], absent: list[int], what: str, watch: Watch | None = None
    ) -> Verdict:  # fmt: skip
        ranks = self.ranks
        who = ", ".join(f"rank {ranks.number(r)} ({ranks.where(r)})" for r in named[:NAMED])
        if len(named) > NAMED:
            who += f" and {len(named) - NAMED} more"
        progress = watch.described(named[0]) if watch is not None else ""
        text = (
            f"{who} {what} phase {phase!r} of {self.label!r} within {self.deadline:g} s{progress}; "
            "look at that rank's log or stack, or raise deadline=; every rank of the group has to make this call"
        )
        failure = Failure(ranks.number(named[0]), ranks.where(named[0]), phase, RankLost.__name__, text)
        return Verdict(short(self.label), None, failure, absent)


_HashStore: Any = getattr(dist, "HashStore", ())  # missing from a torch built without distributed
_PrefixStore: Any = getattr(dist, "PrefixStore", None)
_known: dict[tuple[int, ...], tuple[Any, Ranks]] = {}
_alone = Ranks(0, 1)


def ranks_of(group: dist.ProcessGroup | Ranks | None = None) -> Ranks:
    """The ranks of ``group`` (default: the default process group; without one, this process alone).

    ``Ranks(0, 1)`` stands for this process alone, in any group. Works for any backend: only the group's
    store is used. Raises Mismatch if this rank is not in the group.
    """
    if isinstance(group, Ranks):
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return _alone
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
        raise Mismatch("this rank is not in the group; call only on the ranks that are")
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    me = dist.get_rank()
    if me not in members:
        raise Mismatch(f"global rank {me} is not in the group of ranks {list(members)}; call only on its members")
    store = dist.distributed_c10d._get_default_store()
    known = _known.get(members)
    if known is not None and known[0] is store:
        return known[1]
    # A new process group over the same server must not meet the keys of its predecessor: go on counting.
    calls = known[1].calls if known is not None else 0
    own = store.clone() if hasattr(store, "clone") and not isinstance(store, _HashStore) else store
    prefixed = _PrefixStore(f"holdfast/{digest(repr(members).encode())}", own)
    ranks = Ranks(members.index(me), len(members), prefixed, members, calls=calls)
    _known[members] = (store, ranks)
    return ranks
