"""What a proxy does wrong, and to which request: faults, and the rules that count requests.

Called by `tests.servers.faults` and by everyone who adds a fault there. Never touches a socket.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "reset",  # the connection is reset before anything was forwarded or answered
    "reset_after",  # the request is forwarded and done, the answer is lost: a reset instead
    "reset_upload",  # a reset in the middle of the request's body; the server sees it cut too
    "reset_body",  # a reset in the middle of the answer's body
    "truncate",  # the answer's body ends in the middle, with an orderly close
    "stall",  # nothing is forwarded, never an answer, the connection stays open
    "stall_body",  # the answer's body stops in the middle, the connection stays open
    "slow_body",  # the answer's body comes at `rate`
    "status",  # answered by the proxy itself with `status` and a body as S3 would send it
    "flip",  # one bit of the answer's body is another
    "flip_upload",  # one bit of the request's body is another
    "down",  # from this request on, and for `seconds`, all connections are cut and new ones refused
    "ignore_conditions",  # conditions are taken out of the request: a store that does not know them
]

CONDITIONS = ("if-match", "if-none-match", "x-goog-if-generation-match", "x-goog-if-metageneration-match")
CODES = {
    400: "RequestTimeout",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "ConditionalRequestConflict",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "SlowDown",
}


@dataclass(frozen=True)
class Fault:
    """What happens to the ``nth`` request of those that match, and to those after it until it happened ``times``.

    ``method`` is a regular expression for the whole method, ``path`` one that is searched in path?query. ``times=None``
    means always. Several faults: the first in order that takes a request has it, later ones do not see it; only
    `ignore_conditions` leaves the request to them.
    """

    kind: Kind
    nth: int = 1
    times: int | None = 1
    method: str = ".*"
    path: str = ""
    # Of `status`. The code stands in the body: ExpiredToken, RequestTimeTooSkewed, SignatureDoesNotMatch, …
    status: int = 503
    code: str = ""
    retry_after: int | None = None
    # The byte of the body where it happens; None is the middle. A body without bytes has no middle: nothing happens.
    at: int | None = None
    # Of `down`.
    seconds: float = 1.0
    # Of `slow_body`: bytes a second.
    rate: int = 1000

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"no fault is called {self.kind!r}; there are {', '.join(get_args(Kind))}")
        if self.nth < 1:
            raise ValueError(f"requests are counted from 1, not from {self.nth}")

    def matches(self, method: str, target: str) -> bool:
        return bool(re.fullmatch(self.method, method) and re.search(self.path, target))

    def answer(self, method: str) -> bytes:
        """The whole answer of a `status` fault."""
        code = self.code or CODES.get(self.status, "InternalError")
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n'
            f"<Error><Code>{code}</Code><Message>a fault on purpose</Message><RequestId>fault</RequestId></Error>"
        ).encode()
        lines = [f"HTTP/1.1 {self.status} {code}", "Content-Type: application/xml", f"Content-Length: {len(body)}"]
        if self.retry_after is not None:
            lines.append(f"Retry-After: {self.retry_after}")
        return "\r\n".join([*lines, "", ""]).encode() + (b"" if method == "HEAD" else body)


@dataclass
class _Counted:
    fault: Fault
    seen: int = 0
    fired: int = 0

    def takes(self) -> bool:
        self.seen += 1
        if self.seen < self.fault.nth or (self.fault.times is not None and self.fired >= self.fault.times):
            return False
        self.fired += 1
        return True


class Rules:
    """The faults of one proxy, in order; threads ask at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counted: list[_Counted] = []

    def add(self, *faults: Fault) -> None:
        with self._lock:
            self._counted += [_Counted(fault) for fault in faults]

    def clear(self) -> None:
        with self._lock:
            self._counted = []

    def fired(self) -> int:
        """How often any of them took a request."""
        with self._lock:
            return sum(counted.fired for counted in self._counted)

    def take(self, method: str, target: str) -> tuple[bool, Fault | None]:
        """For one request: whether its conditions are ignored, and the fault that has it."""
        ignored = False
        with self._lock:
            for counted in self._counted:
                if counted.fault.matches(method, target) and counted.takes():
                    if counted.fault.kind != "ignore_conditions":
                        return ignored, counted.fault
                    ignored = True
        return ignored, None
