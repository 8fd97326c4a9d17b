"""Kill or freeze ranks while they write, and see whether the others commit without them; run as a program.

`test_degraded.py` starts it with FOLDER TRIALS, the trials as a list of JSON objects.
It forks four gloo ranks for each trial from one warm process. All ranks save the state to `truth` first; then some die
in the save to `step`, and what is committed there has to equal `truth` bit for bit. Prints one JSON line of counts;
exits with 1 and the reason at the first violation.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.commit.folder import sweep_beside
from holdfast.commit.outgoing import Outgoing
from holdfast.ondisk.spans import ranges
from holdfast.policies.degraded import failover
from holdfast.policies.degraded.failover import _Failover
from holdfast.storage.local.local_place import LocalPlace
from tests import format_reader
from tests.trials import forked, read_line, serve_store

WORLD, DEADLINE = 4, 8.0
TOGETHER = 4  # trials at once: most of each is waiting for a deadline
KINDS = ["ddp", "hsdp", "fsdp", "stages", "per rank"]


@dataclass(frozen=True)
class Trial:
    """``at``: where each victim stops: "write", "durable", "take over", "taken over" or "commit". ``signal``: 9, or 19
    to freeze.

    ``lost`` are the ranks that the commit does without. With ``refused`` there must be none, and survivors have to
    tell this. ``worker``: "none" for a save that training waits for. ``crossing``: see `cross`.
    """

    kind: str = "ddp"
    at: dict[str, str] = field(default_factory=dict)
    lost: tuple[int, ...] = ()
    refused: str = ""
    signal: int = signal.SIGKILL
    worker: str = "none"
    degraded: bool = True
    files: str = "all"
    base: bool = False
    overwrite: bool = False
    crossing: bool = False


def model_of(kind: str, rank: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(96, 128), nn.BatchNorm1d(128), nn.Linear(128, 96), nn.Linear(96, 64, bias=False))
    if kind == "hsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    elif kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    else:
        model[1].running_mean.fill_(rank)  # as batch norm has it: each rank its own
        model[1].running_var.fill_(rank)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A step without collectives: some ranks may be gone."""
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1 * step) + parameter.detach()
    optimizer.step()


def state_of(trial: Trial, rank: int) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = model_of(trial.kind, rank)
    # A stage has settings of its own, which no rank of the other one knows.
    stage = rank // 2 if trial.kind == "stages" else 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (1 + stage))
    train(model, optimizer, 1)
    if trial.kind == "stages":
        state: dict[str, Any] = {f"model{stage}": model, f"optimizer{stage}": optimizer, "step": 1}
    else:
        state = {"model": model, "optimizer": optimizer, "step": 1, "empty": torch.empty(0, 3)}
    if trial.kind == "per rank":
        state["mine"] = holdfast.PerRank([rank])
    return model, optimizer, state


# One rank.


def watch(stage: str, number: int) -> None:
    """Stop this process at a stage of the save to `step`."""

    def stop(at: Any) -> None:
        folder = at if isinstance(at, Path) else at.job.folder
        if folder.name == "step":
            signal.pthread_kill(threading.get_ident(), number)  # this thread too, at once

    def around(owner: Any, name: str, *, after: bool = False) -> None:
        done = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if not after:
                stop(args[0])
            result = done(*args, **options)
            if after:
                stop(args[0])
            return result

        setattr(owner, name, watched)

    stages: dict[str, Callable[[], None]] = {
        "write": lambda: around(Outgoing, "finish"),
        "durable": lambda: around(Outgoing, "finish", after=True),
        "take over": lambda: around(_Failover, "_share"),
        "taken over": lambda: around(_Failover, "_share", after=True),
        "commit": lambda: around(failover, "commit"),
    }
    stages[stage]()


def cross(rank: int, root: Path) -> None:
    """Rank 3 takes back its files of the first attempt in the moment after rank 2 has made folders for the second."""
    made, withdrawn = root / "made", root / "withdrawn"
    withdraw, write, make_folders = failover.withdraw, _Failover._write, LocalPlace.make_folders

    def withdraw_late(*args: Any) -> None:
        await_file(made)
        withdraw(*args)
        withdrawn.touch()

    def write_second(self: _Failover, plan: Any, attempt: int, small: Any) -> Any:
        if attempt == 2:
            LocalPlace.make_folders = make_and_wait
        return write(self, plan, attempt, small)

    def make_and_wait(self: LocalPlace, names: Any) -> None:
        make_folders(self, names)
        made.touch()
        await_file(withdrawn)

    if rank == 3:
        failover.withdraw = withdraw_late
    elif rank == 2:
        _Failover._write = write_second


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def run_rank(rank: int, trial: Trial, root: Path, told: int, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    model, optimizer, state = state_of(trial, rank)
    files = {"config.json": b"{}", "of/this.txt": b"x" * 100}
    if trial.files == "first" and rank:
        files = {}
    holdfast.save(state, root / "truth", deadline=240, run="0123456789abcdef")
    if trial.overwrite:
        train(model, optimizer, 7)
        holdfast.save(state, root / "step", deadline=240)
        holdfast.load(root / "truth", state)
    if str(rank) in trial.at:
        watch(trial.at[str(rank)], trial.signal)
    if trial.crossing:
        cross(rank, root)
    options: dict[str, Any] = {"base": root / "truth"} if trial.base else {}
    options |= {"overwrite": trial.overwrite, "files": files, "run": f"{rank:016x}"}
    try:
        if trial.worker == "none":
            holdfast.save(state, root / "step", deadline=DEADLINE, degraded=trial.degraded, **options)
        else:
            saver = holdfast.Saver(worker=trial.worker, deadline=DEADLINE, degraded=trial.degraded)
            saving = saver.save(state, root / "step", **options)
            # Training goes on: what survivors hold is newer now than what they have to write.
            train(model, optimizer, 2)
            if trial.kind not in ("hsdp", "fsdp"):
                model[1].running_mean.fill_(-1)
            saving.wait()
        words = {"rank": rank, "committed": True}
    except holdfast.SaveFailed as error:
        words = {
            "rank": rank, "committed": False, "error": str(error), "absent": error.absent, "settled": error.settled,
            "kinds": [kind.__name__ for kind in type(error).__mro__],
        }  # fmt: skip
    os.write(told, json.dumps(words).encode() + b"\n")


# The program.


@dataclass(frozen=True)
class Running:
    """A trial under way. Its ranks tell one line each, as JSON, by ``told``."""

    trial: Trial
    root: Path
    server: int
    pids: list[int]
    told: int


def begin(trial: Trial, root: Path) -> Running:
    root.mkdir(parents=True)
    told_read, told = os.pipe()
    port_read, port_told = os.pipe()
    server = forked(serve_store, port_told)
    port = int(read_line(port_read))
    pids = [forked(run_rank, rank, trial, root, told, port) for rank in range(WORLD)]
    for fd in (told, port_read, port_told):
        os.close(fd)
    return Running(trial, root, server, pids, told_read)


def end(running: Running) -> None:
    trial, pids = running.trial, running.pids
    victims = [int(rank) for rank in trial.at]
    words = [json.loads(read_line(running.told)) for _ in range(WORLD - len(victims))]
    if trial.signal == signal.SIGSTOP:
        for victim in victims:
            os.kill(pids[victim], signal.SIGCONT)
        words += [json.loads(read_line(running.told)) for _ in victims]
    for pid in list(pids):
        os.waitpid(pid, 0)
        pids.remove(pid)
    check(trial, running.root, words)


def stop(running: Running) -> None:
    """Whatever is wrong, no process stays."""
    for pid in [*running.pids, running.server]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os.close(running.told)


def check(trial: Trial, root: Path, words: list[dict[str, Any]]) -> None:
    if trial.refused:
        texts = {one.get("error") for one in words}
        assert len(texts) == 1 and None not in texts, f"the ranks tell different things: {texts}"
        text = str(texts.pop())
        assert trial.refused in text, f"{trial.refused!r} is not told: {text}"
        assert all("RankLost" in one["kinds"] for one in words), words
        absent = {tuple(one["absent"]) for one in words}
        assert absent == {tuple(sorted(int(rank) for rank, stage in trial.at.items() if stage != "commit"))}, absent
        if not trial.overwrite:
            assert not (root / "step" / "manifest.json").exists()
        return
    assert all(one["committed"] for one in words), words
    opened, truth = holdfast.open(root / "step"), holdfast.open(root / "truth")
    opened.verify()
    record = opened.manifest
    assert record.producer.get("lost", "") == ranges(trial.lost), record.producer
    assert record.run == f"{0:016x}" and record.step == 1 and record.world_size == WORLD
    found, expected = dict(flat(opened.state_dict())), dict(flat(truth.state_dict()))
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            own = name.endswith(("running_mean", "running_var"))
            first = 2 if name.startswith("/model1") else 0  # of those that have this model
            if own and trial.kind in ("ddp", "stages") and first in trial.lost and not trial.overwrite:
                value = torch.full_like(value, heir_of(first, trial))
            assert torch.equal(value, found[name]), f"{name} is not as it was"
        else:
            assert value == found[name], f"{name} is {found[name]}, not {value}"
    read = format_reader.read(root / "step")
    assert set(read.attachments) == {"config.json", "of/this.txt"}
    for name, value in flat(read.state):
        assert torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name], name
    named = {"manifest.json", *(f.path for f in record.data_files), *(path for path, _, _ in record.attachments)}
    if trial.signal == signal.SIGKILL:
        assert sweep_beside(root / "step", record), "a living save still writes there"
        if 0 in trial.lost:  # what the first rank attached before it died is small, and goes with the checkpoint
            named |= {f"attachments/{name}" for name in read.attachments}
    # A rank that comes back takes its own files away.
    left = {str(f.relative_to(root / "step")) for f in (root / "step").rglob("*") if f.is_file()} - named
    assert not left, f"left behind: {left}"
    if trial.base:
        assert any(f.save for f in record.data_files), "nothing is borrowed"
        whole = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
        again = holdfast.save({"again": whole}, root / "again", base=root / "step")
        again.verify()


def heir_of(first: int, trial: Trial) -> int:
    """Whose buffers are saved if the first rank that has them is lost: its spare's, which has a copy, or the next."""
    holders = range(first, first + (2 if trial.kind == "stages" else WORLD))
    return holders[len(holders) // 2] if trial.worker != "none" else min(set(holders) - set(trial.lost))


def flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, (dict, list)):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from flat(value, f"{path}/{key}")
    else:
        yield path, tree


def main(folder: str, trials: list[Trial]) -> None:
    torch.set_num_threads(1)
    counts: Counter[str] = Counter(trials=0)
    for number in range(0, len(trials), TOGETHER):
        running = [
            begin(trial, LocalPlace(folder, f"{number + i}")) for i, trial in enumerate(trials[number:][:TOGETHER])
        ]
        at = running[0]
        try:
            for at in running:
                end(at)
                counts["trials"] += 1
                counts["refused" if at.trial.refused else "committed"] += 1
        except BaseException:
            print(f"in {at.trial}:", file=sys.stderr)
            raise
        finally:
            for one in running:
                stop(one)
        for one in running:
            shutil.rmtree(one.root)
    print(json.dumps(counts))


def trial_from(fields: dict[str, Any]) -> Trial:
    return Trial(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


if __name__ == "__main__":
    main(sys.argv[1], [trial_from(fields) for fields in json.loads(sys.argv[2])])
