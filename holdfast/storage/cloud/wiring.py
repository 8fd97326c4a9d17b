"""From a store's options to what the client library must be told: one dictionary for each of its parts.

`cloud.py` calls it, once for each client. Never imports the client library and never connects to a store.
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

from holdfast.storage.cloud.credentials import Found, s3
from holdfast.storage.cloud.credentials_azure import azure
from holdfast.storage.cloud.credentials_google import google
from holdfast.version import __version__

KINDS = {"s3": "S3Store", "r2": "S3Store", "weka": "S3Store", "gs": "GCSStore", "az": "AzureStore"}
"""Schemes, and the client that speaks to them; http and https have one of their own."""

ATTEMPT = 600.0
"""Seconds that one attempt of any request may take; it is the silence in between that ends one earlier."""

DEFAULT_REGION = "us-east-1"


class Wiring(NamedTuple):
    """``kind`` of client, what it is told, and where its credentials come from."""

    kind: str
    target: str
    config: dict[str, Any]
    client: dict[str, Any]
    retry: dict[str, Any]
    found: Found


def wiring(scheme: str, bucket: str, options: Mapping[str, Any], *, silence: float) -> Wiring:
    """For a client that gives up after ``silence`` seconds. Raises NoCredentials, ValueError for a ca_file."""
    client, retry = _client(scheme, options, silence), _retry(options)
    kind = KINDS.get(scheme, "HTTPStore")
    if kind == "S3Store":
        found = s3(scheme, options)
        config = _s3(bucket, options, plain=client["allow_http"])
    elif kind == "GCSStore":
        found = google(options)
        config = {"base_url": options["endpoint_url"]} if "endpoint_url" in options else {}
    elif kind == "AzureStore":
        found = azure(options)
        config = {}
        client["allow_http"] = client["allow_http"] or str(found.config.get("endpoint", "")).startswith("http://")
    else:
        return Wiring(kind, f"{scheme}://{bucket}", {}, client, retry, Found(None, "none"))
    return Wiring(kind, bucket, {**config, **found.config}, client, retry, found)


def _client(scheme: str, options: Mapping[str, Any], silence: float) -> dict[str, Any]:
    plain = scheme == "http" or str(options.get("endpoint_url", "")).startswith("http://")
    told: dict[str, Any] = {
        "timeout": timedelta(seconds=max(ATTEMPT, silence)),
        "connect_timeout": timedelta(seconds=options.get("connect_timeout", 5.0)),
        "read_timeout": timedelta(seconds=silence),
        "allow_http": options.get("allow_http", plain),
        "user_agent": f"holdfast/{__version__}",
    }
    if not options.get("verify_tls", True):
        told["allow_invalid_certificates"] = True
    if "ca_file" in options:
        told["root_certificate"] = _read_authority(options["ca_file"])
    return told


def _read_authority(file: str) -> bytes:
    try:
        return Path(file).expanduser().read_bytes()
    except OSError as error:
        # No FileNotFoundError: that would say that a file of the store is missing.
        raise ValueError(f"ca_file {file} cannot be read: {error.strerror}") from None


def _retry(options: Mapping[str, Any]) -> dict[str, Any]:
    backoff = {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5), "base": 2}
    return {
        "max_retries": 10,
        "retry_timeout": timedelta(seconds=options.get("retry_timeout", 180.0)),
        "backoff": backoff,
    }


def _s3(bucket: str, options: Mapping[str, Any], *, plain: bool) -> dict[str, Any]:
    # TLS protects the content as well as a signature of it does, and costs no second pass over the bytes.
    told: dict[str, Any] = {"unsigned_payload": not options.get("sign_payload", plain)}
    if "endpoint_url" in options:
        # Both: the second has precedence in the client, and could come from the environment.
        told["endpoint"] = told["aws_endpoint_url_s3"] = options["endpoint_url"]
    if "virtual_host" in options:
        told["virtual_hosted_style_request"] = options["virtual_host"]
    if not options.get("bulk_delete", True):
        told["disable_bulk_delete"] = True
    if bucket.endswith("--x-s3"):
        told["s3_express"] = True
    region = options.get("region") or ("" if "endpoint_url" in options else asked_region(bucket))
    told["region"] = region or DEFAULT_REGION
    return told


def asked_region(bucket: str, service: str = "https://s3.amazonaws.com") -> str:
    """The region of a bucket at AWS, which it tells anyone; empty if it cannot be learned."""
    return _header(f"{service}/{bucket}", "x-amz-bucket-region")


def asked_clock(endpoint: str) -> float | None:
    """The seconds that this machine's clock is ahead of a server's; None if it cannot be learned."""
    told = _header(endpoint, "date")
    try:
        return time.time() - parsedate_to_datetime(told).timestamp() if told else None
    except ValueError:
        return None


def _header(url: str, name: str) -> str:
    # The client library does not show headers.
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=5) as answer:
            return str(answer.headers.get(name) or "")
    except urllib.error.HTTPError as refusal:
        # The usual case: no is as good an answer as yes.
        return str(refusal.headers.get(name) or "")
    except OSError:
        return ""
