"""Name patterns of rules: ``layers.{i}.{part}.weight``, where braces capture.

``{i}`` takes one component of a name, which has neither a point nor a slash in it; ``{*rest}`` takes anything. Never
looks at what a name holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from holdfast.errors import Mismatch

Captures = tuple[tuple[str, str], ...]

_LONGEST = 1000
"""Characters of a name that a pattern may fit: trying takes as long as the square of it."""

_FIELD = re.compile(r"\{(\*?)([A-Za-z_]\w*)\}")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    text, at, seen = "", 0, set()
    for field in _FIELD.finditer(pattern):
        text += re.escape(pattern[at : field.start()])
        star, name = field.groups()
        text += f"(?P={name})" if name in seen else f"(?P<{name}>{'.+' if star else '[^./]+'})"
        seen.add(name)
        at = field.end()
    rest = pattern[at:]
    if not pattern or "{" in rest or "}" in rest:
        raise Mismatch(f"{pattern[:_LONGEST]!r} is no name pattern: captures are written {{i}} or {{*rest}}")
    words = re.split(r"[./]", _FIELD.sub(lambda field: "*" if field[1] else "{", pattern))
    if pattern.count("{*") > 2 or any(word.count("{") + word.count("*") > 2 for word in words):
        raise Mismatch(f"{pattern[:_LONGEST]!r}: two captures {{*x}}, and two between points, are the most")
    return re.compile(text + re.escape(rest))


def fields_of(pattern: str) -> tuple[str, ...]:
    """The names of a pattern's captures. Raises Mismatch for what is no pattern."""
    return tuple(_compiled(pattern).groupindex)


def captured(pattern: str, name: str) -> Captures | None:
    """What a pattern captures of a name, sorted by capture; None if it does not fit."""
    match = _compiled(pattern).fullmatch(name) if len(name) <= _LONGEST else None
    return None if match is None else tuple(sorted(match.groupdict().items()))


def filled(pattern: str, captures: Mapping[str, str]) -> str:
    """The name that a pattern makes of captures."""
    return _FIELD.sub(lambda field: captures[field[2]], pattern)


def check_same(patterns: Iterable[str], others: Iterable[str], rule: str) -> None:
    """Raise Mismatch unless all these patterns capture the same: else a name could not be made, or not found again."""
    wanted = [(pattern, set(fields_of(pattern))) for pattern in (*patterns, *others)]
    first, fields = wanted[0]
    for pattern, those in wanted[1:]:
        if those != fields:
            raise Mismatch(f"{rule}: {first!r} and {pattern!r} do not capture the same")
