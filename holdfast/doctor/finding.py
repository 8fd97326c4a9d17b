"""One line of a diagnosis, with what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "absent", "warn", "fail"]
"""``absent``: an optional package that is not installed, which is nothing wrong."""


@dataclass(frozen=True)
class Finding:
    """``name`` is what was examined, ``text`` the result, and ``mend``, if anything is wrong, what to do.

    ``kind`` of what is wrong: "machine", "storage", "no checkpoint", "mismatch" or "damaged".
    """

    name: str
    verdict: Verdict
    text: str
    mend: str = ""
    kind: str = "machine"
