"""Signals before the end: all ranks stop at one step with a whole checkpoint on disk, or say in time that they cannot.

The same training runs on warm ranks, where much can be tried, and under torchrun, where processes really end. Run as
a program (`python -m tests.run.test_preemption FOLDER OPTIONS`) this file is one rank of that training.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast import manager as manager_module
from holdfast.run.saves import Saves
from holdfast.write import file_writer
from tests import pool
from tests.patience import freeze

ROWS = 60_000


def content(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS)) + step


def state_of(step: int, rank: int, world: int) -> dict[str, Any]:
    rows = ROWS // world
    w = holdfast.Shard(content(step)[rank * rows : (rank + 1) * rows].clone(), (ROWS,), (rank * rows,))
    return {"model": {"w": w}, "mine": holdfast.PerRank([step, rank], elsewhere="first"), "step": step}


class Blocked:
    """The writes of this rank, held back until `release`, which may make them fail."""

    def __init__(self, manager: CheckpointManager, worker: str) -> None:
        self.pid = manager._saves.saver._pool.worker.pid if worker == "process" else None
        self._free, self._write, self._error = threading.Event(), file_writer._write, None
        if self.pid is not None:
            freeze(self.pid)
        else:
            file_writer._write = self._wait

    def _wait(self, *args: Any) -> None:
        self._free.wait(240)
        if self._error is not None:
            raise self._error
        self._write(*args)

    def release(self, error: OSError | None = None) -> None:
        self._error = error
        self._free.set()
        if self.pid is not None:
            os.kill(self.pid, signal.SIGCONT)


@contextmanager
def errors_logged() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("holdfast").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("holdfast").removeHandler(handler)


def train(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """Train until told to stop. ``blocked``: the rank whose writes hang from the save of step 4 on, ``release`` seconds
    after the signal they go on, or fail if ``fails``; ``signals``: signal by rank, sent before step ``at`` ends.
    """
    rank, world, worker = dist.get_rank(), dist.get_world_size(), options.get("worker", "process")
    blocked, last, told = None, None, []
    chosen = {key: options[key] for key in ("grace", "poll", "busy", "slots", "on_failure", "every") if key in options}
    arguments = {"every": 4, "keep": Keep(last=99), "worker": worker, "deadline": 30, **chosen}
    with errors_logged() as errors, CheckpointManager(root, **arguments) as manager:
        manager.prepare(state_of(0, rank, world))
        if options.get("first"):
            manager.save(1, state_of(1, rank, world))
        for step in range(2, 400):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.002 if step <= options["at"] else options.get("pace", 0.002))
            if step == 4 and options.get("blocked") == rank:
                blocked = Blocked(manager, worker)
                if worker == "process":
                    Path(root).with_name(f"stopped-{rank}").write_text(str(blocked.pid))
            number = options["signals"].get(str(rank))
            if step == options["at"]:
                Path(root).with_name(f"at-{rank}").touch()
                if blocked is not None and "release" in options:
                    error = OSError(28, "No space left on device") if options.get("fails") else None
                    threading.Timer(options["release"], lambda: blocked.release(error)).start()
                if number is not None:
                    told.append(time.monotonic())
                    os.kill(os.getpid(), number)
            saving = manager.step(step, state_of(step, rank, world))
            if manager.should_stop:
                last = saving.step if saving is not None else None
                break
    steps = manager.steps()
    dist.barrier()
    if blocked is not None and options.get("release_at_end"):
        blocked.release()
        saving.settled()
    return {"stopped": step, "last": last, "steps": steps, "errors": errors}


def check_restored(root: Path, step: int) -> None:
    state = state_of(0, 0, 1)
    with CheckpointManager(root, every=1, signals=()) as manager:
        loaded = manager.restore(state)
    assert loaded is not None and loaded.step == step == state["step"]
    assert torch.equal(state["model"]["w"].tensor, content(step)), "not that step, or not all of it"
    for folder in root.glob("step-*"):
        assert (folder / "manifest.json").exists() and not (folder / "parts").exists(), f"{folder} is left behind"
        holdfast.open(folder).verify()


TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


@pytest.mark.parametrize("worker", ["process", "thread"])
@pytest.mark.parametrize("signals", [{"0": TERM}, {"2": USR1}, {"0": TERM, "1": TERM, "2": TERM}])
@pytest.mark.fast_cases("signals0-process", "signals1-thread", "signals2-thread")
def test_the_save_under_way_is_the_last_one(worker: str, signals: dict[str, int], tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = {"worker": worker, "blocked": 1, "release": 0.3, "signals": signals, "at": 6, "every": 4}
    results = pool.run(3, train, str(root), options)
    assert len({result["stopped"] for result in results}) == 1, results
    assert all(r["last"] == 4 and r["steps"] == [4] and not r["errors"] for r in results), results
    check_restored(root, 4)


def test_a_save_begun_before_all_have_heard_is_the_last_one(tmp_path: Path) -> None:
    options = {"blocked": 1, "release": 0.3, "signals": {"0": TERM}, "at": 7}
    results = pool.run(3, train, str(tmp_path / "run"), options)
    assert all((r["stopped"], r["last"], r["steps"]) == (9, 8, [4, 8]) for r in results), results
    check_restored(tmp_path / "run", 8)


@pytest.mark.parametrize("worker", ["process", "thread", "none"])
@pytest.mark.parametrize(("signals", "at", "poll"), [({"2": USR1}, 5, 1), ({"0": TERM, "1": TERM}, 6, 3)])
def test_with_nothing_under_way_the_last_step_is_saved(
    worker: str, signals: dict[str, int], at: int, poll: int, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    if worker == "none":
        root.mkdir()
    results = pool.run(3, train, str(root), {"worker": worker, "signals": signals, "at": at, "poll": poll, "every": 99})
    stopped = results[0]["stopped"]
    assert stopped >= at
    assert all((r["stopped"], r["last"], r["steps"]) == (stopped, stopped, [stopped]) for r in results), results
    check_restored(root, stopped)


@pytest.mark.parametrize("on_failure", ["raise", "warn"])
@pytest.mark.parametrize("busy", ["wait", "skip"])
def test_if_the_save_under_way_fails_the_last_step_is_saved(on_failure: str, busy: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = {"worker": "thread", "blocked": 1, "release": 0.3, "fails": True, "signals": {"0": TERM}, "at": 6}
    results = pool.run(3, train_and_mend, str(root), {**options, "on_failure": on_failure, "busy": busy})
    assert all((r["stopped"], r["last"], r["steps"]) == (8, 8, [8]) for r in results), results
    check_restored(root, 8)


def train_and_mend(root: str, options: dict[str, Any]) -> dict[str, Any]:
    """`train` on a disk that is full for the save of step 4 alone."""
    begin, write = Saves.begin, file_writer._write

    def begin_on_a_mended_disk(self: Saves, step: int, *args: Any, **options: Any) -> Any:
        if step > 4:
            file_writer._write = write
        return begin(self, step, *args, **options)

    Saves.begin = begin_on_a_mended_disk
    try:
        return train(root, options)
    finally:
        Saves.begin, file_writer._write = begin, write


def test_saves_that_were_skipped_do_not_hide_the_one_under_way(tmp_path: Path) -> None:
    options = {"worker": "thread", "blocked": 1, "release": 0.3, "signals": {"1": TERM}, "at": 14, "busy": "skip"}
    results = pool.run(3, train, str(tmp_path / "run"), options)
    assert all((r["stopped"], r["last"], r["steps"]) == (16, 4, [4]) for r in results), results
    check_restored(tmp_path / "run", 4)


@pytest.mark.parametrize("signals", [{"0": TERM}, {"1": TERM}, {"0": TERM, "1": TERM, "2": TERM}])
@pytest.mark.fast_cases("signals0")
def test_a_save_that_cannot_be_done_in_time_is_given_up_on_all_ranks(
    signals: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    options = {"first": True, "blocked": 1, "signals": signals, "at": 6, "grace": 0.8, "release_at_end": True}
    results = pool.run(3, train, str(root), options)
    for result in results:
        assert result["steps"] == [1], "the checkpoint before stays"
        assert len(result["errors"]) == 1 and "step 4 cannot be saved within the grace of 0.8 s" in result["errors"][0]
        assert "step-000000001" in result["errors"][0]
    # The writer that was held up has finished since, and so had the others: nothing is lost after all.
    check_restored(root, 4)


# Under torchrun.


@contextmanager
def torchrun(root: Path, options: dict[str, Any], ranks: int = 2) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "tests.run.test_preemption", str(root), json.dumps(options)]
    with open(root.with_name("output"), "wb") as output:
        running = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
        try:
            yield running
        finally:
            if running.poll() is None:
                running.terminate()
                running.wait()


def told(root: Path, ranks: int = 2) -> list[dict[str, Any]]:
    output = root.with_name("output").read_text(errors="replace")
    files = [root.with_name(f"rank-{rank}.json") for rank in range(ranks)]
    assert all(file.exists() for file in files), output[-4000:]
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.slow
def test_torchrun_ends_with_0_after_a_signal_to_one_rank(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = {"blocked": 0, "release": 0.5, "signals": {"1": USR1}, "at": 6}
    with torchrun(root, options) as running:
        code = running.wait()
    results = told(root)
    assert code == 0 and all((r["stopped"], r["last"], r["steps"]) == (8, 4, [4]) for r in results), results
    check_restored(root, 4)


@pytest.mark.slow
def test_torchrun_ends_although_a_writer_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "run"
    options = {"first": True, "blocked": 1, "signals": {"0": TERM}, "at": 6, "grace": 1.0}
    with torchrun(root, options) as running:
        code = running.wait()
        stopped = int(root.with_name("stopped-1").read_text())
    try:
        results = told(root)
        assert code == 0, root.with_name("output").read_text()[-4000:]
        assert all(r["steps"] == [1] and "cannot be saved" in r["errors"][0] for r in results), results
        with monkeypatch.context() as patch:
            patch.setattr(manager_module, "SURVIVORS", 0.1)
            state = state_of(0, 0, 1)
            with CheckpointManager(root, every=1, signals=()) as manager:
                loaded = manager.restore(state)
            assert loaded is not None and loaded.step == 1, "what still hangs is not waited for for ever"
    finally:
        os.kill(stopped, signal.SIGCONT)
    check_restored(root, 4)  # this restart waits for the writer, and commits what it finishes


@pytest.mark.slow
def test_torchrun_signals_all_ranks_at_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    options = {"blocked": 1, "release": 1.5, "signals": {}, "at": 5, "pace": 0.2}
    with torchrun(root, options) as running:
        while running.poll() is None and not all(root.with_name(f"at-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        running.terminate()
        running.wait()
    results = told(root)
    assert len({r["stopped"] for r in results}) == 1
    # Step 8 may have been begun as well before all had heard of the signal.
    assert all(r["steps"] in ([4], [4, 8]) and r["last"] == r["steps"][-1] for r in results), results
    check_restored(root, results[0]["last"])


def main(root: str, options: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    rank = int(os.environ["RANK"])
    # Registered before anything that holdfast registers would be, this is among the last that the interpreter does.
    atexit.register(lambda: Path(root).with_name(f"rank-{rank}.json").write_text(json.dumps(found)) if found else None)
    dist.init_process_group("gloo")
    found.update(train(root, options))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
