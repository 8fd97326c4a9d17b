"""Notices that any rank of a training loop puts up, and on which all ranks act at the same step.

The manager has one `Notices`. It looks at the store once a step, or less where there are many ranks, and never waits
for another rank.

Ranks learn of a failure or a signal at different times. We rejected acting on it at once, because one rank
would raise while the others hang in the next collective.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Kind = Literal["stop", "failed"]


LOOKS = 2048
"""Ranks that look at the same step at most: together they keep the server of the store busy for some 25 ms.

16,384 looks at one step would take it 0.2 s. In turns of 2,048 ranks a notice is due some 8 looks later there."""


class Notice(msgspec.Struct, frozen=True, array_like=True):
    """A message to all ranks: its ``kind``, the step ``of`` which it speaks, and the step ``at`` which it was put up.

    ``flying``: whether a save was under way there. ``hurry``: whether little time is left.
    """

    kind: Kind
    of: int
    at: int
    flying: bool = False
    hurry: bool = False


class Notices:
    """Notices in one order, the same on all ranks. Without a ``store`` this process is alone.

    Ranks of one training loop are at most one step apart, and look at every step that is a multiple of ``poll``. So a
    notice is due at the first such step after the step after the one it was put at: by then all have seen it. More than
    `LOOKS` ranks take turns, each looks at every n-th of these steps, and the notice is due when all had their turn.
    """

    def __init__(self, store: Any, key: str, poll: int, *, rank: int = 0, size: int = 1) -> None:
        self._store, self._key, self._poll = store, key, poll
        self._turns = -(-size // LOOKS)
        self._turn = rank % self._turns
        self._seen: list[Notice] = []
        self._due: list[tuple[int, Notice]] = []

    def put(self, notice: Notice) -> None:
        """Put a notice up, unless there is one of its kind that speaks of the same step."""
        while not any(_subject(seen) == _subject(notice) for seen in self._seen):
            standing = notice
            if self._store is not None:
                mine = msgspec.json.encode(notice).decode()
                stands = bytes(self._store.compare_set(f"{self._key}/{len(self._seen)}", "", mine))
                standing = msgspec.json.decode(stands, type=Notice)
            self._take(standing)

    def due(self, step: int) -> list[Notice]:
        """The notices to act on at ``step``, each once."""
        if self._store is not None and step % self._poll == 0 and step // self._poll % self._turns == self._turn:
            while self._store.check([f"{self._key}/{len(self._seen)}"]):
                stands = bytes(self._store.get(f"{self._key}/{len(self._seen)}"))
                self._take(msgspec.json.decode(stands, type=Notice))
        due = [notice for at, notice in self._due if step >= at]
        self._due = [(at, notice) for at, notice in self._due if step < at]
        return due

    @property
    def pending(self) -> list[Notice]:
        """Notices seen and not yet due."""
        return [notice for _, notice in self._due]

    def _take(self, notice: Notice) -> None:
        self._seen.append(notice)
        at = notice.at
        if self._store is not None:
            at = ((at + 1) // self._poll + self._turns) * self._poll
        self._due.append((at, notice))


def _subject(notice: Notice) -> tuple[str, int]:
    return notice.kind, notice.of if notice.kind == "failed" else 0
