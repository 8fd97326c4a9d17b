"""Names of leaves: keys joined by ``/``, escaped so that a name has exactly one reading.

Called wherever a state is walked or rebuilt. Never looks at values.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

from holdfast.errors import Unsupported

TOP_SECTION = "state"
_SPECIAL = re.compile(r"[/%@\[\\\x00-\x1f\x7f]")
_NEEDS_CARE = re.compile(r"[/%@\[\\\x00-\x1f\x7f-\U0010ffff]").search
_RESERVED = {".": "%2E", "..": "%2E%2E", "__metadata__": "%5F_metadata__"}


def escape(key: str) -> str:
    """A key as it stands in a name. Raises Unsupported if it is no Unicode text (a lone surrogate).

    ``.`` and ``..`` are escaped too, because a section is also a folder; and ``__metadata__``, which safetensors
    keeps for itself.
    """
    if key in _RESERVED:
        return _RESERVED[key]
    if _NEEDS_CARE(key) is None:
        return key
    try:
        key.encode()
    except UnicodeEncodeError:
        raise Unsupported(f"the key {key!r} is no Unicode text; rename it") from None
    return _SPECIAL.sub(lambda character: f"%{ord(character[0]):02X}", key)


def unescape(key: str) -> str:
    return unquote(key) if "%" in key else key


def join(keys: Sequence[str]) -> str:
    """The name of the leaf at ``keys``."""
    return "/".join(map(escape, keys))


def split(name: str) -> tuple[str, ...]:
    """The keys of a name, unescaped."""
    return tuple(map(unescape, name.split("/")))


def child(prefix: str, key: str) -> str:
    """The name of ``key`` below ``prefix`` (``""`` is the top)."""
    return f"{prefix}/{escape(key)}" if prefix else escape(key)


def children(prefix: str, keys: Sequence[str]) -> list[str]:
    """The names of all ``keys`` below ``prefix``, looked at together: hardly one of thousands has to be escaped."""
    start = f"{prefix}/" if prefix else ""
    plain = _NEEDS_CARE("".join(keys)) is None and _RESERVED.keys().isdisjoint(keys)
    return [start + (key if plain else escape(key)) for key in keys]


def section_of(name: str) -> str:
    """The section a name belongs to: its first key, or ``state`` for a leaf directly at the top."""
    head, slash, _ = name.partition("/")
    return head if slash else TOP_SECTION


def in_section(name: str) -> str:
    """The name without its section: how a data file of that section calls it."""
    return name[name.find("/") + 1 :]


def from_section(section: str, short: str) -> str:
    """The name of what a data file of ``section`` calls ``short``: a name, or a key that begins with one.

    What lies directly at the top is in the section ``state``; a name with more keys there begins with that section.
    """
    at_the_top = section == TOP_SECTION and "/" not in short.partition("@")[0]  # after an @ it is the inside of a value
    return short if at_the_top else f"{section}/{short}"


def under(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or lies below it."""
    return not prefix or name == prefix or name.startswith(prefix + "/")
