"""Trainers that are killed: their writers finish, end, and leave what can be committed late; nothing else is."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.commit import commit
from holdfast.commit.commit import commit_late
from holdfast.ondisk import part
from holdfast.storage.local import large
from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.patience import wait_until

LONG = 240.0


def _state(step: int) -> dict[str, Any]:
    torch.manual_seed(step)
    return {
        "a": {"w": torch.randn(300_000)},
        "b": {"v": torch.randn(50)},
        "mine": holdfast.PerRank([step]),
        "step": step,
    }


def _is(path: Path, step: int) -> None:
    into = {**_state(0), "mine": holdfast.PerRank(None)}
    holdfast.load(path, into, verify="blocks")
    expected = _state(step)
    assert torch.equal(into["a"]["w"], expected["a"]["w"]) and torch.equal(into["b"]["v"], expected["b"]["v"])
    assert into["mine"].value == [step] and into["step"] == step
    assert not (path / "parts").exists()


def _gone(pid: int) -> bool:
    try:
        return LocalPlace(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


TRAINER = """
import os, signal, sys, torch, holdfast
from holdfast.write import write
from holdfast.commit import settle
from tests.commit.test_parts import _state
from tests.patience import freeze
path, moment = sys.argv[1:]

def die(*args, **kwargs):
    print(saver._pool.worker.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if moment == "staging":
    real, seen = write.Writing.stage, []
    def stage(self, *sections):
        real(self, *sections)
        die()
    write.Writing.stage = stage
elif moment == "staged":
    # Its writer is stopped: all that it was told is still to be done when the trainer dies.
    real = write.Writing.leave
    def leave(self, small):
        freeze(saver._pool.worker.pid)
        real(self, small)
        die()
    write.Writing.leave = leave
else:
    settle._commit = die
saver = holdfast.Saver()
saver.save(_state(3), path, files={"config": b"kept", "deep/er": b"too"}).wait()
"""


def killed(path: Path, moment: str) -> int:
    """A trainer that dies at that moment of its first save; the process id of its writer."""
    ran = subprocess.Popen([sys.executable, "-c", TRAINER, str(path), moment], stdout=subprocess.PIPE, text=True)
    assert ran.stdout is not None
    pid = int(ran.stdout.readline())
    assert ran.wait(LONG) == -signal.SIGKILL
    ran.stdout.close()
    if moment == "staged":
        assert not list(path.glob("parts/*")), "nothing is finished yet"
        os.kill(pid, signal.SIGCONT)
    return pid


def ours_in_shared_memory() -> set[str]:
    """What of holdfast lies there, but for what the tests of `make gpu` put there beside this one."""
    return {name for name in os.listdir("/dev/shm") if "holdfast" in name and not name.startswith("holdfast-gpu-")}


@pytest.mark.parametrize("moment", ["staged", "written"])
@pytest.mark.fast_cases("written")
def test_what_was_staged_when_the_trainer_died_is_committed_late(moment: str, tmp_path: Path) -> None:
    shared = ours_in_shared_memory()
    pid = killed(tmp_path / "c", moment)
    record = commit_late(tmp_path / "c", patience=LONG)
    assert record is not None and record.step == 3
    wait_until(lambda: _gone(pid))
    _is(tmp_path / "c", 3)
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    assert (tmp_path / "c" / "attachments" / "deep" / "er").read_bytes() == b"too"
    assert ours_in_shared_memory() == shared
    assert commit_late(tmp_path / "c") is None, "it is one already"


@pytest.mark.slow
def test_what_was_not_staged_is_not_committed(tmp_path: Path) -> None:
    pid = killed(tmp_path / "c", "staging")
    wait_until(lambda: _gone(pid))
    assert commit_late(tmp_path / "c", patience=LONG) is None
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(tmp_path / "c")
    holdfast.save(_state(4), tmp_path / "c")
    _is(tmp_path / "c", 4)


@pytest.mark.slow
def test_nothing_is_committed_while_a_writer_is_at_it(tmp_path: Path) -> None:
    pid = killed(tmp_path / "c", "written")
    wait_until(lambda: _gone(pid))
    file = next((tmp_path / "c" / "a").iterdir())
    fd = os.open(file, os.O_RDONLY)
    large.lock(fd)
    assert commit_late(tmp_path / "c") is None
    assert commit_late(tmp_path / "c", patience=0.1) is None
    threading.Timer(0.3, os.close, [fd]).start()
    assert commit_late(tmp_path / "c", patience=LONG) is not None
    _is(tmp_path / "c", 3)


# Whatever is missing or wrong


def finish_but_for_the_commit(path: str) -> None:
    """Every rank leaves its files and its part; the first one does not commit, as if all had been killed then."""
    from holdfast.commit import settle

    def no_commit(*args: Any) -> str:
        raise KeyboardInterrupt

    kept = settle._commit, settle.withdraw
    settle._commit, settle.withdraw = no_commit, lambda *args: None  # type: ignore[assignment]
    try:
        with holdfast.Saver(worker="thread") as saver:
            saver.save(_state(5), path, files={"config": b"kept"}).settled()
            saver._earlier.savings.clear()
    finally:
        settle._commit, settle.withdraw = kept


@pytest.fixture
def finished(tmp_path: Path) -> Iterator[Path]:
    pool.run(2, finish_but_for_the_commit, str(tmp_path / "c"))
    yield tmp_path / "c"


def test_a_finished_save_of_two_ranks(finished: Path) -> None:
    assert len(list((finished / "parts").iterdir())) == 2
    assert commit_late(finished) is not None
    checkpoint = holdfast.open(finished)
    checkpoint.verify()
    assert torch.equal(checkpoint.read("a/w"), _state(5)["a"]["w"])
    assert checkpoint.world_size == 2 and not (finished / "parts").exists()


def test_recover_is_the_way_without_a_manager(finished: Path) -> None:
    with pytest.raises(holdfast.errors.NotACheckpoint, match=r"holdfast\.tools\.recover"):
        holdfast.open(finished)
    assert holdfast.tools.recover(finished).step == 5
    assert holdfast.tools.recover(finished).manifest.save == holdfast.open(finished).manifest.save


def test_recover_of_what_was_never_finished(finished: Path) -> None:
    next((finished / "parts").iterdir()).unlink()
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.tools.recover(finished)
    assert not (finished / "manifest.json").exists()


def _data(folder: Path) -> Path:
    return sorted((folder / "a").iterdir())[1]


def _truncate(folder: Path) -> None:
    os.truncate(_data(folder), _data(folder).stat().st_size - 1)


def _alter_header(folder: Path) -> None:
    with _data(folder).open("r+b") as file:
        file.seek(60)
        byte = file.read(1)
        file.seek(60)
        file.write(bytes([byte[0] ^ 1]))


def _alter_part(folder: Path) -> None:
    path = sorted((folder / "parts").iterdir())[1]
    path.write_bytes(path.read_bytes().replace(b'"rank":1', b'"rank":0'))


def _of_another_world(folder: Path) -> None:
    path = sorted((folder / "parts").iterdir())[1]
    tree = json.loads(path.read_bytes())
    other = part.Part(save=tree["save"], rank=1, world_size=3, files=[tuple(f) for f in tree["files"]])
    path.write_bytes(part.encode(other))


def _forget_a_file(folder: Path) -> None:
    path = sorted((folder / "parts").iterdir())[1]
    tree = json.loads(path.read_bytes())
    other = part.Part(save=tree["save"], rank=1, world_size=2, files=[tuple(f) for f in tree["files"][1:]])
    path.write_bytes(part.encode(other))


WRONGS = {
    "a truncated file": (_truncate, "is not what its rank wrote"),
    "an altered header": (_alter_header, "is not what its rank wrote"),
    "a missing file": (lambda folder: _data(folder).unlink(), "No such file"),
    "an altered part": (_alter_part, "truncated, altered"),
    "a truncated part": (lambda folder: os.truncate(sorted((folder / "parts").iterdir())[0], 100), "truncated"),
    "a missing attachment": (lambda folder: (folder / "attachments" / "config").unlink(), "No such file"),
    "an altered attachment": (lambda folder: (folder / "attachments" / "config").write_bytes(b"Kept"), "attached"),
    "a part of another world size": (_of_another_world, "contradict"),
    "a part that lacks a file": (_forget_a_file, "was planned and not written"),
    "no part of rank 1": (lambda folder: sorted((folder / "parts").iterdir())[1].unlink(), None),
    "no part of the first rank": (lambda folder: sorted((folder / "parts").iterdir())[0].unlink(), None),
}


@pytest.mark.parametrize("wrong", WRONGS)
def test_what_is_not_whole_is_not_committed(wrong: str, finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, warning = WRONGS[wrong]
    change(finished)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert commit_late(finished) is None
    assert not (finished / "manifest.json").exists()
    texts = [record.getMessage() for record in caplog.records]
    if warning is not None:
        assert any("cannot be committed" in text and warning in text for text in texts), texts


def test_two_that_commit_late_at_once_make_one_checkpoint(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have proved the save before either commits."""
    both = threading.Barrier(2)
    real = commit._prove

    def prove(folder: Path, save: str) -> Any:
        found = real(folder, save)
        both.wait(LONG)
        return found

    monkeypatch.setattr(commit, "_prove", prove)
    with ThreadPoolExecutor(2) as threads:
        found = [future.result() for future in [threads.submit(commit_late, finished) for _ in range(2)]]
    assert any(record is not None for record in found)
    holdfast.open(finished).verify()
    assert sorted(p.name for p in finished.iterdir()) == ["a", "attachments", "b", "manifest.json", "state"]


def test_those_who_ask_whether_a_file_is_in_use_do_not_take_each_other_for_a_save(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(lambda: any(path.in_use() for _ in range(50))) for _ in range(8)]
        assert not any(future.result() for future in asked)


def test_a_folder_with_nothing_in_it(tmp_path: Path) -> None:
    assert commit_late(tmp_path) is None and commit_late(tmp_path / "missing") is None
