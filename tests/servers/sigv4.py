"""Requests signed the way of AWS (Signature Version 4), by hand: for buckets, and for what no client library would ask.

Called by the servers that speak S3, and by their tests. Never signs a body: it is UNSIGNED-PAYLOAD.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import ssl
from collections.abc import Mapping
from datetime import datetime, timezone
from urllib.parse import quote, urlencode, urlsplit

REGION = "us-east-1"
NOTHING: Mapping[str, str] = {}


def signed(
    method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], *, key: str, secret: str
) -> dict[str, str]:
    """``headers`` (names in lower case, host among them), with the signature, and what belongs to it."""
    now = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    headers = {**headers, "x-amz-content-sha256": "UNSIGNED-PAYLOAD", "x-amz-date": now}
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    asked = urlencode(sorted(query.items()), quote_via=quote, safe="")
    canonical = "\n".join([method, quote(path), asked, lines, names, "UNSIGNED-PAYLOAD"])
    scope = f"{now[:8]}/{REGION}/s3/aws4_request"
    to_sign = "\n".join(["AWS4-HMAC-SHA256", now, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = f"AWS4{secret}".encode()
    for part in (now[:8], REGION, "s3", "aws4_request", to_sign):
        signature = hmac.digest(signature, part.encode(), "sha256")
    credential = f"Credential={key}/{scope}, SignedHeaders={names}, Signature={signature.hex()}"
    return {**headers, "authorization": f"AWS4-HMAC-SHA256 {credential}"}


def request(
    endpoint: str,
    method: str,
    path: str,
    query: Mapping[str, str] = NOTHING,
    headers: Mapping[str, str] = NOTHING,
    body: bytes = b"",
    *,
    key: str,
    secret: str,
) -> tuple[int, Mapping[str, str], bytes]:
    """Status, headers and body of the answer to one signed request; certificates are not checked."""
    url = urlsplit(endpoint)
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        connection = http.client.HTTPSConnection(url.netloc, timeout=30, context=ssl._create_unverified_context())
    else:
        connection = http.client.HTTPConnection(url.netloc, timeout=30)
    told = signed(method, path, query, {**headers, "host": url.netloc}, key=key, secret=secret)
    asked = urlencode(query, quote_via=quote, safe="")
    try:
        connection.request(method, f"{quote(path)}?{asked}" if asked else quote(path), body, told)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers.items()), answer.read()
    finally:
        connection.close()


def make_bucket(endpoint: str, name: str, *, key: str, secret: str) -> None:
    """A bucket on an S3 server, path style."""
    status, _, body = request(endpoint, "PUT", f"/{name}", key=key, secret=secret)
    if status != 200:
        raise RuntimeError(f"the bucket {name} was not made: {status} {body.decode(errors='replace')}")
