"""Freeze or kill one of four ranks in each phase of saves and loads, and see what the others are told; a program.

`test_freezes.py` starts it with FOLDER TRIALS, the trials as a list of JSON objects. Ranks
are forked from one warm process, and some trials go on side by side, as they mostly wait. Prints one JSON line of
counts, with the longest time from a freeze to its naming beyond the deadline; exits with 1 and the reason at the first
violation.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager
from holdfast.commit import settle
from holdfast.commit.agree import _Agreeing
from holdfast.commit.job import Job
from holdfast.commit.outgoing import Outgoing
from holdfast.ranks import rounds
from holdfast.read.shared import pass_on, share
from holdfast.run.tiers import nodes
from holdfast.saver import Saver
from holdfast.write import write
from tests.patience import freeze
from tests.read.share_trials import eager
from tests.trials import beside, forked, read_line, serve_store

WORLD = 4
BESIDE = 6  # trials at once
PATIENCE = 120.0

loading: Any = import_module("holdfast.load")
SAVE: dict[str, tuple[Any, str, bool]] = {
    "gather": (Job, "check", False),
    "describe": (_Agreeing, "_describe", False),
    "decide plan": (_Agreeing, "_decide", False),
    "planned": (_Agreeing, "run", True),
    "staging": (write.Writing, "stage", True),
    "written": (Outgoing, "finish", True),
    "joining": (rounds.Round, "_join", False),
    "claimed": (settle, "_commit", False),
    "committing": (settle, "commit", False),
    "committed": (settle, "commit", True),
    "told": (rounds.Round, "forget", False),
}
"""Where a rank stops in a save: at the beginning of a function, or at its end."""

LOAD: dict[str, tuple[Any, str, bool]] = {
    "match": (loading, "compare", False),
    "connect": (share, "_connect", False),
    "connected": (share, "_connect", True),
    "reading": (pass_on._Passing, "_read", False),
    "copying": (pass_on._Passing, "_take", False),
    "read": (share.Sharing, "read", True),
}

MANAGER: dict[str, tuple[Any, str, bool]] = {
    "fast folder": (nodes, "_mark", False),
    "nodes": (nodes, "_sweep_tokens", False),
    "restore": (CheckpointManager, "restore", False),
}

FIRST = ["decide plan", "joining", "claimed", "committing", "committed"]
"""What the first rank does alone."""


@dataclass(frozen=True)
class Trial:
    """``does``: "save", "background" (in a writer process), "thread", "load", "load alone", "manager" or "writer",
    where the writer process of the rank is frozen. ``then``: whether it "wakes", or is left behind.
    """

    does: str
    phase: str
    of: int = 1
    number: int = signal.SIGSTOP
    then: str = "wakes"
    deadline: float = 8.0


def content(step: int) -> torch.Tensor:
    return torch.arange(400_000.0) + step


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    part = 400_000 // 12
    mine = content(step)[rank * part : (rank + 1) * part].clone()
    return {
        "model": {"w": holdfast.Shard(mine, (part * world,), (rank * part,)), "v": content(step)},
        "mine": holdfast.PerRank([step, rank], elsewhere="first"),
        "step": step,
    }


class Rank:
    """One rank of a trial."""

    def __init__(self, rank: int, trial: Trial, root: Path, told: int, port: int) -> None:
        self.rank, self.trial, self.root, self._told, self._hits = rank, trial, root, told, 0
        self.store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))

    def tell(self, what: str, **more: Any) -> None:
        line = json.dumps({"rank": self.rank, "what": what, "at": time.monotonic(), **more}) + "\n"
        os.write(self._told, line.encode())

    def run(self) -> None:
        trial = self.trial
        dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=WORLD)
        holdfast.save(state_of(1, self.rank, WORLD), self.root / "1")
        outcome: dict[str, Any] = {"kind": "", "text": "", "lost": None}
        self.watch()
        try:
            self.act()
        except holdfast.HoldfastError as error:
            lost = error.rank if isinstance(error, holdfast.errors.RankLost) else None
            outcome = {"kind": type(error).__name__, "text": str(error), "lost": lost}
        self.tell("outcome", **outcome)
        self.await_file("next")
        if trial.then == "wakes":
            rank, world = self.rank, WORLD
        else:
            dist.destroy_process_group()
            rank, world = self.rank - (self.rank > trial.of), WORLD - 1
            again = dist.PrefixStore("again", self.store)
            dist.init_process_group("gloo", store=again, rank=rank, world_size=world)
        holdfast.save(state_of(3, rank, world), self.root / "3", deadline=PATIENCE)
        self.tell("saved")

    def act(self) -> None:
        trial, rank = self.trial, self.rank
        path, state, deadline = self.root / "2", state_of(2, rank, WORLD), trial.deadline
        if trial.does == "save":
            holdfast.save(state, path, deadline=deadline)
        elif trial.does in ("background", "thread", "writer"):
            saver = Saver(worker="thread" if trial.does == "thread" else "process", deadline=deadline)
            if trial.does == "writer" and rank == trial.of:
                self.freeze_writer(saver)
            saving = saver.save(state, path)
            try:
                saving.wait()
            finally:
                with suppress(holdfast.SaveFailed):
                    saver.close()
        elif trial.does == "manager":
            fast = self.root.with_name("fast")
            with CheckpointManager(
                self.root, every=1, name="{step}", fast=fast, deadline=deadline, signals=()
            ) as manager:
                manager.restore(state)
        else:
            with eager(block=1 << 16):
                sharing: Any = "off" if trial.does == "load alone" else "auto"
                loaded = holdfast.load(self.root / "1", state, deadline=deadline, share=sharing)
                assert (loaded.bytes_received > 0) == (sharing == "auto")

    def watch(self) -> None:
        """Stop at the phase of the trial."""
        trial = self.trial
        if self.rank != trial.of or trial.does == "writer":
            return
        owner, name, after = {**SAVE, **LOAD, **MANAGER}[trial.phase]
        done = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            if not after:
                self.stop()
            result = done(*args, **options)
            if after:
                self.stop()
            return result

        setattr(owner, name, watched)

    def stop(self) -> None:
        self._hits += 1
        if self._hits == (2 if self.trial.phase in ("reading", "copying", "joining") else 1):
            self.tell("stops")
            signal.pthread_kill(threading.get_ident(), self.trial.number)  # this thread too, at once

    def freeze_writer(self, saver: Saver) -> None:
        stage = write.Writing.stage

        def staging(writing: Any, *sections: Any) -> None:
            write.Writing.stage = stage  # type: ignore[method-assign]
            pid = saver._pool.worker.pid  # type: ignore[union-attr]
            freeze(pid)
            self.tell("stops", writer=pid)
            stage(writing, *sections)

        write.Writing.stage = staging  # type: ignore[method-assign]

    def await_file(self, name: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.root.with_name(name).exists():
            assert time.monotonic() < until, f"no {name}"
            time.sleep(0.01)


# The program.


def serve(rank: int, trial: Trial, root: Path, told: int, port: int) -> None:
    Rank(rank, trial, root, told, port).run()


class Lines:
    """What the ranks tell."""

    def __init__(self, fd: int) -> None:
        self._fd, self._left, self.lines = fd, b"", list[dict[str, Any]]()

    def wait(self, what: str, count: int, but: int | None = None) -> list[dict[str, Any]]:
        """The first ``count`` lines of this kind of ranks ``but`` for one."""
        until = time.monotonic() + PATIENCE
        while True:
            found = [line for line in self.lines if line["what"] == what and line["rank"] != but]
            if len(found) >= count:
                return found
            ready, _, _ = select.select([self._fd], [], [], max(until - time.monotonic(), 0))
            got = os.read(self._fd, 65536) if ready else b""
            assert got, f"{count} times {what!r} was to be told; told: {self.lines}"
            *lines, self._left = (self._left + got).split(b"\n")
            self.lines += [json.loads(line) for line in lines]


def run(trial: Trial, folder: Path) -> float:
    """Seconds from the freeze beyond the deadline after which the last of the others had the outcome."""
    root = folder / "run"
    root.mkdir(parents=True)
    told_read, told_write = os.pipe()
    port_read, port_told = os.pipe()
    server = forked(serve_store, port_told)
    port = int(read_line(port_read))
    pids = [forked(serve, rank, trial, root, told_write, port) for rank in range(WORLD)]
    os.close(told_write)
    lines = Lines(told_read)
    try:
        return check(trial, root, pids, lines)
    finally:
        # Whatever is wrong, no process stays.
        for pid in [*pids, server, *(line["writer"] for line in lines.lines if "writer" in line)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def check(trial: Trial, root: Path, pids: list[int], lines: Lines) -> float:
    (stopped,) = lines.wait("stops", 1)
    others = lines.wait("outcome", WORLD - 1, but=trial.of)
    outcomes = {(line["kind"], line["text"]) for line in others}
    assert len(outcomes) == 1, f"the others were told different things: {others}"
    ((kind, text),) = outcomes
    fine = trial.phase == "committed"
    if fine:
        assert not kind, text
    else:
        assert {line["lost"] for line in others} == {trial.of}, others
        for rank in range(WORLD):
            assert (f"rank {rank} (" in text.partition(" within ")[0].replace(f"save failed (rank {rank} on", "")) == (
                rank == trial.of
            ), text
    if trial.does == "writer":
        assert "alive but stuck" in text, text
    beyond: float = 0.0 if fine else max(line["at"] for line in others) - stopped["at"] - trial.deadline
    if trial.number == signal.SIGKILL:
        with suppress(ChildProcessError):
            os.waitpid(pids[trial.of], 0)
    elif trial.then == "wakes":
        os.kill(stopped.get("writer", pids[trial.of]), signal.SIGCONT)
        own = next(line for line in lines.wait("outcome", WORLD) if line["rank"] == trial.of)
        if trial.phase == "committing":  # it had looked for its claim already: what it did then may stand
            assert "It may be committed all the same" in text, text
        else:
            assert (own["kind"], own["text"]) == (kind, text), f"it woke to {own}, others had {text}"
    root.with_name("next").touch()
    survivors = WORLD if trial.then == "wakes" else WORLD - 1
    lines.wait("saved", survivors)
    opened = holdfast.open(root / "3")
    opened.verify()
    assert opened.step == 3 and opened.world_size == survivors
    assert torch.equal(opened.read("model/v"), content(3))
    return beyond


def main(folder: str, trials: list[Trial]) -> None:
    torch.set_num_threads(1)

    def conduct(number: int, trial: Trial) -> dict[str, float]:
        return {"trials": 1, "seconds beyond the deadlines": run(trial, Path(folder, f"trial-{number}"))}

    print(json.dumps(beside(trials, conduct, BESIDE)))


if __name__ == "__main__":
    main(sys.argv[1], [Trial(**fields) for fields in json.loads(sys.argv[2])])
