"""Failures: from what the clouds really answer, through the real client, to a text that says which thing is wrong."""

from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from obstore.exceptions import GenericError

from holdfast.storage.cloud.cloud import Cloud
from holdfast.storage.cloud.facts import PERMISSIONS, Facts, Request, answer_in
from holdfast.storage.cloud.failures import TABLE, failure
from holdfast.storage.wrappers.retrying import is_transient
from tests.servers import Server
from tests.storage.cloud.canned import Canned
from tests.storage.cloud.canned import canned as make_canned
from tests.storage.cloud.clouds import cloud, options_of

VERBS: dict[str, Callable[[Cloud], object]] = {
    "list": lambda store: store.list("run", deep=True),
    "size": lambda store: store.size("run/a"),
    "get": lambda store: store.get("run/a"),
    "create": lambda store: store.create("run/a", b"x"),
    "put": lambda store: store.put("run/a", [b"x"], 1),
    "delete": lambda store: store.delete(["run/a"]),
}


@pytest.fixture
def canned() -> Iterator[Canned]:
    with make_canned() as told:
        yield told


def store_at(endpoint: str, scheme: str = "s3", more: dict[str, Any] | None = None) -> Cloud:
    own: dict[str, dict[str, Any]] = {
        "s3": {"access_key_id": "AK", "secret_access_key": "hush", "region": "eu-west-3"},
        "gs": {"token": "hush"},
        "az": {"account": "acc", "account_key": "aHVzaA=="},
        "http": {},
    }
    options = {"endpoint_url": endpoint, "retry_timeout": 0.2, "read_timeout": 2, **own[scheme], **(more or {})}
    if scheme == "http":
        del options["endpoint_url"]
        return Cloud("http", endpoint.removeprefix("http://"), options)
    return Cloud(scheme, "lab-bucket", options)


def said(store: Cloud, verb: str) -> OSError:
    with pytest.raises(OSError) as caught:
        VERBS[verb](store)
    text = str(caught.value)
    assert store.url in text
    assert "hush" not in text and "aHVzaA" not in text
    assert "Debug source" not in text and "<" not in text and "\n" not in text
    return caught.value


def xml(code: str, message: str = "", more: str = "") -> bytes:
    head = '<?xml version="1.0" encoding="UTF-8"?>\n'
    return f"{head}<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>".encode()


SKEWED = (
    "<RequestTime>20261121T160500Z</RequestTime><ServerTime>2026-11-21T15:35:00Z</ServerTime>"
    "<MaxAllowedSkewMilliseconds>900000</MaxAllowedSkewMilliseconds>"
)
MAC = (
    "<AuthenticationErrorDetail>The MAC signature found in the HTTP request 'abc=' is not the same as any computed "
    "signature. Server used following string to sign: 'GET'.</AuthenticationErrorDetail>"
)
OLD_SAS = (
    "<AuthenticationErrorDetail>Signature not valid in the specified time frame: Start [Fri, 20 Nov 2026] - Expiry "
    "[Sat, 21 Nov 2026] - Current [Sun, 22 Nov 2026]</AuthenticationErrorDetail>"
)

# Scheme, status, body, what the text says, whether another attempt may succeed.
ANSWERS: dict[str, tuple[str, int, bytes, str, bool]] = {
    "wrong key id": (
        "s3", 403, xml("InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist in our records."),
        "does not know the access key id .credentials: the options.*Check access_key_id", False),
    "wrong secret": (
        "s3", 403, xml("SignatureDoesNotMatch", "The request signature we calculated does not match"),
        "secret key does not belong to the access key id.*Check secret_access_key", False),
    "clock ahead": (
        "s3", 403, xml("RequestTimeTooSkewed", "The difference between the request time", SKEWED),
        "this machine's clock is 1800 s ahead of the server's", False),
    "expired token": (
        "s3", 400, xml("ExpiredToken", "The provided token has expired."), "session token .* has expired", False),
    "wrong token": (
        "s3", 400, xml("InvalidToken", "The provided token is malformed"), "session token .* is not valid", False),
    "wrong region": (
        "s3", 400, xml(
            "AuthorizationHeaderMalformed", "the region 'eu-west-3' is wrong; expecting 'us-west-2'",
            "<Region>us-west-2</Region>"),
        "is in the region 'us-west-2' and not 'eu-west-3'.*region=us-west-2", False),
    "redirected": ("s3", 301, xml("PermanentRedirect"), "not in the region 'eu-west-3'.*AWS_REGION", False),
    "no bucket": (
        "s3", 404, xml("NoSuchBucket", "The specified bucket does not exist"), "no bucket 'lab-bucket'", False),
    "quota": ("s3", 403, xml("QuotaExceeded"), "the store is full", False),
    "slow down": ("s3", 503, xml("SlowDown", "Please reduce your request rate."), "asks to slow down", True),
    "internal": ("s3", 500, xml("InternalError", "We encountered an internal error."), "InternalError", True),
    "gateway": ("s3", 502, b"", "502", True),
    "too many": ("s3", 429, b"", "asks to slow down", True),
    "request timeout": ("s3", 400, xml("RequestTimeout", "Your socket connection"), "RequestTimeout", True),
    "flipped": ("s3", 400, xml("XAmzContentSHA256Mismatch"), "changed on their way", True),
    "google permission": (
        "gs", 403, xml(
            "AccessDenied", "Access denied.",
            "<Details>me@lab.iam.gserviceaccount.com does not have storage.objects access</Details>"),
        "access denied.*me@lab.*does not have storage.objects access.*It takes storage.objects", False),
    "google token": ("gs", 401, xml("AuthenticationRequired", "Authentication required."), "not valid.*gcloud", False),
    "google bucket": (
        "gs", 404, xml("NoSuchBucket", "The specified bucket does not exist."), "no bucket 'lab-bucket'", False),
    "google rate": ("gs", 429, xml("SlowDown"), "asks to slow down", True),
    "azure key": (
        "az", 403, xml("AuthenticationFailed", "Server failed to authenticate the request.", MAC),
        "not a key of this storage account", False),
    "azure sas": (
        "az", 403, xml("AuthenticationFailed", "Server failed to authenticate the request.", OLD_SAS),
        "has expired", False),
    "azure clock": (
        "az", 403, xml(
            "AuthenticationFailed", "Server failed", "<AuthenticationErrorDetail>Request date header too old: "
            "'Sat, 21 Nov 2026 15:00:00 GMT'</AuthenticationErrorDetail>"),
        r"this machine's clock is \d+ s", False),
    "azure permission": (
        "az", 403, xml("AuthorizationPermissionMismatch", "This request is not authorized"),
        "access denied.*AuthorizationPermissionMismatch.*Storage Blob Data", False),
    "azure container": (
        "az", 404, xml("ContainerNotFound", "The specified container does not exist."),
        "no container 'lab-bucket'", False),
    "azure busy": ("az", 503, xml("ServerBusy", "The server is busy."), "asks to slow down", True),
    "web login": ("http", 401, b"", "credentials are missing", False),
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERS)
@pytest.mark.slow_cases(
    "clock ahead",
    "wrong token",
    "wrong region",
    "gateway",
    "too many",
    "request timeout",
    "google token",
    "google bucket",
    "azure sas",
    "azure clock",
    "azure permission",
    "azure container",
)
def test_what_clouds_answer(canned: Canned, name: str) -> None:
    scheme, status, body, text, transient = ANSWERS[name]
    canned.status, canned.body = status, body
    for verb in ("get", "size") if scheme == "http" else ("get", "put", "list"):
        error = said(store_at(canned.endpoint, scheme), verb)
        assert re.search(text, str(error)), str(error)
        assert is_transient(error) is transient
        assert not isinstance(error, FileNotFoundError)


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.slow_cases("list-az", "size-gs", "size-az", "create-gs", "create-az", "put-az", "delete-gs", "delete-az")
def test_a_denied_verb_names_its_permission(canned: Canned, scheme: str, verb: str) -> None:
    canned.status, canned.body = 403, xml("AccessDenied", "Access Denied")
    error = said(store_at(canned.endpoint, scheme), verb)
    assert error.errno == errno.EACCES
    assert PERMISSIONS[scheme][verb] in str(error)


def test_a_clock_is_compared_with_that_of_a_server_that_does_not_tell(canned: Canned) -> None:
    canned.status, canned.body = 403, xml("RequestTimeTooSkewed")
    canned.date = formatdate(time.time() + 7200, usegmt=True)
    found = re.search(
        r"clock is (\d+) s behind the server's. Set this machine's clock", str(said(store_at(canned.endpoint), "get"))
    )
    assert found and 7100 < int(found[1]) <= 7201
    canned.date = "never"
    assert "clock is wrong" in str(said(store_at(canned.endpoint), "get"))


def test_size_finds_the_reason_that_an_answer_to_head_has_not(canned: Canned) -> None:
    canned.status, canned.body = 403, xml("InvalidAccessKeyId")
    assert "does not know the access key id" in str(said(store_at(canned.endpoint), "size"))
    assert [asked[0] for asked in canned.asked] == ["HEAD", "GET"]


def test_a_store_that_knows_no_conditions_says_so(canned: Canned) -> None:
    canned.status, canned.body = 501, xml("NotImplemented", "A header you provided implies functionality")
    error = said(store_at(canned.endpoint), "create")
    assert error.errno == errno.ENOTSUP
    assert not is_transient(error)


def test_a_store_without_bulk_delete_is_told_how_to_do_without(canned: Canned) -> None:
    canned.status, canned.body = 501, xml("NotImplemented", "not implemented")
    assert "bulk_delete=false" in str(said(store_at(canned.endpoint), "delete"))
    canned.status, canned.body = 204, b""
    store_at(canned.endpoint, more={"bulk_delete": False}).delete(["a", "b"])
    # At once, so in any order.
    assert {(method, path) for method, path, _ in canned.asked[-2:]} == {
        ("DELETE", "/lab-bucket/a"),
        ("DELETE", "/lab-bucket/b"),
    }


def test_a_file_that_a_web_server_refuses_is_not_there(canned: Canned) -> None:
    canned.status = 403
    store = store_at(canned.endpoint, "http")
    assert store.size("a") is None
    with pytest.raises(FileNotFoundError, match="not for everyone: the server answered 403"):
        store.get("a")


@pytest.mark.parametrize("number", range(len(TABLE)))
@pytest.mark.parametrize("scheme", ["s3", "gs", "az", "https"])
def test_every_sentence_of_the_table_names_facts_that_there_are(number: int, scheme: str) -> None:
    row = TABLE[number]
    request = Request("get", scheme, "bucket", "key", ask_clock=lambda: 7.0)
    facts = Facts(request, answer_in(OSError("Server returned non-2xx status code: 400: <Error></Error>")))
    for sentence in (row.means, *([row.advice] if isinstance(row.advice, str) else row.advice.values())):
        assert "{" not in facts.filled(sentence)
    assert errno.errorcode[row.number]


def test_an_unknown_error_is_told_as_it_is() -> None:
    assert TABLE[-1].signs == ("",) and TABLE[-1].number == errno.EIO
    error = failure(ValueError("strange"), Request("get", "s3", "bucket", "key"))
    assert str(error) == f"[Errno {errno.EIO}] cannot read s3://bucket/key: ValueError: strange"


# Servers that are not there


def test_nobody_listens() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{held.getsockname()[1]}"
        error = said(store_at(endpoint), "get")
    assert "nobody listens at http://127.0.0.1" in str(error)
    assert is_transient(error)


NOT_SENT = """Generic S3 error: Error performing GET http://h/bucket/key in 2ms - HTTP error: error sending request

Debug source:
Generic {
    store: "S3",
    source: RetryError(
        RetryErrorImpl {
            method: GET,
            retries: 0,
            inner: Http(
                HttpError {
                    kind: Unknown,
                    source: reqwest::Error {
                        kind: Request,
                        source: hyper_util::client::legacy::Error(
                            Canceled,
                            hyper::Error(
                                Canceled,
                                "connection was not ready",
                            ),
                        ),
                    },
                },
            ),
        },
    ),
}"""
"""What the client says if a server closes a connection just as it is taken for a request: it does not try again."""


def test_a_connection_that_closes_before_the_request_goes_out() -> None:
    error = failure(GenericError(NOT_SENT), Request("get", "s3", "bucket", "key"))
    assert error.errno == errno.ECONNRESET and is_transient(error)


def test_silence_is_named() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        store = store_at(f"http://127.0.0.1:{silent.getsockname()[1]}", more={"read_timeout": 0.3})
        error = said(store, "get")
    assert "is silent" in str(error) and "read_timeout" in str(error)
    assert error.errno == errno.ETIMEDOUT and is_transient(error)


def test_a_host_that_does_not_exist() -> None:
    error = said(store_at("http://nobody.invalid"), "get")
    assert "http://nobody.invalid was not found" in str(error) and "Check endpoint_url" in str(error)


def test_an_endpoint_without_tls_that_must_have_it(canned: Canned) -> None:
    error = said(store_at(canned.endpoint, more={"allow_http": False}), "get")
    assert "has no TLS" in str(error) and "allow_http" in str(error)
    error = said(store_at(canned.endpoint.replace("http", "https")), "get")
    assert "does not speak TLS" in str(error)


def test_certificates(ceph_ssl: Server) -> None:
    assert ceph_ssl.folder is not None
    authority = {"ca_file": str(ceph_ssl.folder / "cert.pem")}
    bucket = ceph_ssl.bucket()
    error = said(cloud(ceph_ssl, bucket), "get")
    assert "its authority is unknown" in str(error) and "ca_file" in str(error)
    elsewhere = ceph_ssl.endpoint.replace("127.0.0.1", "localhost")
    error = said(Cloud("s3", bucket, {**options_of(ceph_ssl), "endpoint_url": elsewhere, **authority}), "get")
    assert "it is for another host name" in str(error)
    for accepted in (authority, {"verify_tls": False}):
        store = cloud(ceph_ssl, bucket, accepted)
        store.put("a", [b"x"], 1)
        assert store.get("a").data == b"x"


def test_a_missing_ca_file_is_no_missing_file_of_the_store(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ca_file .*none.pem cannot be read"):
        store_at("https://127.0.0.1:1", more={"ca_file": str(tmp_path / "none.pem")}).size("a")


# A real server that checks signatures


@pytest.mark.parametrize("verb", VERBS)
def test_a_real_server_tells_key_and_secret_apart(ceph: Server, verb: str) -> None:
    bucket = ceph.bucket()
    assert "does not know the access key id" in str(said(cloud(ceph, bucket, {"access_key_id": "NOBODY"}), verb))
    wrong = cloud(ceph, bucket, {"secret_access_key": "hush"})
    assert "secret key does not belong to the access key id" in str(said(wrong, verb))
    denied = said(Cloud("s3", bucket, {"endpoint_url": ceph.endpoint, "anonymous": True}), verb)
    assert f"It takes {PERMISSIONS['s3'][verb]}" in str(denied)


def test_azure_s_emulator_tells_a_wrong_key(azurite: Server) -> None:
    error = said(cloud(azurite, more={"account_key": "aHVzaA=="}), "put")
    assert "account_key" in str(error) or "account key" in str(error)
    assert "no container" in str(said(cloud(azurite, "nobody-made-this"), "put"))
