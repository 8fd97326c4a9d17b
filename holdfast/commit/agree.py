"""Before anything is copied the ranks agree on what there is: digests first, layouts and values only where they differ.

`SaveWork.plan` calls `agree` and then `plan_for`. Remembers the layouts and plans of the last saves, alike on every
rank, so that a state which looks the same costs one small round: digests up, the save's id and a digest down.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from holdfast.buffers.device import Copier, Moments
from holdfast.errors import HoldfastError
from holdfast.plan.layout import Layout, OwnedJoin, OwnedValues, digest_of, join_owned, join_values
from holdfast.plan.plan import Plan, make_plan
from holdfast.policies.replicas.replicas import join_sums, sums_of
from holdfast.ranks.ranks import Call, Ranks
from holdfast.state import Collected
from holdfast.state.outline import owned_digest, owned_values

_REMEMBERED = 8  # saves whose layouts and plans are kept for later ones of the same state
_DIGEST, _MARK = 10, 4  # bytes: with four digests and a mark a rank's word has 61
_BUSY = b""
_KEY = "save"


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on: the save's id, the distinct layouts, and which rank has which.

    ``plan`` stands for the plan that follows from these. ``joined`` are the values of modules and optimizers of all
    ranks; the first rank alone knows them, and only where ranks differ. ``bequest`` is what the first rank has left
    for the case that it is lost, if it did.
    """

    save: str
    plan: str
    layouts: list[Layout]
    layout_of: list[int]
    joined: OwnedJoin | None
    bequest: Bequest | None = None


class Bequest(msgspec.Struct, array_like=True):
    """What a commit needs of the first rank, and can be told to all: so any rank can do it in its place.

    ``attached`` are names, sizes and digests of the files that it attaches, ``owned`` the distinct digests of values of
    modules and optimizers, and ``owned_by`` which of them each rank has; both empty if all have the same.
    """

    run: str
    attached: list[tuple[str, int, str]]
    owned: list[bytes] = []
    owned_by: list[int] = []


def agree(
    call: Call, bring: Callable[[], tuple[Collected, Layout]], *, busy: bool, allow: Callable[[], None],
    begun: Callable[[str], None], after: Moments, leave: Callable[[], Bequest | None] = lambda: None,
) -> Agreement | None:  # fmt: skip
    """Two rounds at the most; None if a rank is ``busy`` and the save is skipped.

    ``bring`` gives this rank's state, as of the moments ``after``, or raises why it has none. ``allow`` runs on the
    first rank, and raises if the save may not take place. ``begun`` is told the save's id, from which on there may be
    something to clean up.
    ``leave`` is what the first rank bequeaths, but for ``owned``.
    Raises what every rank raises: SaveFailed.
    """
    return _Agreeing(call, bring, busy, allow, leave, after).run(begun)


def plan_for(ranks: Ranks, agreement: Agreement) -> Plan:
    """The plan that follows. Raises Mismatch where the layouts of the ranks do not fit together."""
    plans = _memory_of(ranks).plans
    if agreement.plan not in plans:
        plans[agreement.plan] = make_plan(agreement.layouts, agreement.layout_of)
    return plans[agreement.plan]


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
    bequest: Bequest | None = None


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


class _Told(msgspec.Struct, array_like=True):
    """What a rank that was asked tells of its state."""

    layout: Layout | None = None
    values: dict[str, Any] | None = None
    owned: OwnedValues | None = None
    plain: dict[str, str] | None = None


class _Joined(msgspec.Struct, array_like=True):
    """What the first rank makes of it: layouts that are new, and the values of all ranks, where ranks differ."""

    layouts: list[Layout]
    values: dict[str, Any] | None = None


_Owned = tuple[bytes, tuple[tuple[bytes, int], ...]]
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
    joined: tuple[_Owned, OwnedJoin] | None = None

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
    bring: Callable[[], tuple[Collected, Layout]]
    busy: bool
    allow: Callable[[], None]
    leave: Callable[[], Bequest | None]
    after: Moments
    collected: Collected = field(default_factory=Collected)
    layout: Layout | None = None
    plain: dict[str, str] = field(default_factory=dict)
    joined: OwnedJoin | None = None
    owned: _Owned = (b"", ())

    def run(self, begun: Callable[[str], None]) -> Agreement | None:
        decision = self.call.exchange("plan", self._describe, self._decide, _Decision)
        if not decision.save:
            return None
        save, news = decision.save.hex(), decision.news
        begun(save)
        if news is not None and news.afresh:
            self.call.ranks.remembered.pop(_KEY, None)
        memory = _memory_of(self.call.ranks)
        seats = memory.seats.get(decision.plan)
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
                if joined.values is not None:  # any rank may have to commit, and some lack values that others have
                    self.collected.values = joined.values
        if seats is None or not memory.layouts.keys() >= set(seats[0]):
            raise HoldfastError("a plan is to be followed that this rank does not know; this is a fault of holdfast")
        memory.seats[decision.plan] = seats
        memory.keep(decision.plan)
        layouts, layout_of = seats
        return Agreement(
            save, decision.plan.hex(), [memory.layouts[digest] for digest in layouts], layout_of, self.joined,
            decision.bequest,
        )  # fmt: skip

    def _describe(self) -> bytes:
        if self.busy:
            return _BUSY
        self.collected, self.layout = self.bring()
        self.plain = sums_of(self.collected, Copier(self.after)) if self.call.ranks.size > 1 else {}
        owned = bytes.fromhex(owned_digest(self.collected))[:_DIGEST]
        note = _Note(
            _digest(self.layout), _digest(self.collected.values), owned, _digest(self.plain),
            _memory_of(self.call.ranks).mark,
        )  # fmt: skip
        return b"".join(note)

    def _decide(self, told: list[bytes]) -> _Decision:
        if any(note == _BUSY for note in told):
            return _Decision(b"")
        self.allow()
        # Nearly all of many ranks say the same: look at each distinct note once, with the first rank that has it.
        first_with = dict(zip(reversed(told), reversed(range(len(told))), strict=True))
        notes = [(rank, _unpacked(note)) for note, rank in sorted(first_with.items(), key=lambda item: item[1])]
        afresh = len({note.memory for _, note in notes}) > 1
        memory = _Memory() if afresh else _memory_of(self.call.ranks)
        tellers = _first_with((rank, note.layout) for rank, note in notes)
        index = {digest: i for i, digest in enumerate(tellers)}
        seat = {note: index[note[:_DIGEST]] for note in first_with}
        layouts, layout_of = list(tellers), [seat[note] for note in told]
        plan = _digest([[digest.hex() for digest in layouts], layout_of])
        known = plan in memory.seats
        owned = _first_with((rank, note.owned) for rank, note in notes)
        self.owned = plan, tuple(owned.items())
        if memory.joined is not None and memory.joined[0] == self.owned:
            self.joined, owned = memory.joined[1], {}
        news = _News(
            afresh,
            [] if known else layouts,
            [] if known else layout_of,
            [rank for digest, rank in tellers.items() if digest not in memory.layouts],
            _unless_one(_first_with((rank, note.values) for rank, note in notes)),
            _unless_one(owned),
            _unless_one(_first_with((rank, note.plain) for rank, note in notes)),
        )
        bequest = self.leave()
        if bequest is not None and len(self.owned[1]) > 1:
            number = {digest: at for at, (digest, _) in enumerate(self.owned[1])}
            of_note = {note: number[_unpacked(note).owned] for note in first_with}
            bequest.owned, bequest.owned_by = list(number), [of_note[note] for note in told]
        return _Decision(secrets.token_bytes(8), plan, None if known and not news.tells else news, bequest)

    def _tell(self, news: _News) -> _Told:
        rank = self.call.ranks.rank
        return _Told(
            self.layout if rank in news.tell_layout else None,
            self.collected.values if rank in news.tell_values else None,
            owned_values(self.collected) if rank in news.tell_owned else None,
            self.plain if rank in news.tell_plain else None,
        )

    def _join(self, layouts: list[bytes], layout_of: list[int], notes: list[_Told]) -> _Joined:
        told = [note.layout for note in notes if note.layout is not None]
        known = {**_memory_of(self.call.ranks).layouts, **{_digest(layout): layout for layout in told}}
        values = [(r, known[layouts[layout_of[r]]], n.values) for r, n in enumerate(notes) if n.values is not None]
        joined = join_values(values) if values else None
        join_sums([(rank, note.plain) for rank, note in enumerate(notes) if note.plain is not None])
        owned = [(r, layout_of[r], n.owned) for r, n in enumerate(notes) if n.owned is not None]
        if owned:
            self.joined = join_owned([known[d] for d in layouts], owned)
            _memory_of(self.call.ranks).joined = self.owned, self.joined
        return _Joined(told, joined)


def _digest(message: object) -> bytes:
    return bytes.fromhex(digest_of(message))[:_DIGEST]


def _first_with(told: Iterable[tuple[int, bytes]]) -> dict[bytes, int]:
    """Each distinct digest with the first rank that has it; ``told`` = (rank, its digest) in the order of ranks."""
    found: dict[bytes, int] = {}
    for rank, key in told:
        found.setdefault(key, rank)
    return found


def _unless_one(found: dict[bytes, int]) -> list[int]:
    """The ranks to ask, or none if all have the same."""
    return list(found.values()) if len(found) > 1 else []
