"""The pages of the documentation, taken apart into the blocks that are to be run, in order.

Called by the tests of the pages. Never runs anything. What it looks for in a page:

    ```python                    runs, in one namespace a page, in a fresh folder
    ```python title="train.py"   is written into that file of the folder, for a command below
    ```console                   lines that begin with `$ ` run in a shell; the lines below one are what it prints
    ```text, json, yaml, …       shows something; what has a syntax has to keep to it
    <!-- before                  python that readers need not see, up to a line with `-->`
    <!-- raises: Mismatch -->    the block after it has to raise this
    <!-- prints -->              the ```text block after it is what the python block before it printed
    <!-- not run: reason -->     the block after it cannot run here
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

RUN = ("python", "console")
SHOWN = ("text", "json", "yaml", "toml", "ini", "html", "dockerfile", "diff")

_FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,})\s*(?P<word>[\w-]*)\s*(?P<more>.*)$")
_TITLE = re.compile(r'title="([^"]+)"')
_NOTE = re.compile(r"^\s*<!--\s*(?P<word>not run|raises|prints|before)\b:?\s*(?P<text>.*?)\s*(?P<end>-->)?$")
_INDENTED = re.compile(r"^ {4,}\S")
_OPENS_INDENTED = re.compile(r"^\s*([-*+]|\d+\.|!!!|\?\?\?\+?|===)\s")


class Malformed(ValueError):
    """A page does not keep to the convention."""


@dataclass(frozen=True)
class Block:
    """``line`` is that of its first line of content, from 1. ``before`` counts as python that nobody sees."""

    page: str
    line: int
    language: str
    text: str
    hidden: bool = False
    file: str = ""
    raises: str = ""
    prints: bool = False
    not_run: str = ""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """All pages, by their paths from the root of the repository."""
    return ["README.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> list[Block]:
    return parse(page, (ROOT / page).read_text())


def parse(page: str, text: str) -> list[Block]:
    """The blocks of a page; raises `Malformed` for what would be left out without a word."""
    lines = text.split("\n")
    found: list[Block] = []
    said: dict[str, str] = {}
    at = 0
    while at < len(lines):
        line = lines[at]
        if fence := _FENCE.match(line):
            end = _end(page, at, lines, fence["fence"])
            content = _dedented(lines[at + 1 : end], len(fence["indent"]))
            found.append(_block(page, at + 2, fence["word"], fence["more"], content, said))
            said, at = {}, end
        elif note := _NOTE.match(line):
            if note["word"] == "before":
                end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == "-->"), None)
                if end is None:
                    raise Malformed(f"{page}:{at + 1}: this comment has no line with --> alone")
                found.append(Block(page, at + 2, "python", "\n".join(lines[at + 1 : end]), hidden=True))
                at = end
            else:
                if note["word"] != "prints" and not note["text"]:
                    raise Malformed(f"{page}:{at + 1}: {note['word']} what? Say it behind a colon")
                said[note["word"]] = note["text"] or "yes"
        elif _INDENTED.match(line) and at and not lines[at - 1].strip() and not _is_inside(lines[:at]):
            raise Malformed(f"{page}:{at + 1}: a block by indentation says not what it is; fence it, with a language")
        elif line.strip() and said:
            raise Malformed(f"{page}:{at + 1}: there is no block right after what was said of one")
        at += 1
    return found


def _end(page: str, start: int, lines: list[str], fence: str) -> int:
    for at in range(start + 1, len(lines)):
        if lines[at].strip() == fence:
            return at
    raise Malformed(f"{page}:{start + 1}: this block does not end")


def _dedented(lines: list[str], indent: int) -> str:
    return "\n".join(line[indent:] if not line[:indent].strip() else line for line in lines)


def _is_inside(above: list[str]) -> bool:
    """Whether an indented line belongs to a list or to a box of the theme."""
    for line in reversed(above):
        if line.strip() and not line.startswith("    "):
            return bool(_OPENS_INDENTED.match(line)) or line.startswith("  ")
    return False


def _block(page: str, line: int, word: str, more: str, text: str, said: dict[str, str]) -> Block:
    if word not in (*RUN, *SHOWN):
        raise Malformed(f"{page}:{line - 1}: a block needs a language, one of {', '.join((*RUN, *SHOWN))}")
    if word == "console" and not text.startswith("$ "):
        raise Malformed(f"{page}:{line}: a console block begins with a command, behind `$ `")
    title = _TITLE.search(more)
    return Block(
        page, line, word, text,
        file=title[1] if title else "",
        raises=said.get("raises", ""),
        prints="prints" in said,
        not_run=said.get("not run", ""),
    )  # fmt: skip
