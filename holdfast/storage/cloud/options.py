"""What can be said about a store besides its URL: the names, their kinds, and which of them are secrets.

`urls.py` reads options with it, `wiring.py` and `cloud.py` use what it returns. Never shows a value that may be secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple


class Option(NamedTuple):
    """Kind of the value (``str``, ``bool``, ``int`` or ``float``), and what the option says."""

    kind: type
    says: str
    secret: bool = False


OPTIONS: Mapping[str, Option] = {
    "endpoint_url": Option(str, "the server, for example http://10.0.0.5:9000"),
    "region": Option(str, "the region of an S3 bucket"),
    "profile": Option(str, "a profile of ~/.aws/credentials and ~/.aws/config"),
    "anonymous": Option(bool, "send no credentials: for public buckets"),
    "access_key_id": Option(str, "S3 access key"),
    "secret_access_key": Option(str, "S3 secret key", secret=True),
    "session_token": Option(str, "S3 session token", secret=True),
    "account": Option(str, "Azure storage account, or R2 account id"),
    "account_key": Option(str, "key of the Azure storage account", secret=True),
    "sas_token": Option(str, "Azure shared access signature", secret=True),
    "token": Option(str, "bearer token of Google, Azure or a hub", secret=True),
    "private": Option(bool, "hub: a repository that a push makes is private"),
    "credential_file": Option(str, "Google service account or application default credentials, JSON"),
    "allow_http": Option(bool, "talk without TLS; implied by an endpoint_url with http://"),
    "virtual_host": Option(bool, "S3: the bucket is part of the host name; with endpoint_url it must name the bucket"),
    "verify_tls": Option(bool, "check the server's certificate (default true)"),
    "ca_file": Option(str, "PEM file of a certificate authority to trust besides the system's"),
    "connect_timeout": Option(float, "seconds until a connection must stand (default 5)"),
    "read_timeout": Option(float, "seconds without a byte after which a read is given up and tried again (default 20)"),
    "write_timeout": Option(float, "seconds that a part of an upload may take (default 60), in proportion above 8 MiB"),
    "retry_timeout": Option(float, "seconds for which one request is tried again (default 180)"),
    "concurrency": Option(int, "parts of one upload that are under way at once (default 8)"),
    "part_size": Option(int, "bytes of a part of an upload, at least (default 8 MiB)"),
    "sign_payload": Option(bool, "S3: sign the content too (default: only without TLS)"),
    "bulk_delete": Option(bool, "S3: delete many files with one request (default true)"),
}

_KINDS = {bool: "true or false", int: "a whole number above 0", float: "a number of seconds above 0", str: "a text"}
_SERVER = re.compile(r"https?://[^\s/@?#]+(/[^\s?#]*)?")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def checked(options: Mapping[str, Any], where: str, *, from_url: bool = False) -> dict[str, Any]:
    """The options with values of their kind; those that are None are left out.

    Raises ValueError, which names the option and ``where`` it was given and never a value that may be secret.
    """
    return {name: _value(name, value, where, from_url) for name, value in options.items() if value is not None}


def _value(name: str, value: Any, where: str, from_url: bool) -> Any:
    option = OPTIONS.get(name)
    if option is None:
        near = get_close_matches(name, OPTIONS, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{where} has no option {name!r}: {hint}There are {', '.join(OPTIONS)}")
    if option.secret and from_url:
        raise ValueError(
            f"{name} is a secret and does not belong in a URL, which ends up in logs ({where}): "
            f"pass options={{{name!r}: …}}, or set it in the environment or in a credentials file"
        )
    try:
        if option.kind is bool:
            return _truth(value)
        if option.kind in (int, float):
            number = option.kind(value)
            if isinstance(value, bool) or number <= 0:
                raise ValueError
            return number
        if not isinstance(value, str) or not value or (name == "endpoint_url" and not _SERVER.fullmatch(value)):
            raise ValueError
    except (TypeError, ValueError):
        shown = "" if option.secret or "@" in str(value) else f", not {value!r}"
        kind = "http://host:port or https://host" if name == "endpoint_url" else _KINDS[option.kind]
        raise ValueError(f"{name} of {where} must be {kind}{shown}") from None
    return value


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise ValueError
    return text in _TRUE


def secrets_in(options: Mapping[str, Any]) -> list[str]:
    """The values that must not be shown."""
    return [str(value) for name, value in options.items() if OPTIONS[name].secret]


def shown(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options as they may be shown: secrets are replaced."""
    return {name: "…" if OPTIONS[name].secret else value for name, value in options.items()}
