"""Kill trainers and their uploaders at random moments, lose a tier or a node, and see what a restart finds; a program.

`test_tier_kills.py` starts it with TRIALS SEED FOLDER. It forks ranks from one warm process,
so a trial costs a second or two. Prints one JSON line of counts; exits with 1 and the reason at the first violation.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast import manager as manager_module
from holdfast.run.keep import Upload
from holdfast.run.tiers import outage, uploader
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests.trials import forked, read_line, serve_store

ROWS, WIDTH = 6144, 128  # 3 MB a tensor; with the bandwidth below an upload takes long enough to be hit
BANDWIDTH = 30e6
LOSSES = ["fast", "nothing", "node", "store", "nothing"]


def content(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS))[:, None].expand(ROWS, WIDTH) + step


def state_of(step: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ROWS // world
    w = holdfast.Shard(content(step)[rank * rows : (rank + 1) * rows].clone(), (ROWS, WIDTH), (rank * rows, 0))
    return {"sharded": {"w": w}, "mine": holdfast.PerRank([step, rank]), "step": step}


def joined(rank: int, world: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def manager_of(base: Path, nodes: list[str], worker: Any, bandwidth: float | None) -> CheckpointManager:
    return CheckpointManager(
        StorePlace(Local(base / "store"), "run"), every=1, fast=base / nodes[dist.get_rank()], worker=worker,
        signals=(), keep=Keep(last=2), keep_fast=Keep(last=2), deadline=240,
        upload=Upload(every=3, bandwidth=bandwidth),
    )  # fmt: skip


def train(rank: int, port: int, base: Path, nodes: list[str], worker: str, told: int) -> None:
    """One rank: save step after step until killed; the first rank tells what is committed, and what is in the store."""
    joined(rank, len(nodes), port)
    manager = manager_of(base, nodes, worker, BANDWIDTH)
    manager.restore(state_of(0))
    for step in range(1, 1000):
        saving = manager.step(step, state_of(step))
        assert saving is not None
        saving.wait()
        dist.barrier()
        if rank == 0:
            safe = [s for s in range(max(step - 8, 1), step + 1) if manager.durability(s).store]
            os.write(told, f"{step} {max(safe, default=0)}\n".encode())
        time.sleep(0.02)


def resume(rank: int, port: int, base: Path, nodes: list[str], told: int) -> None:
    """One rank: restore, check every bit, save one step more and wait until it is in the store."""
    joined(rank, len(nodes), port)
    manager = manager_of(base, nodes, "thread", None)
    state = state_of(0)
    loaded = manager.restore(state)
    step = loaded.step if loaded is not None else 0
    if loaded is not None:
        expected = state_of(step)
        assert torch.equal(state["sharded"]["w"].tensor, expected["sharded"]["w"].tensor), "bits differ"
        assert state["step"] == step and state["mine"].value == [step, rank], "values differ"
    manager.save(step + 1, state_of(step + 1))
    manager.close()
    dist.barrier()
    if rank == 0:
        os.write(told, f"{step}\n".encode())


def started(work: Any, world: int, *args: Any) -> tuple[list[int], int]:
    """The process ids of the ranks and of their store's server."""
    port_read, port_told = os.pipe()
    server = forked(serve_store, port_told)
    port = int(read_line(port_read))
    os.close(port_read)
    os.close(port_told)
    return [forked(work, rank, port, *args) for rank in range(world)], server


def ended(pids: list[int], server: int) -> list[int]:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    return codes


def in_store(base: Path) -> int:
    """The newest step that is whole in the store; each that is committed there has to be."""
    newest = 0
    for path in (base / "store" / "run").glob("*/manifest.json"):
        opened = holdfast.open(path.parent)
        opened.verify()
        assert torch.equal(opened.read("sharded/w"), content(opened.step or 0)), f"{path} is mixed"
        newest = max(newest, opened.step or 0)
    return newest


def on_fast(base: Path, nodes: list[str]) -> int:
    """The newest step that some node knows to be committed, and of which each node has what its ranks wrote."""
    newest = 0
    for path in (p for node in set(nodes) for p in (base / node).glob("step-*/manifest.json")):
        record = holdfast.open(path.parent).manifest
        places = [
            base / nodes[int(Path(file.path).name[:5])] / path.parent.name / file.path for file in record.data_files
        ]
        stored = [base / "store" / "run" / path.parent.name / file.path for file in record.data_files]
        in_it = (base / "store" / "run" / path.parent.name / "manifest.json").exists()
        if all(place.exists() or (in_it and other.exists()) for place, other in zip(places, stored, strict=True)):
            newest = max(newest, record.step or 0)
    return newest


def half_uploaded(base: Path) -> bool:
    folders = (base / "store" / "run").glob("step-*")
    return any(not (path / "manifest.json").exists() and any(path.rglob("*.*")) for path in folders)


def trial(base: Path, lost: str, chance: random.Random, counts: Counter[str]) -> None:
    world = chance.choice([1, 2])
    nodes = ["a"] * world if chance.random() < 0.5 else ["a", "b"][:world]
    worker = chance.choice(["thread", "process"])
    told_read, told = os.pipe()
    pids, server = started(train, world, base, nodes, worker, told)
    os.close(told)
    lines = [read_line(told_read) for _ in range(chance.randint(1, 6))]
    time.sleep(chance.random() * 0.3)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended(pids, server)
    rest = b""
    while chunk := os.read(told_read, 65536):
        rest += chunk
    os.close(told_read)
    lines += rest.decode().splitlines()
    committed, safe = (max(int(line.split()[at]) for line in lines) for at in (0, 1))
    counts["half uploaded"] += half_uploaded(base)
    if lost == "store":
        shutil.rmtree(base / "store", ignore_errors=True)
    for node in set(nodes) if lost == "fast" else [nodes[-1]] if lost == "node" else []:
        shutil.rmtree(base / node)
    counts[f"lost {lost}"] += 1
    least = {"nothing": committed, "store": committed}.get(lost, safe)
    newest = max(in_store(base), on_fast(base, nodes))
    assert newest >= least, f"{newest} is whole, but {least} was committed ({lost} lost)"
    told_read, told = os.pipe()
    pids, server = started(resume, world, base, nodes, told)
    codes = ended(pids, server)
    os.close(told)
    assert codes == [0] * world, f"the restart ended with {codes}"
    found = int(read_line(told_read))
    os.close(told_read)
    # All ranks may have finished a save that none had committed; or a writer process has outlived its trainer.
    late = len(set(nodes)) == 1 and lost in ("nothing", "store") and found == newest + 1
    assert found == newest or late, f"restored {found}, but {newest} is whole ({lost} lost)"
    assert in_store(base) == found + 1, f"the store ends at {in_store(base)}, not {found + 1}"
    counts["trials"] += 1
    counts["late"] += late
    counts["behind"] += newest > safe


def main(trials: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    manager_module.SURVIVORS = 3.0
    outage.FIRST_PAUSE, uploader.LOOK = 0.05, 0.02
    chance = random.Random(seed)
    counts: Counter[str] = Counter({"trials": 0, "half uploaded": 0, "behind": 0})
    for number in range(trials):
        base = Path(folder) / f"trial-{number}"
        base.mkdir(parents=True)
        trial(base, LOSSES[number % len(LOSSES)], chance, counts)
        shutil.rmtree(base)
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
