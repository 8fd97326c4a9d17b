"""Tiers: every save on the fast one, chosen steps in the store, and what is left of a run when either is lost.

Alone over stores in memory that can be made to fail or to hang, and on real ranks with a fast folder for each node.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.formats.own import read_manifest
from holdfast.load import PARTLY_FILLED
from holdfast.run.keep import is_due, next_upload
from holdfast.run.tiers import outage, uploader
from holdfast.run.tiers.home import Durability
from holdfast.storage import Upload
from holdfast.storage.local.local import Local
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.storage import JOURNAL
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers import throttled
from holdfast.testing import Failing, Memory
from tests import pool
from tests.citing import is_state, needed
from tests.patience import wait_until


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outage, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(outage, "LONGEST_PAUSE", 0.1)
    monkeypatch.setattr(uploader, "LOOK", 0.02)


class Moody(Memory):
    """A store that is ``down`` or makes uploads ``wait``, as it is told; ``sent`` are the keys of all uploads."""

    def __init__(self) -> None:
        super().__init__()
        self.down = False
        self.free = threading.Event()
        self.free.set()
        self.sent: list[str] = []

    def _ask(self) -> None:
        if self.down:
            raise OSError(errno.EHOSTUNREACH, "the store is down")

    def list(self, *args: Any, **options: Any) -> Any:
        self._ask()
        return super().list(*args, **options)

    def size(self, key: str) -> Any:
        self._ask()
        return super().size(key)

    def get(self, *args: Any) -> Any:
        self._ask()
        return super().get(*args)

    def create(self, key: str, data: bytes) -> Any:
        self._ask()
        made = super().create(key, data)
        if made and "probe" not in key:
            self.sent.append(key)
        return made

    def put(self, key: str, chunks: Iterable[Any], nbytes: int) -> None:
        self.free.wait(240)
        self._ask()
        super().put(key, chunks, nbytes)
        self.sent.append(key)

    @property
    def commits(self) -> list[int]:
        """Steps in the order of their commits."""
        return [int(key.split("/")[1][5:]) for key in self.sent if key.endswith("manifest.json")]


def _state(step: int = 0) -> dict[str, Any]:
    return {"model": {"w": torch.full((5000, 3), float(step)), "v": torch.arange(9.0) * step}, "step": step}


def _check(state: dict[str, Any], step: int) -> None:
    expected = _state(step)
    assert state["step"] == step
    assert all(torch.equal(state["model"][name], expected["model"][name]) for name in ("w", "v"))


def _steps(folder: Path) -> list[int]:
    return sorted(int(path.parent.name[5:]) for path in folder.glob("step-*/manifest.json"))


def _warnings(caplog: pytest.LogCaptureFixture, text: str) -> int:
    return sum(text in record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)


def _manager(root: Any, fast: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root, fast=fast, **{"every": 1, "worker": "thread", "deadline": 60, **options})


def _train(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        saving = manager.step(step, _state(step))
        assert saving is not None
        saving.wait()


# Which step goes next.


@pytest.mark.parametrize(
    ("upload", "lacking", "stored", "was_due", "expected"),
    [
        (Upload(), [1, 2, 3], [], True, 3),
        (Upload(), [], [3], True, None),
        (Upload(), [1, 2], [3], True, None),  # older ones are passed over
        (Upload(every=10), [10, 20, 23], [], True, 23),  # in turns
        (Upload(every=10), [10, 20], [23], False, 10),
        (Upload(every=10), [10, 20], [23], True, 10),
        (Upload(every=10, newest=False), [10, 20, 23], [], True, 10),
        (Upload(every=10, newest=False), [23, 27], [10], False, None),
        (Upload(every=10), [23, 27], [10], False, 27),
    ],
)
def test_what_goes_next(
    upload: Upload, lacking: list[int], stored: list[int], was_due: bool, expected: int | None
) -> None:
    assert next_upload(upload, lacking, stored, Keep(last=99), was_due=was_due) == expected


def test_what_the_store_would_not_keep_is_not_due() -> None:
    upload = Upload(every=10)
    assert not is_due(upload, 10, [20, 30], Keep(last=2)) and is_due(upload, 10, [20, 30], Keep(last=2, every=10))
    assert is_due(upload, 10, [20, 30], Keep(last=2, best=1)), "it may be the best"
    assert not is_due(upload, 15, [], Keep()) and not is_due(Upload(), 10, [], Keep())


@pytest.mark.parametrize("bad", [{"every": 0}, {"newest": False}, {"bandwidth": 0}, {"bandwidth": -1.0}])
def test_uploads_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Upload"):
        Upload(**bad)


# A healthy store.


@pytest.mark.parametrize("worker", ["process", "thread", "none"])
def test_every_save_is_fast_and_the_newest_follows(worker: str, tmp_path: Path) -> None:
    store = Moody()
    fast, root = tmp_path / "fast", StorePlace(store, "run")
    options = {"worker": worker, "files": {"config.txt": b"width 3"}, "keep": Keep(last=3)}
    with _manager(root, fast, **options) as manager:
        assert manager.restore(_state()) is None and manager.latest() is None
        _train(manager, 1, 2, 3, 4, 5)
        # What is committed in the store is under way for a moment more, until the uploader has said so.
        wait_until(lambda: manager.durability(5) == Durability(5, True, True, False))
        wait_until(lambda: _steps(fast) == [4, 5])
        assert manager.durability(9) == Durability(9, False, False, False)
        latest = manager.latest()
        assert latest is not None and latest.step == 5 and set(_steps(fast)) < {*manager.steps(), 0} | {4, 5}
    assert store.commits[-1] == 5 and store.commits == sorted(store.commits)
    opened = holdfast.open(root / "step-000000005")
    opened.verify()
    _check(opened.state_dict(), 5)
    assert opened.attachment("config.txt") == b"width 3"
    assert not any("parts/" in key for key in store.sent), "what a save leaves beside its files stays where it is"


def test_older_steps_are_passed_over_while_one_is_under_way(tmp_path: Path) -> None:
    store = Moody()
    with _manager(StorePlace(store, "run"), tmp_path / "fast") as manager:
        store.free.clear()
        _train(manager, 1)
        wait_until(lambda: manager.durability(1).uploading)
        _train(manager, 2, 3, 4)
        assert _steps(tmp_path / "fast") == [1, 3, 4], "what is under way is not swept"
        store.free.set()
    assert store.commits == [1, 4]
    assert _steps(tmp_path / "fast") == [3, 4]


def test_multiples_go_in_order_with_the_newest_in_between(tmp_path: Path) -> None:
    store = Moody()
    store.free.clear()
    upload = Upload(every=2)
    with _manager(StorePlace(store, "run"), tmp_path / "fast", upload=upload, keep=Keep(last=99)) as manager:
        _train(manager, 1)
        wait_until(lambda: manager.durability(1).uploading)
        _train(manager, *range(2, 8))
        assert _steps(tmp_path / "fast") == [1, 2, 4, 6, 7]
        store.free.set()
    assert store.commits == [1, 2, 7, 4, 6]
    assert _steps(tmp_path / "fast") == [6, 7], "and what is safe is swept"


def test_each_tier_has_its_own_retention(tmp_path: Path) -> None:
    store = Moody()
    upload, keep = Upload(every=1, newest=False), Keep(last=1, every=4, best=1)
    losses = {step: float(abs(step - 3)) for step in range(1, 11)}
    with _manager(
        StorePlace(store, "run"), tmp_path / "fast", upload=upload, keep=keep, keep_fast=Keep(last=3)
    ) as manager:
        for step, loss in losses.items():
            manager.step(step, _state(step), metric=loss)
    assert store.commits == list(range(1, 11))
    left = {int(key.split("/")[1][5:]) for key in _keys(store)}
    assert left == {3, 4, 8, 10} and _steps(tmp_path / "fast") == [8, 9, 10]


def test_bandwidth_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(throttled, "sleep", pauses.append)
    store = Moody()
    with _manager(StorePlace(store, "run"), tmp_path / "fast", upload=Upload(bandwidth=10_000.0)) as manager:
        _train(manager, 1)
    nbytes = holdfast.open(StorePlace(store, "run/step-000000001")).nbytes
    assert store.commits == [1] and max(pauses) > nbytes / 10_000.0 * 0.8, "the last byte is told to wait for the rest"


def test_a_step_that_is_made_again_replaces_the_older_one(tmp_path: Path) -> None:
    store = Moody()
    root = StorePlace(store, "run")
    with _manager(root, tmp_path / "fast") as manager:
        _train(manager, 1)
        wait_until(lambda: manager.durability(1).store)
        again = manager.save(1, {**_state(1), "more": 2}, overwrite=True)
        wait_until(lambda: holdfast.open(root / "step-000000001").manifest.save == again.manifest.save)
    opened = holdfast.open(root / "step-000000001")
    assert opened.verify().read and opened.values["more"] == 2
    assert all(again.manifest.save in key for key in _keys(store) if "manifest" not in key), "nothing else is left"


def _keys(store: Memory) -> list[str]:
    return [entry.key for entry in store.list("", deep=True).files if JOURNAL not in entry.key]


# A store that is down, hangs, or breaks off.


def test_a_store_that_is_down_for_a_while(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "holdfast")
    store = Moody()
    store.down = True
    fast = tmp_path / "fast"
    upload = Upload(every=2)
    with _manager(StorePlace(store, "run"), fast, upload=upload, keep=Keep(last=9), keep_fast=Keep(last=1)) as manager:
        _train(manager, *range(1, 8))
        assert _steps(fast) == [2, 4, 6, 7], "what is due stays until it is safe"
        assert manager.durability(6) == Durability(6, True, None, False)
        store.down = False
        wait_until(lambda: _steps(fast) == [7])
        _train(manager, 8)
        wait_until(lambda: _steps(fast) == [8])
        store.down = True
        _train(manager, 9)
        wait_until(lambda: _warnings(caplog, "tried again until it works") == 2)
        store.down = False
    assert _warnings(caplog, "tried again until it works") == 2, "once for each outage"
    assert set(store.commits) >= {2, 4, 6, 8, 9} and len(set(store.commits)) == len(store.commits)
    assert sorted(step for step in store.commits if step in (2, 4, 6)) == [2, 4, 6]


def test_a_store_that_hangs_keeps_nobody_waiting(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    store.free.clear()
    fast = tmp_path / "fast"
    manager = _manager(StorePlace(store, "run"), fast, grace=0.2)
    _train(manager, 1, 2, 3)
    os.kill(os.getpid(), signal.SIGTERM)
    saving = manager.step(4, _state(4))
    assert manager.should_stop and saving is not None and saving.wait().step == 4
    manager.close()
    assert _warnings(caplog, "not in memory://") == 1 and "steps 4" in caplog.text
    assert not store.commits and 4 in _steps(fast)
    store.free.set()
    with _manager(manager.root, fast) as manager:
        state = _state()
        manager.restore(state)
        _check(state, 4)
    assert store.commits == [4], "the next start finds it"


def test_close_gives_up_when_nothing_moves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    store.down = True
    manager = _manager(StorePlace(store, "run"), tmp_path / "fast", upload=Upload(every=2), keep=Keep(last=9))
    _train(manager, 1, 2, 3)
    manager._home._deadline = 0.2
    manager.close()
    assert "steps 2, 3. They are in" in caplog.text
    store.down = False
    _manager(manager.root, tmp_path / "fast", upload=Upload(every=2), keep=Keep(last=9)).close()
    assert sorted(store.commits) == [2, 3], "a manager that is opened and closed uploads what is left"


def test_training_that_fails_does_not_wait_for_uploads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.manager.STOPS", 0.2)  # the journal is in the same store
    store = Moody()
    store.free.clear()
    with pytest.raises(ZeroDivisionError), _manager(StorePlace(store, "run"), tmp_path / "fast", grace=0.2) as manager:
        _train(manager, 1)
        raise ZeroDivisionError
    store.free.set()
    assert _warnings(caplog, "steps 1. They are in") == 1 and not store.commits


def test_training_that_fails_does_not_wait_for_an_upload_that_cannot_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uploader may be within a request that never ends; the test runs into its time limit if it is waited for."""
    begun, go_on = threading.Event(), threading.Event()

    def stuck(path: Any) -> Any:
        begun.set()
        go_on.wait(1000)
        return read_manifest(path)

    monkeypatch.setattr(uploader, "read_manifest", stuck)
    monkeypatch.setattr(uploader, "LEAVE", 0.05)
    with pytest.raises(ZeroDivisionError), _manager(
        StorePlace(Moody(), "run"), tmp_path / "fast", deadline=1000
    ) as manager:  # fmt: skip
        _train(manager, 1)
        assert begun.wait(240)
        raise ZeroDivisionError
    go_on.set()


@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.fast_cases("within")
def test_an_upload_goes_on_after_any_fault(when: Any, tmp_path: Path) -> None:
    """Each request of an upload fails once: the step comes whole, and no file is sent twice but the faulty one."""
    nth = 0
    while True:
        nth += 1
        store = Moody()
        failing = Failing(store, nth, when=when)
        with _manager(StorePlace(failing, "run"), tmp_path / f"fast-{nth}") as manager:
            _train(manager, 1)
            wait_until(lambda: 1 in store.commits)
        opened = holdfast.open(StorePlace(store, "run/step-000000001"))
        opened.verify()
        _check(opened.state_dict(), 1)
        data = [key for key in store.sent if key.endswith(".safetensors")]
        assert len(data) - len(set(data)) <= 1
        if failing.count < nth:
            break
    assert nth > 8


class _Breaking(Moody):
    """A store that takes one file at a time, and goes down after two files of step 2."""

    def __init__(self) -> None:
        super().__init__()
        self._one = threading.Lock()
        self._works = True

    @property
    def of_second(self) -> list[str]:
        """What was sent of step 2."""
        return [key for key in self.sent if "step-000000002" in key]

    def put(self, key: str, chunks: Iterable[Any], nbytes: int) -> None:
        with self._one:
            super().put(key, chunks, nbytes)
            if self._works and len(self.of_second) >= 2:
                self._works, self.down = False, True


def test_a_half_uploaded_step_is_no_step_and_is_continued(tmp_path: Path) -> None:
    store = _Breaking()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"

    def state(step: int) -> dict[str, Any]:
        return {name: {"w": torch.full((1000,), float(step))} for name in ("a", "b", "c")} | {"step": step}

    with _manager(root, fast) as manager:
        manager.save(1, state(1))
        wait_until(lambda: store.commits == [1])
    broken_manager = _manager(root, fast)
    broken_manager.save(2, state(2))
    wait_until(lambda: store.down)
    broken_manager._home.leave()
    broken_manager.close()
    assert 0 < len(store.of_second) < 4 and store.commits == [1], "the fault has to hit the middle for this test"
    store.down = False
    there = holdfast.CheckpointManager(root, every=1).restore(state(0))
    assert there is not None and there.step == 1
    with _manager(root, fast) as manager:
        loaded = manager.restore(state(0))
        assert loaded is not None and loaded.step == 2
    assert store.commits == [1, 2]
    assert len([key for key in store.of_second if key.endswith(".safetensors")]) == 3
    assert holdfast.open(root / "step-000000002").verify().read


def test_a_damaged_file_is_not_brought_to_the_store(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    store.down = True
    fast = tmp_path / "fast"
    with _manager(StorePlace(store, "run"), fast) as manager:
        _train(manager, 1)
        _flip(next((fast / "step-000000001").rglob("*.safetensors")))
        store.down = False
        wait_until(lambda: _warnings(caplog, "step 1 of the fast tier cannot be brought to the store"))
        _train(manager, 2)
    assert store.commits == [2]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


# Restoring.


def _run(root: Any, fast: Path, *steps: int, **options: Any) -> None:
    with _manager(root, fast, keep=Keep(last=9), **options) as manager:
        manager.restore(_state())
        _train(manager, *steps)


def _restored(root: Any, fast: Path, step: int, tier: Any) -> CheckpointManager:
    """A manager that has restored ``step`` from below ``tier``."""
    manager = _manager(root, fast, keep=Keep(last=9))
    state = _state()
    loaded = manager.restore(state)
    assert loaded is not None and loaded.step == step
    _check(state, step)
    assert str(loaded.checkpoint.path).startswith(str(tier))
    return manager


def test_the_newest_step_of_both_tiers(tmp_path: Path) -> None:
    """Of the fast one while it is there, of the store when it is gone, also if either is lost altogether."""
    store, fast = tmp_path / "store", tmp_path / "fast"
    root = StorePlace(Local(store), "run")
    _run(root, fast, 1, 2, 3, upload=Upload(every=2, newest=False))
    assert _steps(fast) == [2, 3] and _steps(store / "run") == [2]
    shutil.copytree(fast, tmp_path / "aside")
    _restored(root, fast, 3, fast).close()
    shutil.rmtree(fast)
    _restored(root, fast, 3, store).close()  # the restore above has brought it there
    shutil.rmtree(store)
    shutil.rmtree(fast)
    shutil.copytree(tmp_path / "aside", fast)
    _restored(root, fast, 3, fast).close()
    assert _steps(store / "run") == [3], "and the store is filled again"
    shutil.rmtree(store)
    shutil.rmtree(fast)
    with _manager(root, fast) as manager:
        assert manager.restore(_state()) is None


def test_a_manager_that_saved_nothing_leaves_no_uploader_behind(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with _manager(StorePlace(Local(tmp_path / "store"), "run"), tmp_path / "fast") as manager:
        assert manager.restore(_state()) is None
        assert {thread.name for thread in set(threading.enumerate()) - before} >= {"holdfast-uploader"}
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "holdfast-uploader"]


def test_a_root_on_local_disk(tmp_path: Path) -> None:
    """A slow tier that is a folder needs no store."""
    _run(tmp_path / "slow", tmp_path / "fast", 1, 2, 3)
    assert 3 in _steps(tmp_path / "slow")
    shutil.rmtree(tmp_path / "fast")
    with _restored(tmp_path / "slow", tmp_path / "fast", 3, tmp_path / "slow") as manager:
        _train(manager, 4)
        latest = manager.latest()
        assert latest is not None and latest.step == 4
    holdfast.open(tmp_path / "slow" / "step-000000004").verify()


def test_a_store_that_is_down_at_the_restart(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"
    _run(root, fast, 1, 2)
    store.down = True
    manager = _restored(root, fast, 2, fast)
    assert "what is in the store is not known" in caplog.text
    latest = manager.latest()
    assert latest is not None and latest.step == 2
    manager._home.leave()
    manager.close()
    shutil.rmtree(fast)
    manager = _manager(root, fast)
    with pytest.raises(holdfast.errors.StorageError, match="the store is down"):
        manager.restore(_state())  # never: afresh, because nobody answers
    manager._home.leave()
    manager.close()


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "manifest"])
def test_what_the_fast_tier_has_lost_comes_from_the_store(how: str, tmp_path: Path) -> None:
    store = Moody()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"
    _run(root, fast, 1, 2)
    file = next((fast / "step-000000002").rglob("*.safetensors"))
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    else:
        _flip(file if how == "flipped" else fast / "step-000000002" / "manifest.json")
    # A file that is missing is taken from the store; one that is altered makes it the store's step.
    _restored(root, fast, 2, fast if how in ("missing", "truncated") else store.url).close()


@pytest.mark.parametrize("how", ["missing", "flipped"])
def test_a_damaged_step_that_is_nowhere_else_is_passed_over(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Moody()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"
    _run(root, fast, 1, 2)
    store.down = True
    manager = _manager(root, fast)
    _train(manager, 3)
    manager._home.leave()
    manager.close()
    store.down = False
    file = next((fast / "step-000000003").rglob("*.safetensors"))
    file.unlink() if how == "missing" else _flip(file)
    manager = _restored(root, fast, 2, fast)
    assert PARTLY_FILLED not in caplog.text
    _train(manager, 3)  # it gives way to its successor
    manager.close()
    assert store.commits[-1] == 3
    _restored(root, fast, 3, fast).close()
    shutil.rmtree(fast)
    _restored(root, fast, 3, store.url).close()


def test_a_restore_says_that_the_state_is_filled_in_part_only_if_it_ends_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path, every=1, worker="none") as manager:
        _train(manager, 1, 2)
        _flip(next((tmp_path / "step-000000002").rglob("*.safetensors")))
        with pytest.raises(holdfast.errors.Damaged, match=PARTLY_FILLED):
            manager.restore(_state(), step=2)
        loaded = manager.restore(_state())
    assert loaded is not None and loaded.step == 1
    assert "is altered" in caplog.text and PARTLY_FILLED not in caplog.text


def test_everything_is_damaged(tmp_path: Path) -> None:
    store = Moody()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"
    _run(root, fast, 1)
    _flip(next((fast / "step-000000001").rglob("*.safetensors")))
    key = next(key for key in _keys(store) if key.endswith(".safetensors"))
    data = bytearray(store.get(key).data)
    data[-1] ^= 1
    store.put(key, [data], len(data))
    manager = _manager(root, fast)
    with pytest.raises(holdfast.errors.NotACheckpoint, match="can be restored"):
        manager.restore(_state())
    manager.close()


def test_two_saves_of_a_step_are_never_mixed(tmp_path: Path) -> None:
    """The run goes on from an older step, as the newest one is out of reach; of the two the one made last counts."""
    store = Moody()
    root, fast = StorePlace(store, "run"), tmp_path / "fast"
    _run(root, fast, 1, 2)
    first = holdfast.open(root / "step-000000002").manifest.save
    shutil.rmtree(fast / "step-000000002")
    store.down = True  # so step 2 is not found
    manager = _restored(root, fast, 1, fast)
    _train(manager, 2)
    manager._home.leave()
    manager.close()
    store.down = False
    second = holdfast.open(fast / "step-000000002").manifest.save
    manager = _restored(root, fast, 2, fast)
    manager.close()
    assert holdfast.open(root / "step-000000002").manifest.save == second != first, "the store follows"
    assert not any(first in key for key in _keys(store))


def test_another_run_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Moody()
    root = StorePlace(store, "run")
    holdfast.save(_state(1), root / "step-000000001", run="0123456789abcdef")
    there = holdfast.open(root / "step-000000001").manifest.save
    with _manager(root, tmp_path / "fast") as manager:
        manager.step(1, _state(1), overwrite=True)  # without a restore: another run
        wait_until(lambda: _warnings(caplog, "is not replaced"))
        _train(manager, 2)
    assert holdfast.open(root / "step-000000001").manifest.save == there and store.commits[-1] == 2


@pytest.mark.parametrize("fast_has_it", [False, True])
def test_a_step_without_a_manifest_in_the_store_names_its_rescue(fast_has_it: bool, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (1, 2):
        holdfast.save(_state(step), root / f"step-00000000{step}", step=step)
    (root / "step-000000001" / "manifest.json").unlink()
    if fast_has_it:
        holdfast.save(_state(1), tmp_path / "fast" / "step-000000001", step=1)
    with _manager(root, tmp_path / "fast") as manager:
        if fast_has_it:
            loaded = manager.restore(_state(0), step=1)
            assert loaded is not None and loaded.step == 1
        else:
            with pytest.raises(holdfast.errors.NotACheckpoint, match="holdfast rescue .*step-000000001 --like STEP"):
                manager.restore(_state(0), step=1)


def test_a_fast_folder_belongs_to_one_root(tmp_path: Path) -> None:
    store = Moody()
    _run(StorePlace(store, "one"), tmp_path / "fast", 1)
    with pytest.raises(holdfast.errors.Mismatch, match="belongs to memory://.*/one"):
        _manager(StorePlace(store, "two"), tmp_path / "fast")
    for fast in ("s3://bucket/fast", "run", "run/fast", "."):
        with pytest.raises(ValueError, match="fast="):
            _manager(tmp_path / "run", fast if "://" in fast else tmp_path / fast)
    with pytest.raises(holdfast.errors.StorageError):
        (tmp_path / "file").write_text("")
        _manager(StorePlace(store, "two"), tmp_path / "file" / "fast")


def test_durability_without_a_fast_tier(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, every=1, worker="thread") as manager:
        _train(manager, 1)
        assert manager.durability(1) == Durability(1, False, True, False)
        assert manager.durability(2) == Durability(2, False, False, False)


# Real ranks, each with the fast folder of its node.

ROWS = 1200


def content(step: int) -> torch.Tensor:
    return torch.arange(float(ROWS)) + step


def sharded(step: int) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = ROWS // world
    w = holdfast.Shard(content(step)[rank * rows : (rank + 1) * rows].clone(), (ROWS,), (rank * rows,))
    return {"model": {"w": w}, "mine": holdfast.PerRank([step, rank], elsewhere="first"), "step": step}


def _is_restored(state: dict[str, Any], step: int) -> bool:
    rank, rows = dist.get_rank(), ROWS // dist.get_world_size()
    own = content(step)[rank * rows : (rank + 1) * rows]
    return state["step"] == step and torch.equal(state["model"]["w"].tensor, own)


class Slow(Local):
    """A store on disk that fails uploads as often as is told: another object in each process."""

    failures = 0

    def put(self, key: str, chunks: Iterable[Any], nbytes: int) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError(errno.EIO, "this upload was made to fail")
        super().put(key, chunks, nbytes)


def run_on_nodes(base: str, nodes: list[str], steps: list[int], options: dict[str, Any]) -> dict[str, Any]:
    """Restore, then save ``steps``, each rank on the node that it is told; what this rank has seen."""
    outage.FIRST_PAUSE, uploader.LOOK = 0.02, 0.02
    rank = dist.get_rank()
    fast = LocalPlace(base, nodes[rank])
    store = Slow(LocalPlace(base, "store"))
    store.failures = options.get("failures", 0) if rank == options.get("failing") else 0
    seen: dict[str, Any] = {}
    chosen = {"keep": Keep(last=9), "upload": Upload(**options.get("upload", {})), "slots": options.get("slots", 1)}
    with _manager(StorePlace(store, "run"), fast, worker=options.get("worker", "thread"), **chosen) as manager:
        seen["leaders"] = manager._home._nodes.leaders
        if options.get("hard of hearing") and rank:
            ordered = manager._home._nodes.ordered
            manager._home._nodes.ordered = lambda: ordered() or time.sleep(0.2)
        if options.get("restore", True):
            state = sharded(0)
            loaded = manager.restore(state)
            seen["restored"] = loaded.step if loaded is not None else None
            if loaded is not None:
                assert _is_restored(state, loaded.step)
                path = str(loaded.checkpoint.path)
                seen["from"] = "fast" if path.startswith(str(fast)) else "store"
        for step in steps:
            dist.barrier()
            saving = manager.step(step, sharded(step))
            assert saving is not None
            if options.get("slots", 1) == 1:
                assert saving.wait().manifest.step == step, "the manifest is there once the save is"
        manager.wait()
        if options.get("give up"):
            manager._home._deadline = 0.5
        if steps and options.get("await", True):
            wait_until(lambda: manager.durability(steps[-1]).store)
    dist.barrier()
    return seen


TWO = ["a", "a", "b", "b"]


def test_nodes_with_disks_of_their_own(tmp_path: Path) -> None:
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2, 3], {})
    assert all(one == {"leaders": [0, 2], "restored": None} for one in seen)
    for node, others in (("a", {"00002", "00003"}), ("b", {"00000", "00001"})):
        assert _steps(tmp_path / node) == [2, 3]
        written = {path.name[:5] for path in (tmp_path / node).rglob("*.safetensors")}
        assert not written & others and len(written) == 2, "each node has what its ranks wrote"
        assert not list((tmp_path / node).glob("*.node")), "no token stays"
    whole = holdfast.open(tmp_path / "store" / "run" / "step-000000003")
    whole.verify()
    assert torch.equal(whole.read("model/w"), content(3))
    shutil.rmtree(tmp_path / "store")
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [], {})
    assert all((one["restored"], one["from"]) == (3, "fast") for one in seen), "each rank from its own node"


def test_a_folder_that_all_share(tmp_path: Path) -> None:
    seen = pool.run(4, run_on_nodes, str(tmp_path), ["a"] * 4, [1, 2], {"worker": "process"})
    assert all(one["leaders"] == [0] for one in seen)
    seen = pool.run(2, run_on_nodes, str(tmp_path), ["a"] * 2, [], {})
    assert all((one["restored"], one["from"]) == (2, "fast") for one in seen)


@pytest.mark.parametrize("lost", ["a", "b"])
@pytest.mark.fast_cases("a")
def test_a_node_is_lost(lost: str, tmp_path: Path) -> None:
    """Steps that are on its disk alone are gone; the newest that is in the store is whole."""
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2, 3], {"upload": {"every": 2, "newest": False}, "await": False})
    assert _steps(tmp_path / "store" / "run") == [2]
    shutil.rmtree(tmp_path / lost)
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [3, 4], {})
    # Step 2 is on the fast tier too: who has lost its files reads them from the store.
    assert all((one["restored"], one["from"]) == (2, "fast") for one in seen)
    holdfast.open(tmp_path / "store" / "run" / "step-000000004").verify()
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [], {})
    assert all((one["restored"], one["from"]) == (4, "fast") for one in seen)


def test_other_ranks_on_other_nodes(tmp_path: Path) -> None:
    """What a rank does not find on its node it finds in the store; what is not there is passed over."""
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2, 3], {"upload": {"every": 2, "newest": False}, "await": False})
    seen = pool.run(4, run_on_nodes, str(tmp_path), ["b", "b", "a", "a"], [], {"upload": {"every": 2, "newest": False}})
    assert all(one["restored"] == 2 for one in seen)
    seen = pool.run(2, run_on_nodes, str(tmp_path), ["a", "b"], [], {"upload": {"every": 2, "newest": False}})
    assert all(one["restored"] == 2 for one in seen)


def test_a_node_that_was_not_told_of_the_commit(tmp_path: Path) -> None:
    """All ranks died between the commit and its spreading."""
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2], {"upload": {"every": 9, "newest": False}, "await": False})
    (tmp_path / "b" / "step-000000002" / "manifest.json").unlink()
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [], {})
    assert all((one["restored"], one["from"]) == (2, "fast") for one in seen)
    assert _steps(tmp_path / "b") == [1, 2]
    (tmp_path / "a" / "step-000000002" / "manifest.json").unlink()  # the first rank is told as well
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [], {})
    assert all((one["restored"], one["from"]) == (2, "fast") for one in seen)


@pytest.mark.slow
def test_saves_that_overlap_on_several_nodes(tmp_path: Path) -> None:
    pool.run(4, run_on_nodes, str(tmp_path), TWO, list(range(1, 13)), {"slots": 3})
    assert _steps(tmp_path / "a") == _steps(tmp_path / "b") == [11, 12]
    holdfast.open(tmp_path / "store" / "run" / "step-000000012").verify()


def test_a_node_obeys_the_last_order_before_it_ends(tmp_path: Path) -> None:
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2, 3, 4], {"slots": 3, "hard of hearing": True})
    assert _steps(tmp_path / "a") == [3, 4]
    assert _steps(tmp_path / "b") == [3, 4], "it keeps nothing that it was told to delete"


@pytest.mark.slow
def test_nodes_end_together_when_one_cannot_upload(tmp_path: Path) -> None:
    options = {"failing": 2, "failures": 10**6, "await": False, "give up": True}
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2], options)
    assert not _steps(tmp_path / "store" / "run")
    seen = pool.run(4, run_on_nodes, str(tmp_path), TWO, [], {})
    assert all(one["restored"] == 2 for one in seen) and _steps(tmp_path / "store" / "run") == [2]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_node_that_cannot_reach_the_store_for_a_while(failing: int, tmp_path: Path) -> None:
    pool.run(4, run_on_nodes, str(tmp_path), TWO, [1, 2], {"failing": failing, "failures": 3})
    holdfast.open(tmp_path / "store" / "run" / "step-000000002").verify()


# Steps that share files, steps that have lost some.


def _large(step: int) -> dict[str, Any]:
    """A state of which little changes."""
    return {
        "frozen": {"w": torch.arange(50_000.0)},
        "model": {"w": torch.full((9000,), float(step // 4))},
        "optimizer": {"m": torch.full((9000,), float(step))},
        "step": step,
    }


def _save_all(manager: CheckpointManager, *steps: int) -> None:
    for step in steps:
        saving = manager.step(step, _large(step))
        assert saving is not None
        saving.wait()
        wait_until(lambda: manager.durability(step).store)


def _files_of(store: Memory, root: str) -> set[str]:
    return {key.removeprefix(f"{root}/") for key in _keys(store)}


@pytest.mark.slow
def test_a_step_brings_to_the_store_only_what_it_lacks(tmp_path: Path) -> None:
    store = Moody()
    root = StorePlace(store, "run")
    options = {"incremental": True, "keep": Keep(last=2, every=4), "upload": Upload(every=1)}
    with _manager(root, tmp_path / "fast", **options) as manager:
        _save_all(manager, *range(1, 8))
    assert sum("/frozen/" in key for key in store.sent) == 1
    assert sum("/model/" in key for key in store.sent) == 2 and sum("/optimizer/" in key for key in store.sent) == 7
    for step in (4, 6, 7):
        path = root / f"step-{step:09d}"
        is_state(path, _large(step))
        assert any(file.path.startswith("../") for file in holdfast.open(path).manifest.data_files)
    assert _files_of(store, "run") == needed(root), "what no step needs any more is gone"
    into = _large(0)
    with _manager(root, tmp_path / "fast", **options) as manager:
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 7 and (into["optimizer"]["m"] == 7).all()
        _save_all(manager, 8, 9)
    assert sum("/frozen/" in key for key in store.sent) == 1, "a run that goes on shares with what is there"
    shutil.rmtree(tmp_path / "fast")
    with _manager(root, tmp_path / "fast", **options) as manager:
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 9
        _save_all(manager, 10, 11)
    assert sum("/frozen/" in key for key in store.sent) == 2, "what the fast tier had is lost, and saved anew"
    for step in (4, 8, 10, 11):
        is_state(root / f"step-{step:09d}", _large(step))
    assert _files_of(store, "run") == needed(root)


def test_a_file_that_a_fast_step_lacks_comes_from_where_the_store_has_it(tmp_path: Path) -> None:
    root = StorePlace(Moody(), "run")
    options = {"incremental": True, "keep": Keep(last=3), "upload": Upload(every=1)}
    with _manager(root, tmp_path / "fast", **options) as manager:
        _save_all(manager, 1, 2)
        lost = next((tmp_path / "fast" / "step-000000002" / "frozen").iterdir())
        lost.unlink()
        into = _large(0)
        into["frozen"]["w"].zero_()
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 2 and torch.equal(into["frozen"]["w"], torch.arange(50_000.0))
        assert LocalPlace(str(loaded.checkpoint.path)).is_relative_to(tmp_path / "fast")


def test_what_the_store_lost_is_sent_again(tmp_path: Path) -> None:
    store = Moody()
    root = StorePlace(store, "run")
    options = {"incremental": True, "keep": Keep(last=3), "upload": Upload(every=1)}
    with _manager(root, tmp_path / "fast", **options) as manager:
        _save_all(manager, 1)
        store.delete([key for key in store.sent if "/frozen/" in key])
        _save_all(manager, 2)
    is_state(root / "step-000000002", _large(2))


@pytest.mark.parametrize("fast_drops", [True, False])
def test_each_tier_drops_what_its_own_rule_says(fast_drops: bool, tmp_path: Path) -> None:
    root, drops = StorePlace(Moody(), "run"), Keep(last=4, optimizer_last=1)
    keeps = {"keep_fast": drops, "keep": Keep(last=4)} if fast_drops else {"keep": drops, "keep_fast": Keep(last=4)}
    with _manager(root, tmp_path / "fast", upload=Upload(every=1), **keeps) as manager:
        _save_all(manager, 1, 2, 3)
    for tier, thin in ((tmp_path / "fast", fast_drops), (root, not fast_drops)):
        for step in (1, 2, 3):
            is_state(tier / f"step-{step:09d}", _large(step), ("optimizer",) if thin and step < 3 else ())
    if fast_drops:
        (tmp_path / "fast" / "step-000000003" / "manifest.json").unlink()
        shutil.rmtree(tmp_path / "fast" / "step-000000003")
        (root / "step-000000003").store.delete([(root / "step-000000003" / "manifest.json").key])
        into = _large(0)
        with _manager(root, tmp_path / "fast", **keeps) as manager:
            loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 2 and (into["optimizer"]["m"] == 2).all()
        assert loaded.checkpoint.path == root / "step-000000002", "the store has it whole"


def test_what_is_to_be_uploaded_is_uploaded_whole(tmp_path: Path) -> None:
    store = Moody()
    store.down = True
    root = StorePlace(store, "run")
    options = {"keep_fast": Keep(last=1, optimizer_last=1), "keep": Keep(last=9), "upload": Upload(every=2)}
    with _manager(root, tmp_path / "fast", **options) as manager:
        for step in range(1, 6):
            saving = manager.step(step, _large(step))
            assert saving is not None
            saving.wait()
        store.down = False
        wait_until(lambda: all(manager.durability(step).store for step in (2, 4)))
    for step in (2, 4):
        is_state(root / f"step-{step:09d}", _large(step))


def train_and_drop(folder: str, root: str, own: bool) -> list[list[str]]:
    """Ranks with a fast folder each, or one that they share; what the manifests there say they have lost."""
    fast = LocalPlace(folder) / (f"node-{dist.get_rank()}" if own else "fast")
    state: dict[str, Any] = {
        "model": {"w": holdfast.Shard(torch.ones(10), (20,), (10 * dist.get_rank(),))},
        "optimizer": {"m": holdfast.Shard(torch.ones(10), (20,), (10 * dist.get_rank(),))},
        "step": 0,
    }
    keep = Keep(last=3, optimizer_last=1)
    with CheckpointManager(
        root, fast=fast, every=1, keep=keep, keep_fast=keep, upload=Upload(every=1), incremental=True, deadline=240
    ) as manager:
        for step in range(1, 4):
            state["step"] = step
            state["optimizer"]["m"].tensor.add_(1)
            manager.step(step, state)
            manager.wait()
        dist.barrier()
    # What is held for the next save keeps all it has.
    with CheckpointManager(root, fast=fast, every=1, keep=keep, keep_fast=keep, deadline=240) as manager:
        loaded = manager.restore(state)
        assert loaded is not None and loaded.step == 3 and (state["optimizer"]["m"].tensor == 4).all()
    dist.barrier()
    return [
        [str(path.name), holdfast.open(path).manifest.producer.get("dropped", "")] for path in sorted(fast.iterdir())
        if path.is_dir()
    ]  # fmt: skip


@pytest.mark.parametrize("own", [True, False])
def test_all_nodes_drop_alike(own: bool, tmp_path: Path) -> None:
    told = pool.run(2, train_and_drop, str(tmp_path), str(tmp_path / "store"), own)
    assert told[0] == told[1]
    assert [name for name, _ in told[0]] == [f"step-{step:09d}" for step in (1, 2, 3)]
    assert told[0][0][1] == "optimizer" and told[0][2][1] == ""
