"""The facts in an error of the client library, which has them nowhere but in its text.

`failures.py` calls it. Never keeps a secret or a query string in what may be shown.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Answer(NamedTuple):
    """What an error has in it: the name of its class, HTTP status (0 without an answer), the store's code and message.

    ``kind`` is the client's word for what became of the connection, ``text`` the first line, ``depth`` all.
    """

    name: str
    status: int
    code: str
    message: str
    kind: str
    text: str
    depth: str


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_DELETED = re.compile(r"(?:DeleteObjects|Bulk delete) request failed for key (.*?): (.*) \(code: (\w+)\)", re.DOTALL)
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_DETAIL = re.compile(r"<(?:AuthenticationErrorDetail|Details)>(.*?)</", re.DOTALL)
_JSON = re.compile(r'"(?:error_description|message)"\s*:\s*"([^"]*)"')
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_QUERY = re.compile(r"\?[^\s<>\"']*")
_USER = re.compile(r"//[^/\s@]+@")


def answer_in(error: BaseException, secrets: tuple[str, ...] = ()) -> Answer:
    """What the text of an error has in it."""
    depth = str(error)
    for secret in secrets:
        depth = depth.replace(secret, "…")
    text = depth.partition("\n\nDebug source:")[0]
    status = int(_first(_STATUS, text) or 0)
    code, message = _first(_CODE, text), _first(_MESSAGE, text)
    if deleted := _DELETED.search(text):
        message, code = deleted[2], deleted[3]
    message = message or _first(_JSON, text)
    if detail := _first(_DETAIL, text):
        message = f"{message.strip()} {detail}"
    if code.isdigit():
        status, code = int(code), ""
    message = " ".join(message.split())[:400]
    return Answer(type(error).__name__, status, code, message, _first(_KIND, depth), _shortened(text), depth)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _shortened(text: str) -> str:
    line = " ".join(re.sub(r"<\?xml.*", "", text, flags=re.DOTALL).split())
    return _USER.sub("//…@", _QUERY.sub("?…", line))[:500]
