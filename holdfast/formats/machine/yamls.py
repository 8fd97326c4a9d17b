"""The YAML that PyYAML's `dump` writes by default, and no more of the language: block mappings and lists, scalars.

`torchsnapshot` reads manifests of its old versions with it. Never guesses: anything else that YAML has is refused.
"""

from __future__ import annotations

import re
from typing import Any

MAX_DEPTH = 50

_KEY = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s"'\[\]{}&*!|>%@`#?-].*?|[?-][^\s].*?)\s*:(?:\s+(.*)|)$""")
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_WORDS: dict[str, Any] = {"": None, "null": None, "~": None, "true": True, "false": False}
_ESCAPES = {
    "0": "\0", "a": "\a", "b": "\b", "t": "\t", "n": "\n", "v": "\v", "f": "\f", "r": "\r", "e": "\x1b", " ": " ",
    '"': '"', "\\": "\\", "\n": "", "N": "\x85", "_": "\xa0", "L": "\u2028", "P": "\u2029", "\t": "\t", "/": "/",
}  # fmt: skip
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|\n+", re.DOTALL)
_BREAKS = re.compile(r"\n+")


def load(text: str) -> Any:
    """The value that ``text`` holds. Raises ValueError, with the line, for YAML that `yaml.dump` does not write."""
    lines = _Lines(text)
    at = lines.skip(0)
    value, at = lines.block(at, lines.indent(at), 0) if at < len(lines.raw) else (None, at)
    if lines.skip(at) < len(lines.raw):
        raise lines.fault(at, "is not where it should be")
    return value


class _Lines:
    """The lines, and a method for each kind of node: from a line on, the value and the line behind it."""

    def __init__(self, text: str) -> None:
        self.raw = text.split("\n")

    def fault(self, at: int, what: str) -> ValueError:
        shown = self.raw[at][:80] if at < len(self.raw) else "the end"
        return ValueError(f"line {at + 1} {what}: {shown!r}")

    def skip(self, at: int) -> int:
        while at < len(self.raw) and not self.raw[at].strip():
            at += 1
        return at

    def indent(self, at: int) -> int:
        line = self.raw[at]
        return len(line) - len(line.lstrip(" "))

    def block(self, at: int, indent: int, depth: int) -> tuple[Any, int]:
        """The mapping, list or scalar that begins on a line, in column ``indent``."""
        if depth > MAX_DEPTH:
            raise self.fault(at, "is nested too deep")
        text = self.raw[at][indent:]
        if text == "-" or text.startswith("- "):
            return self.list(at, indent, depth)
        if text.startswith("? ") or _KEY.match(text):
            return self.mapping(at, indent, depth)
        return self.scalar(at, indent, indent - 1)

    def list(self, at: int, indent: int, depth: int) -> tuple[list[Any], int]:
        found = []
        while at < len(self.raw) and self.indent(at) == indent and re.match(r"-(?: |$)", self.raw[at][indent:]):
            value, at = self.inline(at, indent, depth)
            found.append(value)
            at = self.skip(at)
        return found, at

    def inline(self, at: int, indent: int, depth: int) -> tuple[Any, int]:
        """What follows a dash, or a lone colon or question mark: it may itself be a block, two columns on."""
        self.raw[at] = f"{self.raw[at][:indent]}  {self.raw[at][indent + 2 :]}"
        if not self.raw[at].strip():
            raise self.fault(at, "has nothing behind its mark")
        return self.block(at, self.indent(at), depth + 1)

    def mapping(self, at: int, indent: int, depth: int) -> tuple[dict[Any, Any], int]:
        found: dict[Any, Any] = {}
        while at < len(self.raw) and self.indent(at) == indent:
            text = self.raw[at][indent:]
            if text.startswith("? "):
                key, at = self.inline(at, indent, depth)
                if at >= len(self.raw) or not self.raw[at].startswith(" " * indent + ": "):
                    raise self.fault(at, "should begin with a colon")
                value, at = self.inline(at, indent, depth)
            else:
                match = _KEY.match(text)
                if match is None:
                    raise self.fault(at, "is no key with a value")
                key = self.key(at, match[1])
                value, at = self.value(at, indent, indent + (match.start(2) if match[2] else len(text)), depth)
            if not isinstance(key, (str, int)) or key in found:
                raise self.fault(at - 1, "has a key that is none, or was there before")
            found[key] = value
            at = self.skip(at)
        return found, at

    def key(self, at: int, text: str) -> Any:
        return self.quoted(at, text) if text[0] in "\"'" else _word(text)

    def value(self, at: int, indent: int, column: int, depth: int) -> tuple[Any, int]:
        """The value of a key in column ``indent``: on its line from ``column`` on, or below."""
        if self.raw[at][column:].strip():
            return self.scalar(at, column, indent)
        below = self.skip(at + 1)
        if below < len(self.raw):
            inner = self.indent(below)
            # Lists stand in the column of their key.
            if inner > indent or (inner == indent and re.match(r"-(?: |$)", self.raw[below][indent:])):
                return self.block(below, inner, depth + 1)
        return None, at + 1

    def scalar(self, at: int, column: int, parent: int) -> tuple[Any, int]:
        """A scalar from a column of a line on; it goes on over lines further in than ``parent``."""
        text = self.raw[at][column:].rstrip()
        if text in ("[]", "{}"):
            return ([] if text == "[]" else {}), at + 1
        if text[0] in "\"'":
            parts, end = [text], at
            while not _closes(parts[-1][1:] if end == at else parts[-1], text[0]):
                end += 1
                if end >= len(self.raw):
                    raise self.fault(at, "opens a text that is not closed")
                parts.append(self.raw[end].strip())
            return self.quoted(at, "\n".join(parts)), end + 1
        if text[0] in "[]{}&*!|>%@`#,":
            raise self.fault(at, "begins with something of YAML that is not read here")
        at += 1
        while at < len(self.raw) and self.raw[at].strip() and self.indent(at) > parent:
            text = f"{text} {self.raw[at].strip()}"
            at += 1
        if ": " in text or " #" in text or text.endswith(":"):
            raise self.fault(at - 1, "is no plain text")
        return _word(text), at

    def quoted(self, at: int, text: str) -> str:
        if not _QUOTED.fullmatch(text):
            raise self.fault(at, "has something behind a text")
        inner = text[1:-1]
        if text[0] == "'":
            return _BREAKS.sub(_folded, inner).replace("''", "'")
        try:
            return _ESCAPE.sub(_unescaped, inner)
        except KeyError as error:
            raise self.fault(at, f"has an unknown escape {error}") from None


def _closes(line: str, quote: str) -> bool:
    """Whether a text ends on a line, of which only what is within the text is given."""
    return line.count(quote) % 2 == 1 if quote == "'" else '"' in re.sub(r"\\.", "", line)


def _folded(breaks: re.Match[str]) -> str:
    """One break is a space, more are one less."""
    return " " if len(breaks[0]) == 1 else breaks[0][1:]


def _unescaped(match: re.Match[str]) -> str:
    if match[0][0] == "\n":
        return _folded(match)
    code = match[1] or match[2] or match[3]
    return chr(int(code, 16)) if code else _ESCAPES[match[4]]


def _word(text: str) -> Any:
    if text in _WORDS:
        return _WORDS[text]
    return int(text) if _INT.fullmatch(text) else text
