"""Which repository of which hub a URL means, at which revision, and whose token is sent.

`urls.py` reads ``hf://`` URLs with it. Never connects to anything, and never shows a token.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from holdfast.storage.cloud.options import checked

KINDS = ("models", "datasets", "spaces")
_FORM = "hf://OWNER/NAME, hf://OWNER/NAME@REVISION/PATH or hf://datasets/OWNER/NAME"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_REFS = re.compile(r"refs/(convert/[\w.-]+|pr/\d+)(?=/|$)")
"""Revisions with a slash that URLs write as they are; in any other a slash is written %2F."""


class Address(NamedTuple):
    """A repository; ``revision`` is a branch, a tag or a commit, empty if the URL names none: then it is main."""

    kind: str
    repo: str
    revision: str = ""

    @property
    def path(self) -> str:
        """The repository in a web address of the hub."""
        return self.repo if self.kind == "models" else f"{self.kind}/{self.repo}"

    @property
    def url(self) -> str:
        revision = self.revision if _REFS.fullmatch(self.revision) else self.revision.replace("/", "%2F")
        return f"hf://{self.path}@{revision}" if revision else f"hf://{self.path}"

    @property
    def api(self) -> str:
        return f"api/{self.kind}/{self.repo}"

    @property
    def quoted_revision(self) -> str:
        return quote(self.revision or "main", safe="")


def parsed(rest: str) -> tuple[Address, str]:
    """What stands behind ``hf://``: the repository, and the path in it. Raises ValueError."""
    text, kind = rest.strip("/"), "models"
    first, _, more = text.partition("/")
    if first in KINDS:
        kind, text = first, more
    elif f"{first}s" in KINDS or first in ("kernels", "buckets"):
        known = ", ".join(f"hf://{kind}/" for kind in KINDS)
        raise ValueError(f"hf://{first}/ is nothing that holdfast reads: there are {known} and hf://OWNER/NAME")
    owner, _, tail = text.partition("/")
    head, _, path = tail.partition("/")
    name, at, revision = head.partition("@")
    if not (_NAME.fullmatch(owner) and _NAME.fullmatch(name)) or (at and not revision):
        shown = "an hf:// URL" if "@" in owner or ":" in owner else f"hf://{text.partition('@')[0]}"
        raise ValueError(f"{shown} names no repository of the hub: write {_FORM}")
    if at and (refs := _REFS.match(f"{revision}/{path}")):
        revision, path = refs[0], f"{revision}/{path}"[refs.end() :]
    return Address(kind, f"{owner}/{name}", unquote(revision)), path.strip("/")


def endpoint_of(options: Mapping[str, Any]) -> str:
    """The address of the hub. Raises ValueError."""
    given = options.get("endpoint_url") or os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    return str(checked({"endpoint_url": given}, "HF_ENDPOINT")["endpoint_url"]).rstrip("/")


def token_of(options: Mapping[str, Any]) -> tuple[str, str]:
    """The token to send, and where it comes from; both are empty if there is none. Raises ValueError."""
    if options.get("anonymous"):
        return "", ""
    named = {"the option token": options.get("token"), "HF_TOKEN": os.environ.get("HF_TOKEN")}
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()
    for source, token in named.items():
        if token and token.strip():
            return _plain(token.strip(), source), source
    try:
        token = file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return "", ""
    return (_plain(token, str(file)), str(file)) if token else ("", "")


def _plain(token: str, source: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", token):
        raise ValueError(f"{source} holds no token: it has spaces, line breaks or characters that no token has")
    return token
