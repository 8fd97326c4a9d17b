"""Kill trainers, writer processes or both during background saves, and see what a restart finds; run as a program.

`test_survivors.py` starts it with FOLDER TRIALS, the trials as a list of JSON objects.
It forks ranks from one warm process, so a trial costs a second or two. Prints one JSON line of counts; exits with 1
and the reason at the first violation.

A trial with a ``stage`` stops all ranks that come there in the save of step 3, kills, and lets the others go on.
Without one the kill comes at a random moment.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
import holdfast.saver
from holdfast import CheckpointManager, Keep
from holdfast.buffers.stable import CopyGuard
from holdfast.commit import settle
from holdfast.commit.agree import _Agreeing
from holdfast.commit.job import Job
from holdfast.commit.outgoing import Outgoing
from holdfast.write import pool, write
from tests.patience import freeze
from tests.trials import beside, forked, read_line, serve_store

STAGES = ["save", "plan", "planned", "staging", "staged", "handed", "durable", "committing", "committed", "parts"]
"""Moments of a save, in order. ``handed``: everything is handed to the writer, down to the part that this rank leaves.

``committing`` and ``committed`` are the first rank's alone.
"""

STEP, STEPS = 3, 6
NAME = f"step-{STEP:09d}"
BESIDE = 4  # trials at once
ADOPT = 36  # PR_SET_CHILD_SUBREAPER: writers that lose their trainer become children of this program


@dataclass(frozen=True)
class Trial:
    """``kill``: whom, of "trainers" and "writers"; ``of``: the ranks, all if None. ``slow``: writers are stopped from
    before the save until the restart is under way.
    """

    world: int = 2
    worker: str = "process"
    stage: str | None = None
    kill: tuple[str, ...] = ("trainers",)
    of: tuple[int, ...] | None = None
    slow: bool = False
    expect: int | None = None
    seed: int = 0

    @property
    def victims(self) -> tuple[int, ...]:
        return tuple(range(self.world)) if self.of is None else self.of

    @property
    def rows(self) -> int:
        return 1200 if self.stage else 6000 * 60


def content(step: int, rows: int) -> torch.Tensor:
    return (torch.arange(float(rows))[:, None] + 1000.0 * step).expand(rows, 16)


def state_of(step: int, rank: int, trial: Trial, world: int) -> dict[str, Any]:
    rows = trial.rows // world
    whole = content(step, trial.rows)
    start = rank * rows
    return {
        "sharded": {"w": holdfast.Shard(whole[start : start + rows].clone(), (trial.rows, 16), (start, 0))},
        "replicated": {"v": whole[:300].clone()},
        "mine": holdfast.PerRank([step, rank], elsewhere="first"),
        "step": step,
    }


# One rank.


class Rank:
    """One trainer: tells the program what it does, and stops at the stage of its trial."""

    def __init__(self, rank: int, trial: Trial, root: Path, told: int) -> None:
        self.rank, self.trial, self.root, self._told = rank, trial, root, told
        self.writer = 0
        self._arrived = threading.Lock()
        self._start = pool.start
        pool.start = self.start

    def tell(self, *words: object) -> None:
        os.write(self._told, (" ".join(map(str, words)) + "\n").encode())

    def start(self, kind: str) -> Any:
        worker = self._start(kind)
        if kind == "process":
            self.writer = worker.pid
            self.tell("writer", self.rank, worker.pid)
        return worker

    def arrive(self, folder: Path | None) -> None:
        """Stop here if this is the save: for ever, or until the program says go."""
        if folder is not None and folder.name == NAME and self._arrived.acquire(blocking=False):
            self.tell("at", self.rank)
            while not self.root.with_name("go").exists():
                time.sleep(0.002)

    def watch(self) -> None:
        """Come by `arrive` at the stage of the trial."""

        def before(owner: Any, name: str, folder_of: Callable[..., Path | None], *, after: bool = False) -> None:
            done = getattr(owner, name)

            def watched(*args: Any, **options: Any) -> Any:
                if not after:
                    self.arrive(folder_of(*args))
                result = done(*args, **options)
                if after:
                    self.arrive(folder_of(*args))
                return result

            setattr(owner, name, watched)

        stages: dict[str, Callable[[], None]] = {
            "save": lambda: before(Job, "check", lambda job, *_: job.folder),
            "plan": lambda: before(_Agreeing, "run", lambda agreeing, *_: agreeing.job.folder),
            "planned": lambda: before(_Agreeing, "run", lambda agreeing, *_: agreeing.job.folder, after=True),
            "staging": lambda: before(write.Writing, "stage", lambda writing, *_: writing.folder, after=True),
            "staged": lambda: before(CopyGuard, "copied", lambda guard, *_: guard._copying._path, after=True),
            "handed": lambda: before(write.Writing, "leave", lambda writing, *_: writing.folder, after=True),
            "durable": lambda: before(Outgoing, "finish", lambda outgoing, *_: outgoing.job.folder, after=True),
            "committing": lambda: before(settle, "commit", lambda folder, *_: folder),
            "committed": lambda: before(settle, "commit", lambda folder, *_: folder, after=True),
            "parts": lambda: before(settle, "take_away", lambda folder, *_: folder),
        }
        if self.trial.stage is not None:
            stages[self.trial.stage]()

    def last(self, step: int, store: dist.TCPStore) -> int:
        """The step after which all ranks stop, once told to: the same one, although they may be a step apart."""
        if self.rank == 0 and self.root.with_name("stop").exists() and not store.check(["last"]):
            store.set("last", str(step + 1 if self.trial.world > 1 else step - 1))
        return int(store.get("last")) if store.check(["last"]) else step

    def train(self, port: int) -> None:
        os.setpgid(0, 0)  # a launcher kills the whole group of a trainer, so does the program
        trial = self.trial
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=trial.world)
        self.watch()
        manager = CheckpointManager(self.root, every=1, worker=trial.worker, keep=Keep(last=99), signals=(), deadline=8)
        manager.prepare(state_of(0, self.rank, trial, trial.world))
        for step in range(1, STEPS + 1 if trial.stage else 1000):
            if step > self.last(step, store):
                break
            if trial.slow and step == STEP:
                manager.wait()
                freeze(self.writer)
            try:
                begun = manager.step(step, state_of(step, self.rank, trial, trial.world))
            except holdfast.errors.RankLost:
                raise
            except holdfast.SaveFailed as error:
                self.tell("failed", self.rank, step, str(error).replace("\n", " "))
                continue
            begun.add_done_callback(lambda s: None if s.failed else self.tell("done", self.rank, s.step))
        try:
            manager.close()
        except holdfast.errors.RankLost:
            raise
        except holdfast.SaveFailed as error:
            self.tell("failed", self.rank, step, str(error).replace("\n", " "))


def serve(rank: int, trial: Trial, root: Path, told: int, port: int) -> None:
    one = Rank(rank, trial, root, told)
    try:
        one.train(port)
    except holdfast.errors.RankLost as error:
        one.tell("lost", rank, error.rank)
        raise


# The program.


class Told:
    """What the ranks have told."""

    def __init__(self, fd: int) -> None:
        self.lines: list[list[str]] = []
        self.writers: dict[int, int] = {}
        self.pids: list[int] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(fd,), daemon=True)
        self._reader.start()

    def _read(self, fd: int) -> None:
        with open(fd) as lines:
            for line in lines:
                words = line.split()
                with self._changed:
                    self.lines.append(words)
                    if words[0] == "writer":
                        self.writers[int(words[1])] = int(words[2])
                        self.pids.append(int(words[2]))
                    self._changed.notify_all()

    def wait(self, holds: Callable[[], bool], what: str) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, timeout=240), f"{what} in time; told: {self.lines}"

    def join(self) -> None:
        self._reader.join()

    def of(self, kind: str) -> list[list[str]]:
        return [line[1:] for line in list(self.lines) if line[0] == kind]


def send(pid: int, number: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number) if group else os.kill(pid, number)


def run(trial: Trial, folder: Path, counts: Counter[str]) -> None:
    root = folder / "run"
    root.mkdir(parents=True)
    chance = random.Random(trial.seed)
    told_read, told_write = os.pipe()
    port_read, port_told = os.pipe()
    server = forked(serve_store, port_told)
    port = int(read_line(port_read))
    trainers = [forked(serve, rank, trial, root, told_write, port) for rank in range(trial.world)]
    os.close(told_write)
    told = Told(told_read)
    try:
        _run(trial, folder, root, chance, trainers, server, told, counts)
    except BaseException:
        for pid in [*trainers, server, *told.pids]:  # whatever is wrong, no process stays
            send(pid, signal.SIGKILL)
        raise
    os.close(port_read)
    os.close(port_told)


def _run(
    trial: Trial, folder: Path, root: Path, chance: random.Random, trainers: list[int], server: int, told: Told,
    counts: Counter[str],
) -> None:  # fmt: skip
    if trial.stage is not None:
        come = 1 if trial.stage in ("committing", "committed") else trial.world
        told.wait(lambda: len(told.of("at")) == come, f"{come} ranks at {trial.stage}")
    else:
        told.wait(lambda: bool(told.of("done")), "a save")
        time.sleep(chance.random() * 0.3)
    interrupted = any(not (f / "manifest.json").exists() for f in root.glob("step-*"))
    for rank in trial.victims:
        if "trainers" in trial.kill:
            send(trainers[rank], signal.SIGKILL, group=True)
        if "writers" in trial.kill and rank in told.writers:
            send(told.writers[rank], signal.SIGKILL)
    if trial.slow and "trainers" not in trial.kill:
        for pid in told.pids:
            send(pid, signal.SIGCONT)
    folder.joinpath("go").touch()
    if trial.stage is None and "trainers" not in trial.kill:
        time.sleep(0.3)
        folder.joinpath("stop").touch()
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in trainers]
    send(server, signal.SIGKILL)
    os.waitpid(server, 0)
    told.join()

    killed = set(trial.victims) if "trainers" in trial.kill else set()
    for rank, code in enumerate(codes):
        lost = 3 if killed and trial.stage not in ("committed", "parts") else 0
        possible = {-signal.SIGKILL} if rank in killed else {lost} if trial.stage else {0, 3} if killed else {0}
        if killed and trial.stage in ("committed", "parts"):
            possible |= {3}  # the next save, or the verdict of this one, waits for the dead rank
        assert code in possible, f"rank {rank} ended with {code}, not with one of {possible}; told: {told.lines}"
    for _, named in told.of("lost"):
        assert int(named) in killed, f"lost is {killed}, named was rank {named}"
    acknowledged = max(int(step) for _, step in told.of("done"))
    counts["interrupted"] += interrupted
    newest = check(trial, root, acknowledged, told.pids)
    counts["newest is new"] += newest > acknowledged
    counts["failed saves"] += len({step for _, step, *_ in told.of("failed")})
    counts["trials"] += 1


def check(trial: Trial, root: Path, acknowledged: int, writers: list[int]) -> int:
    """What a restart finds is one whole step, and nothing else stays: no process, no part, no file."""
    if trial.slow:
        waking = threading.Timer(0.5, lambda: [send(pid, signal.SIGCONT) for pid in writers])
        waking.start()
    into = state_of(0, 0, trial, 1)
    with CheckpointManager(root, every=1, signals=(), keep=Keep(last=99)) as manager:
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == into["step"], "nothing is restored"
        newest = loaded.step
        if trial.slow:
            waking.join()
        assert torch.equal(into["sharded"]["w"].tensor, content(newest, trial.rows)), f"step {newest} is mixed"
        assert torch.equal(into["replicated"]["v"], content(newest, trial.rows)[:300]), f"step {newest} is mixed"
        if trial.expect is not None:
            assert newest == trial.expect, f"restored is step {newest}, not {trial.expect}"
        assert newest in (acknowledged, acknowledged + 1), f"newest {newest}, acknowledged {acknowledged}"
        gone = await_the_end(writers)
        manager.save(newest + 1, state_of(newest + 1, 0, trial, 1))
    assert not gone, f"writers {gone} live on"
    for folder in root.glob("step-*"):
        assert (folder / "manifest.json").exists(), f"{folder.name} is left by a dead save"
        opened = holdfast.open(folder)
        opened.verify()
        found = opened.state_dict()
        step = int(folder.name[-9:])
        assert opened.step == found["step"] == step, f"{folder} is step {opened.step}"
        assert torch.equal(found["sharded"]["w"], content(step, trial.rows)), f"{folder} is mixed"
        named = {"manifest.json", *(f.path for f in opened.manifest.data_files)}
        named |= {path for path, _, _ in opened.manifest.attachments}
        left = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()} - named
        assert not left and not (folder / "parts").exists(), f"{folder} holds {left or 'parts/'}"
    return newest


def await_the_end(pids: list[int]) -> list[int]:
    """Those that live on; they are killed then. Writers are ours once their trainers are gone."""
    alive, until = set(pids), time.monotonic() + 240
    while alive and time.monotonic() < until:
        for pid in list(alive):
            try:
                if os.waitpid(pid, os.WNOHANG)[0] == pid:
                    alive.discard(pid)
            except ChildProcessError:
                if not Path(f"/proc/{pid}").exists():
                    alive.discard(pid)
        time.sleep(0.005)
    for pid in alive:
        send(pid, signal.SIGKILL)
    return sorted(alive)


def main(folder: str, trials: list[Trial]) -> None:
    torch.set_num_threads(1)

    def conduct(number: int, trial: Trial) -> dict[str, float]:
        if ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0) != 0:
            raise OSError(errno.EINVAL, "the system cannot hand orphans to this process")
        counts, place = Counter[str](), Path(folder, f"trial-{number}")
        run(trial, place, counts)
        shutil.rmtree(place)
        return dict(counts)

    # Kills at a random moment hit a save in its middle more often if nothing else takes the processor.
    print(json.dumps(beside(trials, conduct, BESIDE if trials[0].stage else 1)))


def trial_from(fields: dict[str, Any]) -> Trial:
    return Trial(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


if __name__ == "__main__":
    main(sys.argv[1], [trial_from(fields) for fields in json.loads(sys.argv[2])])
