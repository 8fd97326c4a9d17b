"""What a look at something found: one line, with what to do about it.

Every part of `doctor` makes them, ``holdfast doctor`` shows them. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """``name`` is what was looked at, ``text`` what was found; ``mend``, if anything is wrong, what to do.

    ``kind`` of what is wrong: "machine", "storage", "no checkpoint", "mismatch" or "damaged".
    """

    name: str
    verdict: Verdict
    text: str
    mend: str = ""
    kind: str = "machine"
