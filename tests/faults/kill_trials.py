"""Kill a random rank at a random moment of a save, again and again, and see what is left; run as a program.

`test_kills.py` starts it with TRIALS SEED FOLDER. It forks ranks from one warm process,
so a trial costs about a second. Prints one JSON line of counts; exits with 1 and the reason at the first violation.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from tests.trials import forked, read_line, serve_store

WORLD = 3
ROWS, WIDTH = 6144, 512  # 12 MB a tensor: a save takes long enough to be hit in its middle


def content(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS))[:, None].expand(ROWS, WIDTH) + step


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    rows = ROWS // world
    start = rank * rows
    return {
        "sharded": {"w": holdfast.Shard(content(step)[start : start + rows].clone(), (ROWS, WIDTH), (start, 0))},
        "replicated": {"v": content(step)[:512].clone()},
        "mine": holdfast.PerRank([step, rank]),
        "step": step,
    }


def train(rank: int, port: int, root: Path, overwrite: bool, told: int) -> None:
    """One rank: save step after step until killed or until a save fails."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for step in range(1, 1000):
        path = root / ("latest" if overwrite else f"step-{step:09d}")
        holdfast.save(state_of(step, rank, WORLD), path, overwrite=overwrite, deadline=2.5)
        os.write(told, f"{step}\n".encode())


def trial(root: Path, chance: random.Random, counts: dict[str, int]) -> None:
    overwrite, all_at_once = chance.random() < 0.4, chance.random() < 0.4
    told_read, told = os.pipe()
    port_read, port_told = os.pipe()
    server = forked(serve_store, port_told)
    port = int(read_line(port_read))
    pids = [forked(train, rank, port, root, overwrite, told) for rank in range(WORLD)]
    os.close(told)
    first = int(read_line(told_read))  # some step is committed; the next is under way
    if chance.random() < 0.7:
        await_open_save(root)
        time.sleep(chance.random() * 0.02)
    else:
        time.sleep(chance.random() * 0.25)
    victims = pids if all_at_once else [chance.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.kill(server, signal.SIGKILL)
    os.waitpid(server, 0)
    survivors = [code for code in codes if code != -signal.SIGKILL]
    assert all(code == 3 for code in survivors), f"survivors ended with {codes}"
    rest = b""
    while chunk := os.read(told_read, 65536):
        rest += chunk
    acknowledged = max([first, *(int(line) for line in rest.split())])
    for fd in (told_read, port_read, port_told):
        os.close(fd)
    check(root, overwrite, acknowledged, counts)


def uncommitted(root: Path) -> list[Path]:
    """Data files that no manifest names: of a save under way, or of one that was killed."""
    found = []
    for folder in root.iterdir():
        manifest = folder / "manifest.json"
        text = manifest.read_text() if manifest.exists() else ""
        found += [f for f in folder.rglob("*.safetensors") if f.name not in text]
    return found


def await_open_save(root: Path) -> None:
    until = time.monotonic() + 2
    while time.monotonic() < until:
        try:
            if uncommitted(root):
                return
        except FileNotFoundError:  # swept while we looked
            continue


def check(root: Path, overwrite: bool, acknowledged: int, counts: dict[str, int]) -> None:
    """Every committed step is whole and unmixed; the newest is the last acknowledged one or the one after."""
    interrupted = bool(uncommitted(root))
    for folder in root.iterdir():
        if (folder / "manifest.json").exists():
            opened = holdfast.open(folder)
            opened.verify()
            state = opened.state_dict()
            step = state["step"]
            assert step == opened.step and torch.equal(state["sharded"]["w"], content(step)), f"{folder} is mixed"
            assert torch.equal(state["replicated"]["v"], content(step)[:512]), f"{folder} is mixed"
            assert [opened.per_rank("mine", r) for r in range(WORLD)] == [[step, r] for r in range(WORLD)]
    into: dict[str, Any] = {**state_of(0, 0, 1), "mine": holdfast.PerRank(None, elsewhere="first")}
    if overwrite:
        holdfast.load(root / "latest", into)
        newest = into["step"]
        assert len(list((root / "latest").rglob("*.safetensors"))) <= 6 * WORLD
    else:
        manager = holdfast.CheckpointManager(root, every=1, signals=())
        loaded = manager.restore(into)
        assert loaded is not None
        newest = loaded.step
        left = [f.name for f in root.iterdir() if not (f / "manifest.json").exists()]
        assert not left, f"orphans stay: {left}"
    assert newest in (acknowledged, acknowledged + 1), f"newest {newest}, acknowledged {acknowledged}"
    assert torch.equal(into["sharded"]["w"].tensor, content(newest))
    counts["trials"] += 1
    counts["interrupted saves"] += interrupted
    counts["overwriting"] += overwrite
    counts["new step"] += newest == acknowledged + 1


def main(trials: int, seed: int, folder: str) -> None:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    counts = dict.fromkeys(["trials", "interrupted saves", "overwriting", "new step"], 0)
    for number in range(trials):
        root = Path(folder) / f"trial-{number}"
        root.mkdir(parents=True)
        trial(root, chance, counts)
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
