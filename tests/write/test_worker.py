"""Workers: one contract, kept by threads of this process and by a process of its own; and how the process ends."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError, StorageError
from holdfast.storage.local.disk import SECTOR
from holdfast.storage.local.local_place import LocalPlace
from holdfast.write import file_writer
from holdfast.write.buffer import StagingBuffer
from holdfast.write.jobs import Worker
from holdfast.write.worker import ProcessWorker, ThreadWorker, start
from tests.patience import freeze

LONG = 240.0


@pytest.fixture
def process() -> Iterator[ProcessWorker]:
    made = ProcessWorker()
    yield made
    made.close()


class Desk:
    """A buffer of four chunks of two sectors, and files opened for a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.fds = worker, []
        self.buffer = StagingBuffer(3, worker, chunk_bytes=2 * SECTOR)
        self.buffer.reserve(8 * SECTOR)
        self.buffer.begin()

    def fill(self, content: bytes) -> int:
        """Put bytes into the next chunk; where it starts."""
        chunk = self.buffer.take(2 * SECTOR, 0.0)
        assert chunk is not None
        chunk.view[: len(content)] = content
        return chunk.start

    def open(self, path: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
        fd = os.open(path, flags, 0o666)
        self.fds.append(fd)
        return self.worker.open(path, fd, direct=False)

    def write(self, file: int, content: bytes, offset: int) -> Any:
        return self.worker.write(file, 3, self.fill(content), len(content), offset)


@pytest.fixture
def desk(worker: Worker) -> Iterator[Desk]:
    made = Desk(worker)
    yield made
    for fd in made.fds:
        os.close(fd)


def test_bytes_arrive_at_their_offsets(desk: Desk, tmp_path: Path) -> None:
    file = desk.open(tmp_path / "f")
    futures = [desk.write(file, bytes([65 + i]) * 10, 10 * i) for i in range(4)]
    for future in futures:
        assert future.result(LONG) is None
    assert (tmp_path / "f").read_bytes() == b"A" * 10 + b"B" * 10 + b"C" * 10 + b"D" * 10


def test_a_direct_write_is_padded_to_whole_sectors_with_zeros(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "f"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o666)
    except OSError:
        pytest.skip("no direct I/O here")
    desk.fds.append(fd)
    file = desk.worker.open(path, fd, direct=True)
    start = desk.fill(b"\xff" * 2 * SECTOR)  # what an earlier save left in the chunk
    desk.worker.write(file, 3, start, 100, SECTOR).result(LONG)
    assert path.read_bytes()[SECTOR:] == b"\xff" * 100 + bytes(SECTOR - 100)
    desk.worker.finish(file, b"h" * SECTOR, SECTOR + 100).result(LONG)
    assert path.read_bytes() == b"h" * SECTOR + b"\xff" * 100, "and finishing cuts the padding off"


def test_finish_comes_after_all_writes_and_cuts_to_size(desk: Desk, tmp_path: Path) -> None:
    file = desk.open(tmp_path / "f")
    writes = [desk.write(file, b"x" * SECTOR, SECTOR * (i + 1)) for i in range(4)]
    desk.worker.finish(file, b"h" * SECTOR, 3 * SECTOR + 5).result(LONG)
    assert all(future.done() for future in writes)
    assert (tmp_path / "f").read_bytes() == b"h" * SECTOR + b"x" * (2 * SECTOR + 5)


def test_small_files_are_left_after_the_data_files_in_order(desk: Desk, tmp_path: Path) -> None:
    file = desk.open(tmp_path / "f")
    small = [(tmp_path / "new" / "folder" / "a", b"1"), (tmp_path / "b", b"x" * 100_000)]
    desk.write(file, b"x", SECTOR)
    finished = desk.worker.finish(file, b"h" * SECTOR, SECTOR + 1)
    left = desk.worker.leave([file], [tmp_path], small)
    left.result(LONG)
    assert finished.done()
    assert [path.read_bytes() for path, _ in small] == [b"1", b"x" * 100_000]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "f", "new"], "no temporary file stays"


def test_a_fault_names_file_doing_and_number(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "read only").touch()
    file = desk.open(tmp_path / "read only", os.O_RDONLY)
    with pytest.raises(StorageError, match="cannot write .*read only") as caught:
        desk.write(file, b"x", 0).result(LONG)
    assert caught.value.errno == errno.EBADF and caught.value.file == str(tmp_path / "read only")
    full = desk.open(LocalPlace("/dev/full"), os.O_RDWR)
    with pytest.raises(StorageError, match="the disk is full") as caught:
        desk.write(full, b"x", 0).result(LONG)
    assert caught.value.errno == errno.ENOSPC


def test_after_a_fault_a_file_is_not_finished_and_nothing_is_left(desk: Desk, tmp_path: Path) -> None:
    good, bad = desk.open(tmp_path / "good"), desk.open(LocalPlace("/dev/full"), os.O_RDWR)
    desk.write(bad, b"x", 0)
    jobs = [
        desk.worker.finish(bad, b"h" * SECTOR, SECTOR),
        desk.worker.leave([good, bad], [tmp_path], [(tmp_path / "part", b"all is there")]),
    ]
    for job in jobs:
        with pytest.raises(StorageError, match="the disk is full"):
            job.result(LONG)
    assert not (tmp_path / "part").exists()
    desk.worker.finish(good, b"h" * SECTOR, SECTOR).result(LONG)
    desk.worker.leave([good], [tmp_path], [(tmp_path / "part", b"x")]).result(LONG)
    assert (tmp_path / "part").exists(), "a fault of one file is none of another"


def test_a_folder_or_small_file_that_fails_is_named(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot sync the folder .*missing"):
        desk.worker.leave([], [tmp_path / "missing"], [(tmp_path / "never", b"")]).result(LONG)
    with pytest.raises(StorageError, match="cannot write .*file/part") as caught:
        desk.worker.leave([], [], [(tmp_path / "file" / "part", b""), (tmp_path / "never", b"")]).result(LONG)
    assert caught.value.errno == errno.ENOTDIR
    assert not (tmp_path / "never").exists(), "what comes after a fault is left undone"


def test_dropped_files_are_unlocked_once_their_owner_closes_them(worker: Worker, tmp_path: Path) -> None:
    """The lock of a data file tells a living save; a worker that kept a descriptor would keep it locked."""
    path, desk = tmp_path / "f", Desk(worker)
    file = desk.open(path)
    fcntl.flock(desk.fds[0], fcntl.LOCK_SH)
    desk.write(file, b"x", 0)
    worker.drop([file])
    worker.leave([], [], []).result(LONG)  # comes after the drop
    os.close(desk.fds.pop())
    with path.open() as mine:
        fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert path.read_bytes() == b"x", "what was asked for before is done"


def test_close_finishes_everything_first(worker: Worker, tmp_path: Path) -> None:
    desk = Desk(worker)
    file = desk.open(tmp_path / "f")
    jobs = [desk.write(file, b"x" * 10, SECTOR + 10 * i) for i in range(4)]
    jobs += [worker.finish(file, b"h" * SECTOR, SECTOR + 40), worker.leave([file], [tmp_path], [(tmp_path / "p", b"")])]
    worker.close()
    assert all(job.done() and job.exception() is None for job in jobs)
    assert worker.dead and (tmp_path / "p").exists() and len((tmp_path / "f").read_bytes()) == SECTOR + 40
    worker.close()
    os.close(desk.fds[0])


def test_the_memory_of_a_buffer_can_be_replaced(desk: Desk, tmp_path: Path) -> None:
    file = desk.open(tmp_path / "f")
    desk.write(file, b"old", 0).result(LONG)
    desk.buffer._lent.clear()
    desk.buffer.reserve(18 * SECTOR)
    desk.buffer.begin()
    desk.write(file, b"new", 3).result(LONG)
    assert (tmp_path / "f").read_bytes() == b"oldnew"


# The process


def _state(pid: int) -> str | None:
    try:
        return LocalPlace(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def test_a_killed_process_is_told_by_name_and_leaves_no_zombie(process: ProcessWorker, tmp_path: Path) -> None:
    desk = Desk(process)
    file = desk.open(tmp_path / "f")
    freeze(process.pid)  # so that it is killed before it has written
    jobs = [desk.write(file, b"x", 0), process.finish(file, b"h" * SECTOR, SECTOR), process.leave([], [], [])]
    os.kill(process.pid, signal.SIGKILL)
    for job in jobs:
        with pytest.raises(HoldfastError, match="was killed by signal 9"):
            job.result(LONG)
    process._connection._reader.join(LONG)
    assert process.dead and _state(process.pid) is None
    for call in (
        lambda: process.write(file, 3, 0, 1, 0), lambda: process.open(tmp_path / "g", desk.fds[0], direct=False),
        lambda: process.map(3, None),
    ):  # fmt: skip
        with pytest.raises(HoldfastError, match="was killed by signal 9"):
            call()
    process.drop([file])
    os.close(desk.fds[0])


def test_a_buffer_goes_over_to_the_next_process(process: ProcessWorker, tmp_path: Path) -> None:
    desk = Desk(process)
    os.kill(process.pid, signal.SIGKILL)
    process._connection._reader.join(LONG)
    following = ProcessWorker()
    desk.worker = following
    desk.buffer.attach(following)
    desk.buffer.begin()
    file = desk.open(tmp_path / "f")
    desk.write(file, b"again", 0).result(LONG)
    assert (tmp_path / "f").read_bytes() == b"again"
    following.close()
    os.close(desk.fds[0])


def test_the_process_knows_nothing_of_torch_and_little_of_anything(process: ProcessWorker, tmp_path: Path) -> None:
    process.leave([], [], [(tmp_path / "f", b"")]).result(LONG)  # so that it has started
    maps = LocalPlace(f"/proc/{process.pid}/maps").read_text()
    assert "torch" not in maps and "site-packages" not in maps
    open_files = len(os.listdir(f"/proc/{process.pid}/fd"))
    assert open_files <= 5, "standard streams and its socket, twice: nothing of the trainer's"


def test_the_process_leads_a_session_and_gives_way(process: ProcessWorker, tmp_path: Path) -> None:
    process.leave([], [], [(tmp_path / "f", b"")]).result(LONG)
    assert os.getsid(process.pid) == process.pid, "launchers kill the trainer's group"
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_meant_for_the_trainer_do_not_end_the_process(
    process: ProcessWorker, number: signal.Signals, tmp_path: Path
) -> None:
    process.leave([], [], [(tmp_path / "f", b"")]).result(LONG)
    os.kill(process.pid, number)
    process.leave([], [], [(tmp_path / "g", b"still here")]).result(LONG)
    assert (tmp_path / "g").read_bytes() == b"still here"


def test_the_process_ends_although_a_forked_child_holds_the_socket(tmp_path: Path) -> None:
    """A data loader's worker outlives the trainer for a moment, with copies of all its descriptors."""
    script = """
import os, time
from holdfast.write.worker import ProcessWorker
worker = ProcessWorker()
worker.leave([], [], []).result(240)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(worker.pid, child, flush=True)
os.kill(os.getpid(), 9)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pid, child = map(int, trainer.stdout.readline().split())
        try:
            _wait_until_gone(pid)
            assert _state(child) is not None, "the child is still there"
        finally:
            os.kill(child, signal.SIGKILL)


def _wait_until_gone(pid: int) -> None:
    pause = threading.Event()
    for _ in range(600):
        if _state(pid) in (None, "Z"):  # its new parent may be slow to reap it
            return
        pause.wait(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(HoldfastError, match=r'no writer process can be started.*Saver\(worker="thread"\) needs none'):
        start("process")


def test_thread_workers_end_their_threads() -> None:
    before = set(threading.enumerate())
    worker = ThreadWorker()
    assert len(set(threading.enumerate()) - before) == file_writer.WRITERS + 1
    worker.close()
    assert not set(threading.enumerate()) - before


def test_a_child_that_is_forked_meanwhile_keeps_nothing_of_the_start_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start would wait until such a child ends, as a process of a DataLoader does after an epoch."""
    begun = threading.Event()
    inodes: list[str] = []
    pair = socket.socketpair

    def slow_pair(*args: Any) -> Any:
        ours, theirs = pair(*args)
        inodes.append(os.readlink(f"/proc/self/fd/{theirs.fileno()}"))
        begun.set()
        time.sleep(0.3)  # as long as a fork that nothing holds back takes
        return ours, theirs

    monkeypatch.setattr(socket, "socketpair", slow_pair)
    made: list[ProcessWorker] = []
    starting = threading.Thread(target=lambda: made.append(ProcessWorker()))
    starting.start()
    assert begun.wait(LONG)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd")]
            os.write(write, b"open" if inodes[0] in links else b"closed")
        finally:
            os._exit(0)
    try:
        assert os.read(read, 10) == b"closed"
    finally:
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
        starting.join()
        made[0].close()
