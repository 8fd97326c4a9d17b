"""Each server answers obstore as a store of its kind does, also through the proxy."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import obstore
import pytest
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from tests.servers import Server, sigv4
from tests.servers.faults import Fault, Proxy

pytestmark = pytest.mark.slow  # the tests' own servers: `make test-all`

BLOB = bytes(range(256)) * 4096 * 12  # 12 MiB
STORES = ["moto", "ceph", "azurite", "gcs"]


# Any: what from_url promises is a union of all stores, of which each function takes another part.
def opened(server: Server, bucket: str, **options: str) -> Any:
    options = {**server.options, **options}
    return from_url(server.url(bucket), config=options, client_options=server.client_options)  # type: ignore[call-overload]


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest) -> Server:
    lent: Server = request.getfixturevalue(request.param)
    return lent


@pytest.fixture(params=STORES)
def proxied(request: pytest.FixtureRequest) -> Iterator[tuple[Server, Proxy]]:
    lent: Server = request.getfixturevalue(request.param)
    with Proxy(lent.endpoint) as proxy:
        yield lent.through(proxy.endpoint), proxy


def paths(store: Any) -> list[str]:
    return sorted(meta["path"] for meta in obstore.list(store).collect())


def test_put_get_list_delete(server: Server) -> None:
    store = opened(server, server.bucket())
    names = ["a/b/3=ü", "a/b/two words", "a/one", "four"]
    for name in names:
        obstore.put(store, name, name.encode())
    assert bytes(obstore.get(store, "a/b/3=ü").bytes()) == "a/b/3=ü".encode()
    assert bytes(obstore.get_range(store, "a/one", start=2, end=4)) == b"on"
    if server.kind != "azurite":
        # Azure has no such ranges; the client refuses.
        assert bytes(obstore.get(store, "a/one", options={"range": {"suffix": 2}}).bytes()) == b"ne"
    assert obstore.head(store, "four")["size"] == 4
    assert paths(store) == names
    listed = obstore.list_with_delimiter(store, "a")
    assert (listed["common_prefixes"], [meta["path"] for meta in listed["objects"]]) == (["a/b"], ["a/one"])
    obstore.delete(store, ["a/one", "a/b/3=ü"])
    assert paths(store) == ["a/b/two words", "four"]
    with pytest.raises(FileNotFoundError):
        obstore.get(store, "a/one")


def test_an_upload_in_parts(server: Server) -> None:
    store = opened(server, server.bucket())
    obstore.put(store, "big", BLOB, chunk_size=5 << 20, max_concurrency=4)
    assert bytes(obstore.get(store, "big").bytes()) == BLOB
    assert bytes(obstore.get_range(store, "big", start=(5 << 20) - 3, length=6)) == BLOB[(5 << 20) - 3 :][:6]
    assert obstore.head(store, "big")["size"] == len(BLOB)
    obstore.put(store, "big", BLOB[:-1], chunk_size=5 << 20)
    assert obstore.head(store, "big")["size"] == len(BLOB) - 1
    assert paths(store) == ["big"]


@pytest.mark.parametrize("name", ["ceph", "gcs"])
def test_a_long_list_comes_in_pages(name: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(name)
    with Proxy(server.endpoint) as proxy:
        store = opened(server.through(proxy.endpoint), server.bucket())
        names = [f"n/{number:04d}" for number in range(1005)]
        for each in names:
            obstore.put(store, each, b"")
        assert paths(store) == names
        assert len(obstore.list_with_delimiter(store, "n")["objects"]) == len(names)
        assert sum("continuation-token" in exchange.query for exchange in proxy.requests()) == 2


def test_buckets_are_apart_and_have_to_be_there(server: Server) -> None:
    one, other = opened(server, server.bucket()), opened(server, server.bucket())
    obstore.put(one, "x", b"1")
    assert paths(other) == []
    with pytest.raises(FileNotFoundError):
        obstore.put(opened(server, "holdfast-no-such-bucket"), "x", b"1")


def test_a_second_create_fails(server: Server) -> None:
    store = opened(server, server.bucket())
    obstore.put(store, "x", b"1", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "x", b"2", mode="create")
    assert bytes(obstore.get(store, "x").bytes()) == b"1"


def test_a_store_that_ignores_conditions(lying_gcs: Server) -> None:
    store = opened(lying_gcs, lying_gcs.bucket())
    obstore.put(store, "x", b"1", mode="create")
    obstore.put(store, "x", b"2", mode="create")
    assert bytes(obstore.get(store, "x").bytes()) == b"2"


def test_https_with_a_certificate_that_only_its_client_trusts(ceph_ssl: Server) -> None:
    bucket = ceph_ssl.bucket()
    assert ceph_ssl.endpoint.startswith("https://")
    store = opened(ceph_ssl, bucket)
    obstore.put(store, "x", BLOB)
    assert bytes(obstore.get(store, "x").bytes()) == BLOB
    stranger = opened(replace(ceph_ssl, client_options={"timeout": "5s"}), bucket)
    with pytest.raises(obstore.exceptions.GenericError):
        obstore.get(stranger, "x")


def finished_in_parts_if_new(server: Server) -> int:
    """The status of the end of an upload in parts, on condition that there is no such object; there is one."""

    def ask(
        method: str, query: dict[str, str], headers: dict[str, str] = {}, body: bytes = b""
    ) -> tuple[int, str, bytes]:
        access = {"key": server.options["access_key_id"], "secret": server.options["secret_access_key"]}
        status, told, answer = sigv4.request(server.endpoint, method, f"/{bucket}/x", query, headers, body, **access)
        return status, told.get("ETag", ""), answer

    bucket = server.bucket()
    assert ask("PUT", {}, body=b"first")[0] == 200
    started = ElementTree.fromstring(ask("POST", {"uploads": ""})[2])
    upload = {"uploadId": started.findtext("{*}UploadId", "")}
    etag = ask("PUT", {"partNumber": "1", **upload}, body=b"second")[1]
    part = f"<Part><PartNumber>1</PartNumber><ETag>{etag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{part}</CompleteMultipartUpload>".encode()
    return ask("POST", upload, {"if-none-match": "*"}, body)[0]


def test_the_one_ceph_lies_about_uploads_in_parts_and_the_other_does_not(ceph: Server, lying_ceph: Server) -> None:
    assert finished_in_parts_if_new(ceph) == 412
    assert finished_in_parts_if_new(lying_ceph) == 200


@pytest.mark.parametrize(
    ("name", "wrong", "error"),
    [
        ("ceph", {"secret_access_key": "wrong"}, PermissionDeniedError),
        ("ceph", {"access_key_id": "nobody"}, PermissionDeniedError),
        ("azurite", {"account_key": "d3Jvbmc="}, PermissionDeniedError),
        ("gcs", {"bearer_token": "wrong"}, UnauthenticatedError),
    ],
)
def test_wrong_credentials_are_refused(
    name: str, wrong: dict[str, str], error: type[Exception], request: pytest.FixtureRequest
) -> None:
    server: Server = request.getfixturevalue(name)
    bucket = server.bucket()
    with pytest.raises(error):
        obstore.put(opened(server, bucket, **wrong), "x", b"1")
    assert paths(opened(server, bucket)) == []


def test_all_of_it_passes_through_the_proxy(proxied: tuple[Server, Proxy]) -> None:
    server, proxy = proxied
    store = opened(server, server.bucket())
    obstore.put(store, "a b/x", b"1234567")
    obstore.put(store, "big", BLOB, chunk_size=5 << 20, max_concurrency=4)
    assert bytes(obstore.get(store, "big").bytes()) == BLOB
    assert bytes(obstore.get_range(store, "a b/x", start=1, end=3)) == b"23"
    assert paths(store) == ["a b/x", "big"]
    seen = proxy.requests()
    assert [(e.range, e.down) for e in seen if e.range] == [("bytes=1-2", 2)]
    assert sum(e.up for e in seen) >= len(BLOB) + 7
    proxy.clear()
    proxy.add(
        Fault("reset", method="GET"), Fault("reset_body", method="GET", path="big"), Fault("status", method="PUT")
    )
    assert bytes(obstore.get(store, "big").bytes()) == BLOB
    obstore.put(store, "again", b"x")
    assert proxy.fired() == 3
    proxy.add(Fault("flip", path="a%20b"))
    obstore.delete(store, "big")
    assert "big" not in paths(store)


def test_a_create_whose_condition_is_ignored_is_an_overwrite(moto: Server) -> None:
    with Proxy(moto.endpoint) as proxy:
        proxy.add(Fault("ignore_conditions", times=None))
        store = opened(moto.through(proxy.endpoint), moto.bucket())
        obstore.put(store, "x", b"1", mode="create")
        obstore.put(store, "x", b"2", mode="create")
        assert bytes(obstore.get(store, "x").bytes()) == b"2"


def test_reading_over_http(nginx: Server, nginx_without_ranges: Server) -> None:
    for server in (nginx, nginx_without_ranges):
        bucket = server.bucket()
        assert server.folder is not None
        (server.folder / bucket / "two words").write_bytes(bytes(range(200)))
        store = opened(server, bucket)
        assert bytes(obstore.get(store, "two words").bytes()) == bytes(range(200))
        assert obstore.head(store, "two words")["size"] == 200
        with pytest.raises(FileNotFoundError):
            obstore.get(store, "three")
        if server is nginx:
            assert bytes(obstore.get_range(store, "two words", start=3, end=6)) == bytes([3, 4, 5])
        else:
            with pytest.raises(NotSupportedError):
                obstore.get_range(store, "two words", start=3, end=6)
            connection = http.client.HTTPConnection(server.endpoint.removeprefix("http://"), timeout=240)
            connection.request("GET", f"/{bucket}/two%20words", headers={"Range": "bytes=3-5"})
            answer = connection.getresponse()
            assert (answer.status, len(answer.read())) == (200, 200)
            connection.close()
