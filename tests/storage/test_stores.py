"""The stories with a store instead of a disk: what comes back, requests and bytes that it takes, what errors say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import holdfast
from holdfast.run.retention import KeptSteps
from holdfast.storage import store_place
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers.hedged import Hedged
from holdfast.write.buffer import CHUNK
from holdfast.write.pool import PART, PARTS
from tests import pool
from tests.servers import Server
from tests.servers.faults import Fault
from tests.servers.fixtures import moto, nginx
from tests.servers.process import hold_port, port_of
from tests.stores import Bucket, bucket_of, empty_like, is_same, is_whole, kind, kinds, state_of

__all__ = ["moto", "nginx"]

MIB = 1 << 20


@pytest.fixture
def bucket(moto: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(Hedged, "_may_hedge", lambda self: False)  # requests are counted, on a busy machine too
    with bucket_of(moto) as made:
        yield made


def asked(bucket: Bucket) -> Counter[str]:
    """What was asked of the store since the last look."""
    found = kinds(bucket.proxy.requests())
    bucket.proxy.clear()
    return found


# What comes back


def test_there_and_back(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """By URL alone, with all else in the environment, and by `holdfast.storage.at`: the same checkpoint."""
    options = bucket.options()
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", options["access_key_id"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", options["secret_access_key"])
    monkeypatch.setenv("AWS_REGION", options["region"])
    state = {**state_of(3), "mine": holdfast.PerRank([1, "two"]), "rng": holdfast.RNG()}
    saved = holdfast.save(state, bucket.url("run/one"), files={"config.yaml": b"a: 1", "deep/er/x": b""})
    assert str(saved.path) == bucket.url("run/one") and saved.step == 3

    into = {**empty_like(state_of(3)), "mine": holdfast.PerRank(None), "rng": holdfast.RNG()}
    loaded = holdfast.load(bucket.at("run/one"), into)
    assert loaded.step == 3 and is_same({k: into[k] for k in state_of(3)}, state_of(3))
    assert into["mine"].value == [1, "two"]

    checkpoint = holdfast.open(bucket.url("run") + "/one/")
    assert checkpoint.format == "holdfast" and checkpoint.world_size == 1
    assert checkpoint.verify().unverified == 0
    assert checkpoint.attachments == {"config.yaml": 4, "deep/er/x": 0}
    assert checkpoint.attachment("config.yaml") == b"a: 1" and checkpoint.attachment("deep/er/x") == b""
    assert checkpoint.per_rank("mine", 0) == [1, "two"]
    weight = state_of(3)["model"]["w"]
    assert torch.equal(checkpoint.read("model/w"), weight)
    assert torch.equal(checkpoint.read("model/w", [slice(17, 200), (3, 9)]), weight[17:200, 3:9])
    assert is_same(checkpoint.state_dict("optim"), {"optim": state_of(3)["optim"]})


def test_overwrite(bucket: Bucket) -> None:
    holdfast.save(state_of(1), bucket.at("c"), files={"a": b"1"})
    with pytest.raises(holdfast.SaveFailed, match="already holds a committed checkpoint.*overwrite=True"):
        holdfast.save(state_of(2), bucket.at("c"))
    is_whole(bucket.direct("c"), state_of(1))
    holdfast.save(state_of(2), bucket.at("c"), files={"a": b"2"}, overwrite=True)
    is_whole(bucket.direct("c"), state_of(2))
    assert holdfast.open(bucket.at("c")).attachment("a") == b"2"
    assert len(bucket.files("c")) == 4, "the old files are gone"
    # A damaged one can be replaced too.
    bucket.direct("c/manifest.json").store.put(bucket.direct("c/manifest.json").key, [b"{"], 1)
    holdfast.save(state_of(3), bucket.at("c"), overwrite=True)
    is_whole(bucket.direct("c"), state_of(3))


@pytest.mark.slow
@pytest.mark.parametrize("worker", ["process", "thread"])
def test_in_the_background(worker: Any, bucket: Bucket) -> None:
    """Three saves in two slots, each larger than its slot may be: sums first, then waves of windows."""
    states = [state_of(step, rows=70_000, width=128) for step in (1, 2, 3)]  # 36 MB in each of two files
    with holdfast.Saver(worker=worker, slots=2, memory_limit=2 * 2 * CHUNK) as saver:
        savings = []
        for state in states:
            savings.append(saver.save(state, bucket.at(f"step-{state['step']}"), files={"note": b"n"}))
            savings[-1].wait_staged()
        for saving in savings:
            assert saving.wait().attachment("note") == b"n"
    for state in states:
        is_whole(bucket.direct(f"step-{state['step']}"), state)
        assert not [path for path in bucket.files(f"step-{state['step']}") if path.startswith("parts/")]


@pytest.mark.slow
def test_a_save_larger_than_its_ring(bucket: Bucket) -> None:
    """More than all its windows hold, in two files: each is summed before it is staged, and goes out as it is."""
    rows = (PARTS * PART // 2 + 12 * MIB) // 1024
    state = {"a": {"w": torch.rand(rows, 256)}, "b": {"t": torch.rand(256, rows).t()}, "step": 1}
    assert sum(part["w" if "w" in part else "t"].nbytes for part in (state["a"], state["b"])) > PARTS * PART
    holdfast.save(state, bucket.at("c"))
    is_whole(bucket.direct("c"), state)


@pytest.mark.slow
def test_sections_with_odd_names(bucket: Bucket) -> None:
    odd = ["a b", "ü+ö", "per%cent", "what?", "hash#", "[0:2]", "x=y&z", "q'\"", "~", "..", "con"]
    state = {name: {"w": torch.full((3,), float(i))} for i, name in enumerate(odd)}
    holdfast.save(state, bucket.at("odd place") / "é?#")
    is_whole(bucket.direct("odd place") / "é?#", state)
    with holdfast.Saver() as saver:
        saver.save(state, bucket.at("odd place/again")).wait()
    is_whole(bucket.direct("odd place/again"), state)


def test_a_commit_that_is_refused_leaves_nothing(bucket: Bucket) -> None:
    bucket.proxy.add(Fault("status", status=403, method="PUT", path="manifest.json"))
    with holdfast.Saver() as saver:
        saving = saver.save(state_of(4), bucket.at("c"))
        with pytest.raises(holdfast.SaveFailed, match="access denied.*Nothing was committed"):
            saving.wait()
    assert bucket.files("c") == {}
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is nothing at"):
        holdfast.tools.recover(bucket.at("c"))


# Ranks


def _dtensor(rows: int, seed: int) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(rows * 1024.0).reshape(rows, 1024) + seed
    return distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def _sharded(seed: int) -> dict[str, Any]:
    model = {f"w{i}": _dtensor(1025, seed + i) for i in range(2)}  # 4.2 MB each
    return {"model": model, "optim": {"m": _dtensor(2050, 2 * seed), "lr": 0.5}, "step": seed}


def save_sharded(url: str, options: Mapping[str, Any]) -> None:
    holdfast.save(_sharded(5), holdfast.storage.at(url, options))


def save_sharded_aside(url: str, options: Mapping[str, Any]) -> None:
    with holdfast.Saver() as saver:
        saver.save(_sharded(5), holdfast.storage.at(url, options)).wait()


def load_sharded(url: str, options: Mapping[str, Any]) -> tuple[int, int, bool]:
    into = _sharded(0)
    loaded = holdfast.load(holdfast.storage.at(url, options), into, only="model")
    same = all(torch.equal(into["model"][k].to_local(), v.to_local()) for k, v in _sharded(5)["model"].items())
    untouched = torch.equal(into["optim"]["m"].to_local(), _sharded(0)["optim"]["m"].to_local()) and not into["step"]
    return loaded.bytes_needed, loaded.bytes_read, same and untouched


def test_ranks_save_on_4_and_load_on_2_and_1(bucket: Bucket) -> None:
    url, options = bucket.url("c"), bucket.options()
    pool.run(4, save_sharded, url, options)
    saving = asked(bucket)
    assert saving == {
        "list": 1, "put data": 8, "put manifest": 1,  # each rank its own two files; the rest is the first rank's
        "put probe": 2, "delete": 1,  # whether the store honours conditions: once
    }, saving  # fmt: skip
    pool.run(4, save_sharded, bucket.url("d"), options)
    assert asked(bucket) == {"list": 1, "put data": 8, "put manifest": 1}
    pool.run(4, save_sharded_aside, bucket.url("e"), options)
    assert asked(bucket) == {"list": 1, "put data": 8, "put note": 4, "put manifest": 1, "delete": 4}

    for world in (2, 1):
        results = pool.run(world, _load_alone if world == 1 else load_sharded, url, options)
        requests = bucket.proxy.requests()
        came = sum(request.down for request in requests if kind(request) == "get data")
        needed = sum(needed for needed, _, _ in results)
        assert all(right for _, _, right in results) and needed == 2 * 1025 * 4096
        assert came <= 1.05 * needed, "no byte of the optimizer was fetched, and of the model none twice"
        # A rank reads the manifest, the header of each file that it needs, and what it needs of each.
        counted = asked(bucket)
        assert counted["get manifest"] == world and counted["get data"] <= 2 * 4 + 2 * world, counted
        assert set(counted) == {"get manifest", "get data"}


def _load_alone(url: str, options: Mapping[str, Any]) -> tuple[int, int, bool]:
    into: dict[str, Any] = {"model": {f"w{i}": torch.zeros(1025, 1024) for i in range(2)}}
    loaded = holdfast.load(holdfast.storage.at(url, options), into, only="model")
    whole = torch.arange(1025 * 1024.0).reshape(1025, 1024)
    return (
        loaded.bytes_needed,
        loaded.bytes_read,
        all(torch.equal(into["model"][f"w{i}"], whole + 5 + i) for i in range(2)),
    )


@pytest.mark.slow
def test_requests_of_a_large_file(bucket: Bucket) -> None:
    """8 MiB a request each way, and nothing asked twice."""
    state = {"w": torch.rand(10 * MIB)}  # 40 MiB
    holdfast.save(state, bucket.at("c"))
    saving = asked(bucket)
    assert saving == {
        "list": 1, "initiate": 1, "part": 6, "complete": 1, "put manifest": 1, "put probe": 2, "delete": 1,
    }, saving  # fmt: skip
    into = {"w": torch.zeros(10 * MIB)}
    holdfast.load(bucket.at("c"), into)
    assert torch.equal(into["w"], state["w"])
    assert asked(bucket) == {"get manifest": 1, "get data": 1 + 5}
    holdfast.open(bucket.at("c")).verify()
    assert asked(bucket) == {"get manifest": 1, "get data": 1 + 5}


# The manager


def copy_within(bucket: Bucket, source: str, target: str) -> None:
    """All files below ``source`` also below ``target``, copied by the server."""
    from tests.servers import sigv4

    for path in bucket.files(source):
        url = f"{bucket.server.endpoint}/{bucket.name}/{target}/{path}"
        request = Request(url, method="PUT", headers={"x-amz-copy-source": f"/{bucket.name}/{source}/{path}"})
        request.add_header("authorization", f"AWS4-HMAC-SHA256 Credential=moto/20260101/{sigv4.REGION}/s3/aws4_request")
        with urlopen(request) as answer:
            assert answer.status == 200


@pytest.mark.slow
def test_a_manager_of_300_steps_asks_little(bucket: Bucket) -> None:
    holdfast.save(state_of(1), bucket.direct("run/step-000000001"))
    for step in range(2, 300):
        copy_within(bucket, "run/step-000000001", f"run/step-{step:09d}")
    time.sleep(1)  # a store's times are whole seconds
    holdfast.save(state_of(300), bucket.direct("run/step-000000300"))
    into = empty_like(state_of(300))
    with holdfast.CheckpointManager(bucket.at("run"), every=1, worker="none", keep=holdfast.Keep(last=400)) as manager:
        assert manager.steps() == list(range(1, 301))
        listing = asked(bucket)
        assert sum(listing.values()) <= 10 and set(listing) == {"list", "get .went-back"}, listing
        assert manager.steps() == list(range(1, 301))
        assert sum(asked(bucket).values()) <= 2
    with holdfast.CheckpointManager(bucket.at("run"), every=1, worker="none", keep=holdfast.Keep(last=400)) as manager:
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 300 and is_same(into, state_of(300))
        restoring = asked(bucket)
        data = restoring.pop("get data")
        assert data <= 4 and sum(restoring.values()) <= 10, restoring


@pytest.mark.slow
def test_a_manager_keeps_what_it_is_told(bucket: Bucket) -> None:
    keep = holdfast.Keep(last=2, every=4, best=1, mode="min")
    with holdfast.CheckpointManager(bucket.at("one"), every=1, keep=keep) as manager:
        for step in range(1, 8):
            manager.step(step, state_of(step), metric=-10.0 if step == 2 else float(step))
            manager.wait()
        assert manager.steps() == [2, 4, 6, 7]
    folders = {path.partition("/")[0] for path in bucket.files("one")} - {".journal"}
    assert folders == {f"step-{step:09d}" for step in (2, 4, 6, 7)}, "what goes is deleted to the last file"

    # Another root beside it, of which this one's name begins, is nobody's business.
    with holdfast.CheckpointManager(bucket.at("one-more"), every=1, keep=holdfast.Keep(last=1)) as other:
        for step in (1, 2):
            other.step(step, state_of(step))
            other.wait()
        assert other.steps() == [2]
    into = empty_like(state_of(0))
    with holdfast.CheckpointManager(bucket.at("one"), every=1, keep=keep) as manager:
        assert manager.steps() == [2, 4, 6, 7]
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 7 and is_same(into, state_of(7))


def test_a_manager_passes_over_what_is_damaged(bucket: Bucket) -> None:
    for step in (1, 2, 3):
        holdfast.save(state_of(step), bucket.direct(f"run/step-{step:09d}"))
    data = next(path for path in bucket.files("run/step-000000003") if path.startswith("model/"))
    place = bucket.direct(f"run/step-000000003/{data}")
    content = bytearray(place.read_bytes())
    content[-100] ^= 1
    place.store.put(place.key, [bytes(content)], len(content))
    lost = next(path for path in bucket.files("run/step-000000002") if path.startswith("optim/"))
    place.store.delete([bucket.direct(f"run/step-000000002/{lost}").key])
    into = empty_like(state_of(0))
    with holdfast.CheckpointManager(bucket.at("run"), every=1, worker="none") as manager:
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 1 and is_same(into, state_of(1))


# Reading from a web server


def test_from_a_web_server(nginx: Server) -> None:
    folder = nginx.bucket()
    assert nginx.folder is not None
    state = state_of(6, rows=9000)
    holdfast.save(state, nginx.folder / folder / "c", files={"note": b"n"})
    url = nginx.url(folder, "c")
    is_whole(holdfast.storage.at(url), state)
    assert holdfast.open(url).attachment("note") == b"n"
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is no .*manifest.json"):
        holdfast.open(nginx.url(folder, "absent"))
    with pytest.raises(holdfast.SaveFailed, match="web server"):
        holdfast.save(state, nginx.url(folder, "new"))


# What errors say


def test_a_bucket_that_is_not_there(bucket: Bucket) -> None:
    place = holdfast.storage.at("s3://holdfast-nobody-made-this/run", bucket.options())
    with pytest.raises(holdfast.SaveFailed, match="there is no bucket 'holdfast-nobody-made-this'") as caught:
        holdfast.save(state_of(1), place)
    assert isinstance(caught.value, holdfast.errors.StorageError) and caught.value.phase == "plan"
    for ask in (holdfast.open, holdfast.tools.recover, lambda path: holdfast.load(path, {})):
        with pytest.raises(holdfast.errors.StorageError, match="there is no bucket 'holdfast-nobody-made-this'"):
            ask(place)
    with pytest.raises(holdfast.errors.StorageError, match="there is no bucket"):
        holdfast.CheckpointManager(place, every=1, worker="none").restore(state_of(1))


def test_a_path_that_is_wrong(bucket: Bucket) -> None:
    for step in (1, 2):
        holdfast.save(state_of(step), bucket.at(f"run/step-{step}"))
    with pytest.raises(holdfast.errors.NotACheckpoint, match="holds checkpoints but is none itself.* step-1, step-2"):
        holdfast.open(bucket.at("run"))
    with pytest.raises(
        holdfast.errors.NotACheckpoint, match="there is nothing at .*run/step-3; beside it are step-1, step-2"
    ):
        holdfast.load(bucket.at("run/step-3"), {})
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is nothing at"):
        holdfast.open(bucket.at("elsewhere"))
    bucket.direct("mine").store.put("mine/thesis.tex", [b"years of work"], 13)
    for overwrite in (False, True):
        with pytest.raises(holdfast.SaveFailed, match=r"holds other files \(thesis.tex\)"):
            holdfast.save(state_of(1), bucket.at("mine"), overwrite=overwrite)
    assert bucket.files("mine") == {"thesis.tex": 13}
    with pytest.raises(holdfast.errors.NotACheckpoint, match="no checkpoint of a format that holdfast reads"):
        holdfast.open(bucket.at("mine"))


def test_a_store_that_lives_in_one_process_is_saved_to_by_threads() -> None:
    place = StorePlace(Memory(), "run/c")
    with holdfast.Saver(worker="thread") as saver:
        saver.save(state_of(1), place).wait()
    is_whole(place, state_of(1))
    with holdfast.Saver() as saver:
        saving = saver.save(state_of(2), StorePlace(place.store, "run/d"))
        with pytest.raises(holdfast.SaveFailed, match='in this process alone: save there with Saver.worker="thread"'):
            saving.wait()


# The end of a process


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "saver", "load"])
@pytest.mark.parametrize("what", ["dead", "silent"])
def test_a_script_ends_by_itself(how: str, what: str) -> None:
    """Nobody listens, or somebody who never answers: an error, and no thread keeps the interpreter."""
    held = hold_port()
    if what == "silent":
        held.listen(64)
    options = {
        "endpoint_url": f"http://127.0.0.1:{port_of(held)}", "access_key_id": "a", "secret_access_key": "b",
        "region": "us-east-1",
    }  # fmt: skip
    code = f"""
import sys, json, torch, holdfast
place = holdfast.storage.at("s3://bucket/c", json.loads(sys.argv[1]))
state = {{"w": torch.ones(1000)}}
try:
    if {how!r} == "save":
        holdfast.save(state, place, deadline=3)
    elif {how!r} == "load":
        holdfast.load(place, state, deadline=3)
    else:
        with holdfast.Saver(deadline=3) as saver:
            saver.save(state, place).wait()
except holdfast.HoldfastError as error:
    print(type(error).__name__, error)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, json.dumps(options)], capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    held.close()
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("SaveFailed" if how != "load" else "StorageError"), ended.stdout
    assert "s3://bucket/c" in ended.stdout and "3 s" in ended.stdout


class _Meddling(Memory):
    """A store during whose uploads somebody changes a tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def put(self, key: str, chunks: Iterable[Any], nbytes: int) -> None:
        self.tensor.add_(1)
        super().put(key, chunks, nbytes)


@pytest.mark.parametrize("per_rank", [False, True])
def test_what_changes_while_it_is_sent_from_where_it_lies_is_not_committed(per_rank: bool) -> None:
    tensor = torch.arange(1 << 16, dtype=torch.float32)
    place = StorePlace(_Meddling(tensor), "run/c")
    state = {"model": {"w": holdfast.PerRank({"t": tensor}) if per_rank else tensor}}
    with pytest.raises(holdfast.SaveFailed, match="model/w changed during a save"):
        holdfast.save(state, place)
    assert not place.store.list("", deep=True).files


def test_what_was_too_young_to_be_swept_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Memory()
    store.create("run/step-000000001/model/00000-of-00001.0123456789abcdef.safetensors", b"left by a dead save")
    steps = KeptSteps(StorePlace(store, "run"), "step-{step:09d}")
    steps.clean(())
    assert store.list("", deep=True).files, "a living save may still need it"
    monkeypatch.setattr(store_place, "LIVING", 0.0)
    steps.clean(())
    assert store.list("", deep=True).files, "it is not asked again with every save"
    steps._swept = dict.fromkeys(steps._swept, 0.0)
    steps.clean(())
    assert not store.list("", deep=True).files


class _Flipping(Memory):
    """A store that answers the first request for each data file with one bit flipped."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped: set[str] = set()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Any:
        got = super().get(key, begin, end)
        if key.endswith(".safetensors") and key not in self.flipped:
            self.flipped.add(key)
            got = got._replace(data=bytes([got.data[0] ^ 1]) + bytes(got.data[1:]))
        return got


def test_a_header_that_came_wrong_is_not_taken_from_the_cache_again(tmp_path: Path) -> None:
    place, state = StorePlace(_Flipping(), "run/c"), state_of(1)
    holdfast.save(state, place)
    into = empty_like(state)
    holdfast.load(place, into, cache=tmp_path / "cache")
    assert is_same(into, state)
    assert place.store.flipped
