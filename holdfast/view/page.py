"""One HTML document that holds its style, its scripts, and the data that they show.

What it shows never becomes markup or script, and a policy in its head keeps the page from any network.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

from holdfast.ondisk.version import __version__

_IN_JSON = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
_ESCAPED = str.maketrans(_IN_JSON)


def page(title: str, scripts: Sequence[str], data: object, *, served: bool = False) -> str:
    """The page: ``scripts`` (files in assets/) run after ``frame.js``, which gives them ``data`` as ``H.data``.

    ``data`` is all that `msgspec` can write as JSON; floats that are no numbers become null. ``title`` and every text
    in ``data`` may be hostile. ``served``: the page may ask the server that it came from, and nobody else.
    """
    style, codes = asset("style.css"), [asset(name) for name in ("frame.js", *scripts)]
    policy = "; ".join((
        "default-src 'none'",
        "script-src " + " ".join(map(_sum, codes)),
        f"style-src {_sum(style)}",
        "img-src data:",
        f"connect-src {chr(39)}self{chr(39)}" if served else "connect-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    ))  # fmt: skip
    return "\n".join((
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        f'<meta name="generator" content="holdfast {__version__}">',
        f'<title>{escape(_plain(title))}</title>\n<link rel="icon" href="{_ICON}">',
        f"<style>{style}</style>\n</head>\n<body>",
        '<a class="skip" href="#main">Skip to the content</a>\n<header id="top" class="top"></header>',
        '<main id="main" tabindex="-1"><noscript>This page draws with JavaScript, which is turned off here.</noscript>',
        f'</main>\n<script type="application/json" id="data">{as_json(data)}</script>',
        *(f"<script>{code}</script>" for code in codes),
        "</body>\n</html>\n",
    ))  # fmt: skip


def as_json(data: object) -> str:
    """JSON that may stand in a script tag: no character of it can end one, or begin a comment or markup."""
    try:
        text = msgspec.json.encode(data, enc_hook=str).decode()
    except UnicodeEncodeError:  # a path with bytes that are no text
        text = msgspec.json.encode(_all_plain(msgspec.to_builtins(data, enc_hook=str))).decode()
    return text.translate(_ESCAPED)


@cache
def asset(name: str) -> str:
    """A file of assets/."""
    return files("holdfast.view").joinpath("assets", name).read_text(encoding="utf-8")


def _sum(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(text: str) -> str:
    # A path may hold bytes that are no text; they are shown as what they are not.
    return text.encode("utf-8", "replace").decode()


def _all_plain(data: Any) -> Any:
    if isinstance(data, dict):
        return {_all_plain(key): _all_plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_all_plain(one) for one in data]
    return _plain(data) if isinstance(data, str) else data


_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%230f766e'/%3E%3Cpath d='M8 3v5M8 8c0 3-2.5 3-3.5 5M8 8c0 3 2.5 3 3.5 5M8 8v5' stroke='white' "
    "stroke-width='1.4' fill='none' stroke-linecap='round'/%3E%3C/svg%3E"
)
