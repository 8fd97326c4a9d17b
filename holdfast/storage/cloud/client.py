"""The arguments of the client library's store for a bucket, from the options of a URL.

`cloud.py` calls it, once for each client. Never connects to a store, but may ask AWS for a bucket's region.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from datetime import timedelta
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.ondisk.version import __version__
from holdfast.storage.cloud.credentials import Credentials, credentials_for

CLIENTS = {"s3": "S3Store", "r2": "S3Store", "weka": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
"""The class of the client library for each scheme; http and https have one of their own."""

ATTEMPT = 600.0
"""Seconds that one attempt of any request may take; it is the silence in between that ends one earlier."""

DEFAULT_REGION = "us-east-1"


class ClientSettings(NamedTuple):
    """The class of the client library, its arguments, and the credentials among them."""

    kind: str
    target: str
    arguments: dict[str, Any]
    credentials: Credentials

    @property
    def region(self) -> str:
        return str(self.arguments.get("config", {}).get("region", ""))


def client_settings(scheme: str, bucket: str, options: Mapping[str, Any], *, silence: float) -> ClientSettings:
    """For a client that gives up after ``silence`` seconds. Raises NoCredentials, ValueError for a ca_file."""
    credentials = credentials_for(scheme, options)
    kind = CLIENTS.get(scheme, "HTTPStore")
    endpoint = str(options.get("endpoint_url") or credentials.config.get("endpoint", ""))
    allow_http = options.get("allow_http", scheme == "http" or endpoint.startswith("http://"))
    client: dict[str, Any] = {
        "timeout": timedelta(seconds=max(ATTEMPT, silence)),
        "connect_timeout": timedelta(seconds=options.get("connect_timeout", 5.0)),
        "read_timeout": timedelta(seconds=silence),
        "allow_http": allow_http,
        "user_agent": f"holdfast/{__version__}",
    }
    if not options.get("verify_tls", True):
        client["allow_invalid_certificates"] = True
    if "ca_file" in options:
        client["root_certificate"] = _read_authority(options["ca_file"])
    retry = {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=options.get("retry_timeout", 180.0)),
        "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2},
    }
    arguments: dict[str, Any] = {"client_options": client, "retry_config": retry}
    if kind == "HTTPStore":
        return ClientSettings(kind, f"{scheme}://{bucket}", arguments, credentials)
    arguments["config"] = dict(credentials.config)
    if kind == "S3Store":
        arguments["config"].update(_s3(bucket, options, sign=options.get("sign_payload", allow_http)))
    if kind == "GCSStore" and endpoint:
        arguments["config"]["base_url"] = endpoint
    if credentials.provider is not None:
        arguments["credential_provider"] = credentials.provider
    return ClientSettings(kind, bucket, arguments, credentials)


def _read_authority(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        # No FileNotFoundError: that would say that a file of the store is missing.
        raise ValueError(f"ca_file {file} cannot be read: {error.strerror}") from None


def _s3(bucket: str, options: Mapping[str, Any], *, sign: bool) -> dict[str, Any]:
    # TLS protects the content as well as a signature of it does, and costs no second pass over the bytes.
    config: dict[str, Any] = {"unsigned_payload": not sign}
    region = options.get("region")
    if "endpoint_url" in options:
        # Both: the second has precedence in the client, and could come from the environment.
        config["endpoint"] = config["aws_endpoint_url_s3"] = options["endpoint_url"]
    else:
        region = region or bucket_region(bucket)
    if "virtual_host" in options:
        config["virtual_hosted_style_request"] = options["virtual_host"]
    if not options.get("bulk_delete", True):
        config["disable_bulk_delete"] = True
    if bucket.endswith("--x-s3"):
        config["s3_express"] = True
    return {**config, "region": region or DEFAULT_REGION}


def bucket_region(bucket: str, service: str = "https://s3.amazonaws.com") -> str:
    """The region of a bucket at AWS, which it tells anyone; empty if it cannot be learned."""
    return _header(f"{service}/{bucket}", "x-amz-bucket-region")


def clock_ahead(endpoint: str) -> float | None:
    """The seconds that this machine's clock is ahead of a server's; None if it cannot be learned."""
    date = _header(endpoint, "date")
    try:
        return time.time() - parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None


def _header(url: str, name: str) -> str:
    # The client library does not show headers.
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as response:
            return str(response.headers.get(name) or "")
    except urllib.error.HTTPError as refusal:
        # The usual case: no is as good an answer as yes.
        return str(refusal.headers.get(name) or "")
    except OSError:
        return ""
