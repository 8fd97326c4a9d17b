"""Whether a command printed what its page shows: `…` is anything, sizes, times and ids are any of their kind.

Called by what runs the pages. Pure.
"""

from __future__ import annotations

import re

_SIZE = r"[kKMGT]?i?B"
_TIME = r"(?:s|ms|µs|min|h|d|days?|hours?|minutes?|seconds?)"
_NUMBER = r"(?:\b\d[\d,]*(?:\.\d+)?|…)"
_KINDS = [
    (re.compile(r"\b\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?"), "‹date›"),
    (re.compile(r"\b[0-9a-f]{16,64}\b"), "‹id›"),
    (re.compile(rf"{_NUMBER} ?{_SIZE}/s(?![\w/])"), "‹rate›"),
    (re.compile(rf"{_NUMBER} ?{_SIZE}(?![\w/])"), "‹size›"),
    (re.compile(rf"{_NUMBER} ?{_TIME}(?![\w/])"), "‹time›"),
    (re.compile(r"([─━═┄┈╌_=-])\1{2,}"), r"\1\1\1"),  # rules of tables, which are as long as what stands above them
]
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def plain(text: str) -> list[str]:
    """Lines without colours, with what may differ named by its kind, and one blank for many."""
    text = _ESCAPES.sub("", text)
    for pattern, kind in _KINDS:
        text = pattern.sub(kind, text)
    lines = [" ".join(line.rsplit("\r", 1)[-1].split()) for line in text.split("\n")]
    return [line for line in lines if line and not line.startswith("[Gloo] ")]  # what an older torch says by itself


def matches(shown: str, printed: str) -> bool:
    """Blank lines count on neither side. A line that is `…` alone stands for any lines, none too."""
    pattern = "".join(_pattern_of(line) for line in plain(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(printed))) is not None


def _pattern_of(line: str) -> str:
    if line == "…":
        return r"(?:.*\n)*?"
    return "[^\n]*?".join(map(re.escape, re.split(" ?… ?", line))) + "\n"
