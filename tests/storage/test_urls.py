"""URLs: what names what, which options there are, and that a wrong one is refused without a secret in the text."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.storage.cloud.cloud import Cloud
from holdfast.storage.cloud.options import OPTIONS
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import at, location
from holdfast.storage.wrappers.retrying import Retrying
from holdfast.testing import Memory
from tests.servers import Server
from tests.storage.cloud.clouds import options_of


@pytest.fixture(autouse=True)
def nothing_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No settings of the machine that runs the tests; the folder of ``~``."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "R2_", "WEKA_", "GOOGLE_", "AZURE_", "GCE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def client(place: Any) -> Cloud:
    assert isinstance(place, StorePlace)
    assert isinstance(place.store, Retrying)
    inside = place.store.store
    assert isinstance(inside, Cloud)
    return inside


def told(url: str, options: dict[str, Any] | None = None) -> tuple[str, str, str, dict[str, Any]]:
    """Scheme, bucket, key and options."""
    place = at(url, options)
    store = client(place)
    return store.scheme, store.bucket, place.key, store.options


# Local paths


def test_an_empty_path_is_not_the_working_directory() -> None:
    with pytest.raises(ValueError, match="the path is empty"):
        location("")


@pytest.mark.parametrize("path", ["run", "./run/../b", "/a//b/", "~/x", "~nobody-of-this-name/x", "a:b", "s3:", "C:/x"])
def test_local_paths_are_what_they_were(path: str) -> None:
    assert location(path) == Path(os.path.abspath(os.path.expanduser(path)))
    if path:
        assert location(Path(path)) == Path(os.path.abspath(os.path.expanduser(Path(path))))


@pytest.mark.parametrize("url", ["file:///a/b%20c", "file://localhost/a/b%20c", "FILE:///a/b%20c"])
def test_file_urls(url: str) -> None:
    assert location(url) == Path("/a/b c")


@pytest.mark.parametrize("url", ["file://host/a", "file://relative"])
def test_file_urls_of_other_hosts_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="three slashes"):
        location(url)


def test_options_of_a_local_path_are_refused() -> None:
    with pytest.raises(ValueError, match="options are for URLs"):
        location("/a", {"region": "x"})
    with pytest.raises(ValueError, match="is a local path"):
        at("/a")


def test_a_place_is_passed_through() -> None:
    place = StorePlace(Memory(), "run")
    assert location(place) is place
    with pytest.raises(ValueError, match="holdfast.storage.at"):
        location(place, {"region": "x"})


@pytest.mark.parametrize("path", [Path("s3://bucket/run"), "s3:/bucket/run", Path("https://host/run")])
def test_a_url_that_pathlib_flattened_is_recognised(path: Any) -> None:
    with pytest.raises(ValueError, match="took one slash away"):
        location(path)


# Schemes


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run/step-1", ("s3", "bucket", "run/step-1", {})),
        ("S3A://bucket//run/", ("s3", "bucket", "run", {})),
        ("s3://bucket", ("s3", "bucket", "", {})),
        ("s3://bucket/a%20b/c+d é", ("s3", "bucket", "a%20b/c+d é", {})),
        ("s3://bucket/run?region=x&anonymous=yes", ("s3", "bucket", "run", {"region": "x", "anonymous": True})),
        ("gs://bucket/run", ("gs", "bucket", "run", {})),
        ("gcs://bucket/run", ("gs", "bucket", "run", {})),
        ("az://box/run?account=lab", ("az", "box", "run", {"account": "lab"})),
        ("az://box@lab/run", ("az", "box", "run", {"account": "lab"})),
        ("abfss://box@lab.dfs.core.windows.net/run", ("az", "box", "run", {"account": "lab"})),
        (
            "abfss://box@lab.dfs.core.chinacloudapi.cn/run",
            ("az", "box", "run", {"account": "lab", "endpoint_url": "https://lab.blob.core.chinacloudapi.cn"}),
        ),
        ("http://host:8000/a%20b/c", ("http", "host:8000", "a b/c", {})),
        ("https://bucket.s3.eu-west-3.amazonaws.com/run", ("https", "bucket.s3.eu-west-3.amazonaws.com", "run", {})),
        ("https://storage.googleapis.com/bucket/run", ("https", "storage.googleapis.com", "bucket/run", {})),
    ],
)
def test_schemes(url: str, expected: tuple[Any, ...]) -> None:
    assert told(url) == expected


def test_r2_is_the_endpoint_of_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="R2_ACCOUNT_ID"):
        at("r2://bucket/run")
    monkeypatch.setenv("R2_ACCOUNT_ID", "abc")
    auto = {"region": "auto", "endpoint_url": "https://abc.r2.cloudflarestorage.com"}
    assert told("r2://bucket/run") == ("r2", "bucket", "run", auto)
    assert told("r2://bucket/run?account=def")[3]["endpoint_url"] == "https://def.r2.cloudflarestorage.com"
    monkeypatch.setenv("R2_ENDPOINT_URL", "https://r2.example")
    assert told("r2://bucket/run")[3]["endpoint_url"] == "https://r2.example"


def test_weka_needs_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="WEKA_ENDPOINT_URL"):
        at("weka://bucket/run")
    monkeypatch.setenv("WEKA_ENDPOINT_URL", "https://weka.example:9000")
    assert told("weka://bucket/run") == ("weka", "bucket", "run", {"endpoint_url": "https://weka.example:9000"})


def test_endpoint_and_region_come_from_options_then_environment_then_profile(
    monkeypatch: pytest.MonkeyPatch, nothing_around: Path
) -> None:
    (nothing_around / ".aws").mkdir()
    (nothing_around / ".aws/config").write_text(
        "[default]\nregion = of-default\n[profile lab]\nregion = of-lab\nservices = own\n"
        "[services own]\ns3 =\n  endpoint_url = http://of-lab:1\n"
    )
    assert told("s3://b/k")[3] == {"region": "of-default"}
    assert told("s3://b/k?profile=lab")[3] == {
        "region": "of-lab", "endpoint_url": "http://of-lab:1", "profile": "lab",
    }  # fmt: skip
    monkeypatch.setenv("AWS_PROFILE", "lab")
    assert told("s3://b/k")[3] == {"region": "of-lab", "endpoint_url": "http://of-lab:1"}
    monkeypatch.setenv("AWS_REGION", "of-env")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://of-env:1")
    assert told("s3://b/k")[3] == {"region": "of-env", "endpoint_url": "http://of-env:1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://of-s3:1")
    assert told("s3://b/k")[3]["endpoint_url"] == "http://of-s3:1"
    assert told("s3://b/k?endpoint_url=http://asked:1", {"region": "asked"})[3] == {
        "region": "asked", "endpoint_url": "http://asked:1",
    }  # fmt: skip


# Refused


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("hdfs://host/run", "no store for hdfs://"),
        ("s3:///run", "names no bucket"),
        ("https:///run", "names no host"),
        ("s3://bucket/a/../b", "'.' or '..'"),
        ("s3://buc ket/a", "character"),
        ("s3://bucket/a?endpoint=x", "did you mean 'endpoint_url'"),
        ("s3://bucket/a?endpoint_url=10.0.0.1:9000", "http://host:port"),
        ("s3://bucket/a?endpoint_url=http://u:hush@host", "http://host:port"),
        ("s3://bucket/a?anonymous=perhaps", "true or false"),
        ("s3://bucket/a?concurrency=0", "above 0"),
        ("s3://bucket/a?read_timeout=soon", "number of seconds"),
        ("s3://AK:hush@bucket/a", "credentials in it"),
        ("https://me:hush@host/a", "credentials in it"),
        ("s3://bucket/a?secret_access_key=hush", "does not belong in a URL"),
        ("az://box/a?account=x&sas_token=hush", "does not belong in a URL"),
        ("az://box@lab/a?sv=2022&sig=hush", "no option 'sv'"),
        ("https://host/a?X-Amz-Signature=hush", "no option 'X-Amz-Signature'"),
    ],
)
def test_urls_that_cannot_be_meant(url: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        location(url)
    assert text in str(caught.value)
    assert "hush" not in str(caught.value)


def test_a_secret_of_the_wrong_kind_is_not_shown() -> None:
    with pytest.raises(ValueError) as caught:
        at("s3://bucket", {"secret_access_key": b"hush"})
    assert "hush" not in str(caught.value)


def test_a_secret_is_in_no_text_of_a_place() -> None:
    place = at("s3://bucket/run", {"access_key_id": "AK", "secret_access_key": "hush", "endpoint_url": "http://h:1"})
    assert "hush" not in f"{place} {place!r} {client(place)!r}"
    assert str(place / "a") == "s3://bucket/run/a"


def test_the_public_text_names_every_option() -> None:
    assert at.__doc__ is not None
    assert set(OPTIONS) <= set(re.findall(r"\w+", at.__doc__))


# One store


def test_one_store_for_the_same_bucket_and_options() -> None:
    first = at("s3://bucket/a", {"region": "x"})
    assert at("s3://bucket/b/c?region=x").store is first.store
    assert at("s3a://bucket?region=x").store is first.store
    assert at("s3://bucket/a", {"region": "y"}).store is not first.store
    assert at("s3://other/a", {"region": "x"}).store is not first.store


def test_a_place_reads_and_writes(moto: Server) -> None:
    place = at(f"s3://{moto.bucket()}/run", options_of(moto))
    place.store.put((place / "a/b").key, [b"bytes"], 5)
    assert (place / "a" / "b").read_bytes() == b"bytes"
    assert [str(found) for found in place.iterdir()] == [f"{place}/a"]
    assert place.is_dir() and not place.is_file() and (place / "a/b").is_file()
    with (place / "a/b").open() as file:
        assert file.read() == b"bytes"


def test_an_endpoint_in_the_query(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "moto")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "moto")
    # What the client library would prefer, and must not.
    place = at(f"s3://{moto.bucket()}/run/a?endpoint_url={moto.endpoint}&region=us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    place.store.put(place.key, [b"x"], 1)
    assert place.read_bytes() == b"x"


@pytest.mark.slow
def test_without_the_client_library_a_url_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['obstore'] = None\n"
        "from importlib import util; real = util.find_spec\n"
        "util.find_spec = lambda name, *a: None if name == 'obstore' else real(name, *a)\n"
        "from holdfast.storage.urls import location\n"
        "from holdfast.errors import Unsupported\n"
        "location('/tmp')\n"
        "try: location('s3://bucket/run')\n"
        "except Unsupported as error: assert 'pip install \"holdfast-torch[cloud]\"' in str(error), error\n"
        "else: raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=240, check=True)
