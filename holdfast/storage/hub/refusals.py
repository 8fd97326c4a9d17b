"""What a hub's refusal means, and what to do about it.

`hub.py` and `push.py` pass every answer here that is no success. Never shows a token.
"""

from __future__ import annotations

import errno
import json
import re
from contextlib import suppress
from typing import Protocol

from holdfast.storage.hub.address import Address
from holdfast.storage.hub.client import Client, shown
from holdfast.storage.wrappers.retrying import transient

LOG_IN = "log in (`hf auth login`), or set HF_TOKEN"

_RESET = re.compile(r"\bt=(\d+)")


class Headers(Protocol):
    def get(self, name: str, /) -> str | None: ...


def refusal(doing: str, address: Address, client: Client, status: int, headers: Headers, body: bytes = b"") -> OSError:
    """The OSError for an answer. FileNotFoundError for a missing file alone; ``missing`` says what else is."""
    code, text = headers.get("X-Error-Code") or "", _said(client, headers, body)
    page = f"{client.endpoint}/{address.path}"
    who = f"the token from {client.token_source}" if client.token else "a reader without a token"
    said = f": {text}" if text else ""

    def made(number: int, means: str, missing: str = "") -> OSError:
        error = OSError(number, f"cannot {doing}: {means}")
        vars(error)["missing"] = missing
        return error

    if status == 429 or status == 408 or status >= 500:
        means = "the hub asks to slow down" if status == 429 else f"the hub answered {status}"
        advice = f". It allows more to those who {LOG_IN}" if status == 429 and not client.token else ""
        return transient(made(errno.EAGAIN, f"{means}{said}{advice}"), retry_after=_wait(headers))
    if code == "EntryNotFound":
        return FileNotFoundError(errno.ENOENT, f"cannot {doing}: there is no such file")
    if code == "RevisionNotFound":
        revision = address.revision or "main"
        means = f"{address.repo} has no revision {revision!r}: name a branch, a tag or a commit of {page}/commits"
        return made(errno.ENXIO, means, missing="revision")
    if code == "GatedRepo":
        account = "with the account of this token" if client.token else f"then {LOG_IN}"
        means = f"{address.repo} is gated, and {who} has no access: accept its terms at {page}, {account}"
        return made(errno.EACCES, means)
    if status == 401 and client.token and (code != "RepoNotFound"):
        return made(
            errno.EACCES, f"the hub does not accept {who}{said}. Get another one at {client.endpoint}/settings/tokens, "
            f"and {LOG_IN}",
        )  # fmt: skip
    if code == "RepoNotFound" or status in (401, 404):
        hint = ", and that this account may see it" if client.token else f"; if it is private, {LOG_IN}"
        kind, said = address.kind.removesuffix("s"), "" if code else said
        means = f"there is no {kind} {address.repo} at {client.endpoint} that {who} may see{said}. Check the name{hint}"
        return made(errno.ENXIO, means, missing="repository")
    if status == 403:
        means = f"{who} may not do that{said}. A fine-grained token needs the right for {address.repo}"
        return made(errno.EACCES, means if client.token else f"access denied{said}. If it is private, {LOG_IN}")
    if status == 412:
        return made(errno.EBUSY, f"somebody pushed to {page} meanwhile, and nothing was changed: do it again")
    return made(errno.EIO, f"the hub answered {status}{said} ({shown(page)})")


def _said(client: Client, headers: Headers, body: bytes) -> str:
    """The hub's own words."""
    text = headers.get("X-Error-Message") or ""
    with suppress(ValueError, AttributeError):
        text = text or str(json.loads(body).get("error") or "")
    text = " ".join(text.split())[:300]
    return text.replace(client.token, "…") if client.token else text


def _wait(headers: Headers) -> float | None:
    """The seconds that a hub asks for, in either of the two ways in which it does."""
    after = headers.get("Retry-After") or ""
    if after.isdigit():
        return float(after)
    reset = _RESET.search(headers.get("RateLimit") or "")
    return float(reset[1]) if reset else None
