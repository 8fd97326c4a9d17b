"""Before anything is copied the ranks agree on what there is: digests first, layouts and values only where they differ.

`SaveWork.plan` calls `agree` and then `plan_for`. Remembers the layouts and plans of the last saves, alike on every
rank, so that a state which looks the same costs one small round.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from holdfast.engine.layout import (
    Layout,
    OwnedJoin,
    OwnedValues,
    digest_of,
    join_owned,
    join_values,
    owned_digest,
    owned_values,
)
from holdfast.engine.plan import Plan, make_plan
from holdfast.engine.ranks import Call, Ranks
from holdfast.engine.replicas import join_sums, sums_of
from holdfast.engine.state import Collected

_REMEMBERED = 8  # saves whose layouts and plans are kept for later ones of the same state


@dataclass(frozen=True)
class Agreement:
    """What the ranks agreed on: the save's id, the distinct layouts, and which rank has which.

    ``plan`` stands for the plan that follows from these. ``joined`` are the values of modules and optimizers of all
    ranks; the first rank alone knows them, and only where ranks differ.
    """

    save: str
    plan: str
    layouts: list[Layout]
    layout_of: list[int]
    joined: OwnedJoin | None


def agree(
    call: Call, bring: Callable[[], tuple[Collected, Layout]], *, busy: bool, allow: Callable[[], None],
    begun: Callable[[str], None],
) -> Agreement | None:  # fmt: skip
    """Two rounds at the most; None if a rank is ``busy`` and the save is skipped.

    ``bring`` gives this rank's state, or raises why it has none. ``allow`` runs on the first rank, and raises if the
    save may not take place. ``begun`` is told the save's id, from which on there may be something to clean up.
    Raises what every rank raises: SaveFailed.
    """
    return _Agreeing(call, bring, busy, allow).run(begun)


def plan_for(ranks: Ranks, agreement: Agreement) -> Plan:
    """The plan that follows. Raises Mismatch where the layouts of the ranks do not fit together."""
    plans = _memory_of(ranks).plans
    if agreement.plan not in plans:
        plans[agreement.plan] = make_plan(agreement.layouts, agreement.layout_of)
    return plans[agreement.plan]


class _Note(msgspec.Struct, array_like=True):
    """A rank's state in four digests."""

    layout: str
    values: str
    owned: str
    plain: str
    busy: bool


class _Decision(msgspec.Struct, array_like=True):
    """What the first rank decides, and what it still has to be told."""

    save: str
    skip: bool = False
    layouts: list[str] = []
    layout_of: list[int] = []
    tell_layout: list[int] = []
    tell_values: list[int] = []
    tell_owned: list[int] = []
    tell_plain: list[int] = []

    @property
    def tells(self) -> bool:
        """Whether anybody has to tell anything."""
        return bool(self.tell_layout or self.tell_values or self.tell_owned or self.tell_plain)


class _Told(msgspec.Struct, array_like=True):
    layout: Layout | None = None
    values: dict[str, Any] | None = None
    owned: OwnedValues | None = None
    plain: dict[str, str] | None = None


@dataclass
class _Memory:
    """Layouts and plans of earlier saves of one group; every rank has seen the same ones in the same order."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    recent: list[tuple[str, list[str]]] = field(default_factory=list)

    def keep(self, plan: str, layouts: list[str]) -> None:
        """Note what a save uses, and forget what none of the last few used; alike on every rank."""
        self.recent = [*self.recent, (plan, layouts)][-_REMEMBERED:]
        used = {digest for _, digests in self.recent for digest in digests}
        self.layouts = {digest: layout for digest, layout in self.layouts.items() if digest in used}
        self.plans = {key: made for key, made in self.plans.items() if any(key == k for k, _ in self.recent)}


def _memory_of(ranks: Ranks) -> _Memory:
    memory: _Memory = ranks.remembered.setdefault("save", _Memory())
    return memory


@dataclass
class _Agreeing:
    call: Call
    bring: Callable[[], tuple[Collected, Layout]]
    busy: bool
    allow: Callable[[], None]
    collected: Collected = field(default_factory=Collected)
    layout: Layout | None = None
    plain: dict[str, str] = field(default_factory=dict)
    joined: OwnedJoin | None = None

    def run(self, begun: Callable[[str], None]) -> Agreement | None:
        memory = _memory_of(self.call.ranks)
        decision = self.call.exchange("plan", self._describe, self._decide, _Decision)
        if decision.skip:
            return None
        begun(decision.save)
        if decision.tells:
            told = self.call.exchange(
                "layout", lambda: self._tell(decision), lambda notes: self._join(decision, notes), list[Layout]
            )
            memory.layouts.update((digest_of(layout), layout) for layout in told)
        plan = digest_of([decision.layouts, decision.layout_of])
        memory.keep(plan, decision.layouts)
        layouts = [memory.layouts[digest] for digest in decision.layouts]
        return Agreement(decision.save, plan, layouts, decision.layout_of, self.joined)

    def _describe(self) -> _Note:
        if self.busy:
            return _Note("", "", "", "", True)
        self.collected, self.layout = self.bring()
        self.plain = sums_of(self.collected) if self.call.ranks.size > 1 else {}
        return _Note(
            digest_of(self.layout),
            digest_of(self.collected.values),
            owned_digest(self.collected),
            digest_of(self.plain),
            False,
        )

    def _decide(self, notes: list[_Note]) -> _Decision:
        if any(note.busy for note in notes):
            return _Decision("", skip=True)
        self.allow()
        known = _memory_of(self.call.ranks).layouts
        layouts = list(dict.fromkeys(n.layout for n in notes))
        index = {digest: i for i, digest in enumerate(layouts)}
        return _Decision(
            secrets.token_hex(8),
            False,
            layouts,
            [index[n.layout] for n in notes],
            [rank for digest, rank in _first_with(n.layout for n in notes).items() if digest not in known],
            _unless_one(_first_with(n.values for n in notes)),
            _unless_one(_first_with(n.owned for n in notes)),
            _unless_one(_first_with(n.plain for n in notes)),
        )

    def _tell(self, decision: _Decision) -> _Told:
        rank = self.call.ranks.rank
        return _Told(
            self.layout if rank in decision.tell_layout else None,
            self.collected.values if rank in decision.tell_values else None,
            owned_values(self.collected) if rank in decision.tell_owned else None,
            self.plain if rank in decision.tell_plain else None,
        )

    def _join(self, decision: _Decision, notes: list[_Told]) -> list[Layout]:
        told_values = [(rank, note.values) for rank, note in enumerate(notes) if note.values is not None]
        if told_values:
            join_values(told_values)
        join_sums([(rank, note.plain) for rank, note in enumerate(notes) if note.plain is not None])
        told = [note.layout for note in notes if note.layout is not None]
        known = {**_memory_of(self.call.ranks).layouts, **{digest_of(layout): layout for layout in told}}
        if decision.tell_owned:
            owned = [(r, decision.layout_of[r], n.owned) for r, n in enumerate(notes) if n.owned is not None]
            self.joined = join_owned([known[d] for d in decision.layouts], owned)
        return told


def _first_with(keys: Iterable[str]) -> dict[str, int]:
    """Each distinct key with the first rank that has it."""
    found: dict[str, int] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, rank)
    return found


def _unless_one(found: dict[str, int]) -> list[int]:
    """The ranks to ask, or none if all have the same."""
    return list(found.values()) if len(found) > 1 else []
