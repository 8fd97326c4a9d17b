"""Foreign bytes: files that go away, memory, and what is unpacked: bounded in number, in bytes, and on a full disk."""

from __future__ import annotations

import gc
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from holdfast.errors import Damaged, StorageError
from holdfast.formats import sources
from holdfast.formats.sources import File, Memory, Source, Stretch, Unpacked, all_of, file
from holdfast.storage.local.local_place import LocalPlace

WHERE = LocalPlace("some/file.bin")


def whole(source: Source) -> bytes:
    """All bytes by way of its descriptors, which are closed."""
    cached, direct = source.open()
    try:
        return os.pread(cached, source.nbytes + 1, 0)
    finally:
        os.close(cached)
        if direct is not None:
            os.close(direct)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    source = file(path)
    assert source == File(path, 10) and whole(source) == b"0123456789"
    assert source.read(3, 4) == b"3456" and source.read(8, 100) == b"89"


def test_a_file_that_is_missing_or_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(FileNotFoundError):
        file(path)
    path.write_bytes(b"0123456789")
    source = file(path)
    path.unlink()
    for read in (lambda: source.read(0, 1), lambda: source.open(), lambda: all_of(source).read()):
        with pytest.raises(Damaged, match="is missing; bring it back") as caught:
            read()
        assert str(path) in str(caught.value)
    path.write_bytes(b"012")
    with pytest.raises(Damaged, match="ends at byte 3"):
        all_of(source).read()


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # to open it would wait for ever
    for path in (tmp_path / "pipe", tmp_path, LocalPlace("/dev/zero")):
        with pytest.raises(StorageError, match="no regular file"):
            file(path)
    with pytest.raises(StorageError, match="a part of the path is a file"):
        file(LocalPlace(__file__) / "x")


def test_memory() -> None:
    source, before = Memory(WHERE, b"abc"), descriptors()
    assert whole(source) == b"abc" and source.read(1, 9) == b"bc"
    assert descriptors() == before


def test_stretches_stay_in_their_source() -> None:
    source = Memory(WHERE, bytes(range(10)))
    middle = Stretch(source, 2, 5)
    assert middle.read() == bytes(range(2, 7)) and middle.part(1, 3).read() == bytes([3, 4, 5])
    assert middle.read(4) == bytes([6]) and middle.read(1, 2) == bytes([3, 4]) and middle.part(5, 0).nbytes == 0
    for begin, nbytes in ((0, 6), (-1, 2), (6, 0), (5, 1), (0, -1), (1 << 70, 1)):
        with pytest.raises(Damaged, match=str(WHERE)):
            middle.part(begin, nbytes)
    for begin, nbytes in ((0, 11), (-1, 1), (11, 0), (0, 1 << 70)):
        with pytest.raises(Damaged, match=str(WHERE)):
            Stretch(source, begin, nbytes)


class Counted:
    """Unpacks to some bytes, and counts how often."""

    def __init__(self, data: bytes) -> None:
        self.data, self.times = data, 0

    def __call__(self, target: BinaryIO) -> None:
        self.times += 1
        target.write(self.data)


def test_unpacked_once_for_many_reads() -> None:
    unpack = Counted(b"0123456789")
    source = Unpacked(WHERE, 10, unpack)
    assert unpack.times == 0
    assert whole(source) == b"0123456789" and source.read(2, 3) == b"234" and all_of(source).read(9) == b"9"
    assert unpack.times == 1


@pytest.mark.slow
def test_thousands_of_unpacked_keep_few_descriptors() -> None:
    before = descriptors()
    made = [Unpacked(WHERE, 8, Counted(n.to_bytes(8, "little"))) for n in range(1000)]
    for _ in range(2):
        for n, source in enumerate(made):
            assert whole(source) == n.to_bytes(8, "little")
            assert descriptors() <= before + sources.KEPT_FILES
    assert [made[-1].unpack.times, made[0].unpack.times] == [2, 2]  # type: ignore[attr-defined]
    last = made[-1]
    assert whole(last) == (999).to_bytes(8, "little") and last.unpack.times == 2  # type: ignore[attr-defined]
    del made, source, last
    assert descriptors() == before


def test_what_is_unpacked_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KEPT_BYTES", 250)
    made = [Unpacked(WHERE, 100, Counted(bytes([n]) * 100)) for n in range(4)]
    for source in (*made, made[3], made[2], made[1], made[2]):
        whole(source)
    assert [source.unpack.times for source in made] == [1, 2, 1, 1]  # type: ignore[attr-defined]
    large = Unpacked(WHERE, 1000, Counted(bytes(1000)))  # the last one is kept whatever its size
    assert whole(large) == whole(large) == bytes(1000) and large.unpack.times == 1  # type: ignore[attr-defined]


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "KEPT_FILES", 3)
    before = descriptors()
    inner = [Unpacked(WHERE, 8, Counted(n.to_bytes(8, "little"))) for n in range(8)]

    def scattered(n: int) -> Unpacked:
        # What unpacks by reading what is unpacked itself, as a view within a compressed archive does.
        return Unpacked(WHERE, 16, lambda target: target.write(inner[n].read(0, 8) + inner[-n].read(0, 8)) and None)

    outer = [scattered(n) for n in range(8)]

    def read(n: int) -> bool:
        n %= 8
        return whole(outer[n]) == n.to_bytes(8, "little") + (-n % 8).to_bytes(8, "little")

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(2000)))
    assert descriptors() <= before + 3


@pytest.mark.parametrize("nbytes", [9, 11])
def test_another_size_than_was_said(nbytes: int) -> None:
    before = descriptors()
    with pytest.raises(Damaged, match=str(WHERE)):
        whole(Unpacked(WHERE, nbytes, Counted(b"0123456789")))
    assert descriptors() == before


def test_a_bomb_is_stopped_while_it_unpacks() -> None:
    written = 0

    def endless(target: BinaryIO) -> None:
        nonlocal written
        while True:
            written += target.write(bytes(1000))

    with pytest.raises(Damaged, match="more than the 5000 bytes"):
        whole(Unpacked(WHERE, 5000, endless))
    assert written == 5000


def test_an_error_while_unpacking_comes_home_and_leaves_nothing() -> None:
    before, unpack = descriptors(), Counted(b"0123456789")

    def once(target: BinaryIO) -> None:
        if unpack.times == 0:
            unpack.times = 1
            raise Damaged("broken")
        unpack(target)

    source = Unpacked(WHERE, 10, once)
    with pytest.raises(Damaged, match="broken"):
        whole(source)
    assert descriptors() == before
    assert whole(source) == b"0123456789"


def test_a_full_disk_is_told_with_what_to_do(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    before = descriptors()
    with pytest.raises(StorageError, match=r"some/file.bin into .*small.*No space.*20971520 bytes there.*TMPDIR"):
        whole(Unpacked(WHERE, 20 << 20, Counted(bytes(20 << 20))))
    assert descriptors() == before
    assert whole(Unpacked(WHERE, 3, Counted(b"abc"))) == b"abc"
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk / "missing"))
    with pytest.raises(StorageError, match="TMPDIR"):
        whole(Unpacked(WHERE, 3, Counted(b"abc")))


def test_what_nobody_holds_is_closed_without_a_word() -> None:
    before = descriptors()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source = Unpacked(WHERE, 1, Counted(b"1"))
        assert whole(source) == b"1" and descriptors() == before + 1
        del source
        gc.collect()
    assert descriptors() == before
