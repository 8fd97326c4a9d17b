"""The state of a run at one moment, computed from its history. What is not known is None."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.inspect.history import History, Underway
from holdfast.run.journal import BEAT_IN_STORE, Entry

RECENT = 40
"""Saves whose stalls and rates are shown."""

SILENT = 3 * BEAT_IN_STORE
"""Seconds without a heartbeat after which a run is called silent; ten of its steps, if those are longer."""

State = Literal["running", "saving", "ended", "silent", "unknown"]


@dataclass(frozen=True)
class Save:
    """A save that committed: ``age`` in seconds, ``rate`` in bytes a second. Durations are None without a journal."""

    step: int
    age: float
    bytes: int
    seconds: float | None
    stall: float | None
    rate: float | None
    metric: float | None


@dataclass(frozen=True)
class Failure:
    """A save that failed, ``age`` seconds ago."""

    step: int
    age: float
    error: str


@dataclass(frozen=True)
class Standing:
    """A run at one moment, ``at`` unix seconds; ages and waits are seconds from then.

    ``step``: the last one that training reported; ``heard``: how long ago. ``starts``: how often it was started, as far
    as the journal goes. ``failed_since``: failures since the last save that committed. ``next_step`` is when the next
    save is due, ``next_in`` in how many seconds, as steps went of late. ``there``: steps that are committed,
    by their manifests; ``unreadable``: folders that cannot be looked into, with why. ``fast_of``: the root that this is
    the fast tier of, where the journal lies. ``stalls`` and ``rates``: of the last saves, the oldest first, None for
    one that failed.
    """

    root: str
    at: float
    state: State
    step: int | None
    heard: float | None
    step_seconds: float | None
    ranks: int | None
    starts: int
    last: Save | None
    saving: list[Underway]
    next_step: int | None
    next_in: float | None
    saved: int
    failed: int
    skipped: int
    failed_since: int
    failure: Failure | None
    best: Save | None
    backlog: int | None
    there: list[int]
    left_behind: list[int]
    unreadable: dict[str, str]
    fast_of: str | None
    stalls: list[float | None]
    rates: list[float | None]


def standing(root: str, history: History) -> Standing:
    """The state of the run in ``root`` now."""
    now, entries, at = history.now, history.entries, history.at
    saved = history.saved
    last = max(saved, key=lambda entry: entry.began, default=None)
    failed = [entry for entry in entries if entry.outcome == "failed"]
    recent = [entry for entry in entries if entry.start and entry.outcome != "skipped"][-RECENT:]
    state = _state(history)
    step_seconds = now.step_seconds if now is not None else None
    next_step = (now.step // now.every + 1) * now.every if now is not None and now.every and state != "ended" else None
    next_in = None
    if next_step is not None and now is not None and step_seconds is not None and state != "silent":
        next_in = max((next_step - now.step) * step_seconds - (at - now.at), 0.0)
    counting = [entry for entry in saved if entry.step not in history.behind]
    newest = now or (entries[-1] if entries else None)
    return Standing(
        root=root, at=at, state=state, step=now.step if now is not None else last.step if last is not None else None,
        heard=None if now is None else max(at - now.at, 0.0), step_seconds=step_seconds,
        ranks=newest.ranks if newest is not None else None,
        starts=len({entry.start for entry in entries if entry.start} | ({now.start} if now is not None else set())),
        last=None if last is None else _save(last, at), saving=history.saving if state != "ended" else [],
        next_step=next_step, next_in=next_in, saved=len(saved), failed=len(failed),
        skipped=sum(entry.outcome == "skipped" for entry in entries),
        failed_since=sum(last is None or entry.began > last.began for entry in failed),
        failure=Failure(failed[-1].step, max(at - failed[-1].began, 0.0), failed[-1].error) if failed else None,
        best=_best(counting, at, largest=now is not None and now.mode == "max"),
        backlog=newest.backlog if newest is not None else None, there=[*history.there],
        left_behind=sorted(history.behind),
        unreadable=history.unreadable, fast_of=history.fast_of,
        stalls=[entry.stall if entry.outcome == "saved" else None for entry in recent],
        rates=[rate_of(entry) for entry in recent],
    )  # fmt: skip


def rate_of(entry: Entry) -> float | None:
    """Bytes a second that a save wrote, from its call to its commit; None if it did not commit, or is not known."""
    if entry.outcome != "saved" or entry.seconds < 1e-9:  # the latter of no save that took place
        return None
    return (entry.bytes if entry.written is None else entry.written) / entry.seconds


def _state(history: History) -> State:
    now = history.now
    if now is None:
        return "saving" if history.saving else "unknown"
    if now.ended:
        return "ended"
    if history.at - now.at > max(SILENT, 10 * (now.step_seconds or 0.0)):
        return "silent"
    return "saving" if history.saving else "running"


def _save(entry: Entry, at: float) -> Save:
    journaled = bool(entry.start)
    return Save(
        entry.step, max(at - (entry.committed or entry.began), 0.0), entry.bytes, entry.seconds if journaled else None,
        entry.stall if journaled else None, rate_of(entry), entry.metric,
    )  # fmt: skip


def _best(saved: Sequence[Entry], at: float, *, largest: bool) -> Save | None:
    rated = [(entry.metric, entry) for entry in saved if entry.metric is not None]
    if not rated:
        return None
    return _save((max if largest else min)(rated, key=lambda pair: pair[0])[1], at)
