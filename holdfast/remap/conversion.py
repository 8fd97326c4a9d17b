"""A conversion of transformers as data: the rule in `architecture` keeps those that made a model."""

from __future__ import annotations

import msgspec


class Conversion(msgspec.Struct, frozen=True):
    """A conversion of transformers, by what it matches and what it makes of it."""

    kind: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    scope: str | None = None
