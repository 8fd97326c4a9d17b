"""Stores over the servers of the tests: what a user would pass as options to reach one.

Called by tests of the client. Never starts a server.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.storage.cloud.cloud import Cloud
from tests.servers import Server

OURS = {
    "endpoint": "endpoint_url",
    "base_url": "endpoint_url",
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "region": "region",
    "account_name": "account",
    "account_key": "account_key",
    "bearer_token": "token",
}


def options_of(server: Server, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The server's options in our words, and ``more``."""
    return {**{OURS[name]: value for name, value in server.options.items() if name in OURS}, **(more or {})}


def cloud(server: Server, bucket: str | None = None, more: Mapping[str, Any] | None = None) -> Cloud:
    """A store in a ``bucket`` (a fresh one) of a server; retries end within seconds."""
    return Cloud(server.scheme, bucket or server.bucket(), options_of(server, {"retry_timeout": 3, **(more or {})}))
