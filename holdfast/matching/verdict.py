"""What the ranks of a load tell the first one of their comparison, and what it makes of that.

`load` calls `judge` on the first rank. Pure: it raises one error for all ranks, or says how reading is shared.
"""

from __future__ import annotations

import msgspec

from holdfast.errors import Mismatch
from holdfast.matching.differences import Differences, raise_if_any
from holdfast.read.shared.demand import Choice, Offer
from holdfast.read.shared.share import who_shares


class RankNote(msgspec.Struct, array_like=True):
    """What one rank tells the first one of its comparison.

    ``unfit``: patterns of ``only=`` that fit nothing, with what errors say of each; ``awaited``: those that fit the
    target alone. ``early``: whether objects are handed their state early. ``commit``: that of a repository.
    """

    differences: Differences
    offer: Offer = Offer()
    early: bool = False
    unfit: dict[str, str] = {}
    awaited: list[str] = []
    commit: str = ""


class Verdict(msgspec.Struct, array_like=True):
    """What the first rank makes of all notes: who shares reading, and whether any rank hands over objects early."""

    choice: Choice
    early: bool


def judge(notes: list[RankNote], advice: str = "") -> Verdict:
    """On the first rank: raise Mismatch with every name of every rank, unless all fits; else who may share reading.

    ``advice`` as for `raise_if_any`.
    """
    commits = sorted({note.commit for note in notes})
    if len(commits) > 1:
        raise Mismatch(
            f"somebody pushed while the ranks opened the repository, and they would read different commits "
            f"({', '.join(commits)}); nothing was changed. Load again, or name a commit in the URL: @{commits[0]}"
        )
    awaited = {pattern for note in notes for pattern in note.awaited}
    unfit = {pattern: text for note in notes for pattern, text in note.unfit.items() if pattern not in awaited}
    raise_if_any([note.differences for note in notes], unfit.values(), advice)
    return Verdict(who_shares([note.offer for note in notes]), any(note.early for note in notes))
