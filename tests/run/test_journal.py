"""The journal: what it says of real runs, that no save ever waits for it, and that nothing in it is believed."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep, events
from holdfast.run import journal, journaling
from holdfast.run.journal import Entry, Now, Reader, read
from holdfast.run.journaling import Journal, thin, thinned
from holdfast.run.retention import KeptSteps
from holdfast.storage.local import disk
from holdfast.storage.memory import Memory
from holdfast.storage.place import Place
from holdfast.storage.storage import JOURNAL
from holdfast.storage.store_place import StorePlace
from holdfast.testing import disk_faults
from tests import pool
from tests.servers import Server
from tests.stores import bucket_of
from tests.test_manager import before_each_write, held_back, refuse


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((50, 3), float(step))}, "step": step}


def entry(step: int, outcome: Any = "saved", began: float | None = None) -> Entry:
    began = 1000.0 + step if began is None else began
    return Entry(step, began, began + 1, 1.0, 0.1, 100, 1, None, outcome)


def lines_of(root: Path) -> list[str]:
    return [line for file in sorted((root / JOURNAL).glob("*.jsonl")) for line in file.read_text().splitlines()]


# What it says


@pytest.mark.parametrize("worker", ["thread", "none"])
def test_every_save_has_an_entry(worker: Any, tmp_path: Path) -> None:
    losses = {1: 3.0, 2: float("nan"), 3: 2.5, 4: 1.0}
    with CheckpointManager(tmp_path, every=2, worker=worker, keep=Keep(last=1)) as manager:
        for step, loss in losses.items():
            manager.step(step, state_of(step), metric=loss)
        manager.wait()
        manager.save(5, state_of(5))
    found = read(tmp_path)
    assert [(e.step, e.outcome, e.metric) for e in found] == [(2, "saved", None), (4, "saved", 1.0), (5, "saved", None)]
    last = found[-1]
    assert last.bytes == last.written == holdfast.open(tmp_path / "step-000000005").nbytes and last.ranks == 1
    assert last.committed is not None and last.began < last.committed and not last.error
    assert 0 < last.stall <= last.seconds and abs(sum(last.phases.values()) - last.seconds) < 1e-6
    assert last.step_seconds is not None and last.step_seconds >= 0 and last.backlog is None
    assert len({e.start for e in found}) == 1 and last.start
    now = Reader(tmp_path).read().now
    assert now is not None and now.ended and now.saving is None and now.step == 5 and now.every == 2


def test_a_save_that_borrows_says_what_it_wrote(tmp_path: Path) -> None:
    state = {"frozen": {"w": torch.zeros(1 << 16)}, "model": {"w": torch.zeros(10)}}
    with CheckpointManager(tmp_path, every=1, worker="none", incremental=True) as manager:
        for step in (1, 2):
            state["model"]["w"] += 1
            manager.step(step, state)
    first, second = read(tmp_path)
    assert first.written == first.bytes and second.bytes == first.bytes
    assert second.written is not None and 0 < second.written < 1 << 16


def test_what_fails_and_what_is_skipped(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread", busy="skip", on_failure="warn") as manager:
        with held_back():
            first = manager.step(1, state_of(1))
            second = manager.step(2, state_of(2))
            assert first is not None and second is not None and not second.settled()
            manager._record.journal.settle(30)
            now = Reader(tmp_path).read().now
            assert now is not None and now.saving == 1 and now.since is not None and now.at >= now.since
        manager.wait()
        with before_each_write(refuse):
            third = manager.step(3, state_of(3))
            assert third is not None and not third.settled()
    found = read(tmp_path)
    assert [(e.step, e.outcome) for e in found] == [(1, "saved"), (2, "skipped"), (3, "failed")]
    assert "No space left" in found[2].error and found[2].committed is None and not found[0].error


def test_nothing_is_kept_of_a_run_that_is_only_looked_at(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "off", every=1, worker="none", journal=False) as manager:
        manager.step(1, state_of(1))
    assert not (tmp_path / "off" / JOURNAL).exists() and read(tmp_path / "off") == []
    with CheckpointManager(tmp_path / "off", every=1) as manager:
        assert manager.restore(state_of(0)) is not None
    assert not (tmp_path / "off" / JOURNAL).exists()


def start_again(root: str, first: int) -> None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    state = state_of(0)
    with CheckpointManager(root, every=1, signals=(), worker="thread") as manager:
        manager.restore(state)
        for step in range(first, first + 2):
            state["step"] = step
            manager.step(step, state, metric=float(world))


def test_starts_on_other_ranks_go_on_with_it(tmp_path: Path) -> None:
    pool.run(2, start_again, str(tmp_path), 1)
    start_again(str(tmp_path), 3)
    found = read(tmp_path)
    assert [(e.step, e.ranks, e.metric) for e in found] == [(1, 2, 2.0), (2, 2, 2.0), (3, 1, 1.0), (4, 1, 1.0)]
    assert len({e.start for e in found}) == 2


def save_and_die(root: str) -> None:
    manager = CheckpointManager(root, every=1, signals=(), worker="thread")
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    manager._record.journal.settle(30)  # what is written a moment later is what may be lost
    manager.step(4, state_of(4))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow  # a pool of its own, which is not used again
def test_a_killed_run_leaves_what_was_written(tmp_path: Path) -> None:
    assert pool.attempt(1, save_and_die, str(tmp_path))[0].kinds == ["Killed"]
    pool.close(1)
    assert [e.step for e in read(tmp_path)][:3] == [1, 2, 3]
    start_again(str(tmp_path), 5)
    assert [e.step for e in read(tmp_path) if e.step != 4] == [1, 2, 3, 5, 6]


def test_the_backlog_of_uploads(tmp_path: Path) -> None:
    store = StorePlace(Memory(), "run")
    upload = holdfast.storage.Upload(newest=False, every=100)
    with CheckpointManager(store, fast=tmp_path, every=1, upload=upload, worker="none") as manager:
        manager.step(1, state_of(1))
    assert [(e.step, e.backlog) for e in read(store)] == [(1, 0)] and not (tmp_path / JOURNAL).exists()


# It is beside the steps, and in nobody's way


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_nobody_takes_it_for_a_step(kind: str, tmp_path: Path) -> None:
    root: Place = StorePlace(Memory(), "run") if kind == "store" else tmp_path / "run"
    with CheckpointManager(root, every=1, worker="none", keep=Keep(last=2)) as manager:
        for step in (1, 2, 3):
            manager.step(step, state_of(step))
        assert manager.steps() == [2, 3] and len(manager.scrub().wait(240)) == 2
    steps = KeptSteps(root, "step-{step:09d}")
    assert sorted(path.name for path in steps.folders()) == ["step-000000002", "step-000000003"] and steps._others == []
    steps.clean(())
    assert len(read(root)) == 3
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(root / JOURNAL)
    if kind == "store":
        copied = holdfast.copy(root, tmp_path / "copy")
        assert [*copied.steps] == ["step-000000002", "step-000000003"] and not (tmp_path / "copy" / JOURNAL).exists()


# When it cannot be written


def test_a_disk_that_fails_costs_the_journal_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread") as manager, caplog.at_level(logging.WARNING):
        with disk_faults.faults("any", times=0, error="ENOSPC", under=tmp_path / JOURNAL) as met:
            for step in (1, 2, 3):
                manager.save(step, state_of(step))
            manager._record.journal.settle(30)
            assert met.count
        assert read(tmp_path) == []
        told = [record.getMessage() for record in caplog.records]
        assert len(told) == 1 and "saves go on without it" in told[0] and "disk is full" in told[0]
        manager.save(4, state_of(4))
    assert [e.step for e in read(tmp_path)] == [1, 2, 3, 4], "what could not be written is, once that is possible"


def test_a_write_that_ends_in_its_middle(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread") as manager:
        manager.save(1, state_of(1))
        manager._record.journal.settle(30)
        half = threading.Event()

        def tear(call: Any, do: Any) -> Any:
            if call.verb != "write" or call.offset != -1:
                return do()
            if half.is_set():
                raise OSError(5, "the disk is gone")
            half.set()
            return os.write(call.fd, bytes(call.data)[:40])

        with disk.hooked(tear):
            manager.save(2, state_of(2))
            manager._record.journal.settle(30)
        assert [e.step for e in read(tmp_path)] == [1] and len(lines_of(tmp_path)) == 2
        manager.save(3, state_of(3))
    assert [e.step for e in read(tmp_path)] == [1, 2, 3]


def test_a_store_that_hangs_keeps_no_save_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    free = threading.Event()

    class Hanging(Memory):
        def put(self, key: str, chunks: Any, nbytes: int) -> None:
            if JOURNAL in key:
                free.wait(240)
            super().put(key, chunks, nbytes)

    store = StorePlace(Hanging(), "run")
    manager = CheckpointManager(store, every=1, worker="thread")
    for step in (1, 2, 3):
        manager.save(step, state_of(step))
    assert manager.steps() == [2, 3] and read(store) == []
    manager._record.journal.settle(0.0)
    assert "the last entries may be lost" in caplog.text
    free.set()
    manager.close()
    assert [e.step for e in read(store)] == [1, 2, 3]


def test_a_thread_that_cannot_be_started_costs_the_journal_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refusing(thread: threading.Thread) -> None:
        if thread.name == "holdfast-journal":
            raise RuntimeError("can't start new thread")
        start(thread)

    with CheckpointManager(tmp_path, every=1, worker="none", keep=Keep(last=1)) as manager:
        with monkeypatch.context() as without:
            without.setattr(threading.Thread, "start", refusing)
            for step in (1, 2):
                manager.step(step, state_of(step))
        assert manager.steps() == [2] and caplog.text.count("can't start new thread") == 1
        manager.step(3, state_of(3))
    assert [e.step for e in read(tmp_path)] == [1, 2, 3], "with the first thread that starts all is written"


def test_numbers_of_other_kinds(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread", keep=Keep(last=9)) as manager:
        manager.step(0, state_of(0), due=False, metric=10**400)
        manager._record.journal.tell(manager._record.now, news=True)
        manager.save(np.int64(1), state_of(1))
        manager.save(torch.tensor(2), state_of(2))  # type: ignore[arg-type]
        assert manager.step(np.int64(2), state_of(2)) is None
    found = Reader(tmp_path).read()
    assert [e.step for e in found.entries] == [1, 2] and found.now is not None and found.now.ended


def test_no_step_waits_for_what_is_told_of_it(tmp_path: Path) -> None:
    free, asked = threading.Event(), []

    class OnDevice:
        """A metric that is still computed."""

        def __float__(self) -> float:
            asked.append(threading.current_thread().name)
            assert free.wait(240)
            return 1.5

    with CheckpointManager(tmp_path, every=100, worker="thread") as manager:
        manager.step(1, state_of(1), metric=OnDevice())  # type: ignore[arg-type]
        free.set()
    assert set(asked) == {"holdfast-journal"}
    now = Reader(tmp_path).read().now
    assert now is not None and now.metric == 1.5 and now.ended


def test_training_that_has_ended_does_not_go_on(tmp_path: Path) -> None:
    journal, where = Journal(tmp_path), Now(7, 1.0, 1, 1, saving=8)
    journal.close(lambda: where, 30)
    journal.add(entry(8, "failed"))  # its save was given up, and ends now
    journal.tell(lambda: where, news=True)
    journal.settle(30)
    found = Reader(tmp_path).read()
    assert [e.step for e in found.entries] == [8] and found.now is not None and found.now.ended


def test_what_is_written_is_not_written_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(tmp_path)
    for step in (1, 2, 3):
        journal.add(entry(step))
        journal.tell(lambda: 1 // 0, news=True)  # type: ignore[arg-type, return-value]
        journal.settle(30)
    assert len(lines_of(tmp_path)) == 3 and caplog.text.count("division") == 1


def test_an_interpreter_that_ends_waits_for_the_last_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    with disk.hooked(lambda call, do: (call.verb == "write" and free.wait(240), do())[1]):
        journal = Journal(tmp_path)
        journal.add(entry(1))
        assert journaling._settle_all in events._last
        monkeypatch.setattr(journaling, "LEAVE", 0.0)
        journaling._settle_all()
        assert "the last entries may be lost" in caplog.text, "nor for ever"
        child = os.fork()
        if not child:
            os._exit(len(journaling._open))
        assert os.waitpid(child, 0)[1] == 0, "a forked process has nothing to wait for"
        monkeypatch.undo()
        free.set()
        journaling._settle_all()
    assert [e.step for e in read(tmp_path)] == [1]


@pytest.mark.slow
def test_in_a_bucket(moto: Server, caplog: pytest.LogCaptureFixture) -> None:
    with bucket_of(moto) as bucket:
        with CheckpointManager(bucket.at("run"), every=1, worker="thread") as manager:
            for step in (1, 2):
                manager.save(step, state_of(step))
            manager._record.journal.settle(60)
            assert [e.step for e in read(bucket.at("run"))] == [1, 2]
            written = [r for r in bucket.proxy.requests() if r.method == "PUT" and "journal" in r.path]
            assert len({r.path for r in written}) == 2, "one file of entries, and where training is"
        start = CheckpointManager(bucket.at("run"), every=1, worker="thread")
        start.save(3, state_of(3))
        start.close()
        assert [e.step for e in read(bucket.direct("run"))] == [1, 2, 3]
        assert len([name for name in bucket.files(f"run/{JOURNAL}") if name.endswith(".jsonl")]) == 2


# What is read back


HOSTILE = [
    b"", b"\n\n", b"{", b"[]", b"null", b'"x"', b"{}", b"\xff\xfe\x00", b"[" * 5000, b"1" * 100_000,
    b'{"step":-1,"began":1,"committed":2,"seconds":1,"stall":0,"bytes":1,"ranks":1,"metric":null,"outcome":"saved"}',
    b'{"step":1,"began":"1","committed":2,"seconds":1,"stall":0,"bytes":1,"ranks":1,"metric":null,"outcome":"saved"}',
    b'{"step":1,"began":1,"committed":2,"seconds":1,"stall":0,"bytes":1e99,"ranks":1,"metric":0,"outcome":"saved"}',
    b'{"step":1,"began":1e999,"committed":2,"seconds":1,"stall":0,"bytes":1,"ranks":1,"metric":0,"outcome":"saved"}',
    b'{"step":1,"began":1,"committed":2,"seconds":1,"stall":0,"bytes":1,"ranks":1,"metric":0,"outcome":"eaten"}',
    b'{"step":1,"began":1e300,"committed":2,"seconds":1,"stall":0,"bytes":1,"ranks":1,"metric":0,"outcome":"saved"}',
    b'{"step":1,"began":1,"committed":2,"seconds":-1,"stall":0,"bytes":1,"ranks":1,"metric":0,"outcome":"saved"}',
]  # fmt: skip


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    Journal(tmp_path).close(lambda: Now(1, 1.0, 1, 1), 30)
    file = tmp_path / JOURNAL / "1700000000000-0123abcd.jsonl"
    file.write_bytes(b"".join(journal.msgspec.json.encode(entry(step)) + b"\n" for step in (1, 2)))
    yield file


@pytest.mark.parametrize("bad", HOSTILE, ids=range(len(HOSTILE)))
def test_what_is_no_entry_is_passed_over(bad: bytes, kept: Path) -> None:
    kept.write_bytes(bad + b"\n" + kept.read_bytes() + bad)
    (kept.parent / "now.json").write_bytes(bad)
    found = Reader(kept.parent.parent).read()
    assert [e.step for e in found.entries] == [1, 2] and found.now is None


def test_every_torn_end_is_passed_over(kept: Path) -> None:
    whole = kept.read_bytes()
    for cut in {*range(0, len(whole), 5), whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 1}:
        kept.write_bytes(whole[:cut])
        assert len(read(kept.parent.parent)) == (cut >= whole.index(b"\n")) + (cut >= len(whole) - 1)


def test_what_is_read_is_bounded_and_harmless(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = {
        "step": 3, "began": 5.0, "committed": None, "seconds": 1, "stall": 0, "bytes": 1, "ranks": 1, "metric": None,
        "outcome": "failed", "error": "\x1b[2J\u202egone" + "x" * 2000, "start": "\x07" * 99, "phases": {"a\n": 1.0},
        "other": [1],
    }  # fmt: skip
    kept.write_text(json.dumps(bad) + "\n")
    (found,) = read(kept.parent.parent)
    assert len(found.error) == journal.ERROR_LETTERS and found.error.startswith(" [2J gone") and "a " in found.phases
    assert not found.start.strip()
    kept.write_text(json.dumps({**bad, "error": "x" * journal.LINE}) + "\n")
    assert read(kept.parent.parent) == []
    kept.write_bytes(b"".join(journal.msgspec.json.encode(entry(step)) + b"\n" for step in range(1, 1000)))
    assert [e.step for e in read(kept.parent.parent)][-1:] == [999] and len(read(kept.parent.parent)) <= journal.MOST
    monkeypatch.setattr(journal, "FILE", 300)
    kept.write_bytes(b"".join(journal.msgspec.json.encode(entry(step)) + b"\n" for step in range(1, 1000)))
    assert len(read(kept.parent.parent)) == 1, "not more of a file than it may have"
    (kept.parent / "notes.txt").write_text("x")
    os.mkfifo(kept.parent / "now.pipe")
    (kept.parent / "now.json").unlink()
    os.mkfifo(kept.parent / "now.json")
    with pytest.raises(holdfast.errors.StorageError):  # and nobody waits for what comes out of a pipe
        read(kept.parent.parent)


def test_a_reader_reads_what_is_new(kept: Path) -> None:
    reader, root = Reader(kept.parent.parent), kept.parent.parent
    assert len(reader.read().entries) == 2
    other = kept.with_name("1700000000001-0123abcd.jsonl")
    other.write_bytes(journal.msgspec.json.encode(entry(3)) + b"\n")
    with disk_faults.faults("read", nth=99, under=root / JOURNAL) as met:
        assert [e.step for e in reader.read().entries] == [1, 2, 3]
    assert met.count == 2, "the new file, and where training is"
    kept.unlink()
    assert [e.step for e in reader.read().entries] == [3]


# Its size


def test_a_full_file_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "CHUNK", 3)
    for root in (tmp_path, StorePlace(Memory(), "run")):
        kept = Journal(root)
        for step in range(8):
            kept.add(entry(step))
            kept.close(Now(step, 1.0, 1, 1), 30)
        assert [e.step for e in read(root)] == [*range(8)]
        files = [name for name in (root / JOURNAL).files_below() if name.endswith(".jsonl")]
        assert len(files) == 3


@pytest.mark.parametrize("kind", ["disk", "store"])
def test_old_entries_are_thinned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FILES", 10)
    monkeypatch.setattr(journal, "CHUNK", 4)
    root: Place = StorePlace(Memory(), "run") if kind == "store" else tmp_path
    kept = Journal(root)
    for step in range(400):
        kept.add(entry(step, "failed" if step == 17 else "saved"))
        if step % 4 == 3:
            kept.close(Now(step, 1.0, 1, 1), 30)
    found = [e.step for e in read(root)]
    files = [name for name in (root / JOURNAL).files_below() if name.endswith(".jsonl")]
    assert len(files) <= 10 and found == sorted(set(found)) and len(found) <= 40
    assert found[-16:] == [*range(384, 400)], "the newest are all there"
    assert 17 in found and found[0] < 100, "failures stay, and something of the beginning"


def test_thinning_that_dies_in_its_middle_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "FILES", 3)
    folder = tmp_path / JOURNAL
    folder.mkdir()
    for number in range(4):
        line = journal.msgspec.json.encode(entry(number)) + b"\n"
        (folder / f"170000000000{number}-0123abcd.jsonl").write_bytes(line)
    nth, died = 1, True
    while died:
        died = False
        with disk_faults.faults("change", nth=nth, under=folder):
            try:
                thin(folder)
            except holdfast.errors.StorageError:
                died = True
        assert [e.step for e in read(tmp_path)] == [0, 1, 2, 3]
        nth += 1
    assert nth > 3


def test_what_is_left_when_entries_are_thinned() -> None:
    all_of_them = [entry(step, "failed" if step % 10 == 0 else "saved") for step in range(100)]
    left = thinned(all_of_them, 20)
    assert len(left) == 20 and sum(e.outcome == "failed" for e in left) == 10
    assert [e.step for e in left] == sorted(e.step for e in left)
    assert thinned(all_of_them[:5], 20) == all_of_them[:5]
    assert len(thinned([entry(step, "failed") for step in range(100)], 20)) == 10
