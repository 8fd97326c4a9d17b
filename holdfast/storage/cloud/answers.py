"""What was asked, and what is in the text of the client library's error, which has its facts nowhere else.

`cloud.py` and `refusals.py` call it. Never keeps a secret or a query string in what may be shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple


class Asked(NamedTuple):
    """What was asked of a store: ``verb`` of the seam (or ``open``), of which key, as whom.

    ``ask_region`` may ask the vendor where the bucket is (``""`` if it cannot learn that), ``ask_clock`` the server for
    its time: the seconds that this machine is ahead.
    """

    verb: str
    scheme: str
    bucket: str
    key: str
    endpoint: str = ""
    region: str = ""
    credentials: str = ""
    secrets: tuple[str, ...] = ()
    ask_region: Callable[[], str] = lambda: ""
    ask_clock: Callable[[], float | None] = lambda: None

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.bucket}"

    @property
    def family(self) -> str:
        """``s3``, ``gs``, ``az`` or ``http``: whose words the answers are in."""
        return {"r2": "s3", "weka": "s3", "https": "http"}.get(self.scheme, self.scheme)


class Answer(NamedTuple):
    """What an error has in it: the name of its class, HTTP status (0 without an answer), the store's code and message.

    ``kind`` is the client's word for what became of the connection, ``text`` the first line, ``depth`` all;
    ``repeated`` if the request was sent more than once.
    """

    name: str
    status: int
    code: str
    message: str
    kind: str
    text: str
    depth: str
    repeated: bool


_STATUS = re.compile(r"non-2xx status code: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_DELETED = re.compile(r"(?:DeleteObjects|Bulk delete) request failed for key (.*?): (.*) \(code: (\w+)\)", re.DOTALL)
_MESSAGE = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_DETAIL = re.compile(r"<(?:AuthenticationErrorDetail|Details)>(.*?)</", re.DOTALL)
_JSON = re.compile(r'"(?:error_description|message)"\s*:\s*"([^"]*)"')
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_REPEATED = re.compile(r"after [1-9]\d* retries")
_QUERY = re.compile(r"\?[^\s<>\"']*")
_USER = re.compile(r"//[^/\s@]+@")


def answered(error: BaseException, secrets: tuple[str, ...] = ()) -> Answer:
    """What the text of an error has in it."""
    depth = str(error)
    for secret in secrets:
        depth = depth.replace(secret, "…")
    text = depth.partition("\n\nDebug source:")[0]
    status = _STATUS.search(text)
    code, message = _CODE.search(text), _MESSAGE.search(text)
    found_code, found_message = (code[1] if code else ""), (message[1] if message else "")
    if deleted := _DELETED.search(text):
        found_message, found_code = deleted[2], deleted[3]
    if not found_message and (told := _JSON.search(text)):
        found_message = told[1]
    if detail := _DETAIL.search(text):
        found_message = f"{found_message.strip()} {detail[1]}"
    kind = _KIND.search(depth)
    number = int(status[1]) if status else 0
    if found_code.isdigit():
        number, found_code = int(found_code), ""
    return Answer(
        type(error).__name__,
        number,
        found_code,
        " ".join(found_message.split())[:400],
        kind[1] if kind else "",
        _shortened(text),
        depth,
        bool(_REPEATED.search(text)),
    )


def _shortened(text: str) -> str:
    line = " ".join(re.sub(r"<\?xml.*", "", text, flags=re.DOTALL).split())
    return _USER.sub("//…@", _QUERY.sub("?…", line))[:500]
