"""The file writer: order, and faults that stay; that it needs the standard library alone."""

from __future__ import annotations

import ast
import errno
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.storage.local import disk, durable
from holdfast.storage.local.disk import SECTOR
from holdfast.write import activity, file_writer, writer_process
from holdfast.write.file_writer import Fault, FileWriter
from tests.marks import examples

LONG = 240.0


class Answers:
    """What a file writer answered, by job."""

    def __init__(self) -> None:
        self._told: dict[int, Fault | None] = {}
        self._news = threading.Condition()

    def __call__(self, job: int, fault: Fault | None) -> None:
        with self._news:
            assert job not in self._told, "each job is answered once"
            self._told[job] = fault
            self._news.notify_all()

    def of(self, job: int) -> Fault | None:
        with self._news:
            assert self._news.wait_for(lambda: job in self._told, LONG)
            return self._told[job]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def one(answers: Answers) -> Any:
    made = FileWriter(answers)
    made.map(0, memoryview(bytearray(16 * SECTOR)))
    yield made
    made.close()


def test_it_imports_the_standard_library_alone() -> None:
    """The writer process runs these files without site-packages and without the start of this package."""
    for module in (activity, file_writer, disk, durable, writer_process):
        tree = ast.parse(Path(module.__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                node.body = []
        found = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
        found |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        found -= {"holdfast.write", "holdfast.storage.local", "holdfast.write.activity", "holdfast.write.file_writer"}
        assert {name.split(".")[0] for name in found} <= set(sys.stdlib_module_names)


def test_a_fault_stays_although_a_later_write_succeeds(
    one: FileWriter, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads write one file: the success of one must not wipe out the failure of the other."""
    good_began, bad_failed = threading.Event(), threading.Event()

    def write(file: Any, view: memoryview, nbytes: int, offset: int) -> None:
        if offset:
            assert good_began.wait(LONG)
            raise OSError(errno.EIO, "Input/output error")
        good_began.set()
        assert bad_failed.wait(LONG)

    monkeypatch.setattr(file_writer, "_write", write)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    one.open(1, str(tmp_path / "f"), fd, direct=False)
    one.write(10, 1, 0, 0, 1, 0)
    one.write(11, 1, 0, SECTOR, 1, SECTOR)
    fault = answers.of(11)
    assert fault is not None and fault.errno == errno.EIO
    bad_failed.set()
    answers.of(10)
    one.finish(12, 1, b"h", 1)
    one.leave(13, [1], [], [(str(tmp_path / "part"), b"all is there")])
    assert answers.of(12) == answers.of(13) == fault
    assert not (tmp_path / "part").exists(), "no part may speak for a file that was not written"
    os.close(fd)


@pytest.mark.parametrize("doing", ["write", "cut", "sync"])
def test_finishing_says_what_failed(
    doing: str, one: FileWriter, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    where = {"write": (file_writer, "_write_to"), "cut": (os, "ftruncate"), "sync": (os, "fsync")}[doing]
    monkeypatch.setattr(*where, fail)
    fd = os.open(tmp_path / "f", os.O_RDWR | os.O_CREAT)
    one.open(1, str(tmp_path / "f"), fd, direct=False)
    one.finish(2, 1, b"h", 1)
    assert answers.of(2) == Fault(doing, str(tmp_path / "f"), errno.EIO, "Input/output error")
    os.close(fd)


def test_what_is_no_fault_of_the_system_is_told_too(
    one: FileWriter, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(file_writer, "_write", fail)
    one.open(1, "f", -1, direct=False)
    one.write(2, 1, 0, 0, 1, 0)
    assert answers.of(2) == Fault("write", "f", None, "ValueError: a bug")


def test_writes_of_two_files_do_not_wait_for_each_other_to_be_finished(
    one: FileWriter, answers: Answers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file is slow to sync; windows of the other are written meanwhile, so that memory comes free."""
    release, real = threading.Event(), os.fsync

    def slow(fd: int) -> None:
        assert release.wait(LONG)
        real(fd)

    monkeypatch.setattr(os, "fsync", slow)
    fds = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in "ab"]
    for number, fd in enumerate(fds):
        one.open(number, str(number), fd, direct=False)
    one.finish(10, 0, b"h", 1)
    one.write(11, 1, 0, 0, 1, 0)
    assert answers.of(11) is None
    assert 10 not in answers._told
    release.set()
    assert answers.of(10) is None
    for fd in fds:
        os.close(fd)


@settings(max_examples=examples(30))
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, SECTOR)), max_size=16))
def test_any_writes_are_what_a_plain_file_would_hold(writes: list[tuple[int, int]]) -> None:
    made = FileWriter(Answers())
    memory = os.urandom(16 * SECTOR)
    made.map(0, memoryview(bytearray(memory)))
    fds = [os.memfd_create("file") for _ in range(3)]
    expected = [b"h" * SECTOR for _ in fds]
    for number, fd in enumerate(fds):
        made.open(number, str(number), fd, direct=False)
    for job, (file, nbytes) in enumerate(writes):  # the n-th write takes the n-th sector of memory
        made.write(job, file, 0, job * SECTOR, nbytes, len(expected[file]))
        expected[file] += memory[job * SECTOR : job * SECTOR + nbytes]
    for number in range(3):
        made.finish(100 + number, number, b"h" * SECTOR, len(expected[number]))
    made.close()
    for fd, content in zip(fds, expected, strict=True):
        assert os.pread(fd, 1 << 24, 0) == content
        os.close(fd)
