"""Which saved tensors a tensor comes from, where a checkpoint is opened under a map. It reads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.checkpoint import Checkpoint

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")


def origins_of(checkpoint: Checkpoint, name: str) -> list[str] | None:
    """The saved tensors that a tensor is read from, none if it is made up; None for the tensor of that very name."""
    stored = checkpoint.saved_name(name)
    if stored == name:
        return None
    return [origin for origin, _ in checkpoint.files.origins(stored, checkpoint.records[name])]


def described(name: str, origins: Sequence[str] | None, *, shown: int = 2, folded: bool = False) -> str:
    """Origins in a few words: ``q_proj.weight, k_proj.weight and 1 more``, without the path that all names share.

    With ``folded`` a number that the tensor's own name has, such as that of its layer, is a star.
    """
    if origins is None:
        return ""
    if not origins:
        return "made up"
    shared = _shared(name, origins)
    numbers = _NUMBER.findall(name[shared:]) if folded else []
    words = [_starred(origin[shared:], numbers) for origin in origins[:shown]]
    more = f" and {len(origins) - shown} more" if len(origins) > shown else ""
    return ", ".join(words) + more


def _shared(name: str, origins: Sequence[str]) -> int:
    """How long the path is that all these names begin with."""
    length = 0
    for at, letter in enumerate(name):
        if any(origin[at : at + 1] != letter for origin in origins):
            break
        length = at + 1 if letter in "./" else length
    return length


def _starred(name: str, numbers: Sequence[str]) -> str:
    left = list(numbers)

    def star(match: re.Match[str]) -> str:
        if left and match[0] == left[0]:
            left.pop(0)
            return "*"
        return match[0]

    return _NUMBER.sub(star, name)
