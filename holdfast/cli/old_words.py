"""The commands of earlier versions, and what each is called now. `app` rewrites the arguments of the program with it.

Help and TAB never show the old words.
"""

from __future__ import annotations

import re

_NOW = {
    "du": "show --sizes",
    "plan": "show --mesh=",
    "gc": "prune --orphans",
    "unshard": "convert --model-only",
    "bench": "doctor --bench",
    "timeline": "view",
}


def renamed(words: list[str]) -> tuple[list[str], str]:
    """The arguments of the program in today's words, and a line that says so, which is empty if none is old."""
    at = next((at for at, word in enumerate(words) if not word.startswith("-")), None)
    new = None if at is None else _NOW.get(words[at])
    if at is None or new is None:
        return words, ""
    rest = [re.sub("^--section(?==|$)", "--only", word) for word in words[at + 1 :]]
    line = f"`holdfast {words[at]}` is now `holdfast {new.rstrip('=')}`; the next version will not know the old name"
    return [*words[:at], *new.split(), *rest], line
