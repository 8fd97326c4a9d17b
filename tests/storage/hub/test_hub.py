"""A repository of a hub as a store: the contract, one commit, ranges that are cut, the token, what errors say."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Mapping
from typing import Any

import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.hub.address import Address, parsed
from holdfast.storage.hub.client import _redirected as redirected
from holdfast.storage.hub.hub import Hub as Repository
from holdfast.storage.store import Store
from holdfast.storage.store_place import StorePlace
from holdfast.storage.urls import location
from holdfast.storage.wrappers.retrying import is_transient
from holdfast.testing import ReadOnlyContract
from tests.servers.hub import TOKEN, Hub

BIG = os.urandom(300_001)


def store_of(rest: str, **options: Any) -> Repository:
    """The store itself, without what repeats requests."""
    return Repository(parsed(rest)[0], options)


class TestContract(ReadOnlyContract):
    @pytest.fixture
    def there(self, hub: Hub) -> Mapping[str, bytes]:
        files = {
            "config.json": b"{}", "empty.txt": b"", "model.safetensors": BIG, "deep/er/model.safetensors": BIG[:70_001],
            "deep/%41 b+c/é#?&;~'.json": b"odd", "deep/none.bin": b"x",
        }  # fmt: skip
        hub.make("me/model", files)
        return files

    @pytest.fixture
    def store(self, hub: Hub) -> Store:
        return store_of("me/model")

    def folders(self, there: Mapping[str, bytes]) -> list[str]:
        return ["deep", "deep/er"]

    def test_listing(self, store: Store, there: Mapping[str, bytes]) -> None:
        assert [entry.key for entry in store.list("", deep=True).files] == sorted({*there, ".gitattributes"})
        level = store.list("", deep=False)
        assert [entry.key for entry in level.files] == [
            ".gitattributes",
            "config.json",
            "empty.txt",
            "model.safetensors",
        ]
        assert level.folders == ["deep"] and store.list("deep", deep=False).folders == ["deep/%41 b+c", "deep/er"]
        for nothing in ("absent", "config.json", "dee"):
            assert store.list(nothing, deep=True) == store.list(nothing, deep=False) == ([], [])


class TestPages(TestContract):
    @pytest.fixture
    def store(self, hub: Hub) -> Store:
        hub.page = 2
        return store_of("me/model")


def test_a_page_that_is_missing_is_no_end(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("me/model", {"deep/a": b"", "deep/b": b"", "deep/c": b""})
    hub.page, store = 2, store_of("me/model")
    ask = store._json

    def first_alone(url: str, doing: str) -> Any:
        if "cursor" in url:
            raise FileNotFoundError(2, "cannot list it")
        return ask(url, doing)

    monkeypatch.setattr(store, "_json", first_alone)
    with pytest.raises(FileNotFoundError):
        store.list("deep", deep=True)


class TestWithoutRanges(TestContract):
    @pytest.fixture
    def store(self, hub: Hub) -> Store:
        hub.has_ranges = False
        return store_of("datasets/me/data@v1")

    @pytest.fixture
    def there(self, hub: Hub) -> Mapping[str, bytes]:
        files = {"a.safetensors": BIG, "deep/er/b.json": b"deep"}
        hub.make("me/data", {"gone": b"1"}, kind="datasets").push({**files, "gone": None}, branch="v1")
        return files

    def test_listing(self, store: Store, there: Mapping[str, bytes]) -> None:
        assert {entry.key for entry in store.list("", deep=True).files} == {*there}


# URLs


@pytest.mark.parametrize(
    ("url", "repository", "revision", "key"),
    [
        ("hf://me/model", "me/model", "", ""),
        ("hf://me/model/", "me/model", "", ""),
        ("hf://me/model/a/b.pt", "me/model", "", "a/b.pt"),
        ("HF://me/model@v1.0/a@b", "me/model", "v1.0", "a@b"),
        ("hf://models/me/model@a%2Fb/c", "me/model", "a/b", "c"),
        ("hf://me/model@refs/pr/12/c", "me/model", "refs/pr/12", "c"),
        ("hf://me/model@refs/convert/parquet", "me/model", "refs/convert/parquet", ""),
        ("hf://datasets/me/x@dev", "datasets/me/x", "dev", ""),
    ],
)
def test_urls(url: str, repository: str, revision: str, key: str) -> None:
    place = location(url)
    assert isinstance(place, StorePlace) and place.key == key
    address: Address = place.store.store.address  # type: ignore[attr-defined]
    assert (address.path, address.revision) == (repository, revision)
    again = location(str(place))
    assert again == place and again.store.store.address == address  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(place)) == place


@pytest.mark.parametrize(
    "url",
    [
        "hf://", "hf://gpt2", "hf://gpt2@main/x", "hf://me/model@", "hf://me/mo del", "hf://dataset/me/x",
        "hf://buckets/me/x", "hf://me:pl4nted@hub/x/y", "hf://me/model/../x", "hf://me/model?token=pl4nted",
        "hf://pl4nted@me/model", "hf://me/model?nonsense=pl4nted",
    ],
)  # fmt: skip
def test_urls_that_name_no_repository(url: str) -> None:
    with pytest.raises(ValueError, match="hf://") as caught:
        location(url)
    assert "pl4nted" not in str(caught.value)


# One commit


def test_all_that_is_read_is_of_one_commit(hub: Hub) -> None:
    made = hub.make("me/model", {"a.json": b"old", "b.json": b"old"})
    opened, first = holdfast.storage.at("hf://me/model"), made.branches["main"]
    assert (opened / "a.json").read_bytes() == b"old"
    made.push({"a.json": b"new!", "b.json": b"new!"})
    assert (opened / "b.json").read_bytes() == b"old" and (opened / "b.json").size() == 3
    assert pickle.loads(pickle.dumps(opened / "b.json")).read_bytes() == b"old"
    assert (holdfast.storage.at("hf://me/model") / "b.json").read_bytes() == b"new!"
    assert holdfast.storage.at(f"hf://me/model@{first}/b.json").read_bytes() == b"old"


def test_a_commit_that_replaces_a_file_is_not_served_from_the_cache(hub: Hub, tmp_path: Any) -> None:
    from holdfast.storage.wrappers.layers import with_cache

    name, old, new = "big.safetensors", os.urandom(2 << 20), os.urandom(2 << 20)
    made = hub.make("me/model", {name: old})
    for content in (old, old, new):
        if content is new:
            made.push({name: new})
        place = with_cache(location("hf://me/model"), tmp_path / "cache")
        place.sizes_below()
        assert (place / name).read_bytes() == content
    made.push({"another": b"file"})
    hub.asked.clear()
    place = with_cache(location("hf://me/model"), tmp_path / "cache")
    place.sizes_below()
    assert (place / name).read_bytes() == new
    assert not [one for one in hub.asked if one.host == "second"], "the same content in another commit"


# Requests


def test_few_requests_and_no_token_for_another_host(hub: Hub) -> None:
    hub.make("me/model", {"model.safetensors": BIG, "config.json": b"{}"}, private=True)
    store = store_of("me/model", token=TOKEN)
    for begin in range(0, 250_000, 50_000):
        assert store.get("model.safetensors", begin, begin + 1000).data == BIG[begin : begin + 1000]
    assert store.get("config.json").data == b"{}"
    hosts = [one.host for one in hub.asked]
    assert hosts.count("second") == 5 and hosts.count("hub") == 2 + 1 + 2, "the redirect of a file is asked for once"
    assert {one.token for one in hub.asked if one.host == "second"} == {""}
    assert {one.token for one in hub.asked if one.host == "hub"} == {TOKEN}
    assert not [one for one in hub.asked if one.host == "second" and not one.range]


def test_an_address_that_has_expired_is_asked_for_again(hub: Hub) -> None:
    hub.make("me/model", {"model.safetensors": BIG})
    store = store_of("me/model")
    assert store.get("model.safetensors", 0, 10).data == BIG[:10]
    hub.age += 1
    assert store.get("model.safetensors", 10, 20).data == BIG[10:20]
    hub.asked.clear()
    assert store.get("model.safetensors", 20, 30).data == BIG[20:30] and len(hub.asked) == 1


def test_a_range_that_is_cut_goes_on_where_it_was_cut(hub: Hub) -> None:
    hub.make("me/model", {"model.safetensors": BIG})
    store = store_of("me/model")
    hub.cuts = [100_000, 1, 7]
    assert store.get("model.safetensors", 1000, 200_000).data == BIG[1000:200_000]
    ranges = [one.range for one in hub.asked if one.host == "second"]
    assert ranges == [f"bytes={begin}-199999" for begin in (1000, 101_000, 101_001, 101_008)]
    hub.cuts = [0]
    with pytest.raises(OSError, match="cannot read hf://me/model/model.safetensors: the connection") as caught:
        store.get("model.safetensors")
    assert is_transient(caught.value)
    hub.cuts = [0, 5, 0]
    assert holdfast.storage.at("hf://me/model/model.safetensors").read_bytes() == BIG


def test_a_hub_that_is_busy_is_asked_again(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    hub.faults = [(429, {"RateLimit": '"api";r=0;t=0'}), (503, {}), (500, {"Retry-After": "0"})]
    assert holdfast.storage.at("hf://me/model/config.json").read_bytes() == b"{}"
    hub.faults = [(429, {"RateLimit": '"api";r=0;t=77'})]
    with pytest.raises(OSError, match="asks to slow down.*those who log in") as caught:
        store_of("me/model").list("", deep=True)
    assert caught.value.retry_after == 77  # type: ignore[attr-defined]


def test_connections_are_kept_and_survive_a_server_that_closes_them(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    store = store_of("me/model", read_timeout=30.0)
    assert store.size("config.json") == 2
    (idle,) = [kept for kept in store.client._idle.values() if kept]
    idle[0][1].sock.shutdown(2)
    assert store.get("config.json").data == b"{}"
    assert sum(map(len, store.client._idle.values())) == 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("ftp://127.0.0.1/x?signature=pl4nted", "redirects to ftp://127.0.0.1/x, without TLS"),
        ("http://127.0.0.1:port/pl4nted", "redirects to what is no address"),
        ("/somewhere?signature=pl4nted", "nothing of GET /somewhere"),
        ("/é ü", "nothing of GET /%"),
    ],
)
def test_redirects_that_no_hub_makes(hub: Hub, target: str, text: str) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    hub.faults = [(302, {"Location": target})]
    with pytest.raises(OSError, match=text) as caught:
        store_of("me/model").size("x")
    assert "pl4nted" not in str(caught.value)


def test_redirects_without_end(hub: Hub) -> None:
    hub.faults = [(302, {"Location": "/again"})] * 9
    with pytest.raises(OSError, match="again and again"):
        store_of("me/model").size("x")


def test_a_redirect_away_from_tls_is_refused() -> None:
    assert redirected("https://hub/a/b", "../c?d=e%2F") == "https://hub/c?d=e%2F"
    assert redirected("http://hub/a", "https://host/b") == "https://host/b"
    with pytest.raises(OSError, match="https://hub/a redirects to http://host/b, without TLS"):
        redirected("https://hub/a", "http://user@host/b?signature=x")


@pytest.mark.parametrize(
    "rows",
    [[{"type": "file", "path": "../x", "size": 1}], [{"type": "file", "path": "x", "size": -1}], [7], [{"path": "x"}]],
)
def test_a_listing_that_no_hub_sends(hub: Hub, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    store = store_of("me/model")
    assert store.commit
    monkeypatch.setattr(store, "_json", lambda url, doing: (rows, ""))
    with pytest.raises(OSError, match="bad row"):
        store.list("", deep=True)


def test_a_proxy(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.url)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.example")
    assert store_of("me/model").get("config.json").data == b"{}"
    assert {one.path.partition("/api/")[0].partition("/me/")[0] for one in hub.asked} == {"http://hub.example"}
    monkeypatch.setenv("no_proxy", "hub.example,127.0.0.1")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.asked.clear()
    assert store_of("me/model").get("config.json").data == b"{}" and hub.asked[0].path.startswith("/api/")


# Who may read, and what errors say


def test_where_the_token_comes_from(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    hub.make("me/model", {"config.json": b"{}"}, private=True)

    def read(**options: Any) -> bytes:
        return holdfast.storage.at("hf://me/model/config.json", options).read_bytes()

    with pytest.raises(OSError, match=r"no model me/model at .* without a token.*private, log in .*HF_TOKEN"):
        read()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(f"{TOKEN}\n")
    assert read() == b"{}"
    with pytest.raises(OSError, match="without a token"):
        read(anonymous=True)
    monkeypatch.setenv("HF_TOKEN", "hf_wr0ng")
    with pytest.raises(OSError, match="does not accept the token from HF_TOKEN.*settings/tokens") as caught:
        read()
    assert "wr0ng" not in str(caught.value)
    assert read(token=TOKEN) == b"{}"
    monkeypatch.setenv("HF_TOKEN", "hf_two\nlines")
    with pytest.raises(ValueError, match="HF_TOKEN holds no token") as bad:
        read()
    assert "lines" not in str(bad.value)


def test_a_gated_repository(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}", "model.safetensors": BIG}, gated=True)
    for options, who in (({}, "a reader without a token"), ({"token": TOKEN}, "the token from the option token")):
        for name in ("config.json", "model.safetensors"):
            with pytest.raises(
                OSError, match=f"gated, and {who} has no access: accept its terms at {hub.url}/me/model"
            ):
                store_of("me/model", **options).get(name)
    hub.accepted.add(TOKEN)
    assert store_of("me/model", token=TOKEN).get("config.json").data == b"{}"


def test_what_is_not_there(hub: Hub) -> None:
    hub.make("me/model", {"config.json": b"{}"})
    with pytest.raises(OSError, match=r"me/model has no revision 'v9'.*commits"):
        store_of("me/model@v9").list("", deep=True)
    with pytest.raises(OSError, match="no dataset me/model .* option token may see. Check the name"):
        store_of("datasets/me/model", token=TOKEN).list("", deep=True)
    with pytest.raises(holdfast.errors.NotACheckpoint, match="hf://me/model"):
        holdfast.open("hf://me/model")
    with pytest.raises(StorageError, match="no model me/other"):
        holdfast.open("hf://me/other")


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(OSError, match=r"cannot open hf://me/model: nobody listens at http://127.0.0.1:1.*HF_ENDPOINT"):
        store_of("me/model").size("x")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        store_of("me/model").size("x")
    monkeypatch.setenv("HF_ENDPOINT", "http://me:pl4nted@127.0.0.1")
    with pytest.raises(ValueError, match="endpoint_url") as caught:
        store_of("me/model").size("x")
    assert "pl4nted" not in str(caught.value)


def test_secrets_are_not_shown(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    hub.make("me/model", {"model.safetensors": BIG})
    place = holdfast.storage.at("hf://me/model/model.safetensors", {"token": TOKEN})
    hub.cuts = [5, 5, 0]
    place.read_bytes()
    hub.age = hub.age - 1
    shown = f"{place!r} {place} {place.store!r} {place.store.url} {vars(place)!r} {place.store.store!r}"  # type: ignore[attr-defined]
    assert TOKEN not in shown + caplog.text and "s3cret" not in shown + caplog.text
