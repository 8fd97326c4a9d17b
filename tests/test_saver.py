"""Saves beside training: what they write, how they fail, what they leave behind, and how they end."""

from __future__ import annotations

import errno
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.ranks.ranks import ranks_of
from holdfast.saving import earlier
from holdfast.storage.local import large as local_large
from holdfast.write import buffer as buffers
from holdfast.write import file_writer
from holdfast.write import pool as buffer_pool
from tests import meshes, pool
from tests.patience import freeze, wait_until

LONG = 240.0
WORKERS = ["thread", "process"]


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _state(step: int, rows: int = 64) -> dict[str, Any]:
    return {"model": {"w": torch.full((rows, 64), float(step)), "b": torch.full((3,), float(step))}, "step": step}


def _is_whole(path: str | Path, step: int) -> None:
    checkpoint = holdfast.open(path)
    checkpoint.verify()
    state = checkpoint.state_dict()
    assert state["step"] == checkpoint.step == step
    assert (state["model"]["w"] == step).all() and (state["model"]["b"] == step).all()
    names = {p.name for p in Path(path).iterdir()}
    assert "parts" not in names and not any(name.endswith(".tmp") for name in names), names


@contextmanager
def gated() -> Iterator[threading.Event]:
    """Writes of threads of this process wait until the event is set."""
    gate, real = threading.Event(), file_writer._write

    def write(*args: Any) -> None:
        assert gate.wait(LONG)
        real(*args)

    file_writer._write = write
    try:
        yield gate
    finally:
        gate.set()
        file_writer._write = real


def _processes() -> dict[int, str]:
    """Children of this process; Z for a zombie, S for one that lives, whatever it does at the moment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if int(stat[1]) == os.getpid():
                found[int(folder.name)] = "Z" if stat[0] == "Z" else "S"
    return found


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


# What is written


def save_twice(layout: str, root: str, worker: str) -> list[str]:
    state = {**meshes.build(layout, 7, steps=2), "rng": holdfast.RNG(), "mine": holdfast.PerRank([_rank()]), "step": 2}
    holdfast.save(state, f"{root}/blocking", files={"a/b": b"attached"})
    with holdfast.Saver(worker=worker) as saver:  # type: ignore[arg-type]
        saver.prepare(state)
        for number in range(2):
            saver.save(state, f"{root}/{number}", files={"a/b": b"attached"})
    wrong = []
    one = holdfast.open(f"{root}/blocking")
    for number in range(2) if _rank() == 0 else ():
        two = holdfast.open(f"{root}/{number}")
        two.verify()
        ours, theirs = one.manifest, two.manifest
        for field in ("tensors", "values", "containers", "aliases", "per_rank", "attachments", "step", "world_size"):
            if getattr(ours, field) != getattr(theirs, field):
                wrong.append(field)
        for file, other in zip(ours.data_files, theirs.data_files, strict=True):
            pair = Path(root, "blocking", file.path).read_bytes(), Path(root, str(number), other.path).read_bytes()
            if len({data[size:] for data, size in zip(pair, (file.header_bytes, other.header_bytes))}) != 1:
                wrong.append(file.path)
    return wrong


@pytest.mark.parametrize("layout", meshes.LAYOUTS)
@pytest.mark.parametrize("worker", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.slow_cases("thread-FSDP2 2", "thread-FSDP2 4", "thread-HSDP x TP 2x2x2")
def test_every_layout_is_written_as_a_blocking_save_writes_it(layout: str, worker: str, tmp_path: Path) -> None:
    assert pool.run(meshes.LAYOUTS[layout][0], save_twice, layout, str(tmp_path), worker)[0] == []


def sizes_and_times(path: str) -> tuple[Any, int]:
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(_state(1), path)
        early = saving.timing
        saving.wait()
        return (early, saving.timing), sum(
            file.bytes - file.header_bytes
            for file in holdfast.open(path).manifest.data_files
            if Path(file.path).name.startswith(f"{_rank():05}")
        )


def test_timing_adds_up(tmp_path: Path) -> None:
    for (early, late), nbytes in pool.run(2, sizes_and_times, str(tmp_path / "c")):
        for timing in (early, late):
            assert min(timing.stall, timing.staging, timing.writing, timing.commit, timing.total) >= 0
            assert timing.total == pytest.approx(timing.staging + timing.writing + timing.commit)
        assert late.total >= early.total and late.staging > 0 and late.writing > 0 and late.commit > 0
        assert late.bytes == nbytes > 0


def test_timing_of_a_save_that_failed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with holdfast.Saver(worker="thread") as saver:
        saving = saver.save(_state(1), tmp_path / "file")
        assert isinstance(pytest.raises(holdfast.SaveFailed, saving.wait).value, OSError)
    timing = saving.timing
    assert timing.staging == timing.writing == timing.commit == 0, "what did not happen took no time"
    assert timing.total > 0 and timing.stall > 0


# What stays


def _shared_memory() -> list[str]:
    """What has a name in shared memory and holds this process's number in it, as torch's and Python's own do."""
    return [name for name in os.listdir("/dev/shm") if str(os.getpid()) in name]


def _resources() -> dict[str, Any]:
    gc.collect()
    if dist.is_initialized():
        dist.barrier()  # until all have read the last verdict
    smaps = Path("/proc/self/smaps").read_text()
    found = {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20,
        "shared memory": smaps.count("memfd:holdfast") + len(_shared_memory()),
        # The heartbeat has one thread at most, which ends by itself.
        "threads": sum(t.name != "holdfast-heartbeat" for t in threading.enumerate()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "children": sorted(_processes().values()),
        "keys": ranks_of().store.underlying_store.num_keys() if dist.is_initialized() else 0,
    }
    if dist.is_initialized():
        dist.barrier()  # before any begins the next save
    return found


def many_saves(root: str, worker: str, count: int, fail_every: int) -> tuple[dict[str, Any], dict[str, Any], int]:
    """What this rank holds after five saves and after all; and how many states of saves that are over still live."""
    living: list[weakref.ref[Any]] = []
    early: dict[str, Any] = {}
    with holdfast.Saver(worker=worker) as saver:  # type: ignore[arg-type]
        for step in range(count):
            state = _state(step)
            living.append(weakref.ref(state["model"]["w"]))
            fails = fail_every and step % fail_every == 0
            saving = saver.save(state, f"{root}/{0 if fails and step else step}")
            try:
                saving.wait()
            except holdfast.SaveFailed:
                assert fails
            if step == 5:
                saving.join()  # its thread may still be on its way out, with what it holds
                early = _resources()
        saving.join()
        del state
        return early, _resources(), sum(ref() is not None for ref in living)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "count", "fail_every"),
    [(1, 300, 0), (1, 90, 3), (2, 100, 0), (2, 60, 3)],
    ids=["300 saves", "every third fails", "100 saves of 2 ranks", "of 2 ranks, every third fails"],
)
@pytest.mark.parametrize("worker", WORKERS)
def test_nothing_grows(world: int, count: int, fail_every: int, worker: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as root:
        for early, late, living in pool.run(world, many_saves, root, worker, count, fail_every):
            resident = late.pop("resident") - early.pop("resident")
            assert early == late and living == 0
            assert resident < 12, "MiB"


def dropped(root: str, worker: str) -> tuple[dict[str, Any], dict[str, Any]]:
    def use() -> None:
        saver = holdfast.Saver(worker=worker, slots=2)  # type: ignore[arg-type]
        saver.prepare(_state(0, 300_000))  # 77 MB a slot
        saver.save(_state(1), f"{root}/c{len(os.listdir(root))}").wait()

    def settled() -> dict[str, Any]:
        # The thread of the last save may still be on its way out.
        wait_until(lambda: not any(t.name.startswith("holdfast") for t in threading.enumerate()))
        return _resources()

    use()
    early = settled()
    for _ in range(3):
        use()
    return early, settled()


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.fast_cases("thread")
def test_a_saver_dropped_without_close_lets_everything_go(worker: str, tmp_path: Path) -> None:
    early, late = pool.run(1, dropped, str(tmp_path), worker)[0]
    assert late.pop("resident") - early.pop("resident") < 30
    assert early == late and late["children"] == [] and late["shared memory"] == 0


# Failures


def _told(work: Any) -> tuple[str, Any]:
    try:
        work()
    except holdfast.SaveFailed as error:
        kinds = [k.__name__ for k in type(error).__mro__]
        return str(error), (kinds, error.rank, error.phase, error.file, getattr(error, "errno", None))
    return "no failure", None


def failing_write(path: str, worker: str) -> tuple[Any, Any]:
    """Rank 1 (or the only one) cannot write; what `wait` and the next `save` say."""
    real = file_writer._write

    def broken(file: Any, *args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with holdfast.Saver(worker=worker) as saver:  # type: ignore[arg-type]
        saver.save(_state(1), f"{path}-before").wait()
        if _rank() == dist.get_world_size() - 1:
            file_writer._write = broken
        try:
            first = _told(saver.save(_state(2), path, files={"a": b"b"}).wait)
            saver.save(_state(2), path).settled()
        finally:
            file_writer._write = real
        second = _told(lambda: saver.save(_state(3), path))
        saver.save(_state(4), f"{path}-after").wait()
    return first, second


def test_a_device_that_fails_is_told_everywhere(tmp_path: Path) -> None:
    results = pool.run(2, failing_write, str(tmp_path / "c"), "thread")
    first, second = results[0]
    assert results[0][0] == results[1][0], "the same on both ranks"
    assert results[0][1] == results[1][1], "the next save tells what nobody has heard"
    for text, (kinds, rank, phase, file, number) in (first, second):
        assert "the device failed" in text and {"SaveFailed", "StorageError", "OSError"} <= set(kinds)
        assert (rank, phase, number) == (1, "write", errno.EIO) and file.startswith(str(tmp_path / "c" / "model"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c-after", "c-before"], "nothing stays behind"
    _is_whole(tmp_path / "c-before", 1)
    _is_whole(tmp_path / "c-after", 4)


@pytest.mark.parametrize("unreserved", [False, True], ids=["when reserving", "when writing"])
@pytest.mark.parametrize("worker", WORKERS)
def test_a_full_disk(worker: Any, unreserved: bool, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {"a": {"t": torch.ones(1 << 20)}, "b": {"t": torch.ones(1 << 20)}}  # 4 MiB each: the second is too much
    with holdfast.Saver(worker=worker) as saver:
        saver.save(_state(1), small_disk / "before").wait()
        with monkeypatch.context() as patch:
            if unreserved:
                patch.setattr(local_large, "_reserve", lambda fd, nbytes, path: None)
            for _ in range(2):
                with pytest.raises(holdfast.SaveFailed, match="the disk is full") as caught:
                    saver.save(large, small_disk / "c", files={"f": b"x"}).wait()
                assert isinstance(caught.value, holdfast.errors.StorageError) and caught.value.errno == errno.ENOSPC
                assert caught.value.file is not None and caught.value.file.endswith(".safetensors")
        assert [p.name for p in small_disk.iterdir()] == ["before"]
        # The writer process lets go of what was taken away a moment after the failure is told.
        wait_until(lambda: shutil.disk_usage(small_disk).free > 5 << 20)
        saver.save({"a": large["a"], "step": 3}, small_disk / "after").wait().verify()
    _is_whole(small_disk / "before", 1)


def _writer(saver: holdfast.Saver) -> int:
    return int(saver._pool.worker.pid)  # type: ignore[union-attr]


def test_a_killed_writer_fails_its_save_and_the_next_one_starts_another(tmp_path: Path) -> None:
    before = _processes()
    with holdfast.Saver(slots=2) as saver:
        saver.save(_state(1), tmp_path / "1").wait()
        for kill in range(2, 5):
            pid = _writer(saver)
            freeze(pid)
            savings = [saver.save(_state(kill, 10_000), tmp_path / f"{kill} {i}") for i in range(2)]
            for saving in savings:
                saving.wait_staged(LONG)
            os.kill(pid, signal.SIGKILL)
            for saving in savings:
                with pytest.raises(holdfast.SaveFailed, match="writer process .* was killed by signal 9"):
                    saving.wait(LONG)
                assert not saving.path.exists()
            saver.save(_state(kill), tmp_path / f"{kill} after").wait()
            _is_whole(tmp_path / f"{kill} after", kill)
            assert _writer(saver) != pid
            assert [s for s in _processes().values() if s == "Z"] == []
    assert _processes() == before


@pytest.mark.slow
def test_a_writer_killed_at_any_moment(tmp_path: Path) -> None:
    """Whatever the moment: a failure that says so, or a whole checkpoint; and the next save works."""
    with holdfast.Saver() as saver:
        for trial in range(0, 12, 2):
            saver.save(_state(trial), tmp_path / f"{trial} first").wait()
            threading.Timer(0.001 * trial, os.kill, [_writer(saver), signal.SIGKILL]).start()
            saving = saver.save(_state(trial, 20_000), tmp_path / f"{trial}")
            if saving.settled(LONG):
                _is_whole(saving.path, trial)
            else:
                assert "was killed by signal 9" in str(saving.failed) and not saving.path.exists()
                with pytest.raises(holdfast.SaveFailed):
                    saving.wait()


def bad_states(root: str) -> list[tuple[str, Any]]:
    rank, told = _rank(), []
    holdfast.save(_state(0), f"{root}/taken")
    with holdfast.Saver(worker="thread") as saver:
        for number, (state, files) in enumerate([
            ({"f": (lambda: 1) if rank else 1}, None),
            ({"f": {"x": rank}}, None),
            ({"w": torch.ones(4 + rank)}, None),
            (_state(1), {"a": f"{root}/missing"}),
            (_state(1), {"../a": b""}),
        ]):  # fmt: skip
            told.append(_told(saver.save(state, f"{root}/{number}", files=files).wait))
            saver.save(_state(number), f"{root}/{number} after")
        told.append(_told(saver.save(_state(1), f"{root}/taken").wait))
        told.append(_told(saver.save(_state(1), f"{root}/rank {rank}").wait))
        saver.save(_state(9), f"{root}/last")
    return told


def test_states_that_cannot_be_saved_fail_on_every_rank_alike(tmp_path: Path) -> None:
    one, two = pool.run(2, bad_states, str(tmp_path))
    assert one == two
    texts = [text for text, _ in one]
    for text, expected in zip(
        texts,
        ["is code", "f/x differs between ranks", "w is float32 [4] on rank 0", "missing", "must be a relative path",
         "already holds a committed checkpoint", "the ranks do different things"],
        strict=True,
    ):  # fmt: skip
        assert expected in text
    assert sorted(p.name for p in tmp_path.iterdir()) == [*(f"{n} after" for n in range(5)), "last", "taken"]
    for number in range(5):
        _is_whole(tmp_path / f"{number} after", number)
    _is_whole(tmp_path / "taken", 0)


def test_a_url_takes_no_slot(tmp_path: Path) -> None:
    with holdfast.Saver(worker="thread") as saver:
        for _ in range(3):
            with pytest.raises(ValueError, match="no store for ftp"):
                saver.save(_state(1), "ftp://bucket/run")
        saver.save(_state(1), tmp_path / "c").wait(LONG)
    _is_whole(tmp_path / "c", 1)


def test_the_file_of_somebody_else_is_never_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save fails while another file of it is being finished: its number must not be free for other files yet."""
    finishing, real_finish, real_write = threading.Event(), file_writer._finish, file_writer._write

    def finish(file: Any, header: bytes, size: int) -> Any:
        finishing.set()
        threading.Event().wait(0.3)  # meanwhile the save fails
        return real_finish(file, header, size)

    def write(file: Any, *args: Any) -> None:
        if "/b/" in file.path:
            assert finishing.wait(LONG)
            raise OSError(errno.EIO, "Input/output error")
        real_write(file, *args)

    monkeypatch.setattr(file_writer, "_finish", finish)
    monkeypatch.setattr(file_writer, "_write", write)
    with holdfast.Saver(worker="thread") as saver:
        with pytest.raises(holdfast.SaveFailed, match="the device failed"):
            saver.save({"a": {"t": torch.ones(9)}, "b": {"t": torch.ones(9)}}, tmp_path / "c").wait()
        files = [(tmp_path / f"mine{i}").open("w+b") for i in range(20)]
        threading.Event().wait(0.5)
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * 20
        for file in files:
            file.close()


def test_windows_that_come_back_late_are_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its bytes are written is known a moment before the window is back; the next save must not come between."""
    pause, real_give, real_write = threading.Event(), buffers.StagingBuffer.give, file_writer._write

    def late(self: buffers.StagingBuffer, window: Any) -> None:
        pause.wait(0.3)
        real_give(self, window)

    def write(*args: Any) -> None:
        pause.wait(0.05)  # so that somebody waits for it
        real_write(*args)

    monkeypatch.setattr(buffers.StagingBuffer, "give", late)
    monkeypatch.setattr(file_writer, "_write", write)
    with holdfast.Saver(worker="thread") as saver:
        for step in range(3):
            saver.save(_state(step), tmp_path / str(step)).wait()


# No slot is free


def skip_or_not(root: str, slots: int) -> tuple[list[bool], list[str]]:
    """Rank 1 writes slowly, so its slots are taken; rank 0 has long written."""
    with gated() as gate, holdfast.Saver(worker="thread", slots=slots, busy="skip") as saver:
        if _rank() == 0:
            gate.set()
        savings = [saver.save(_state(step), f"{root}/{step}") for step in range(slots + 3)]
        for saving in savings[slots:]:
            saving.known(LONG)
        taken = len(saver._pool.buffers)
        gate.set()
        texts = [_told(saving.wait)[0] for saving in savings]
        savings.append(saver.save(_state(99), f"{root}/99"))
        assert savings[-1].settled(LONG) and taken <= slots
        return [saving.skipped for saving in savings], texts


@pytest.mark.parametrize("slots", [1, 2])
def test_all_ranks_skip_when_one_has_no_slot(slots: int, tmp_path: Path) -> None:
    expected = [False] * slots + [True] * 3 + [False]
    for skipped, texts in pool.run(2, skip_or_not, str(tmp_path), slots):
        assert skipped == expected
        assert [("was skipped" in text) for text in texts] == expected[:-1]
        assert texts[:slots] == ["no failure"] * slots
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*map(str, range(slots)), "99"])
    _is_whole(tmp_path / "99", 99)


def test_a_skipped_save_is_no_failure_of_the_saver(tmp_path: Path) -> None:
    with gated() as gate, holdfast.Saver(worker="thread", busy="skip") as saver:
        first, second = (saver.save(_state(i), tmp_path / str(i)) for i in range(2))
        assert not second.settled(LONG) and second.skipped and isinstance(second.failed, holdfast.SaveFailed)
        gate.set()
        first.wait(LONG)
        saver.wait()


def test_a_save_waits_for_a_slot(tmp_path: Path) -> None:
    with gated() as gate, holdfast.Saver(worker="thread", slots=2) as saver:
        began: list[int] = []

        def saves() -> None:
            for step in range(4):
                saver.save(_state(step), tmp_path / str(step))
                began.append(step)

        thread = threading.Thread(target=saves)
        thread.start()
        wait_until(lambda: len(began) == 2)
        thread.join(0.2)
        assert began == [0, 1]
        gate.set()
        thread.join(LONG)
        assert began == [0, 1, 2, 3]
    for step in range(4):
        _is_whole(tmp_path / str(step), step)


def test_a_save_waits_for_the_earlier_one_to_its_path(tmp_path: Path) -> None:
    with gated() as gate, holdfast.Saver(worker="thread", slots=2) as saver:
        saver.save(_state(1), tmp_path / "latest", overwrite=True)
        later: list[holdfast.Saving] = []
        thread = threading.Thread(
            target=lambda: later.append(saver.save(_state(2), tmp_path / "latest", overwrite=True))
        )
        thread.start()
        thread.join(0.2)
        at_once = bool(later)
        gate.set()
        thread.join(LONG)
    assert not at_once
    _is_whole(tmp_path / "latest", 2)


def test_a_save_is_skipped_while_an_earlier_one_to_its_path_is_under_way(tmp_path: Path) -> None:
    with gated() as gate, holdfast.Saver(worker="thread", slots=3, busy="skip") as saver:
        first = saver.save(_state(1), tmp_path / "latest", overwrite=True)
        second = saver.save(_state(2), tmp_path / "latest", overwrite=True)
        other = saver.save(_state(3), tmp_path / "other")
        gate.set()
        assert not second.settled(LONG) and second.skipped
        first.wait(LONG)
        other.wait(LONG)
        saver.save(_state(4), tmp_path / "latest", overwrite=True).wait(LONG)
    _is_whole(tmp_path / "latest", 4)


# Callbacks


def test_callbacks_hear_of_every_outcome(tmp_path: Path) -> None:
    heard: list[tuple[str, bool]] = []
    with holdfast.Saver(worker="thread") as saver:
        with gated():
            saving = saver.save(_state(1), tmp_path / "c")
            saving.add_done_callback(lambda s: 1 / 0)
            saving.add_done_callback(lambda s: heard.append((s.path.name, s.failed is None)))
        saving.wait()
        saving.add_done_callback(lambda s: heard.append((s.path.name, s.failed is None)))
        failed = saver.save(_state(1), tmp_path / "c")
        failed.settled()
        failed.add_done_callback(lambda s: heard.append((s.path.name, s.failed is None)))
        assert "failed" in repr(failed) and "done" in repr(saving)
        with pytest.raises(holdfast.SaveFailed):
            failed.wait()
    assert heard == [("c", True), ("c", True), ("c", False)]


def test_callbacks_are_let_go_once_called(tmp_path: Path) -> None:
    heard: list[Path] = []
    callback = functools.partial(lambda paths, saving: paths.append(saving.path), heard)
    kept = weakref.ref(callback)
    with holdfast.Saver(worker="thread") as saver:
        with gated():
            saving = saver.save(_state(1), tmp_path / "c")
            saving.add_done_callback(callback)
            del callback
            assert kept() is not None
        saving.wait()
    assert heard == [saving.path]
    assert kept() is None


# The end


@pytest.mark.parametrize("worker", WORKERS)
def test_saves_and_loads_leave_nothing_for_the_garbage_collector(tmp_path: Path, worker: Any) -> None:
    # Loops of many ranks turn it off, so that all collect at the same step.
    model = nn.Sequential(nn.Linear(7, 1001), nn.Linear(1001, 33))
    state: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    unreachable = []
    with holdfast.CheckpointManager(tmp_path, every=1, signals=(), worker=worker) as manager:
        for step in range(1, 5):
            gc.collect()
            gc.disable()
            try:
                # Loads scatter it, each through memory of another length.
                state["grows"] = torch.ones(step * 100_001, 3)[:, :2]
                manager.save(step, state)
                manager.restore(state)
                unreachable.append(gc.collect())
            finally:
                gc.enable()
    assert unreachable[-2:] == [0, 0]  # before that, modules are imported


def test_close_waits_and_can_be_repeated(tmp_path: Path) -> None:
    for worker in WORKERS:
        saver = holdfast.Saver(worker=worker)  # type: ignore[arg-type]
        saving = saver.save(_state(1, 10_000), tmp_path / worker)
        saver.close()
        assert saving.done
        _is_whole(tmp_path / worker, 1)
        saver.close()
        for call in (lambda: saver.save(_state(2), tmp_path / "x"), lambda: saver.prepare(_state(2))):
            with pytest.raises(holdfast.HoldfastError, match="closed"):
                call()
    holdfast.Saver().close()


def test_close_raises_what_nobody_has_heard(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    saver = holdfast.Saver(worker="thread")
    saver.save(_state(1), tmp_path / "file")
    with pytest.raises(holdfast.SaveFailed, match="is a file"):
        saver.close()
    saver.close()
    with pytest.raises(ZeroDivisionError), holdfast.Saver(worker="thread") as saver:
        saver.save(_state(1), tmp_path / "file")
        raise ZeroDivisionError


SCRIPT = """
import os, torch, holdfast
saver = holdfast.Saver(worker={worker!r})
for step in range({count}):
    saver.save({{"model": {{"w": torch.full((1 << 20,), float(step))}}, "step": step}}, {path!r} + f"/{{step}}")
print(saver._pool.worker.pid if saver._pool.worker and {worker!r} == "process" else 0)
"""


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("worker", "how"),
    [
        ("process", "file"),
        ("thread", "-c"),
        ("process", "stdin"),
        pytest.param("thread", "file", marks=_SLOW),
        pytest.param("process", "-c", marks=_SLOW),
        pytest.param("thread", "stdin", marks=_SLOW),
    ],
)
@pytest.mark.fast_cases("process-file")
def test_an_interpreter_that_ends_waits_for_its_last_save(how: str, worker: str, tmp_path: Path) -> None:
    """No close(), and no ``if __name__ == "__main__"``, which other ways to start a process would need."""
    script = SCRIPT.format(worker=worker, path=str(tmp_path), count=2 if how == "file" else 1)
    (tmp_path / "script.py").write_text(script)
    command = {"file": [str(tmp_path / "script.py")], "-c": ["-c", script], "stdin": ["-"]}[how]
    ran = subprocess.run(
        [sys.executable, *command], input=script if how == "stdin" else None, text=True, capture_output=True,
        timeout=240,
    )  # fmt: skip
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    checkpoint = holdfast.open(tmp_path / ("1" if how == "file" else "0"))
    checkpoint.verify()
    pid = int(ran.stdout)
    assert pid == 0 or _gone(pid)


TORCHRUN = """
import os, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
saver = holdfast.Saver()
for step in range(3):
    saving = saver.save({{"w": torch.full((1000,), float(step)), "step": step}}, {path!r} + f"/{{step}}")
saving.wait()
maps = open(f"/proc/{{saver._pool.worker.pid}}/maps").read()
assert "torch" not in maps
saver.save({{"w": torch.full((1000,), 3.0), "step": 3}}, {path!r} + "/3")
"""


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TORCHRUN.format(path=str(tmp_path)))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0", "--standalone",
         str(tmp_path / "script.py")],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for step in range(4):
        holdfast.open(tmp_path / str(step)).verify()


# Before the first save


def prepared(layout: str, optimizer: str, root: str) -> tuple[list[str], list[Any], list[Any], int]:
    torch.manual_seed(3)
    model = meshes.LAYOUTS[layout][1](meshes.Model())
    trained = [p for p in model.parameters() if p.requires_grad]
    made = {
        "AdamW": lambda: torch.optim.AdamW(trained, lr=1e-3),
        "AMSGrad": lambda: torch.optim.AdamW(trained, lr=1e-3, amsgrad=True),
        "SGD": lambda: torch.optim.SGD(trained, lr=1e-3, momentum=0.9),
        "RMSprop": lambda: torch.optim.RMSprop(trained, lr=1e-3, momentum=0.9, centered=True),
    }[optimizer]()
    state = {"model": model, "optimizer": made, "step": 0}
    window = 4096  # small, so that a wrong guess is seen
    kept = buffer_pool.StagingBuffer
    buffer_pool.StagingBuffer = functools.partial(buffers.StagingBuffer, chunk_bytes=window)  # type: ignore[assignment,misc]
    try:
        with holdfast.Saver(worker="thread", slots=2) as saver:
            saver.prepare(state)
            files = os.listdir(root)
            before = [(slot._address, slot.nbytes) for slot in saver._pool.buffers.values()]
            model(torch.randint(0, 11, (4, 5))).square().mean().backward()
            made.step()
            for step in range(2):
                saver.save(state, f"{root}/{step}")
            saver.wait()
            after = [(slot._address, slot.nbytes) for slot in saver._pool.buffers.values()]
            return files, before, after, len(saver._pool.buffers)
    finally:
        buffer_pool.StagingBuffer = kept  # type: ignore[misc]


@pytest.mark.parametrize("optimizer", ["AdamW", "AMSGrad", "SGD", "RMSprop"])
@pytest.mark.parametrize("layout", ["FSDP2 2", "DDP 2"])
def test_what_was_prepared_is_enough_for_the_first_save(layout: str, optimizer: str, tmp_path: Path) -> None:
    for files, before, after, slots in pool.run(2, prepared, layout, optimizer, str(tmp_path)):
        assert files == [] and slots == 2
        assert before == after, "the memory is where it was, and no more of it"


def resident() -> int:
    """Bytes of memory that this process has and no file has."""
    found = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(words[1]) << 10 for words in found if words[0] in ("RssAnon:", "RssShmem:"))


def prepared_for_many(root: str, worker: str, sections: int) -> tuple[int, int, int]:
    """What `prepare`, a background save and a blocking one take for sections of 300 bytes."""
    state = {f"agent{i}": nn.Linear(8, 8) for i in range(sections)}
    with holdfast.Saver(worker=worker, slots=2) as saver:  # type: ignore[arg-type]
        saver.save({"t": torch.ones(3)}, f"{root}/first").wait()
        before = resident()
        saver.prepare(state)
        prepared = resident() - before
        saver.save(state, f"{root}/background").wait()
        saved = resident() - before
    before = resident()
    holdfast.save(state, f"{root}/blocking")
    return prepared, saved, resident() - before


@pytest.mark.slow
@pytest.mark.parametrize("worker", WORKERS)
def test_many_small_sections_take_little_memory(worker: str, tmp_path: Path) -> None:
    for figures in pool.run(1, prepared_for_many, str(tmp_path), worker, 300):
        assert max(figures) < 24 << 20, "what is saved, and what Python needs for 300 files"


@pytest.mark.parametrize("nbytes", [1, 3 << 20, 16 << 20, 70 << 20])
def test_a_slot_takes_what_is_saved_and_little_more(nbytes: int, tmp_path: Path) -> None:
    with holdfast.Saver(worker="thread") as saver:
        saver.prepare({"a": {"t": torch.empty(nbytes, dtype=torch.uint8)}, "b": {"t": torch.ones(2)}})
        (slot,) = saver._pool.buffers.values()
        assert nbytes < slot.nbytes <= nbytes + (17 << 20 if nbytes > 15 << 20 else 2 << 20)


def prepare_badly(root: str) -> tuple[str, str]:
    with holdfast.Saver(worker="thread") as saver:
        texts = []
        for state in ({"f": (lambda: 1) if _rank() else 1}, {"w": torch.ones(3 + _rank())}):
            try:
                saver.prepare(state)
            except holdfast.HoldfastError as error:
                assert not isinstance(error, holdfast.SaveFailed)
                texts.append(str(error))
        saver.prepare(_state(1))
        saver.save(_state(1), f"{root}/c").wait()
    return texts[0], texts[1]


def test_preparing_fails_on_all_ranks_alike(tmp_path: Path) -> None:
    one, two = pool.run(2, prepare_badly, str(tmp_path))
    assert one == two and "is code" in one[0] and "rank 1" in one[0] and "w is float32 [3] on rank 0" in one[1]
    _is_whole(tmp_path / "c", 1)


def test_bad_arguments() -> None:
    for wrong in ({"worker": "fork"}, {"busy": "panic"}, {"slots": 0}, {"memory_limit": 1 << 20}):
        with pytest.raises(ValueError):
            holdfast.Saver(**wrong)  # type: ignore[arg-type]


# Many at once


def all_at_once(root: str, rounds: int) -> str:
    """Two Savers, blocking saves, loads and collectives, on the same ranks at the same time."""
    wrong: list[str] = []
    with holdfast.Saver(worker="thread", slots=2) as one, holdfast.Saver(worker="process", slots=1) as two:
        savings = []
        for step in range(rounds):
            savings.append(one.save(_state(step), f"{root}/one {step}"))
            savings.append(two.save(_state(step), f"{root}/two {step}"))
            total = torch.ones(1000)
            for _ in range(5):
                dist.all_reduce(total)
            if total[0] != dist.get_world_size() ** 5:
                wrong.append(f"all_reduce gave {total[0]}")
            holdfast.save(_state(step), f"{root}/blocking {step}")
            into = _state(0)
            holdfast.load(f"{root}/blocking {step}", into)
            if into["step"] != step or (into["model"]["w"] != step).any():
                wrong.append(f"load of {step}")
            if step % 3 == 1:
                failing = one.save(_state(step), f"{root}/blocking {step}")
                if "already holds" not in _told(failing.wait)[0]:
                    wrong.append(f"save over {step}")
    wrong += [str(s.failed) for s in savings if s.failed is not None]
    return "\n".join(wrong)


@pytest.mark.parametrize(("world", "rounds"), [(2, 10), (3, 6)])
@pytest.mark.fast_cases("2-10")
def test_savers_saves_loads_and_collectives_at_the_same_time(world: int, rounds: int, tmp_path: Path) -> None:
    assert pool.run(world, all_at_once, str(tmp_path), rounds) == [""] * world
    for kind in ("one", "two", "blocking"):
        for step in range(rounds):
            _is_whole(tmp_path / f"{kind} {step}", step)


# Ranks that fall out of step with each other


def one_rank_hears_first(root: str) -> list[str]:
    """A save fails, and only the first rank waits for it; what each later call of `save` does on this rank."""
    told = []
    with holdfast.Saver(worker="thread", deadline=240) as saver:
        taken = Path(root, "taken")
        dist.barrier()
        failed = saver.save(_state(0), taken)
        failed.settled()
        if _rank() == 0:
            with pytest.raises(holdfast.SaveFailed):
                failed.wait()
        for step in range(1, 4):
            try:
                saving = saver.save(_state(step), f"{root}/{step}")
                told.append("saved" if saving.settled() else "skipped" if saving.skipped else "failed")
            except holdfast.SaveFailed:
                told.append("raised")
    return told


def test_who_waited_for_a_failure_does_not_matter_to_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    first, second = pool.run(2, one_rank_hears_first, str(tmp_path))
    assert first == ["skipped", "saved", "saved"] and second == ["raised", "saved", "saved"]
    assert not (tmp_path / "1").exists(), "one rank was told of the failure instead, so nobody saved"


def one_rank_misses_a_save(root: str) -> list[bool]:
    outcomes = []
    with holdfast.Saver(worker="thread", busy="skip", deadline=6) as saver:
        for step in range(3):
            if step != 1 or _rank() == 0:
                outcomes.append(saver.save(_state(step), f"{root}/{step}").settled())
            dist.barrier()  # as training keeps ranks together
        saver._earlier._unheard.clear()
        saver._earlier.savings.clear()
    return outcomes


@pytest.mark.slow
def test_a_rank_that_missed_a_save_catches_up(tmp_path: Path) -> None:
    first, second = pool.run(2, one_rank_misses_a_save, str(tmp_path))
    assert first == [True, False, True] and second == [True, True]
    holdfast.open(tmp_path / "2").verify()


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.fast_cases("thread")
def test_a_forked_child_leaves_the_save_to_its_parent(tmp_path: Path, worker: Any) -> None:
    """It has neither the threads nor the writer: it waits for nothing, and takes nothing away from its parent."""
    gate = threading.Event()
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def held(event: holdfast.events.Event) -> None:
        assert event.task != "stage" or gate.wait(LONG)

    with holdfast.Saver(worker=worker) as saver, holdfast.events.listen(held):
        saver.save(_state(0), tmp_path / "before")
        gate.set()
        saver.wait()
        gate.clear()
        saving = saver.save({"model": model, "optimizer": optimizer, "step": 1}, tmp_path / "1")
        child = os.fork()
        if not child:
            faults = 1
            try:
                signal.alarm(int(LONG))  # it is to end by itself
                earlier._finish_last_saves()
                optimizer.step()
                with pytest.raises(holdfast.HoldfastError, match=f"goes on in process {os.getppid()}"):
                    saving.wait()
                with pytest.raises(holdfast.HoldfastError, match="closed"):
                    saver.save(_state(1), tmp_path / "2")
                saver.close()
                del saver
                gc.collect()
                faults = 0
            finally:
                os._exit(faults)
        status = os.waitpid(child, 0)[1]
        gate.set()
        assert saving.settled(LONG)
    assert status == 0
    holdfast.open(tmp_path / "1").verify()
