"""Name patterns of rules: ``layers.{i}.{part}.weight``, where braces capture.

``{i}`` takes one component of a name, which has neither a point nor a slash in it; ``{*rest}`` takes anything. Never
looks at what a name holds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
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
    return re.compile(text + re.escape(pattern[at:]))


@lru_cache(maxsize=4096)
def fields_of(pattern: str) -> tuple[str, ...]:
    """The names of a pattern's captures. Raises Mismatch for what is no pattern."""
    texts = _texts(pattern)
    if not pattern or not set("{}").isdisjoint("".join(texts[::3])):
        raise Mismatch(f"{pattern[:_LONGEST]!r} is no name pattern: captures are written {{i}} or {{*rest}}")
    words = re.split(r"[./]", _FIELD.sub(lambda field: "*" if field[1] else "{", pattern))
    if pattern.count("{*") > 2 or any(word.count("{") + word.count("*") > 2 for word in words):
        raise Mismatch(f"{pattern[:_LONGEST]!r}: two captures {{*x}}, and two between points, are the most")
    return tuple(dict.fromkeys(texts[2::3]))


@lru_cache(maxsize=4096)
def finder(pattern: str) -> Callable[[str], Captures | None]:
    """`captured` for one pattern and many names, most of which do not fit."""
    texts, fields = _texts(pattern), sorted(fields_of(pattern))
    begins, ends, compiled = texts[0], texts[-1], _compiled(pattern)

    def found(name: str) -> Captures | None:
        if not (name.startswith(begins) and name.endswith(ends) and len(name) <= _LONGEST):
            return None
        match = compiled.fullmatch(name)
        return None if match is None else tuple((field, match[field]) for field in fields)

    return found


def captured(pattern: str, name: str) -> Captures | None:
    """What a pattern captures of a name, sorted by capture; None if it does not fit."""
    return finder(pattern)(name)


def filled(pattern: str, captures: Mapping[str, str]) -> str:
    """The name that a pattern makes of captures."""
    texts = _texts(pattern)
    return "".join([text if at % 3 == 0 else captures[text] for at, text in enumerate(texts) if at % 3 != 1])


@lru_cache(maxsize=4096)
def _texts(pattern: str) -> tuple[str, ...]:
    """A pattern cut at its fields: a text, the star of a field or nothing, the field's name, a text, and so on."""
    return tuple(_FIELD.split(pattern))


def check_same(patterns: Iterable[str], others: Iterable[str], rule: str) -> None:
    """Raise Mismatch unless all these patterns capture the same: else a name could not be made, or not found again."""
    wanted = [(pattern, set(fields_of(pattern))) for pattern in (*patterns, *others)]
    first, fields = wanted[0]
    for pattern, those in wanted[1:]:
        if those != fields:
            raise Mismatch(f"{rule}: {first!r} and {pattern!r} do not capture the same")
