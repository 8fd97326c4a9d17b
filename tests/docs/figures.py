"""Finds the figures of a page, numbers with a unit of time, rate, ratio or memory, and the runs they come from.

`test_evidence` calls it. Never looks into code.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_UNIT = (
    r"(?:CPU )?(?:ns|µs|ms|s|h|min|seconds?|minutes?|hours?|[KMGT]i?B(?:/s)?|bytes per second|bytes/s|%"
    r"|times as (?:fast|long|much)|times the)|×"
)
_FIGURE = re.compile(rf"(?<![\w.#-])(?P<all>\d[\d,]*(?:\.\d+)?\s?(?:{_UNIT})(?![\w/])|\d+\.\d+ of\b)")
_PRODUCT = re.compile(r"\d[\d,]*\s?×\s?\d|[a-z]+ × |\d \w+ × ", re.IGNORECASE)
_LINK = re.compile(r"\((?:docs/)?(?:trust\.md)?#run-(?P<name>[\w.-]+)\)")
_ROW = re.compile(r'<a id="run-(?P<name>[\w.-]+)"></a>')
_CODE = re.compile(r"`[^`]*`")
_SETTING = re.compile(r"\bdefault|\bat most\b|\blimit|\bbound|\bblocks? of \d|\(\d+ [KMGT]i?B\)", re.IGNORECASE)
"""What makes a number a setting, a limit or part of the format, and nothing that was measured."""


@dataclass(frozen=True)
class Figure:
    """``context``: the sentence or line of a table; ``runs``: those that its section links to or has the rows of."""

    page: str
    line: int
    text: str
    context: str
    runs: tuple[str, ...]

    @property
    def is_setting(self) -> bool:
        return _SETTING.search(self.context) is not None


def figures(page: str, text: str) -> list[Figure]:
    """All figures of a page outside of blocks of code and of `code`."""
    found = []
    for section in _sections(text.split("\n")):
        whole = "\n".join(line for _, line in section)
        runs = (*links(whole), *(row["name"] for row in _ROW.finditer(whole)))
        for line, sentence in _sentences(section):
            plain = _PRODUCT.sub(" ", _CODE.sub("", sentence))
            found += [Figure(page, line, one["all"], sentence, runs) for one in _FIGURE.finditer(plain)]
    return found


def links(text: str) -> list[str]:
    """The names of the runs that a text links to."""
    return [link["name"] for link in _LINK.finditer(text)]


def _sections(lines: list[str]) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines from one heading to the next, without blocks of code."""
    section: list[tuple[int, str]] = []
    fence = ""
    for number, line in enumerate(lines, 1):
        mark = re.match(r"\s*(`{3,})", line)
        if fence:
            if line.strip() == fence:
                fence = ""
        elif mark:
            fence = mark[1]
        elif line.startswith("#"):
            yield section
            section = []
        else:
            section.append((number, line))
    yield section


def _sentences(section: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Sentences, joined over lines, each with the line that it begins in; a line of a table is one."""
    paragraph: list[tuple[int, str]] = []
    for number, line in [*section, (0, "")]:
        is_row = line.lstrip().startswith("|")
        if paragraph and (not line.strip() or is_row or re.match(r"\s*([-*]|\d+\.)\s", line)):
            yield from _split(paragraph)
            paragraph = []
        if is_row:
            yield number, line
        elif line.strip():
            paragraph.append((number, line.strip()))
    yield from _split(paragraph)


def _split(paragraph: list[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    text = " ".join(line for _, line in paragraph)
    at = 0
    for part in re.split(r"(?<=[.:;!?])\s+(?=[A-Z*`\[])", text) if text else ():
        at = text.index(part, at)
        yield _line_of(paragraph, at), part
        at += len(part)


def _line_of(paragraph: list[tuple[int, str]], at: int) -> int:
    for number, line in paragraph:
        if at < len(line):
            return number
        at -= len(line) + 1
    return paragraph[-1][0]
