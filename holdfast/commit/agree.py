"""Before anything is copied the ranks agree on what there is: digests first, layouts and values only where they differ.

The second stage of a save. Remembers the layouts and plans of the last saves, alike on every
rank, so that a state which looks the same costs one small round: digests up, the save's id and a digest down.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.buffers.device import Copier
from holdfast.commit.folder import prepare, withdraw
from holdfast.commit.gather import Gathered
from holdfast.commit.job import Failed, Job, value_of
from holdfast.commit.plain_tensors import join_sums, sums_of
from holdfast.errors import HoldfastError
from holdfast.ondisk import blocks
from holdfast.plan.layout import Layout, OwnedJoin, OwnedValues, digest_of, join_owned, join_values
from holdfast.plan.plan import Plan, make_plan
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state.leaves import owned_digest, owned_values

_REMEMBERED = 8  # saves whose layouts and plans are kept for later ones of the same state
_DIGEST, _MARK = 10, 4  # bytes: with four digests and a mark a rank's word has 61
_BUSY = b""
_KEY = "save"


class FailoverNote(msgspec.Struct, array_like=True):
    """What a commit needs of the first rank. All ranks get it, so that any of them can commit in its place.

    ``attached`` are names, sizes and digests of the files that the first rank attaches. ``owned`` are the distinct
    digests of the values of modules and optimizers, ``owned_by`` which of them each rank has; both are empty if all
    ranks have the same.
    """

    run: str
    attached: list[tuple[str, int, str]]
    owned: list[bytes] = []
    owned_by: list[int] = []


@dataclass(frozen=True)
class Agreed:
    """What the ranks agreed on: the save's id, the distinct layouts, and which rank has which.

    ``plan`` is the digest of the plan that follows from these. ``values`` are those that all ranks share. ``owned``
    are the values of modules and optimizers of all ranks; the first rank alone has them, and only where ranks differ.
    ``failover`` is the first rank's note for the case that it is lost, if the save is degraded.
    """

    save: str
    plan: str
    layouts: list[Layout]
    layout_of: list[int]
    values: dict[str, Any]
    owned: OwnedJoin | None
    failover: FailoverNote | None = None


def agree(call: Call, job: Job, gathered: Gathered | Failed, *, busy: bool = False) -> Agreed | None:
    """Agree with the other ranks on what there is, in two rounds at most; None if a rank is ``busy``: no save then.

    The first rank checks that the folder may take the save. Raises what every rank raises: SaveFailed.
    """
    job.reached("plan")
    with job.span("plan"):
        return _Agreeing(call, job, gathered, busy).run()


def plan_for(ranks: Ranks, agreed: Agreed) -> Plan:
    """The plan that follows. Raises Mismatch where the layouts of the ranks do not fit together."""
    plans = _memory_of(ranks).plans
    if agreed.plan not in plans:
        plans[agreed.plan] = make_plan(agreed.layouts, agreed.layout_of)
    return plans[agreed.plan]


class _Note(NamedTuple):
    """A rank's state in four digests, and in ``memory`` a fifth, of what the rank remembers."""

    layout: bytes
    values: bytes
    owned: bytes
    plain: bytes
    memory: bytes


def _unpacked(note: bytes) -> _Note:
    layout, values, owned, plain = (note[i : i + _DIGEST] for i in range(0, 4 * _DIGEST, _DIGEST))
    return _Note(layout, values, owned, plain, note[4 * _DIGEST :])


class _Decision(msgspec.Struct, array_like=True):
    """What the first rank decides: the save's id, none if it is skipped, and a digest of who has which layout."""

    save: bytes
    plan: bytes = b""
    news: _News | None = None
    failover: FailoverNote | None = None


class _News(msgspec.Struct, array_like=True):
    """What is not remembered: the distinct layouts, which rank has which, and who has to tell what.

    ``afresh``: the ranks remember different things, and have to forget them.
    """

    afresh: bool
    layouts: list[bytes]
    layout_of: list[int]
    tell_layout: list[int]
    tell_values: list[int]
    tell_owned: list[int]
    tell_plain: list[int]

    @property
    def tells(self) -> bool:
        """Whether anybody has to tell anything."""
        return bool(self.tell_layout or self.tell_values or self.tell_owned or self.tell_plain)


class _RankState(msgspec.Struct, array_like=True):
    """What a rank that was asked tells of its state."""

    layout: Layout | None = None
    values: dict[str, Any] | None = None
    owned: OwnedValues | None = None
    plain: dict[str, str] | None = None


class _Joined(msgspec.Struct, array_like=True):
    """What the first rank makes of it: layouts that are new, and the values of all ranks, where ranks differ."""

    layouts: list[Layout]
    values: dict[str, Any] | None = None


_Owners = tuple[bytes, tuple[tuple[bytes, int], ...]]
"""A plan, and the distinct digests of owned values, each with the first rank that has them."""


@dataclass
class _Memory:
    """Layouts and plans of earlier saves of one group; every rank has seen the same ones in the same order.

    ``seats``: by the digest of a plan the distinct layouts, and which rank has which. ``mark`` stands for all of it.
    ``joined`` is known to the first rank alone: the values of modules and optimizers of the last save, and of which
    digests they were made.
    """

    layouts: dict[bytes, Layout] = field(default_factory=dict)
    seats: dict[bytes, tuple[list[bytes], list[int]]] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    recent: list[bytes] = field(default_factory=list)
    mark: bytes = bytes(_MARK)
    joined: tuple[_Owners, OwnedJoin] | None = None

    def keep(self, plan: bytes) -> None:
        """Note what a save uses, and forget what none of the last few used; alike on every rank."""
        self.recent = [*self.recent, plan][-_REMEMBERED:]
        self.seats = {key: seats for key, seats in self.seats.items() if key in self.recent}
        used = {digest for layouts, _ in self.seats.values() for digest in layouts}
        self.layouts = {digest: layout for digest, layout in self.layouts.items() if digest in used}
        self.plans = {key: made for key, made in self.plans.items() if bytes.fromhex(key) in self.recent}
        self.mark = _digest([key.hex() for key in self.recent])[:_MARK]


def _memory_of(ranks: Ranks) -> _Memory:
    memory: _Memory = ranks.remembered.setdefault(_KEY, _Memory())
    return memory


@dataclass
class _Agreeing:
    call: Call
    job: Job
    gathered: Gathered | Failed
    busy: bool
    save: str = ""
    plain: dict[str, str] = field(default_factory=dict)
    owned: OwnedJoin | None = None
    owners: _Owners = (b"", ())

    @property
    def own(self) -> Gathered:
        """What this rank brings. Raises why it brings nothing."""
        return value_of(self.gathered)

    def run(self) -> Agreed | None:
        try:
            decision = self.call.exchange("plan", self._describe, self._decide, _Decision)
            if not decision.save:
                return None
            self.save = decision.save.hex()
            self.job.reached("layout")
            with self.job.span("layout"):
                return self._follow(decision)
        except BaseException:
            # Not before the decision: until then the folder may be somebody else's.
            if self.save and self.job.folder is not None:
                withdraw([], self.job.folder)
            raise

    def _follow(self, decision: _Decision) -> Agreed:
        news = decision.news
        if news is not None and news.afresh:
            self.call.ranks.remembered.pop(_KEY, None)
        memory = _memory_of(self.call.ranks)
        seats = memory.seats.get(decision.plan)
        values: dict[str, Any] | None = None
        if news is not None:
            seats = seats or (news.layouts, news.layout_of)
            if news.tells:
                layouts, layout_of = seats
                joined = self.call.exchange(
                    "layout",
                    lambda: self._tell(news),
                    lambda notes: self._join(layouts, layout_of, notes),
                    _Joined,
                )
                memory.layouts.update((_digest(layout), layout) for layout in joined.layouts)
                values = joined.values  # any rank may have to commit, and some lack values that others have
        if seats is None or not memory.layouts.keys() >= set(seats[0]):
            raise HoldfastError("a plan is to be followed that this rank does not know; this is a fault of holdfast")
        memory.seats[decision.plan] = seats
        memory.keep(decision.plan)
        layouts, layout_of = seats
        return Agreed(
            self.save, decision.plan.hex(), [memory.layouts[digest] for digest in layouts], layout_of,
            self.own.state.values if values is None else values, self.owned, decision.failover,
        )  # fmt: skip

    def _describe(self) -> bytes:
        if self.busy:
            return _BUSY
        own = self.own
        self.plain = sums_of(own.state, Copier(own.moments)) if self.call.ranks.size > 1 else {}
        owned = bytes.fromhex(owned_digest(own.state))[:_DIGEST]
        note = _Note(
            _digest(own.layout), _digest(own.state.values), owned, _digest(self.plain),
            _memory_of(self.call.ranks).mark,
        )  # fmt: skip
        return b"".join(note)

    def _decide(self, words: list[bytes]) -> _Decision:
        if any(note == _BUSY for note in words):
            return _Decision(b"")
        if self.job.folder is not None:
            prepare(self.job.folder, overwrite=self.job.overwrite)
        # Nearly all of many ranks say the same: look at each distinct note once, with the first rank that has it.
        first_with = dict(zip(reversed(words), reversed(range(len(words))), strict=True))
        notes = [(rank, _unpacked(note)) for note, rank in sorted(first_with.items(), key=lambda item: item[1])]
        afresh = len({note.memory for _, note in notes}) > 1
        memory = _Memory() if afresh else _memory_of(self.call.ranks)
        tellers = _first_with((rank, note.layout) for rank, note in notes)
        index = {digest: i for i, digest in enumerate(tellers)}
        seat = {note: index[note[:_DIGEST]] for note in first_with}
        layouts, layout_of = list(tellers), [seat[note] for note in words]
        plan = _digest([[digest.hex() for digest in layouts], layout_of])
        known = plan in memory.seats
        owned = _first_with((rank, note.owned) for rank, note in notes)
        self.owners = plan, tuple(owned.items())
        if memory.joined is not None and memory.joined[0] == self.owners:
            self.owned, owned = memory.joined[1], {}
        news = _News(
            afresh,
            [] if known else layouts,
            [] if known else layout_of,
            [rank for digest, rank in tellers.items() if digest not in memory.layouts],
            _unless_one(_first_with((rank, note.values) for rank, note in notes)),
            _unless_one(owned),
            _unless_one(_first_with((rank, note.plain) for rank, note in notes)),
        )
        failover = self._failover_note()
        if failover is not None and len(self.owners[1]) > 1:
            number = {digest: at for at, (digest, _) in enumerate(self.owners[1])}
            of_note = {note: number[_unpacked(note).owned] for note in first_with}
            failover.owned, failover.owned_by = list(number), [of_note[note] for note in words]
        return _Decision(secrets.token_bytes(8), plan, None if known and not news.tells else news, failover)

    def _failover_note(self) -> FailoverNote | None:
        if not self.job.degraded or self.job.folder is None:
            return None
        attached = [(name, len(data), blocks.digest(data)) for name, data in self.own.attachments.items()]
        return FailoverNote(self.job.run, attached)

    def _tell(self, news: _News) -> _RankState:
        rank, own = self.call.ranks.rank, self.own
        return _RankState(
            own.layout if rank in news.tell_layout else None,
            own.state.values if rank in news.tell_values else None,
            owned_values(own.state) if rank in news.tell_owned else None,
            self.plain if rank in news.tell_plain else None,
        )

    def _join(self, layouts: list[bytes], layout_of: list[int], states: list[_RankState]) -> _Joined:
        new = [state.layout for state in states if state.layout is not None]
        known = {**_memory_of(self.call.ranks).layouts, **{_digest(layout): layout for layout in new}}
        values = [(r, known[layouts[layout_of[r]]], s.values) for r, s in enumerate(states) if s.values is not None]
        joined = join_values(values) if values else None
        join_sums([(rank, state.plain) for rank, state in enumerate(states) if state.plain is not None])
        owned = [(r, layout_of[r], s.owned) for r, s in enumerate(states) if s.owned is not None]
        if owned:
            self.owned = join_owned([known[d] for d in layouts], owned)
            _memory_of(self.call.ranks).joined = self.owners, self.owned
        return _Joined(new, joined)


def _digest(message: object) -> bytes:
    return bytes.fromhex(digest_of(message))[:_DIGEST]


def _first_with(digests: Iterable[tuple[int, bytes]]) -> dict[bytes, int]:
    """Each distinct digest with the first rank that has it; ``digests`` = (rank, its digest) in the order of ranks."""
    first: dict[bytes, int] = {}
    for rank, digest in digests:
        first.setdefault(digest, rank)
    return first


def _unless_one(first: dict[bytes, int]) -> list[int]:
    """The ranks to ask, or none if all have the same."""
    return list(first.values()) if len(first) > 1 else []
