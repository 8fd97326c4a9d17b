"""Four ranks, one of which meets a fault at a phase of a save or a load: what all of them say; run as a program.

`test_fault_matrix.py` starts it with FOLDER TRIALS, the trials as a list of JSON objects.
The ranks are forked from one warm process and live on from trial to trial, unless they are killed. Prints one JSON line
of counts; exits with 1 and the reason at the first violation.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from select import select
from typing import Any

import torch
import torch.distributed as dist

import holdfast
from holdfast.testing import at_phase, faults, freeze_at, kill_at
from tests.trials import forked, read_line, serve_store

WORLD = 4
ROWS = 4000
PATIENT, SHORT = 240.0, 6.0
"""Deadlines in seconds: where all ranks answer, and where one does not."""
GUARD = 240.0
"""Seconds beyond a deadline after which a rank counts as hung: far more than any of them needs."""

SIGNALS = ("SIGKILL", "SIGSTOP")
ROOM = ("create", "reserve", "write", "make folder", "link", "replace")
"""What a full disk, or a quota that is used up, refuses."""
REFUSED: dict[str, tuple[str | tuple[str, ...], int]] = {
    "ENOSPC": (ROOM, 0),
    "EDQUOT": (ROOM, 0),
    "EROFS": ("change", 0),
    "EACCES": (("create", "open", "make folder", "link", "replace"), 0),
    "EIO": ("any", 1),
    "ESTALE": (("read", "write", "sync", "list", "stat", "open"), 1),
}
"""For each error what fails with it, and how often: 0 is from then on."""

FIRST_ALONE = ("commit", "committed")
"""Phases of the first rank."""


@dataclass(frozen=True)
class Trial:
    """``act``: "save", "overwrite", "background" or "load". ``real``: the fault is the system's own, not ours."""

    act: str
    fault: str
    rank: int
    phase: str = "plan"
    real: bool = False


def state_of(step: int, rank: int) -> dict[str, Any]:
    share = ROWS // WORLD
    whole, start = whole_of(step), rank * share
    return {
        "sharded": {"w": holdfast.Shard(whole[start : start + share].clone(), (ROWS, 8), (start, 0))},
        "replicated": {"v": whole[:64].clone()},
        "mine": holdfast.PerRank([step, rank], elsewhere="first"),
        "step": step,
    }


def whole_of(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS))[:, None].expand(ROWS, 8) + 1000.0 * step


def is_step(path: Path, step: int) -> None:
    """The checkpoint is whole, and that of this step alone."""
    opened = holdfast.open(path)
    opened.verify()
    found = opened.state_dict()
    whole = whole_of(step)
    assert found["step"] == step, f"{path} is step {found['step']}, not {step}"
    assert torch.equal(found["sharded"]["w"], whole) and torch.equal(found["replicated"]["v"], whole[:64]), "mixed"
    assert [opened.per_rank("mine", rank)[:2] for rank in range(WORLD)] == [[step, rank] for rank in range(WORLD)]


# One rank: does what it is told, and answers what came of it.


def serve(rank: int, port: int, orders: int, answers: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=240))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    saver = None
    while True:
        line = read_line(orders)
        told = json.loads(line)
        if told["act"] == "end":
            os._exit(0)
        if saver is None and told["act"] == "background":
            saver = holdfast.Saver(deadline=PATIENT)
        answer = {"kind": "done"}
        try:
            with _fault_of(told, rank):
                _do(told, rank, saver)
        except holdfast.HoldfastError as error:
            kinds = [kind.__name__ for kind in type(error).__mro__]
            fields = {key: getattr(error, key, None) for key in ("rank", "phase", "file", "errno", "settled", "cause")}
            answer = {"kind": "failed", "kinds": kinds, "text": str(error), **fields}
        except BaseException as error:
            answer = {"kind": "broken", "text": f"{type(error).__name__}: {error}"}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _do(told: dict[str, Any], rank: int, saver: Any) -> None:
    path, deadline, step = told["path"], told["deadline"], told["step"]
    if told["act"] == "load":
        into = state_of(0, rank)
        holdfast.load(path, into, deadline=deadline)
        assert into["step"] == step and into["mine"].value[:2] == [step, rank], f"loaded is {into['step']}"
        expected = state_of(step, rank)
        assert torch.equal(into["sharded"]["w"].tensor, expected["sharded"]["w"].tensor), "loaded is something else"
        return
    state = state_of(step, rank)
    if told.get("huge") and rank == told["rank"]:
        state["stage"] = {f"of rank {rank}": torch.ones(4 << 20)}  # more than the disk of the trial takes
    if told["act"] == "background":
        saver._deadline = deadline
        saver.save(state, path).wait()
    else:
        holdfast.save(state, path, deadline=deadline, overwrite=told["act"] == "overwrite")


@contextmanager
def _fault_of(told: dict[str, Any], rank: int) -> Iterator[None]:
    kind, phase, under = told.get("fault"), told.get("phase"), told["path"]
    if kind is None or rank != told["rank"]:
        yield
        return
    with ExitStack() as stack:
        if kind == "EFBIG":
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, limit)
        elif kind in SIGNALS:
            stack.enter_context((kill_at if kind == "SIGKILL" else freeze_at)(phase))
        elif not told["real"]:
            verbs, times = REFUSED[kind]

            def meet() -> None:
                stack.enter_context(faults(verbs, times=times, error=kind, under=under))

            stack.enter_context(at_phase(phase, meet))
        yield


# The program.


class Fleet:
    """Four ranks, and the store that they meet at."""

    def __init__(self) -> None:
        port_read, port_told = os.pipe()
        self.server = forked(serve_store, port_told)
        port = int(read_line(port_read))
        self.orders: list[int] = []
        self.answers: list[int] = []
        self.pids: list[int] = []
        for rank in range(WORLD):
            orders, ordering = os.pipe()
            answering, answers = os.pipe()
            self.pids.append(forked(serve, rank, port, orders, answers))
            os.close(orders)
            os.close(answers)
            self.orders.append(ordering)
            self.answers.append(answering)
        os.close(port_read)
        os.close(port_told)

    def tell(self, told: dict[str, Any]) -> None:
        for order in self.orders:
            os.write(order, json.dumps(told).encode() + b"\n")

    def hear(self, rank: int, seconds: float) -> dict[str, Any]:
        """What a rank answers; of one that is gone, how it ended."""
        if not select([self.answers[rank]], [], [], seconds)[0]:
            raise AssertionError(f"rank {rank} is hung: no answer within {seconds:g} s")
        try:
            answer: dict[str, Any] = json.loads(read_line(self.answers[rank]))
            return answer
        except RuntimeError:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pids[rank], 0)[1])
            self.pids[rank] = 0
            return {"kind": "ended", "code": code}

    def all(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        self.tell(told)
        return [self.hear(rank, told["deadline"] + GUARD) for rank in range(WORLD)]

    def await_stop(self, rank: int) -> None:
        until = time.monotonic() + GUARD
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pids[rank], os.WUNTRACED | os.WNOHANG)
            if pid:
                assert os.WIFSTOPPED(status), f"rank {rank} ended with {os.waitstatus_to_exitcode(status)}"
                return
            time.sleep(0.005)
        raise AssertionError(f"rank {rank} did not stop within {GUARD:g} s")

    def close(self) -> None:
        for pid in [*filter(None, self.pids), self.server]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for fd in [*self.orders, *self.answers]:
            os.close(fd)


class Program:
    """All trials, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts, self.step = folder, Counter[str](), 0
        self.fleet = Fleet()

    def ordered(self, act: str, path: Path, step: int, **more: Any) -> dict[str, Any]:
        return {"act": act, "path": str(path), "step": step, "deadline": PATIENT, "real": False, **more}

    def well(self, act: str, path: Path, step: int, **more: Any) -> None:
        answers = self.fleet.all(self.ordered(act, path, step, **more))
        assert all(answer["kind"] == "done" for answer in answers), f"{act} without a fault: {answers}"

    def run(self, trial: Trial) -> None:
        self.step += 2
        root = self.folder / f"trial-{self.step}"
        root.mkdir()
        with mounted(root) if trial.real and trial.fault != "EFBIG" else _nothing():
            self._run(trial, root)
        shutil.rmtree(root)
        self.counts["trials"] += 1
        self.counts[trial.fault] += 1

    def _run(self, trial: Trial, root: Path) -> None:
        old, new = self.step, self.step + 1
        self.well("save", root / "old", old)
        path = root / ("old" if trial.act in ("overwrite", "load") else "new")
        told = self.ordered(
            trial.act, path, old if trial.act == "load" else new, fault=trial.fault, rank=trial.rank,
            phase=trial.phase, real=trial.real,
        )  # fmt: skip
        if trial.fault in SIGNALS:
            self._silence(trial, told, root)
        elif trial.real and trial.fault == "EROFS":
            self._read_only(told, root)
        else:
            if trial.real and trial.fault == "ENOSPC":
                told["huge"] = True
            self._error(trial, told)
        self._on_disk(trial, root, old, new)
        self.well("save", root / "next", new)
        self.well("load", root / "next", new)

    # What all say

    def _silence(self, trial: Trial, told: dict[str, Any], root: Path) -> None:
        """A rank that is killed or stopped is named by all others."""
        told["deadline"] = SHORT
        self.fleet.tell(told)
        rest = [rank for rank in range(WORLD) if rank != trial.rank]
        answers = {rank: self.fleet.hear(rank, SHORT + GUARD) for rank in rest}
        found = one_answer(answers)
        late = trial.phase in ("saved", "loaded") or trial.phase == "committed"
        if late:
            assert found["kind"] == "done", f"all was said before the fault came, and yet: {found}"
        else:
            assert "RankLost" in found["kinds"], f"{found['kinds']}: {found['text']}"
            assert found["rank"] == trial.rank and f"rank {trial.rank}" in found["text"], (
                f"the culprit is not named: {found}"
            )
        if trial.fault == "SIGKILL":
            ended = self.fleet.hear(trial.rank, GUARD)
            assert ended == {"kind": "ended", "code": -signal.SIGKILL}, ended
            self.fleet.close()
            self.fleet = Fleet()
        else:
            self.fleet.await_stop(trial.rank)  # all may have been said before
            os.kill(self.fleet.pids[trial.rank], signal.SIGCONT)
            woken = self.fleet.hear(trial.rank, SHORT + GUARD)
            if found["kind"] == "failed" and not found["settled"]:
                self.counts["unsettled"] += 1  # the others have been told that it may be committed all the same
            else:
                one_answer({**answers, trial.rank: woken})
        self.counts["lost" if not late else "too late to matter"] += 1

    def _error(self, trial: Trial, told: dict[str, Any]) -> None:
        """An error of one rank is told by all, with the rank and the file."""
        found = one_answer(dict(enumerate(self.fleet.all(told))))
        if found["kind"] == "done":
            # Nothing came that could fail, or what failed loses space or nothing at all.
            assert not trial.real, "the disk refused nothing"
            self.counts["no harm"] += 1
            return
        assert "StorageError" in found["kinds"], f"{found['kinds']}: {found['text']}"
        assert found["rank"] == trial.rank, f"named is rank {found['rank']}: {found['text']}"
        assert found["errno"] == getattr(errno, trial.fault), found
        if trial.fault != "EFBIG" or "bytes of memory" not in found["text"]:  # which that limit counts for too
            assert found["file"] and found["file"] in found["text"] and told["path"] in found["file"], found
        self.counts["refused"] += 1

    def _read_only(self, told: dict[str, Any], root: Path) -> None:
        remount(root, "ro")
        try:
            found = one_answer(dict(enumerate(self.fleet.all(told))))
        finally:
            remount(root, "rw")
        if told["act"] == "load":
            assert found["kind"] == "done", found
        else:
            assert found["errno"] == errno.EROFS and found["file"], found
        self.counts["refused"] += told["act"] != "load"

    # What is there

    def _on_disk(self, trial: Trial, root: Path, old: int, new: int) -> None:
        """The old step is whole, and what is visible of the new one is all of it."""
        if trial.act == "overwrite":
            stands = holdfast.open(root / "old").step
            assert stands in (old, new)
            is_step(root / "old", stands)
        else:
            is_step(root / "old", old)
            with suppress(holdfast.errors.NotACheckpoint):
                is_step(root / "new", new)
                self.counts["new is there"] += 1


def one_answer(answers: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """The answer that all of these ranks gave."""
    first, *rest = answers.values()
    assert first["kind"] in ("done", "failed"), f"{answers}"
    for other in rest:
        assert other == first, f"two verdicts: {answers}"
    return first


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def mounted(root: Path) -> Iterator[None]:
    """A real file system of 12 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(root)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


def remount(root: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(root)], check=True)


def main(folder: str, trials: list[Trial]) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    program = Program(Path(folder))
    try:
        for trial in trials:
            try:
                program.run(trial)
            except BaseException as error:
                error.args = (f"{trial}: {error}",)
                raise
    finally:
        program.fleet.close()
    print(json.dumps({**program.counts, "seconds": round(time.monotonic() - began)}))


if __name__ == "__main__":
    main(sys.argv[1], [Trial(**trial) for trial in json.loads(sys.argv[2])])
