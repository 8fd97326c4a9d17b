"""The manager: rhythm, failures, retention, falling back, sweeping, stopping, advice; alone and on real ranks."""

from __future__ import annotations

import errno
import fcntl
import logging
import math
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast import manager as manager_module
from holdfast.commit import folder as folder_module
from holdfast.commit import settle
from holdfast.errors import Damaged, SaveFailed, StorageError
from holdfast.ondisk.manifest import NOTES, Manifest
from holdfast.saving import Saving
from holdfast.saving.background import BackgroundSave
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.place import Place
from holdfast.write import file_writer
from tests import pool


def _state(step: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.full((50, 3), float(step))}, "step": step}


def _names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.name != ".journal")


WORKERS = ["process", "thread", "none"]


@contextmanager
def before_each_write(then: Callable[[str], object]) -> Iterator[None]:
    """Every write of this process to a data file is preceded by ``then(path)``; for workers of this process."""
    write = file_writer._write

    def patched(file: Any, *args: Any) -> None:
        then(file.path)
        write(file, *args)

    file_writer._write = patched
    try:
        yield
    finally:
        file_writer._write = write


@contextmanager
def held_back(only: str = "") -> Iterator[threading.Event]:
    """No byte reaches a data file, or one with ``only`` in its path, before the event is set."""
    free = threading.Event()
    with before_each_write(lambda path: only in path and not free.wait(240)):
        try:
            yield free
        finally:
            free.set()


def refuse(path: str) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def begun(manager: CheckpointManager, step: int) -> Saving:
    saving = manager.step(step, _state(step))
    assert saving is not None
    return saving


@pytest.mark.parametrize("worker", WORKERS)
def test_rhythm_and_retention(worker: Any, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, keep=Keep(last=2, every=6), name="ckpt-{step}", worker=worker) as manager:
        assert manager.restore(_state()) is None and manager.latest() is None
        saved = [step for step in range(1, 14) if manager.step(step, _state(step)) is not None]
        manager.wait()
        assert saved == [2, 4, 6, 8, 10, 12] and manager.steps() == [6, 10, 12]
        assert _names(tmp_path) == ["ckpt-10", "ckpt-12", "ckpt-6"]
        latest = manager.latest()
        assert latest is not None and latest.step == 12 and not manager.should_stop


def test_due_says_so_in_place_of_the_rhythm(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, worker="none", keep=Keep(last=9)) as manager:
        for step in range(1, 7):
            manager.step(step, _state(step), due={1: True, 2: False, 6: False}.get(step))
    assert manager.steps() == [1, 4]


def test_best_by_metric(tmp_path: Path) -> None:
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: 9.0, 6: 0.5, 7: float("nan"), 8: 4.0}
    with CheckpointManager(tmp_path / "min", every=1, keep=Keep(last=1, best=2)) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
        manager.wait()
        assert manager.steps() == [2, 6, 8]
    with CheckpointManager(tmp_path / "max", every=1, keep=Keep(last=1, best=1, mode="max"), slots=3) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
        manager.wait()
        assert manager.steps() == [5, 8]


def test_a_disk_that_does_not_tell_the_metric_costs_no_step(tmp_path: Path) -> None:
    """The best step is not taken for one without a metric; the next sweep that can read deletes what is too much."""

    def fail(call: disk.Call, do: Any) -> Any:
        if call.verb in ("open", "read") and call.path.endswith(NOTES):
            raise OSError(errno.EIO, os.strerror(errno.EIO), call.path)
        return do()

    with CheckpointManager(tmp_path / "run", every=1, keep=Keep(last=1, best=1)) as manager:
        manager.step(1, _state(1), metric=1.0)
        manager.step(2, _state(2), metric=2.0)
        manager.wait()
        assert manager.steps() == [1, 2]
        with disk.hooked(fail):
            manager.step(3, _state(3), metric=3.0)
            manager.wait()
            assert manager.steps() == [1, 2, 3]
            with pytest.raises(StorageError, match="Input/output error"):
                manager.best()
        manager.step(4, _state(4), metric=4.0)
        manager.wait()
        assert manager.steps() == [1, 4]


@pytest.mark.parametrize(
    "bad",
    [
        {"every": 0},
        {"name": "fixed"},
        {"name": "a/{step}"},
        {"poll": 0},
        {"on_failure": "ignore"},
        {"worker": "fork"},
        {"busy": "queue"},
        {"slots": 0},
        {"mtbf": 0.0},
        {"mtbf": -1.0},
        {"mtbf": math.nan},
    ],
)
def test_manager_is_checked(bad: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        CheckpointManager(tmp_path, **{"every": 1, **bad})


def _break(path: Path, how: str) -> None:
    file = next(path.rglob("*.safetensors"))
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif how == "missing":
        file.unlink()
    elif how == "flipped":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        manifest = path / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-9])


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "manifest"])
def test_restore_falls_back_and_says_why(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=3)) as manager:
        for step in (1, 2, 3):
            manager.step(step, _state(step))
        manager.wait()
        _break(tmp_path / "step-000000003", how)
        state = _state()
        with caplog.at_level(logging.WARNING, "holdfast"):
            loaded = manager.restore(state)
        assert loaded is not None and loaded.step == state["step"] == 2 and (state["model"]["w"] == 2).all()
        assert "step-000000003" in caplog.text
        if how != "manifest":
            saving = manager.step(3, _state(3))
            assert saving is not None and saving.wait().step == 3
            assert holdfast.open(tmp_path / "step-000000003").verify().read, (
                "the broken step gives way to its successor"
            )
            _break(tmp_path / "step-000000003", how)
        for step in (1, 2):
            _break(tmp_path / f"step-00000000{step}", "flipped")
        if how != "flipped":
            (tmp_path / "step-000000003" / "manifest.json").unlink()
        with pytest.raises(holdfast.errors.NotACheckpoint, match="can be restored"):
            manager.restore(_state())


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped", "manifest"])
@pytest.mark.parametrize("fast", [False, True])
def test_damaged_steps_alone_are_not_taken_for_none(how: str, fast: bool, tmp_path: Path) -> None:
    root, steps = tmp_path / "run", (1, 2)
    with CheckpointManager(root, every=1) as manager:
        for step in steps:
            manager.step(step, _state(step))
    for step in steps:
        _break(root / f"step-00000000{step}", how)
    tiers: dict[str, Any] = {"fast": tmp_path / "fast"} if fast else {}
    with CheckpointManager(root, every=1, **tiers) as manager:
        with pytest.raises(holdfast.errors.NotACheckpoint, match="can be restored: .*step-000000002"):
            manager.restore(_state())
        for step in steps:
            shutil.rmtree(root / f"step-00000000{step}")
        assert manager.restore(_state()) is None, "those who deleted them want to start from scratch"


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("older", ["damaged", "unlike"])
def test_a_restore_that_fails_says_if_it_has_filled_the_state_in_part(older: str, fast: bool, tmp_path: Path) -> None:
    root, tiers = tmp_path / "run", {"fast": tmp_path / "fast"} if fast else {}
    with CheckpointManager(root, every=1, keep=Keep(last=5)) as manager:
        manager.save(1, {**_state(1), "ema": torch.zeros(2)} if older == "unlike" else _state(1))
        manager.save(2, _state(2))
    for step in (1, 2):
        _break(root / f"step-00000000{step}", "flipped")
    error = holdfast.errors.Mismatch if older == "unlike" else holdfast.errors.NotACheckpoint
    told = "(; |\n)the state may be filled in part: load again before you use it(\n|$)"
    with CheckpointManager(root, every=1, **tiers) as manager, pytest.raises(error, match=told):  # type: ignore[arg-type]
        manager.restore(_state())


def test_a_step_that_is_not_there_is_told_in_one_traceback(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(10, _state(10))
        with pytest.raises(holdfast.errors.NotACheckpoint, match="no step 45 in .*; its steps are 10") as caught:
            manager.restore(_state(), step=45)
    assert caught.value.__cause__ is None and caught.value.__suppress_context__


def test_a_restore_that_fails_before_it_fills_says_nothing_of_it(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.save(1, _state(1))
        _break(tmp_path / "step-000000001", "truncated")
        with pytest.raises(holdfast.errors.NotACheckpoint) as caught:
            manager.restore(_state())
        assert "in part" not in str(caught.value)


def test_mismatch_does_not_fall_back(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.step(1, _state(1))
        manager.step(2, _state(2))
        with pytest.raises(holdfast.errors.Mismatch):
            manager.restore({"model": {"w": torch.zeros(2)}, "step": 0})


@pytest.mark.parametrize("fast", [False, True])
def test_a_pattern_that_fits_nothing_does_not_fall_back(fast: bool, tmp_path: Path) -> None:
    """The older step has what the newest one lacks: it is not looked at."""
    tiers: dict[str, Any] = {"fast": tmp_path / "fast"} if fast else {}
    with CheckpointManager(tmp_path / "run", every=1, keep=Keep(last=5), **tiers) as manager:
        for empty in ("", []):
            with pytest.raises(holdfast.errors.Mismatch, match="names nothing: leave it out"):
                manager.restore(_state(), only=empty)
        assert manager.restore(_state(), only="model") is None, "nothing is saved yet"
        manager.save(1, {**_state(1), "ema": {"w": torch.ones(3)}})
        manager.save(2, _state(2))
    with CheckpointManager(tmp_path / "run", every=1, **tiers) as manager:
        state = _state()
        with pytest.raises(holdfast.errors.Mismatch, match=r"step-000000002 .*\n.*\n *'emma'"):
            manager.restore(state, only=["model", "emma"])
        with pytest.raises(holdfast.errors.Mismatch, match=r"step-000000002 .*\n.*\n *'ema'"):
            manager.restore(state, only="ema")
        with pytest.raises(holdfast.errors.Mismatch, match="1 missing from the checkpoint.*\n *ema/w"):
            manager.restore({**state, "ema": {"w": torch.zeros(3)}}, only=["model", "ema"])
        assert not state["model"]["w"].any() and manager.steps() == [1, 2]
        loaded = manager.restore(state, only="model")
        assert loaded is not None and loaded.step == 2 and state["step"] == 0


def test_orphans_are_swept_but_never_a_living_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "SURVIVORS", 0.1)
    holdfast.save(_state(7), tmp_path / "step-000000007")
    (tmp_path / "step-000000007" / "manifest.json").unlink()
    (tmp_path / "step-000000008").mkdir()
    (tmp_path / "step-000000009").mkdir()
    (tmp_path / "step-000000009" / "notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    holdfast.save(_state(6), tmp_path / "step-000000006")
    (tmp_path / "step-000000006" / "manifest.json").unlink()
    alive = next((tmp_path / "step-000000006").rglob("*.safetensors"))
    with CheckpointManager(tmp_path, every=1) as manager, alive.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # as a save under way holds it
        assert manager.restore(_state()) is None
        assert _names(tmp_path) == ["elsewhere", "step-000000006", "step-000000009"] and alive.exists()
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        assert _names(tmp_path) == ["elsewhere", "step-000000009"]


def test_leavings_beside_a_committed_step_are_swept(tmp_path: Path) -> None:
    holdfast.save(_state(1), tmp_path / "step-000000001")
    stray = tmp_path / "step-000000001" / "model" / "00000-of-00001.0123456789abcdef.safetensors"
    stray.write_bytes(b"what a killed overwrite left")
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        assert not stray.exists()
        holdfast.open(tmp_path / "step-000000001").verify()


def test_a_part_that_was_only_begun_is_swept(tmp_path: Path) -> None:
    """A writer that is killed while it writes its part leaves a file under a temporary name."""
    for step in (1, 2):
        holdfast.save(_state(step), tmp_path / f"step-00000000{step}")
        (tmp_path / f"step-00000000{step}" / "parts").mkdir()
        (tmp_path / f"step-00000000{step}" / "parts" / ".00000.0123456789abcdef.json.77.tmp").write_bytes(b"{")
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    assert holdfast.save(_state(2), tmp_path / "step-000000002").step == 2, "nor is it in the way of another save"
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    with CheckpointManager(tmp_path, every=1) as manager:
        manager.restore(_state())
        assert _names(tmp_path) == ["step-000000001"] and not (tmp_path / "step-000000001" / "parts").exists()


def test_a_resumed_run_is_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CheckpointManager(tmp_path, every=1) as manager:
        saving = manager.step(1, _state(1))
        assert saving is not None
        first = saving.wait().manifest
    holdfast.save(_state(5), tmp_path / "other")
    with CheckpointManager(tmp_path, every=1) as manager:
        monkeypatch.setattr("holdfast.saver.RUN", "0123456789abcdef")  # as another process would have another one
        manager.restore(_state())
        saving = manager.step(2, _state(2))
        assert manager.step(2, _state(2)) is None, "a step is saved once"
        assert saving is not None
        second = saving.wait().manifest
        third = manager.save(3, _state(3)).manifest
    assert first.run == second.run == third.run != "0123456789abcdef"
    assert len({first.save, second.save, third.save}) == 3


def test_deleting_takes_the_manifest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holdfast.save(_state(1), tmp_path / "c")

    def crash(path: Path, present: list[str], kept: set[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(folder_module, "_delete_ours", crash)
    with pytest.raises(KeyboardInterrupt):
        folder_module.delete_checkpoint(tmp_path / "c")
    assert not (tmp_path / "c" / "manifest.json").exists()


def test_signal_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    manager = CheckpointManager(tmp_path, every=100)
    for step in range(1, 50):
        if step == 5:
            os.kill(os.getpid(), signal.SIGUSR1)
        manager.step(step, _state(step))
        if manager.should_stop:
            break
    assert step == 5 and manager.steps() == [5]
    assert "asks this run to stop: step 5 is its last one" in caplog.text
    manager.close()
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_start_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"), CheckpointManager(tmp_path, every=1) as manager:
        assert manager.restore(_state()) is None
        assert f"no checkpoint in {tmp_path} yet: training starts afresh" in caplog.text
        manager.save(1, _state(1))
        manager.restore(_state())
        assert f"restored step 1 from {tmp_path / 'step-000000001'}" in caplog.text
        assert "ranks then 1, now 1" in caplog.text


def test_the_step_that_takes_the_place_of_a_damaged_one_is_logged_as_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, every=1, keep=Keep(last=9)) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
    damaged = tmp_path / "step-000000003" / "manifest.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"float32", b"float64", 1))
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        CheckpointManager(tmp_path, every=1, keep=Keep(last=9)) as manager,
    ):
        with pytest.raises(Damaged, match=f"holdfast doctor {damaged.parent}"):
            manager.restore(_state(), step=3)
        assert manager.restore(_state()) is not None
        assert "step-000000003 is passed over" in caplog.text and "restored step 2 from" in caplog.text
        with pytest.raises(SaveFailed):  # a loop that begins at 1 again
            manager.save(1, _state(1))
        assert 'saving step 1 after step 2 was restored: let the loop begin at state["step"] + 1' in caplog.text
        caplog.clear()
        manager.save(3, _state(3))
        manager.save(4, _state(4))
        assert "let the loop begin" not in caplog.text


def train_until_told(root: str, signalled: int, at: int, poll: int) -> tuple[int, list[int]]:
    rank = dist.get_rank()
    with CheckpointManager(root, every=1000, poll=poll, deadline=240) as manager:
        for step in range(1, 200):
            dist.all_reduce(torch.ones(1))  # ranks of one training loop keep step
            if rank == signalled and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            manager.step(step, {"w": torch.full((10,), float(step)), "step": step})
            if manager.should_stop:
                return step, manager.steps()
    return -1, []


@pytest.mark.parametrize(("signalled", "at", "poll"), [(2, 3, 1), (0, 6, 1), (1, 8, 5), (0, 10, 5)])
def test_one_signal_stops_all_ranks_at_one_step(signalled: int, at: int, poll: int, tmp_path: Path) -> None:
    results = pool.run(3, train_until_told, str(tmp_path / "run"), signalled, at, poll)
    assert len({step for step, _ in results}) == 1 and results[0][0] >= at
    assert results[0][1] == [results[0][0]], "the last step was saved, once"


def resume(root: str, steps: int) -> tuple[int, float, list[int]]:
    state: dict[str, Any] = {
        "w": holdfast.Shard(
            torch.zeros(12 // dist.get_world_size()), (12,), (dist.get_rank() * 12 // dist.get_world_size(),)
        ),
        "step": 0,
        "rng": holdfast.RNG(),
    }
    with CheckpointManager(root, every=2, keep=Keep(last=2)) as manager:
        manager.restore(state)
        start = state["step"]
        for step in range(start + 1, start + steps + 1):
            state["w"].tensor.add_(1)
            state["step"] = step
            manager.step(step, state)
        manager.wait()
        dist.barrier()  # the first rank sweeps after the save; the others see its result only then
        return start, float(state["w"].tensor[0]), manager.steps()


def test_resume_on_other_world_sizes(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    for world, start in ((4, 0), (2, 4), (3, 8), (4, 12)):
        for got in pool.run(world, resume, root, 5):
            assert got == (start, start + 5.0, [start + 2, start + 4])


# Saves beside training.


@pytest.mark.parametrize("slots", [1, 2])
def test_a_step_waits_only_for_a_slot(slots: int, tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, worker="thread", slots=slots) as manager, held_back() as free:
        savings = []
        for step in range(1, 2 * slots + 2):
            saving = manager.step(step, _state(step))
            savings += [saving] if saving is not None else []
        assert [s.step for s in savings] == [2, 4][:slots] and not any(s.done for s in savings)
        assert manager.steps() == [], "these steps returned although nothing could be written"
        step = 2 * slots + 2
        waits = threading.Thread(target=lambda: savings.append(begun(manager, step)))
        waits.start()
        waits.join(0.3)
        assert waits.is_alive(), "there is no slot for one more"
        free.set()
        waits.join()
        assert savings[0].done and savings[-1].wait().step == step


def test_skip_leaves_out_what_has_no_slot(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread", busy="skip", keep=Keep(last=9)) as manager:
        with held_back():
            first = begun(manager, 1)
            others = [begun(manager, step) for step in (2, 3, 4, 5)]
        assert first.wait().step == 1
        for saving in others:
            with pytest.raises(holdfast.SaveFailed, match="skipped"):
                saving.wait()
            assert saving.skipped
        assert begun(manager, 6).wait().step == 6, "and no step raises that others were skipped"
    assert manager.steps() == [1, 6]


def test_a_save_that_was_skipped_is_made_if_it_is_asked_for(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread", busy="skip") as manager:
        with held_back():
            begun(manager, 1)
            assert begun(manager, 2) is not None
        assert manager.save(2, _state(2)).step == 2
    assert manager.steps() == [1, 2]


def test_save_waits_and_does_not_save_twice(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, worker="thread") as manager:
        with held_back() as free:
            saving = begun(manager, 2)
            threading.Timer(0.2, free.set).start()
            ended = manager.save(2, _state(2))
        assert saving.done and ended.manifest.save == saving.wait().manifest.save
        again = manager.save(2, _state(2), overwrite=True)
        assert again.manifest.save != ended.manifest.save
        assert manager.save(3, _state(3)).step == 3 and manager.steps() == [2, 3]


def test_restore_in_the_middle_of_a_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=2, worker="thread", keep=Keep(last=9)) as manager:
        with held_back() as free:
            begun(manager, 2)
            manager.step(3, _state(3))
            threading.Timer(0.2, free.set).start()
            state = _state(3)
            loaded = manager.restore(state)
        assert loaded is not None and loaded.step == state["step"] == 2 and (state["model"]["w"] == 2).all()
        assert manager.step(2, state) is None, "what was restored is not saved again"
        for step in (3, 4):
            manager.step(step, _state(step))
    assert manager.steps() == [2, 4]


# Failures.


@pytest.mark.parametrize("busy", ["wait", "skip"])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_failure_is_raised_once_and_training_goes_on(worker: Any, busy: Any, tmp_path: Path) -> None:
    blocked = tmp_path / "step-000000002"
    blocked.write_text("a file where a folder should be")
    raised = []
    with CheckpointManager(tmp_path, every=2, worker=worker, busy=busy) as manager:
        for step in range(1, 7):
            try:
                saving = manager.step(step, _state(step))
                if saving is not None:
                    with pytest.raises(holdfast.SaveFailed) if step == 2 else _nothing():
                        assert saving.settled() or step == 2
                        if worker == "none":
                            saving.wait()
                        elif step == 2:
                            raise holdfast.SaveFailed("not heard yet")
            except holdfast.SaveFailed as error:
                raised.append((step, str(error)))
    assert [step for step, _ in raised] == ([2] if worker == "none" else [3]) and str(blocked) in raised[0][1]
    assert manager.steps() == [4, 6] and blocked.is_file()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def test_a_failure_is_not_forgotten_among_saves_that_are_skipped(tmp_path: Path) -> None:
    gate, raised = threading.Event(), []

    def wait_and_refuse(path: str) -> None:
        gate.wait(240)
        refuse(path)

    with CheckpointManager(tmp_path, every=1, worker="thread", busy="skip") as manager:
        with before_each_write(wait_and_refuse):
            first = begun(manager, 1)
            assert all(begun(manager, step) is not None for step in range(2, 8))
            gate.set()
            assert not first.settled()
        for step in range(8, 12):
            try:
                manager.step(step, _state(step))
            except holdfast.SaveFailed as error:
                raised.append((step, error.errno))
    assert raised == [(8, errno.ENOSPC)], "once, and closing does not raise it again"


@pytest.mark.parametrize("worker", WORKERS)
def test_failures_can_be_only_logged(worker: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "step-000000002").write_text("a file where a folder should be")
    caplog.set_level(logging.WARNING, "holdfast")
    with CheckpointManager(tmp_path, every=1, worker=worker, on_failure="warn", keep=Keep(last=9)) as manager:
        for step in range(1, 5):
            manager.step(step, _state(step))
        manager.wait()
        (tmp_path / "step-000000005").write_text("another")
        manager.step(5, _state(5))
    assert manager.steps() == [1, 3, 4]
    assert all(f"step-00000000{step} is a file" in caplog.text for step in (2, 5)), "each failure has its line"


@pytest.mark.parametrize("slots", [1, 2])
def test_closing_raises_what_nobody_has_heard(slots: int, tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path, every=1, worker="thread", slots=slots)
    with before_each_write(refuse):
        begun(manager, 1)
        with pytest.raises(holdfast.SaveFailed) as caught:
            manager.close()
    assert caught.value.errno == errno.ENOSPC
    manager.close()
    with pytest.raises(ZeroDivisionError), CheckpointManager(tmp_path, every=1, worker="thread") as manager:
        with before_each_write(refuse):
            begun(manager, 1).settled()
        raise ZeroDivisionError  # what ended the block is not hidden by the failure


def train_with_a_failure(root: str, late: float, every: int, options: dict[str, Any]) -> dict[str, Any]:
    """Rank 1 cannot write step 4; the failure is known on rank r only r times ``late`` seconds after it happened."""
    rank = dist.get_rank()
    raised, saved, end = [], [], BackgroundSave.end

    def end_late(self: BackgroundSave, failed: BaseException | None) -> None:
        if failed is not None:
            time.sleep(late * rank)
        end(self, failed)

    BackgroundSave.end = end_late
    blocked = LocalPlace(root, "step-000000004", "model", f"00001-of-{dist.get_world_size():05d}")
    try:
        with CheckpointManager(root, every=every, keep=Keep(last=99), deadline=240, **options) as manager:
            for step in range(1, 17):
                dist.all_reduce(torch.ones(1))
                time.sleep(0.02)
                w = holdfast.Shard(torch.full((4,), float(step)), (4 * dist.get_world_size(),), (4 * rank,))
                state = {"model": {"w": w}, "step": step}
                if step == 4:
                    manager.wait()  # so that this save is not skipped
                try:
                    with _unwritable(blocked) if rank == 1 and step == 4 else _nothing():
                        saving = manager.step(step, state)
                        if saving is not None and step == 4:
                            saving.wait_staged()
                    saved += [] if saving is None else [saving.step]
                except holdfast.SaveFailed as error:
                    raised.append((step, error.rank, str(error)))
    finally:
        BackgroundSave.end = end
    return {"raised": raised, "begun": saved, "committed": manager.steps()}


@contextmanager
def _unwritable(start: Path) -> Iterator[None]:
    """Files whose path starts so cannot be created by this process."""
    opened = LocalPlace.open_to_write

    def refuse_some(path: LocalPlace, nbytes: int) -> tuple[int, bool]:
        if str(path).startswith(str(start)):
            refuse(str(path))
        return opened(path, nbytes)

    LocalPlace.open_to_write = refuse_some
    try:
        yield
    finally:
        LocalPlace.open_to_write = opened


@pytest.mark.parametrize(
    ("world", "worker", "slots", "late"),
    [(3, "process", 1, 0.03), (3, "thread", 1, 0.3), (2, "thread", 2, 0.05), (2, "none", 1, 0.0)],
)
@pytest.mark.fast_cases("3-process-1-0.03", "2-none-1-0.0")
def test_all_ranks_raise_a_failure_at_the_same_later_step(
    world: int, worker: str, slots: int, late: float, tmp_path: Path
) -> None:
    options = {"worker": worker, "slots": slots}
    results = pool.run(world, train_with_a_failure, str(tmp_path / "run"), late, 4, options)
    assert all(result == results[0] for result in results), results
    ((step, failed_rank, text),) = results[0]["raised"]
    assert failed_rank == 1 and "No space left" in text
    assert step == 4 if worker == "none" else 4 < step <= 4 + 4 * slots
    expected = [s for s in (4, 8, 12, 16) if s != step]
    assert results[0]["begun"] == expected and results[0]["committed"] == [s for s in expected if s != 4]


@pytest.mark.parametrize(("every", "poll", "late"), [(2, 1, 0.02), (1, 4, 0.01), (4, 5, 0.3)])
@pytest.mark.fast_cases("1-4-0.01")
def test_no_rank_raises_a_failure_twice_when_busy_saves_are_skipped(
    every: int, poll: int, late: float, tmp_path: Path
) -> None:
    options = {"worker": "thread", "busy": "skip", "poll": poll}
    results = pool.run(2, train_with_a_failure, str(tmp_path / "run"), late, every, options)
    assert results[0] == results[1]
    assert [rank for _, rank, _ in results[0]["raised"]] == [1], "once, and not again when the manager is closed"


def train_with_a_slow_rank(root: str) -> list[tuple[int, bool]]:
    found, w = [], torch.arange(3.0 * (1 << 18))  # large enough for every rank to write a share
    with CheckpointManager(root, every=2, worker="thread", busy="skip", keep=Keep(last=99)) as manager:
        with held_back() if dist.get_rank() == 1 else _nothing():
            for step in range(1, 12):
                dist.all_reduce(torch.ones(1))
                saving = manager.step(step, {"w": w + step, "step": step})
                found += [] if saving is None else [saving]
            for saving in found[1:]:
                assert not saving.settled()
            assert dist.get_rank() != 1 or not found[0].done
        assert found[0].settled(), found[0].failed
        dist.barrier()
        for step in range(12, 15):
            dist.all_reduce(torch.ones(1))
            saving = manager.step(step, {"w": w + step, "step": step})
            found += [] if saving is None else [saving]
            manager.wait()
    return [(s.step, s.skipped) for s in found]


def test_ranks_skip_alike(tmp_path: Path) -> None:
    root = tmp_path / "run"
    results = pool.run(3, train_with_a_slow_rank, str(root))
    skipped = [(step, 2 < step < 12) for step in range(2, 15, 2)]
    assert results == [skipped] * 3
    with CheckpointManager(root, every=1) as manager:
        assert manager.steps() == [2, 12, 14]


# Sweeping beside saves that are under way.


def test_sweeping_leaves_a_save_under_way_alone(tmp_path: Path) -> None:
    dead = tmp_path / "step-000000009"
    holdfast.save(_state(9), dead)
    (dead / "manifest.json").unlink()
    with CheckpointManager(tmp_path, every=1, worker="thread", slots=2, keep=Keep(last=1)) as manager:
        begun(manager, 1).wait()
        assert not dead.exists(), "what was dead is gone"
        free, reached, whole = threading.Event(), threading.Event(), threading.Event()

        def hold(path: str) -> None:
            if "step-000000003" in path:
                reached.set()
                free.wait(240)

        def commit(folder: Place, record: Manifest, **options: Any) -> None:
            """The second save is committed once the third one writes, which begins when the second is written."""
            whole.set()
            reached.wait(240)
            commits(folder, record, **options)

        commits = settle.commit
        with before_each_write(hold), patch.object(settle, "commit", commit):
            before = begun(manager, 2)
            assert whole.wait(240)
            slow = begun(manager, 3)
            assert before.wait().step == 2 and manager.steps() == [2], "the older one is gone"
            assert list((tmp_path / "step-000000003").rglob("*.safetensors")), "the one under way is not touched"
            assert not slow.done
            free.set()
            slow.wait().verify()
        assert manager.steps() == [3] and _names(tmp_path) == ["step-000000003"]


@pytest.mark.slow
def test_retention_goes_on_while_saves_overlap(tmp_path: Path) -> None:
    losses = {step: float(abs(step - 7)) for step in range(1, 25)}
    keep = Keep(last=2, every=10, best=1)
    with CheckpointManager(tmp_path, every=1, slots=3, keep=keep) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
        manager.wait()
        manager.save(25, _state(25))
        assert manager.steps() == [7, 10, 20, 24, 25]
        for step in manager.steps():
            opened = holdfast.open(tmp_path / f"step-{step:09d}")
            opened.verify()
            assert opened.state_dict()["step"] == step
        assert not list(tmp_path.rglob("parts")), "parts go once a save is committed"


# Advice.


def test_advice_from_what_was_measured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, every=2, mtbf=7200.0, worker="thread") as manager:
        assert manager.advice(3600.0) is None, "nothing is measured yet"
        with pytest.raises(ValueError, match="mtbf"):
            manager.advice(-1.0)
        timings = []
        with caplog.at_level(logging.DEBUG, "holdfast"):
            for step in range(1, 9):
                time.sleep(0.01)
                saving = manager.step(step, _state(step))
                timings += [] if saving is None else [(saving.wait(), saving.timing)[1]]
        assert "mean time between failures of 7200 s" in caplog.text
        with pytest.raises(ValueError, match="mtbf"):
            manager.advice(0.0)
        advice = manager.advice(3600.0)
        assert advice is not None
        stall = sum(t.stall for t in timings) / len(timings)
        assert advice.stall == pytest.approx(stall) and 0 < advice.stall < advice.save
        young = math.sqrt(2 * stall * 3600.0)
        assert advice.seconds == pytest.approx(max(young - stall, advice.save), rel=0.02)
        assert advice.steps >= 1 and 0 < advice.lost < 1
        often = manager.advice(1e-3)
        assert often is not None and often.seconds >= often.save, "never more often than a save takes"


def test_what_cannot_be_measured_does_not_stop_the_sweep(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, mtbf=1.0, keep=Keep(last=1)) as manager:
        for step in range(1, 5):
            begun(manager, step).wait()
        assert manager.steps() == [4]


def test_a_step_that_is_a_link_goes_alone(tmp_path: Path) -> None:
    """What a step leads to may be somebody's only copy: the link goes, and nothing behind it."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    archive.mkdir()
    state = {**_state(), "optimizer": {"m": torch.ones(3)}}
    with CheckpointManager(root, every=1, keep=Keep(last=1, every=4, optimizer_last=1)) as manager:
        for step in (1, 4):
            path = LocalPlace(str(manager.save(step, state).path))
            path.rename(archive / str(step))
            path.symlink_to(archive / str(step))
        manager.save(5, state)
    assert len(_names(root)) == 2, "the link to step 1 is gone"
    for step in (1, 4):
        checkpoint = holdfast.open(archive / str(step))
        checkpoint.verify()
        assert "optimizer/m" in checkpoint.tensors
