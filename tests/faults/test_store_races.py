"""Several writers for one path of a store, and writers that are killed: one whole checkpoint, and everybody is told."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests import pool
from tests.patience import wait_until
from tests.servers import Server
from tests.servers.faults import Fault
from tests.servers.fixtures import lying_ceph, lying_gcs, moto
from tests.stores import Bucket, bucket_of, is_whole, kinds, state_of

__all__ = ["lying_ceph", "lying_gcs", "moto"]

HERE = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture
def bucket(moto: Server) -> Iterator[Bucket]:
    with bucket_of(moto) as made:
        yield made


# Programs that save, and can be killed. What they are told comes as JSON.

WRITER = """
import json, logging, sys, threading, time, torch, holdfast
sys.path.insert(0, {here!r})
from tests.stores import state_of
logging.basicConfig(level=logging.WARNING, format="%(message)s")
told = json.loads(sys.argv[1])
place = holdfast.storage.at(told["url"], told["options"])
"""

RACER = (
    WRITER
    + """
print("ready", flush=True)
sys.stdin.readline()
try:
    made = holdfast.save(state_of(told["seed"]), place, overwrite=told["overwrite"])
    print("won", made.manifest.save, flush=True)
except holdfast.SaveFailed as error:
    print("lost", error, flush=True)
"""
)


def start(code: str, **told: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code.replace("{here!r}", repr(str(HERE))), json.dumps(told)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=HERE,
    )  # fmt: skip


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def race(bucket: Bucket, seeds: list[int], *, overwrite: bool = False) -> dict[int, tuple[str, str]]:
    """What became of a save of each seed's state, all of them begun at once; with what was logged."""
    options = bucket.options()
    racers = {
        seed: start(RACER, url=bucket.url("c"), options=options, seed=seed, overwrite=overwrite) for seed in seeds
    }
    for racer in racers.values():
        assert line_of(racer) == "ready"
    for racer in racers.values():
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    results = {}
    for seed, racer in racers.items():
        said, logged = racer.communicate(timeout=240)
        assert racer.returncode == 0, logged
        results[seed] = (said.strip(), logged)
    return results


def one_has_won(bucket: Bucket, results: Mapping[int, str], states: Mapping[int, Any]) -> None:
    """Exactly one; the others know it by its id, and nothing of theirs is left."""
    won = [seed for seed, said in results.items() if said.startswith("won ")]
    assert len(won) == 1, results
    is_whole(bucket.direct("c"), states[won[0]])
    record = holdfast.open(bucket.direct("c")).manifest
    assert results[won[0]] == f"won {record.save}"
    for seed, said in results.items():
        if seed != won[0]:
            assert f"was committed by another save ({record.save})" in said or "already holds a committed" in said, said
    named = {"manifest.json", *(file.path for file in record.data_files)}
    assert {path for path in bucket.files("c") if ".holdfast-probe-" not in path} == named


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 8])
def test_one_of_several_processes_wins(count: int, bucket: Bucket) -> None:
    seeds = list(range(1, count + 1))
    # They come to their manifests at about the same time, whatever else this machine does.
    bucket.proxy.latency = 0.3
    results = race(bucket, seeds)
    one_has_won(bucket, {seed: said for seed, (said, _) in results.items()}, {seed: state_of(seed) for seed in seeds})


def save_as_a_group(url: str, options: Mapping[str, Any], seed: int) -> str:
    """One group of two ranks; the ranks of both groups are in one pool."""
    import torch.distributed as dist

    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own = dist.get_rank() // 2
    try:
        made = holdfast.save(
            _of_group(seed + own, dist.get_rank() % 2), holdfast.storage.at(url, options), group=groups[own]
        )
    except holdfast.SaveFailed as error:
        return f"lost {error}"
    return f"won {made.manifest.save}"


def _of_group(seed: int, rank: int | None) -> dict[str, Any]:
    whole = state_of(seed)["model"]["w"]
    if rank is None:
        return {"model": {"w": whole}, "step": seed}
    half = len(whole) // 2
    return {
        "model": {"w": holdfast.Shard(whole[rank * half : (rank + 1) * half].clone(), whole.shape, (rank * half, 0))},
        "step": seed,
    }


@pytest.mark.slow
def test_one_of_two_groups_of_ranks_wins(bucket: Bucket) -> None:
    for attempt in range(2):
        with bucket_of(bucket.server) as fresh:
            fresh.proxy.latency = 0.1 * attempt
            said = pool.run(4, save_as_a_group, fresh.url("c"), fresh.options(), 10)
            assert said[0] == said[1] and said[2] == said[3], "the ranks of a group are told the same"
            one_has_won(fresh, {10: said[0], 11: said[2]}, {seed: _of_group(seed, None) for seed in (10, 11)})


@pytest.mark.slow
def test_an_overwrite_race_leaves_one_whole_checkpoint(bucket: Bucket) -> None:
    """Without a lock the last manifest counts; files of either may stay behind, and none that it names is missing."""
    holdfast.save(state_of(9), bucket.direct("c"))
    results = race(bucket, [1, 2], overwrite=True)
    assert sum(said.startswith("won") for said, _ in results.values()) >= 1, results
    checkpoint = holdfast.open(bucket.direct("c"))
    assert checkpoint.step in (1, 2)
    is_whole(bucket.direct("c"), state_of(checkpoint.step))
    # Whoever comes next finds an ordinary checkpoint.
    holdfast.save(state_of(3), bucket.at("c"), overwrite=True)
    is_whole(bucket.direct("c"), state_of(3))


# A store that ignores conditions


def claims_decide(bucket: Bucket) -> None:
    results = race(bucket, [1, 2, 3])
    states = {seed: state_of(seed) for seed in results}
    one_has_won(bucket, {seed: said for seed, (said, _) in results.items()}, states)
    for said, logged in results.values():
        if said.startswith("lost") and "already holds" in said:
            continue  # it came too late to have to commit anything
        assert "ignores conditions" in logged and "Commits use claims instead" in logged, logged


@pytest.mark.slow
def test_where_conditions_are_ignored_the_oldest_claim_wins(bucket: Bucket) -> None:
    bucket.proxy.add(Fault("ignore_conditions", times=None))
    claims_decide(bucket)
    # Later ones find a checkpoint, as anywhere.
    with pytest.raises(holdfast.SaveFailed, match="already holds a committed checkpoint"):
        holdfast.save(state_of(4), bucket.at("c"))


@pytest.mark.slow
def test_a_store_that_ignores_conditions_is_told_of_once(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    bucket.proxy.add(Fault("ignore_conditions", times=None))
    with caplog.at_level(logging.WARNING, "holdfast"):
        for step in (1, 2):
            holdfast.save(state_of(step), bucket.at(f"step-{step}"))
            is_whole(bucket.direct(f"step-{step}"), state_of(step))
            assert not [path for path in bucket.files(f"step-{step}") if ".claim." in path]
    assert sum("ignores conditions" in record.getMessage() for record in caplog.records) == 1
    assert kinds(bucket.proxy.requests())["put probe"] == 2


@pytest.mark.slow
def test_the_claim_of_a_dead_writer_is_told_of(bucket: Bucket) -> None:
    """It died between its claim and its manifest: for some minutes nobody can know that, and others are refused."""
    holdfast.save(state_of(1), bucket.direct("c"))
    place = bucket.direct("c")
    place.store.delete([f"{place.key}/manifest.json"])
    claim = f"{place.key}/manifest.json.claim.-dead"
    place.store.put(claim, [b"dead"], 4)
    before = bucket.files("c")
    bucket.proxy.add(Fault("ignore_conditions", times=None))
    with pytest.raises(holdfast.SaveFailed, match="has claimed .*manifest.json before this one"):
        holdfast.save(state_of(2), bucket.at("c"))
    assert bucket.files("c") == before, "it has left nothing"
    place.store.delete([claim])
    holdfast.save(state_of(2), bucket.at("c"))
    is_whole(bucket.direct("c"), state_of(2))


@pytest.mark.slow
def test_at_another_store_where_every_create_is_an_overwrite(lying_gcs: Server) -> None:
    with bucket_of(lying_gcs) as bucket:
        claims_decide(bucket)


@pytest.mark.slow
def test_at_an_old_server_that_ignores_some_conditions(lying_ceph: Server) -> None:
    """But not that of a create: there one wins without claims."""
    with bucket_of(lying_ceph) as bucket:
        results = race(bucket, [1, 2, 3])
        states = {seed: state_of(seed) for seed in results}
        one_has_won(bucket, {seed: said for seed, (said, _) in results.items()}, states)


# Kills

TRAINER = (
    WRITER
    + """
saver = holdfast.Saver(worker="process", deadline=240)
saving = saver.save(state_of(told["seed"], rows=told["rows"]), place)
saving.wait_staged()
while told["staged"] and saving.timing.bytes == 0 and not saver._pool.worker:
    time.sleep(0.01)
print("staged", saver._pool.worker.pid, flush=True)
time.sleep(600)
"""
)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def trainer_and_writer(bucket: Bucket) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A trainer that has handed a save of 20 MB to its writer process, whose uploads hardly move."""
    bucket.proxy.bandwidth = 2_000_000
    trainer = start(TRAINER, url=bucket.url("c"), options=bucket.options(), seed=6, rows=40_000, staged=True)
    said = line_of(trainer).split()
    if said[:1] != ["staged"]:
        raise AssertionError(trainer.communicate(timeout=240)[1])
    writer = int(said[1])
    # All that is told to the writer has been told once its last file is on its way.
    wait_until(lambda: any("partNumber" in request.query for request in bucket.proxy.requests()))
    yield trainer, writer
    trainer.kill()
    trainer.communicate(timeout=240)
    if is_alive(writer):
        os.kill(writer, signal.SIGKILL)


@pytest.mark.slow
def test_a_writer_process_finishes_what_is_staged_when_its_trainer_is_killed(
    bucket: Bucket, trainer_and_writer: tuple[subprocess.Popen[str], int]
) -> None:
    trainer, writer = trainer_and_writer
    time.sleep(1.0)  # until the part, too, is with the writer: nothing outside tells
    trainer.send_signal(signal.SIGKILL)
    trainer.wait(240)
    assert is_alive(writer) and "manifest.json" not in bucket.files("c")
    bucket.proxy.bandwidth = None
    wait_until(lambda: not is_alive(writer))
    assert "manifest.json" not in bucket.files("c"), "nobody has committed it"
    with pytest.raises(holdfast.errors.NotACheckpoint, match="never committed; holdfast.tools.recover"):
        holdfast.open(bucket.at("c"))
    assert holdfast.tools.recover(bucket.at("c")).step == 6
    is_whole(bucket.direct("c"), state_of(6, rows=40_000))
    assert not [path for path in bucket.files("c") if path.startswith("parts/")]


@pytest.mark.slow
def test_trainer_and_writer_are_killed(bucket: Bucket, trainer_and_writer: tuple[subprocess.Popen[str], int]) -> None:
    trainer, writer = trainer_and_writer
    trainer.send_signal(signal.SIGKILL)
    os.kill(writer, signal.SIGKILL)
    trainer.wait(240)
    wait_until(lambda: not is_alive(writer))
    bucket.proxy.bandwidth = None
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.tools.recover(bucket.at("c"))
    assert "manifest.json" not in bucket.files("c")
    # What it left is no obstacle, and a manager starts afresh.
    holdfast.save(state_of(7), bucket.at("c"))
    is_whole(bucket.direct("c"), state_of(7))


@pytest.mark.slow
def test_the_writer_process_is_killed(bucket: Bucket) -> None:
    """The save fails and says so; the next one has a new writer."""
    state = state_of(1, rows=40_000)
    with holdfast.Saver(worker="process") as saver:
        bucket.proxy.bandwidth = 2_000_000
        saving = saver.save(state, bucket.at("one"))
        wait_until(lambda: any(request.up for request in bucket.proxy.requests()))
        assert saver._pool.worker is not None
        os.kill(saver._pool.worker.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(holdfast.SaveFailed, match="the writer process .* was killed by signal 9"):
            saving.wait(240)
        bucket.proxy.bandwidth = None
        saver.save(state, bucket.at("two")).wait(240)
    is_whole(bucket.direct("two"), state)
    assert bucket.files("one") == {}


# Forks


FORKED = (
    WRITER
    + """
import os
state = state_of(1)
holdfast.save(state, place / "early")
child = os.fork()
if not child:
    try:
        for ask in (
            lambda: holdfast.save(state, place / "late"),
            lambda: holdfast.load(place / "early", state),
            lambda: holdfast.open(place / "early"),
            lambda: holdfast.copy(place / "early", place / "copy"),
        ):
            try:
                ask()
            except holdfast.errors.StorageError as error:
                assert "forked" in str(error) and "spawn" in str(error), error
            else:
                os._exit(3)
        os._exit(0)
    finally:
        os._exit(4)
assert os.waitpid(child, 0)[1] == 0
holdfast.save(state, place / "later")
print("done", flush=True)
"""
)


@pytest.mark.slow
def test_after_a_fork_every_story_says_so_instead_of_hanging(bucket: Bucket) -> None:
    ended = start(FORKED, url=bucket.url("run"), options=bucket.options())
    said, logged = ended.communicate(timeout=240)
    assert said.strip() == "done", logged
    is_whole(bucket.direct("run/later"), state_of(1))
