"""One writer of a manifest: the probe tells stores that honour conditions from those that do not, and claims decide."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterable

import pytest

from holdfast.storage.cloud import conditions
from holdfast.storage.cloud.conditions import create_by_claims, create_once, honours_conditions
from holdfast.storage.store import Buffer, Listing
from holdfast.storage.wrappers.deadline import Deadline
from holdfast.storage.wrappers.retrying import Retrying
from holdfast.testing import Memory
from tests.servers import Server
from tests.servers.faults import Fault, Proxy
from tests.storage.cloud.clouds import cloud


class Ignoring(Memory):
    """Does what it is asked to, and takes no notice of conditions; ``dawdle`` sleeps at each verb."""

    def __init__(self, *, clock: Callable[[], float] = time.time, dawdle: Callable[[], None] = lambda: None) -> None:
        super().__init__(clock=clock)
        self.dawdle, self.creates = dawdle, 0

    def create(self, key: str, data: bytes) -> bool:
        self.creates += 1
        self.put(key, [data], len(data))
        return True

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        self.dawdle()
        super().put(key, chunks, nbytes)

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.dawdle()
        return super().list(prefix, deep=deep)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "SETTLE", 0.3)


def keys(store: Memory) -> list[str]:
    return [entry.key for entry in store.list("", deep=True).files]


def race(create: Callable[[int], bool], writers: int = 8) -> list[int]:
    """Which of several writers at once were told that they won."""
    won: list[int] = []
    ready = threading.Barrier(writers)

    def write(n: int) -> None:
        ready.wait(240)
        time.sleep(n % 4 * 0.02)
        if create(n):
            won.append(n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return won


# The probe


@pytest.mark.parametrize("server", ["moto", "ceph", "azurite", "gcs"])
def test_servers_that_honour_conditions(request: pytest.FixtureRequest, server: str) -> None:
    store = cloud(request.getfixturevalue(server))
    assert honours_conditions(store, "run/step-1")
    assert store.list("", deep=True).files == []


def test_servers_that_do_not(lying_gcs: Server, moto: Server, caplog: pytest.LogCaptureFixture) -> None:
    store = cloud(lying_gcs)
    assert not honours_conditions(store, "run")
    assert "Commits use claims instead" in caplog.text
    assert store.list("", deep=True).files == []
    with Proxy(moto.endpoint) as proxy:
        proxy.add(Fault("ignore_conditions", times=None))
        assert not honours_conditions(cloud(moto.through(proxy.endpoint), moto.bucket()), "run")


def test_the_probe_takes_four_requests_at_most_and_is_made_once(moto: Server) -> None:
    with Proxy(moto.endpoint) as proxy:
        store = Retrying(cloud(moto.through(proxy.endpoint), moto.bucket()))
        assert honours_conditions(store, "run")
        asked = len(proxy.requests())
        assert asked <= 4
        # What is put around the store is another one for each save.
        assert honours_conditions(Deadline(store, 60), "run/other")
        assert create_once(Deadline(store, 60), "run/m", b"a", "a")
        assert len(proxy.requests()) == asked + 1


def test_a_store_that_refuses_conditions_gets_claims(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Ignoring):
        def create(self, key: str, data: bytes) -> bool:
            raise OSError(errno.ENOTSUP, "not implemented")

    store = Refusing()
    assert create_once(store, "run/m", b"a", "a")
    assert not create_once(store, "run/m", b"b", "b")
    assert keys(store) == ["run/m"]
    assert caplog.text.count("refuses conditions") == 1


def test_a_probe_that_fails_is_no_answer() -> None:
    class Broken(Memory):
        def create(self, key: str, data: bytes) -> bool:
            raise OSError(errno.EACCES, "access denied")

    for _ in range(2):
        with pytest.raises(PermissionError):
            honours_conditions(Broken(), "run")


def test_a_probe_that_cannot_be_deleted_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Keeping(Memory):
        def delete(self, keys: object) -> None:
            raise OSError(errno.EACCES, "access denied")

    assert honours_conditions(Keeping(), "run")
    assert "could not be deleted and stays" in caplog.text


# Claims


def test_a_store_that_ignores_conditions_has_one_winner_by_claims() -> None:
    def create(n: int) -> bool:
        return create_once(store, "run/manifest.json", b"%d" % n, f"id-{n}")

    for granularity in (1e-6, 0.1):  # clocks of stores count microseconds, or seconds
        store = Ignoring(clock=lambda: time.time() // granularity * granularity)
        won = race(create)
        assert len(won) == 1
        assert store.get("run/manifest.json").data == b"%d" % won[0]
        assert keys(store) == ["run/manifest.json"]
        assert store.creates == 2, "the probe's"
    # Without claims it has several: else this test would show nothing.
    assert len(race(lambda n: store.create("run/other", b"%d" % n))) == 8


def test_the_winner_s_manifest_stays_with_a_slow_store() -> None:
    turns = iter(range(10_000))
    store = Ignoring(dawdle=lambda: time.sleep(next(turns) % 5 * 0.01))
    won = race(lambda n: create_by_claims(store, "m", b"%d" % n, f"id-{n}"))
    assert len(won) == 1
    assert store.get("m").data == b"%d" % won[0]
    assert keys(store) == ["m"]


def test_of_honest_stores_no_claim_is_asked() -> None:
    store = Memory()
    won = race(lambda n: create_once(store, "run/m", b"%d" % n, f"id-{n}"))
    assert len(won) == 1
    assert store.get("run/m").data == b"%d" % won[0]
    assert keys(store) == ["run/m"]


def test_a_manifest_that_is_there_wins() -> None:
    store = Ignoring()
    store.put("m", [b"older"], 5)
    assert not create_by_claims(store, "m", b"mine", "id")
    assert store.get("m").data == b"older" and keys(store) == ["m"]


def test_an_older_claim_wins_until_its_writer_is_taken_for_dead() -> None:
    now = time.time()
    offset = 0.0
    store = Ignoring(clock=lambda: now + offset)
    store.put("m.claim.other", [b"other"], 5)
    offset = conditions.STALE - 1
    assert not create_by_claims(store, "m", b"mine", "id")
    assert keys(store) == ["m.claim.other"]
    offset = conditions.STALE + 1
    assert create_by_claims(store, "m", b"mine", "id")
    assert store.get("m").data == b"mine"


def test_a_writer_that_was_stopped_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Ignoring()
    began = time.monotonic()
    monkeypatch.setattr(conditions.time, "monotonic", lambda: began + next(passed))
    passed = iter([0.0, *[conditions.STALE] * 5])
    with pytest.raises(OSError, match="have passed since the claim"):
        create_by_claims(store, "m", b"mine", "id")
    assert keys(store) == []


def test_a_manifest_that_was_replaced_meanwhile_is_not_ours() -> None:
    class Replacing(Ignoring):
        def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
            super().put(key, chunks, nbytes)
            if key == "m":
                super().put(key, [b"theirs"], 6)

    assert not create_by_claims(Replacing(), "m", b"mine", "id")


def test_a_store_that_does_not_list_what_was_written_is_refused() -> None:
    class Late(Ignoring):
        def list(self, prefix: str, *, deep: bool) -> Listing:
            return Listing([], [])

    store = Late()
    with pytest.raises(OSError, match="was written and is not listed"):
        create_by_claims(store, "m", b"mine", "id")
    assert store.size("m") is None


def test_the_weaker_protocol_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    store = Ignoring()
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for n in range(3):
            create_once(store, f"run/{n}", b"x", "id")
    assert caplog.text.count("Commits use claims instead") == 1
    assert "may replace each other's manifest" in caplog.text


def test_a_real_server_that_ignores_conditions_has_one_winner(lying_gcs: Server) -> None:
    store = cloud(lying_gcs)
    won = race(lambda n: create_once(store, "run/m", b"%d" % n, f"id-{n}"), writers=4)
    assert len(won) == 1
    assert store.get("run/m").data == b"%d" % won[0]
    assert [entry.key for entry in store.list("", deep=True).files] == ["run/m"]
