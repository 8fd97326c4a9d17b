"""The client: the contract of every store on each kind of server, and what only the client does."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from html import unescape
from pathlib import Path

import pytest

from holdfast.storage.cloud.cloud import Cloud
from holdfast.storage.cloud.feed import part_size
from holdfast.storage.store import Store
from holdfast.testing import ReadOnlyContract, StoreContract
from tests.servers import Server
from tests.servers.faults import Fault, Proxy
from tests.storage.cloud.clouds import cloud, options_of

MIB = 1 << 20


class TestMoto(StoreContract):
    @pytest.fixture
    def store(self, moto: Server) -> Store:
        return cloud(moto)

    @pytest.mark.slow  # each of a thousand files is a request
    def test_more_files_than_a_page(self, store: Store, below: str) -> None:
        super().test_more_files_than_a_page(store, below)


class TestCeph(StoreContract):
    @pytest.fixture
    def store(self, ceph: Server) -> Store:
        return cloud(ceph)


class TestAzurite(StoreContract):
    @pytest.fixture
    def store(self, azurite: Server) -> Store:
        return cloud(azurite)


class TestGoogle(StoreContract):
    @pytest.fixture
    def store(self, gcs: Server) -> Store:
        return cloud(gcs)


class _Web(ReadOnlyContract):
    def served(self, server: Server) -> tuple[Store, Mapping[str, bytes]]:
        folder = server.bucket()
        there = {f"{folder}/few": b"few", f"{folder}/none": b"", f"{folder}/in ner/m%any+": os.urandom(70_001)}
        assert server.folder is not None
        for key, content in there.items():
            file = server.folder / key
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(content)
        return Cloud("http", server.endpoint.removeprefix("http://"), {"retry_timeout": 3}), there


class TestNginx(_Web):
    @pytest.fixture
    def both(self, nginx: Server) -> tuple[Store, Mapping[str, bytes]]:
        return self.served(nginx)

    @pytest.fixture
    def store(self, both: tuple[Store, Mapping[str, bytes]]) -> Store:
        return both[0]

    @pytest.fixture
    def there(self, both: tuple[Store, Mapping[str, bytes]]) -> Mapping[str, bytes]:
        return both[1]


class TestNginxWithoutRanges(TestNginx):
    @pytest.fixture
    def both(self, nginx_without_ranges: Server) -> tuple[Store, Mapping[str, bytes]]:
        return self.served(nginx_without_ranges)


@pytest.fixture
def proxy(moto: Server) -> Iterator[Proxy]:
    with Proxy(moto.endpoint) as made:
        yield made


@pytest.fixture
def behind(moto: Server, proxy: Proxy) -> Cloud:
    """A store on moto, through the proxy."""
    return cloud(moto.through(proxy.endpoint), moto.bucket())


# Requests


def test_keys_reach_the_server_as_they_are(moto: Server) -> None:
    store = cloud(moto)
    keys = [f"k/{name}" for name in ("a%2Fb", "a b", "a+b", "é", "@x", "[0:2]", "a=b", "~", "%5B", "a%b")]
    for key in keys:
        store.put(key, [key.encode()], len(key.encode()))
    assert [entry.key for entry in store.list("k", deep=True).files] == sorted(keys)

    with urllib.request.urlopen(f"{moto.endpoint}/{store.bucket}?list-type=2") as answer:
        there = [unescape(key) for key in re.findall("<Key>(.*?)</Key>", answer.read().decode())]
    assert sorted(there) == sorted(keys)


def test_how_many_requests_each_verb_takes(behind: Cloud, proxy: Proxy) -> None:
    def asked() -> list[str]:
        methods = [exchange.method for exchange in proxy.requests()]
        proxy.clear()
        return methods

    # The first file that is missing may be a bucket that is; the next one is not.
    assert behind.size("absent") is None
    assert behind.size("absent") is None
    assert asked() == ["HEAD", "GET", "HEAD"]
    behind.put("a", [b"0123456789"], 10)
    assert behind.size("a") == 10
    assert asked() == ["PUT", "HEAD"]
    assert behind.get("a", 2, 5) == (b"234", 10)
    assert behind.get("a") == (b"0123456789", 10)
    assert asked() == ["GET", "GET"]
    assert behind.create("b", b"1")
    assert not behind.create("b", b"2")
    assert asked() == ["PUT", "PUT"]
    behind.list("", deep=True)
    behind.delete(["a", "b", "absent"])
    assert asked() == ["GET", "POST"]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3 * MIB, 5 * MIB, 23 * MIB], ids=["smaller", "equal", "larger"])
def test_an_upload_has_the_parts_that_are_asked_for_and_no_more_at_once(moto: Server, proxy: Proxy, chunk: int) -> None:
    proxy.latency = 0.2
    store = cloud(moto.through(proxy.endpoint), moto.bucket(), {"part_size": 5 * MIB, "concurrency": 2})
    data = os.urandom(23 * MIB)
    chunks = (memoryview(data)[begin : begin + chunk] for begin in range(0, len(data), chunk))
    store.put("big", chunks, len(data))
    parts = [exchange for exchange in proxy.requests() if "partNumber" in exchange.query]
    assert sorted(part.up for part in parts) == [3 * MIB, *[5 * MIB] * 4]
    at_once = [sum(other.began <= part.began < (other.ended or 1e99) for other in parts) for part in parts]
    assert max(at_once) == 2
    assert bytes(memoryview(store.get("big").data)) == data


def test_parts_grow_with_what_is_uploaded() -> None:
    # 10,000 parts are the most; what is under way at once grows with them.
    assert part_size(0, 8 * MIB) == part_size(80_000 * MIB, 8 * MIB) == 8 * MIB
    assert part_size(80_000 * MIB + 1, 8 * MIB) == 9 * MIB
    assert part_size(5 << 40, 8 * MIB) * 10_000 >= 5 << 40


def test_nothing_is_left_of_an_upload_that_ended_early(moto: Server) -> None:
    store = cloud(moto)

    def chunks() -> Iterator[bytes]:
        yield bytes(10 * MIB)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.put("big", chunks(), 20 * MIB)
    with pytest.raises(ValueError, match="was given 10485760 bytes, not 20971520"):
        store.put("big", [bytes(10 * MIB)], 20 * MIB)
    with urllib.request.urlopen(f"{moto.endpoint}/{store.bucket}?uploads") as answer:
        assert b"<Upload>" not in answer.read()
    assert store.size("big") is None


# Lost answers, silence, refusals


def test_a_create_whose_answer_was_lost_is_ours(behind: Cloud, proxy: Proxy) -> None:
    proxy.add(Fault("reset_after", method="PUT"))
    assert behind.create("a", b"ours") is True
    assert behind.create("a", b"ours, of another") is False


def test_a_create_that_was_lost_to_another_is_not_ours(behind: Cloud, proxy: Proxy) -> None:
    behind.put("a", [b"theirs"], 6)
    proxy.add(Fault("reset_after", method="PUT"))
    assert behind.create("a", b"ours") is False
    assert behind.get("a").data == b"theirs"


def test_a_create_that_was_refused_and_then_too_late_is_looked_at(behind: Cloud, proxy: Proxy) -> None:
    proxy.add(Fault("status", status=503, method="PUT"))
    assert behind.create("a", b"ours") is True
    proxy.add(Fault("status", status=409, method="PUT"))
    assert behind.create("a", b"another") is False
    proxy.add(Fault("status", status=409, method="PUT"))
    with pytest.raises(OSError, match="ConditionalRequestConflict") as caught:
        behind.create("b", b"ours")
    assert caught.value.transient  # type: ignore[attr-defined]


def test_silence_ends_an_attempt_and_the_next_one_succeeds(moto: Server, proxy: Proxy) -> None:
    store = cloud(moto.through(proxy.endpoint), moto.bucket(), {"read_timeout": 0.5, "write_timeout": 0.5})
    proxy.add(Fault("stall", method="PUT"), Fault("stall", method="GET"), Fault("stall_body", method="GET", nth=2))
    data = os.urandom(MIB)
    store.put("a", [data], len(data))
    assert store.get("a").data == data
    assert store.get("a").data == data
    assert proxy.fired() == 3


@pytest.mark.slow
def test_an_upload_may_be_slower_than_a_read(moto: Server) -> None:
    # The server says nothing while a part comes in: that is no silence.
    with Proxy(moto.endpoint, bandwidth=MIB) as slow:
        store = cloud(moto.through(slow.endpoint), moto.bucket(), {"read_timeout": 1.5, "retry_timeout": 0.1})
        store.put("a", [bytes(3 * MIB)], 3 * MIB)
        assert store.size("a") == 3 * MIB


def test_a_reset_connection_is_tried_again(behind: Cloud, proxy: Proxy) -> None:
    data = os.urandom(20 * MIB)
    proxy.add(Fault("reset_upload", path="partNumber"), Fault("reset_body", method="GET"))
    behind.put("a", [data], len(data))
    assert behind.get("a").data == data
    assert proxy.fired() == 2


def test_no_bucket_is_no_missing_file(moto: Server) -> None:
    store = cloud(moto, "holdfast-nobody-made-this")
    for ask in (
        lambda: store.size("a"),
        lambda: store.get("a"),
        lambda: store.list("a", deep=True),
        lambda: store.list("", deep=False),
        lambda: store.put("a", [b"x"], 1),
        lambda: store.create("a", b"x"),
        lambda: store.delete(["a"]),
    ):
        with pytest.raises(OSError, match="there is no bucket 'holdfast-nobody-made-this'") as caught:
            ask()
        assert not isinstance(caught.value, FileNotFoundError)


def test_credentials_that_were_good_are_looked_for_again(
    ceph: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(key: str) -> None:
        file.write_text(f"[lab]\naws_access_key_id = {key}\naws_secret_access_key = {options['secret_access_key']}\n")

    file = tmp_path / "credentials"
    options = options_of(ceph)
    write(options["access_key_id"])
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with Proxy(ceph.endpoint) as proxy:
        profile = {"endpoint_url": proxy.endpoint, "region": "us-east-1", "profile": "lab", "retry_timeout": 1}
        store = Cloud("s3", ceph.bucket(), profile)
        store.put("a", [b"1"], 1)
        assert store.get("a").data == b"1"
        write("REPLACED")
        assert store.get("a").data == b"1", "what was read holds for some minutes"
        proxy.add(Fault("status", status=400, code="ExpiredToken"))
        with pytest.raises(OSError, match="has expired") as caught:
            store.get("a")
        assert caught.value.transient  # type: ignore[attr-defined]
        with pytest.raises(OSError, match="the access key id .credentials: the profile 'lab' of") as caught:
            store.get("a")
        write(options["access_key_id"])
        assert store.get("a").data == b"1"


# Processes


def test_a_spec_makes_the_same_store_in_another_process(moto: Server) -> None:
    store = cloud(moto)
    store.put("a", [b"bytes"], 5)
    code = (
        "import json, sys; from holdfast.storage.cloud.cloud import Cloud;"
        "store = Cloud.from_spec(json.loads(sys.argv[1])); print(bytes(store.get('a').data).decode(), store.url)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, json.dumps(store.spec)], capture_output=True, text=True, timeout=240, check=True
    )
    assert told.stdout.split() == ["bytes", store.url]
    assert pickle.loads(pickle.dumps(store)).get("a").data == b"bytes"


def test_the_client_needs_neither_torch_nor_the_package(moto: Server) -> None:
    # The writer process runs it in a plain interpreter.
    package = Path(__file__).parents[3] / "holdfast"
    code = (
        "import json, sys, types\n"
        "sys.modules['holdfast'] = stub = types.ModuleType('holdfast'); stub.__path__ = [sys.argv[2]]\n"
        "from holdfast.storage.cloud.cloud import Cloud\n"
        "Cloud.from_spec(json.loads(sys.argv[1])).put('a', [b'x'], 1)\n"
        "bad = {'torch', 'msgspec', 'numpy', 'boto3'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(cloud(moto).spec), str(package)], timeout=240, check=True)


@pytest.mark.slow
def test_after_a_fork_every_verb_says_so_instead_of_hanging(moto: Server) -> None:
    code = f"""
import errno, os
from holdfast.storage.cloud.cloud import Cloud
options = {options_of(moto)!r}
store = Cloud("s3", {moto.bucket()!r}, options)
early = os.fork()
if not early:
    store.put("early", [b"x"], 1)
    os._exit(0)
assert os.waitpid(early, 0)[1] == 0
store.put("a", [b"x"], 1)
late = os.fork()
if not late:
    for asked in (
        lambda: store.get("a"),
        lambda: store.put("a", [b"x"], 1),
        lambda: store.list("", deep=True),
        lambda: Cloud("s3", "another", options).size("a"),
    ):
        try:
            asked()
        except OSError as error:
            assert error.errno == errno.EDEADLK and "forked" in str(error) and "spawn" in str(error), error
        else:
            os._exit(3)
    os._exit(0)
assert os.waitpid(late, 0)[1] == 0
assert store.size("early") == store.size("a") == 1
"""
    subprocess.run([sys.executable, "-c", code], timeout=240, check=True)


def test_many_threads_make_one_client(behind: Cloud) -> None:
    behind.put("a", [b"x"], 1)
    other = Cloud.from_spec(behind.spec)
    made: list[object] = []
    threads = [threading.Thread(target=lambda: made.append(other.size("a"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert made == [1] * 8
    assert len(other._clients) == 1


# What is never told


def test_secrets_are_in_no_error_and_no_repr(moto: Server) -> None:
    store = cloud(moto, "nobucket", {"secret_access_key": "hush-hush", "session_token": "very-hush"})
    with pytest.raises(OSError) as caught:
        store.put("hush-hush", [b"x"], 1)
    for text in (repr(store), str(caught.value), store.url):
        assert "very-hush" not in text
    assert "hush-hush" not in repr(store)


# Web servers


def test_a_web_server_can_only_be_read(nginx: Server) -> None:
    store = Cloud("http", nginx.endpoint.removeprefix("http://"))
    for ask in (lambda: store.put("a", [b"x"], 1), lambda: store.create("a", b"x"), lambda: store.delete(["a"])):
        with pytest.raises(OSError, match="web server can be read only") as caught:
            ask()
        assert caught.value.errno == errno.EROFS


# Folders that consoles make


def test_an_object_that_stands_for_a_folder_is_no_file(moto: Server) -> None:
    store = cloud(moto)
    request = urllib.request.Request(f"{moto.endpoint}/{store.bucket}/run/step/", method="PUT", data=b"")
    urllib.request.urlopen(request).close()
    store.put("run/step/a", [b"x"], 1)
    assert [entry.key for entry in store.list("run", deep=True).files] == ["run/step/a"]
    found = store.list("run", deep=False)
    assert (found.files, found.folders) == ([], ["run/step"])
    assert [entry.key for entry in store.list("run/step", deep=False).files] == ["run/step/a"]
