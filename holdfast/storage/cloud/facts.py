"""What an error of a store may say: the request, the answer, and the words of that store.

`failures.py` fills its sentences with it. Never decides what an error is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

_LIST_TOO = "; without s3:ListBucket a file that is missing is refused in this way too"

PERMISSIONS: dict[str, dict[str, str]] = {
    "s3": {
        "list": "s3:ListBucket on the bucket",
        "size": f"s3:GetObject{_LIST_TOO}",
        "get": f"s3:GetObject{_LIST_TOO}",
        "create": "s3:PutObject, and s3:GetObject to see who was first",
        "put": "s3:PutObject and s3:AbortMultipartUpload",
        "delete": "s3:DeleteObject",
    },
    "gs": {
        "list": "storage.objects.list",
        "size": "storage.objects.get",
        "get": "storage.objects.get",
        "create": "storage.objects.create, and storage.objects.get to see who was first",
        "put": "storage.objects.create, storage.multipartUploads.create and storage.multipartUploads.abort "
        "(and storage.objects.delete to replace a file)",
        "delete": "storage.objects.delete",
    },
    "az": {
        "list": "the role Storage Blob Data Reader, or a SAS with l (list)",
        "size": "the role Storage Blob Data Reader, or a SAS with r (read)",
        "get": "the role Storage Blob Data Reader, or a SAS with r (read)",
        "create": "the role Storage Blob Data Contributor, or a SAS with r, c and w (read, create, write)",
        "put": "the role Storage Blob Data Contributor, or a SAS with c and w (create, write)",
        "delete": "the role Storage Blob Data Contributor, or a SAS with d (delete)",
    },
}
"""What must be allowed for each verb, in the words of each store."""

_REGION = re.compile(r"<Region>([\w-]+)</Region>|expecting '([\w-]+)'|<Endpoint>[^<]*?s3[.-]([a-z]{2}-[\w-]+?-\d)\.")


class Request(NamedTuple):
    """What a store was asked: ``verb`` (one of the six, or ``open``), of which key, with whose credentials.

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


@dataclass(frozen=True)
class Facts:
    """What a sentence may name. The clock and the region are looked up when a sentence names them."""

    request: Request
    answer: Answer

    def filled(self, sentence: str) -> str:
        """The sentence with what it names in braces."""
        return re.sub(r"\{([\w.]+)\}", lambda name: str(attrgetter(name[1])(self)), sentence)

    @property
    def names(self) -> tuple[int | str, ...]:
        """The HTTP status, the store's code, the class of the error, and what became of the connection."""
        return self.answer.status, self.answer.code, self.answer.name, self.connection and self.answer.kind

    @property
    def connection(self) -> str:
        """``connection`` if there was no answer, and something became of the connection."""
        return "connection" if self.answer.kind and not self.answer.status else ""

    @property
    def who(self) -> str:
        return f" (credentials: {self.request.credentials})" if self.request.credentials else ""

    @property
    def host(self) -> str:
        return self.request.endpoint or (self.request.url if self.request.family == "http" else "the server")

    @property
    def bucket(self) -> str:
        return f"{'container' if self.request.family == 'az' else 'bucket'} {self.request.bucket!r}"

    @property
    def permission(self) -> str:
        needed = PERMISSIONS.get(self.request.family, {}).get(self.request.verb)
        return f"It takes {needed}" if needed else ""

    @property
    def reason(self) -> str:
        return self.answer.message or self.answer.text

    @property
    def said(self) -> str:
        """The store's own words."""
        answer = self.answer
        words = ": ".join(dict.fromkeys(part for part in (answer.code, answer.message) if part))
        if not words:
            return (
                f"the server answered {answer.status} without a reason"
                if answer.status
                else f"{answer.name}: {answer.text}"
            )
        return f"the server says {words}" + (f" (status {answer.status})" if answer.status else "")

    @property
    def wants_tls(self) -> str:
        endpoint = self.request.endpoint
        return "If the server wants TLS, write https://" if endpoint and not endpoint.startswith("https") else ""

    @property
    def region(self) -> str:
        """Where the bucket is, as far as the answer or the vendor says it."""
        used, region = self.request.region, self._expected_region
        if region:
            return f"in the region {region!r}" + (f" and not {used!r}" if used else "")
        return f"not in the region {used!r}" + (f": {self.answer.message}" if self.answer.message else "")

    @property
    def region_option(self) -> str:
        return f"region={self._expected_region}" if self._expected_region else "region"

    @cached_property
    def _expected_region(self) -> str:
        match = _REGION.search(self.answer.depth)
        return next(filter(None, match.groups())) if match else self.request.ask_region()

    @property
    def clock(self) -> str:
        """By how much this machine's clock is wrong: as the answer says, or the server's clock does."""
        server, sent = self._time("ServerTime"), self._time("RequestTime") or datetime.now(timezone.utc)
        ahead = (sent - server).total_seconds() if server else self.request.ask_clock()
        if ahead is None:
            return "the server refuses the time of the request: this machine's clock is wrong (or the server's)"
        return f"this machine's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"

    def _time(self, tag: str) -> datetime | None:
        match = re.search(rf"<{tag}>(.*?)</{tag}>", self.answer.depth)
        try:
            time = datetime.fromisoformat(match[1].replace("Z", "+00:00")) if match else None  # Python 3.10 knows no Z
        except ValueError:
            return None
        return time.replace(tzinfo=timezone.utc) if time and time.tzinfo is None else time


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
    line = " ".join(re.sub(r"<\?xml.*", "", text, flags=re.DOTALL).split())
    line = _USER.sub("//…@", _QUERY.sub("?…", line))[:500]
    return Answer(type(error).__name__, status, code, message, _first(_KIND, depth), line, depth)


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
