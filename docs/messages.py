"""Write the generated table of docs/troubleshooting.md: the classes of errors. The site also gets all messages.

    python docs/messages.py

Classes come from `holdfast.errors.MEANINGS`, messages from the `raise` statements of the package. Called by
docs/hooks.py and tests.
"""

from __future__ import annotations

import ast
import builtins
import html
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from holdfast import errors  # noqa: E402
from holdfast.cli.errors import code_of  # noqa: E402
from holdfast.storage.cloud.failures import TABLE  # noqa: E402

PAGE = ROOT / "docs/troubleshooting.md"
CLASSES = ("<!-- classes: python docs/messages.py -->", "<!-- end of classes -->")
MESSAGES = "<!-- messages: docs/hooks.py puts them here -->"
STORES, OTHER = "What a store refuses", "Other errors"
_OURS = {row.error.__name__ for row in errors.MEANINGS} | {"HoldfastError"}
_WORD = re.compile(r"[A-Za-z][A-Za-z_']*[A-Za-z]")


@dataclass(frozen=True)
class Message:
    """One message of a `raise`: the class it raises, and its text with … for what differs."""

    error: str
    text: str
    where: str


def messages() -> list[Message]:
    """All messages of the package, by file."""
    found: list[Message] = []
    for path in sorted((ROOT / "holdfast").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        found += _of(ast.parse(path.read_text()), where)
    for row in TABLE:
        advice = [row.advice] if isinstance(row.advice, str) else list(row.advice.values())
        for text in (row.means, *advice):
            if _WORD.search(text := re.sub(r"\{[^}]*\}", "…", text)):
                found.append(Message(STORES, text, "holdfast/storage/cloud/failures.py"))
    return found


def _of(module: ast.Module, where: str) -> Iterator[Message]:
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            called, name = node.exc, _name(node.exc.func)
        elif isinstance(node, ast.Call) and _name(node.func) in _OURS:  # made here, raised elsewhere
            called, name = node, _name(node.func)
        else:
            continue
        for argument in [*called.args, *(keyword.value for keyword in called.keywords)]:
            text = " ".join(_text(argument).split())
            if _WORD.search(text):
                yield Message(name if name in _OURS or hasattr(builtins, name) else "", text, where)


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _text(node: ast.expr) -> str:
    """The constant parts of a text, with … for the others."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_text(value) for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.BinOp(left=left, op=ast.Mod()):
            return _text(left)
        case ast.IfExp(body=body, orelse=orelse):
            return f"{_text(body)} / {_text(orelse)}"
        case ast.FormattedValue(value=ast.IfExp() as value):
            return _text(value)
    return "…"


def words(text: str) -> set[str]:
    """The words of a text, in lower case."""
    return {word.lower() for word in _WORD.findall(text)}


def classes_part() -> str:
    """The table of classes."""
    rows = ["| error | is also a | exit status | what happened | what to do |", "|---|---|---|---|---|"]
    for row in errors.MEANINGS:
        also = row.error.__mro__[2].__name__
        code = code_of(row.error("…"))
        rows.append(f"| `{row.error.__name__}` | `{also}` | {code and int(code)} | {row.happened} | {row.do} |")
    return "\n".join(rows)


def messages_part() -> str:
    """All messages, folded, a list for each class."""
    by_class: dict[str, set[str]] = {}
    for message in messages():
        name = message.error if message.error in {*_OURS, STORES} else OTHER
        by_class.setdefault(name, set()).add(message.text)
    parts = []
    for name in sorted(by_class, key=lambda name: (name == OTHER, name == STORES, name)):
        texts = sorted(by_class[name], key=str.lower)
        lines = "\n".join(f"<li>{html.escape(text, quote=False)}</li>" for text in texts)
        title = f"{name}: {len(texts)} messages"
        parts.append(f"<details><summary>{title}</summary>\n<ul>\n{lines}\n</ul>\n</details>")
    return "\n\n".join(parts)


def written(page: str) -> str:
    """The page with its table of classes."""
    (begin, end), part = CLASSES, classes_part()
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{part}\n\n{end}{rest.partition(end)[2]}"


def with_messages(page: str) -> str:
    """The page as the site has it: with all messages."""
    return page.replace(MESSAGES, messages_part())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
