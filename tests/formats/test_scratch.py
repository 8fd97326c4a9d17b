"""Compressed archives: unpacked once for all processes of a machine, bounded, and never left behind."""

from __future__ import annotations

import bz2
import fcntl
import gc
import gzip
import io
import lzma
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import events
from holdfast.errors import Damaged, StorageError, Unsupported
from holdfast.formats.machine import scratch
from holdfast.formats.sources import Stretch
from tests.formats.test_tars import packed

COMPRESS = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "lzma": lambda data: lzma.compress(data, lzma.FORMAT_ALONE),
}  # fmt: skip
MEMBERS = [("composer_states.pt", b"states" * 1000), ("notes.txt", b"n" * 5000), ("deepspeed/x.pt", os.urandom(3000))]


def wanted(name: str) -> bool:
    return name.endswith(".pt")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go; what is unpacked lies in `root` of it."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def root(home: Path) -> Path:
    return home / f"holdfast-scratch-{os.geteuid()}"


def left(home: Path) -> list[str]:
    gc.collect()
    return sorted(os.listdir(root(home))) if root(home).exists() else []


def archive(path: Path, kind: str = "gz", members: list[tuple[str, bytes]] = MEMBERS) -> Path:
    path.write_bytes(COMPRESS[kind](packed(members)))
    return path


@pytest.fixture
def unpacked_times() -> Iterator[list[str]]:
    seen: list[str] = []
    with events.listen(
        lambda event: seen.append(event.path) if (event.task, event.kind) == ("unpack", "start") else None
    ):
        yield seen


@pytest.mark.parametrize("kind", list(COMPRESS))
@pytest.mark.fast_cases("xz")
def test_the_wanted_members(tmp_path: Path, home: Path, kind: str) -> None:
    found = scratch.unpacked(archive(tmp_path / "a", kind), wanted)
    assert {name: part.read() for name, part in found.items()} == {k: v for k, v in MEMBERS if wanted(k)}
    assert found["deepspeed/x.pt"].read(5, 7) == MEMBERS[2][1][5:12]
    assert found["composer_states.pt"].source.path == tmp_path / "a" / "composer_states.pt"
    assert scratch.first_member(tmp_path / "a") == "composer_states.pt"
    folder = next(path for path in root(home).iterdir() if path.is_dir())
    assert sorted(os.listdir(folder)) == ["0", "1", "index.json"]  # no name of the archive's, and not what is unwanted
    assert (root(home).stat().st_mode & 0o777, folder.stat().st_mode & 0o777) == (0o700, 0o700)
    del found
    assert left(home) == []


@pytest.mark.parametrize("kind", list(COMPRESS))
def test_a_file_that_is_no_archive(tmp_path: Path, home: Path, kind: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(COMPRESS[kind](b"alone"))
    assert scratch.first_member(path) == ""
    assert {name: part.read() for name, part in scratch.unpacked(path, lambda name: True).items()} == {"": b"alone"}
    assert scratch.unpacked(path, wanted) == {}


def test_what_is_not_compressed(tmp_path: Path, home: Path) -> None:
    (tmp_path / "a").write_bytes(packed(MEMBERS))
    assert scratch.first_member(tmp_path / "a") is None
    (tmp_path / "b").write_bytes(b'\x04"M\x18 whatever')
    with pytest.raises(Unsupported, match="packed by lz4"):
        scratch.unpacked(tmp_path / "b", wanted)
    assert left(home) == []


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_several_streams_and_padding(tmp_path: Path, home: Path, kind: str) -> None:
    data = packed(MEMBERS)
    pieces = [COMPRESS[kind](data[at : at + 4000]) for at in range(0, len(data), 4000)]
    (tmp_path / "a").write_bytes(b"".join(pieces) + bytes(64))
    assert scratch.unpacked(tmp_path / "a", wanted)["composer_states.pt"].read() == MEMBERS[0][1]


def test_once_in_a_process(tmp_path: Path, home: Path, unpacked_times: list[str]) -> None:
    path = archive(tmp_path / "a")
    (tmp_path / "link").symlink_to(path)
    found: list[dict[str, Stretch]] = []
    threads = [
        threading.Thread(target=lambda p=p: found.append(scratch.unpacked(p, wanted)))
        for p in [path, tmp_path / "link"] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(unpacked_times) == 1
    del found[1:]
    gc.collect()
    assert found[0]["composer_states.pt"].read() == MEMBERS[0][1]
    path.write_bytes(COMPRESS["gz"](packed([("composer_states.pt", b"others")])))
    assert scratch.unpacked(path, wanted)["composer_states.pt"].read() == b"others"
    assert len(unpacked_times) == 2


class Rank:
    """Another process that opens an archive, tells how often it unpacked and what it read, and waits to be let go."""

    def __init__(self, path: Path) -> None:
        self.pipe, theirs = FORK.Pipe()
        self.process = FORK.Process(target=_open, args=(path, theirs), daemon=True)
        self.process.start()

    def told(self) -> tuple[int, int]:
        assert self.pipe.poll(240)
        return self.pipe.recv()

    def ends(self) -> None:
        self.pipe.send("end")
        self.process.join(240)
        assert self.process.exitcode == 0


FORK = multiprocessing.get_context("fork")


def _open(path: Path, pipe: Any) -> None:
    times = []
    events.install(lambda event: times.append(1) if (event.task, event.kind) == ("unpack", "start") else None)
    found = scratch.unpacked(path, wanted)
    pipe.send((len(times), len(found["composer_states.pt"].read())))
    pipe.recv()


def test_once_on_a_machine(tmp_path: Path, home: Path) -> None:
    path = archive(tmp_path / "a")
    ranks = [Rank(path) for _ in range(4)]
    assert sorted(rank.told() for rank in ranks) == [(0, 6000)] * 3 + [(1, 6000)]
    for rank in ranks[:3]:
        rank.ends()
    assert len(left(home)) == 2  # the last rank still reads
    ranks[3].ends()
    assert left(home) == []


def test_another_process_is_quicker(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, unpacked_times: list[str]
) -> None:
    """It unpacks while this one goes over to the exclusive lock, and keeps a shared one."""
    path = archive(tmp_path / "a")
    flock, asked, ranks = fcntl.flock, [], []

    def late(lock: int, how: int) -> None:
        if how & fcntl.LOCK_EX and not asked:
            asked.append(how)
            flock(lock, fcntl.LOCK_UN)  # as the kernel does
            ranks.append(Rank(path))
            assert ranks[0].told() == (1, 6000)
        flock(lock, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    monkeypatch.setattr(scratch, "PATIENCE", 1.0)
    found = scratch.unpacked(path, wanted)
    assert found["composer_states.pt"].read() == MEMBERS[0][1] and not unpacked_times
    ranks[0].ends()
    assert len(left(home)) == 2  # this process still reads
    del found
    assert left(home) == []


def test_a_child_lets_its_parent_read_on(tmp_path: Path, home: Path) -> None:
    found = scratch.unpacked(archive(tmp_path / "a"), wanted)

    def let_go() -> None:
        found.clear()
        gc.collect()

    child = FORK.Process(target=let_go)
    child.start()
    child.join(240)
    assert child.exitcode == 0
    assert len(found["composer_states.pt"].read()) == 6000


@pytest.mark.slow
def test_a_program_that_just_ends(tmp_path: Path, home: Path) -> None:
    program = (
        "import sys; from holdfast.formats.machine import scratch; "
        "from holdfast.storage.local.local_place import LocalPlace; "
        "kept = scratch.unpacked(LocalPlace(sys.argv[1]), lambda name: True)"
    )
    subprocess.run([sys.executable, "-c", program, str(archive(tmp_path / "a"))], check=True)
    assert left(home) == []


def test_what_a_killed_process_leaves(tmp_path: Path, home: Path, unpacked_times: list[str]) -> None:
    path = archive(tmp_path / "a")
    rank = Rank(path)
    rank.told()
    os.kill(rank.process.pid, signal.SIGKILL)
    rank.process.join(240)
    assert len(left(home)) == 2
    found = scratch.unpacked(path, wanted)  # whole, so it serves again
    assert not unpacked_times and found["composer_states.pt"].read() == MEMBERS[0][1]
    os.rename(root(home), home / "aside")
    del found
    gc.collect()
    os.rename(home / "aside", root(home))
    assert len(left(home)) == 2
    scratch.unpacked(archive(tmp_path / "b"), wanted)
    assert left(home) == []  # swept


def test_a_process_killed_while_unpacking(tmp_path: Path, home: Path) -> None:
    path = archive(tmp_path / "a")
    found = scratch.unpacked(path, wanted)
    lock = next(entry for entry in root(home).iterdir() if entry.suffix == ".lock")
    folder = lock.with_suffix("")
    del found
    gc.collect()
    folder.mkdir()
    (folder / "0").write_bytes(b"half")  # and neither index nor lock
    assert scratch.unpacked(path, wanted)["composer_states.pt"].read() == MEMBERS[0][1]
    (root(home) / "other").mkdir()
    scratch.unpacked(path, wanted)
    assert left(home) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(COMPRESS))
def test_bombs(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    bombs = {
        "claims it": packed([("composer_states.pt", bytes(8 << 20))]),
        "unwanted": packed([("composer_states.pt", b"1"), ("b", bytes(8 << 20)), ("c.pt", b"1")]),
        "no archive": bytes(8 << 20),
        "after the end": packed([("composer_states.pt", b"1")]) + bytes(8 << 20),
    }
    monkeypatch.setenv(scratch.LIMIT, str(1 << 18))
    for name, data in bombs.items():
        (tmp_path / "a").write_bytes(COMPRESS[kind](data))
        assert (tmp_path / "a").stat().st_size < 1 << 18
        with pytest.raises(StorageError, match=f"more than 262144 bytes.*{scratch.LIMIT}"):
            scratch.unpacked(tmp_path / "a", lambda name: name != "b")
        assert left(home) == [], name


def test_limits(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "a")
    free = shutil.disk_usage(home)._replace(free=30_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda where: free)
    with pytest.raises(StorageError, match="more than 15000 bytes, half of what is free"):
        scratch.unpacked(path, wanted)
    monkeypatch.setenv(scratch.LIMIT, "100000")
    assert len(scratch.unpacked(path, wanted)) == 2
    for nonsense in ("", "-1", "1e9", "10G", "٣"):
        monkeypatch.setenv(scratch.LIMIT, nonsense)
        with pytest.raises(Unsupported, match="not a number of bytes"):
            scratch.unpacked(path, wanted)
    assert left(home) == []


def test_a_full_disk(tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    monkeypatch.setenv(scratch.LIMIT, str(1 << 30))
    path = archive(tmp_path / "a", members=[("a.pt", os.urandom(9 << 20))])
    with pytest.raises(StorageError, match="No space left"):
        scratch.unpacked(path, wanted)
    assert left(small_disk) == []


@pytest.mark.parametrize("kind", list(COMPRESS))
@pytest.mark.fast_cases("gz", "xz")
def test_cut_off_and_altered(tmp_path: Path, home: Path, kind: str) -> None:
    whole = archive(tmp_path / "a", kind).read_bytes()
    for length in (len(whole) // 2, len(whole) - 1):
        if kind != "lzma" or length < len(whole) - 1:  # it has nothing after its data
            (tmp_path / "a").write_bytes(whole[:length])
            with pytest.raises(Damaged):
                scratch.unpacked(tmp_path / "a", wanted)
    found = 0
    for at in range(20, len(whole), 50) if kind in ("gz", "bz2", "xz") else ():  # these keep sums
        altered = bytearray(whole)
        altered[at] ^= 4
        (tmp_path / "a").write_bytes(altered)
        try:
            held = scratch.unpacked(tmp_path / "a", wanted)
            assert {name: part.read() for name, part in held.items()} == {k: v for k, v in MEMBERS if wanted(k)}
            del held
        except Damaged:
            found += 1
    assert found > 50 or kind not in ("gz", "bz2", "xz")
    assert left(home) == []


@pytest.mark.parametrize("how", ["link", "open to all", "a file"])
def test_a_folder_that_others_can_use(tmp_path: Path, home: Path, how: str) -> None:
    if how == "link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        root(home).symlink_to(tmp_path / "theirs")
    elif how == "a file":
        root(home).write_bytes(b"")
    else:
        root(home).mkdir()
        root(home).chmod(0o777)
    with pytest.raises(StorageError, match="not a folder that only this user can use"):
        scratch.unpacked(archive(tmp_path / "a"), wanted)


def test_removed_by_somebody(tmp_path: Path, home: Path) -> None:
    found = scratch.unpacked(archive(tmp_path / "a"), wanted)
    shutil.rmtree(root(home))
    with pytest.raises(StorageError, match="which was removed: open it again"):
        found["composer_states.pt"].read()
    del found
    gc.collect()
    assert len(scratch.unpacked(tmp_path / "a", wanted)["composer_states.pt"].read()) == 6000


def test_links_in_archives(tmp_path: Path, home: Path) -> None:
    import tarfile

    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as made:
        info = tarfile.TarInfo("composer_states.pt")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        made.addfile(info)
    (tmp_path / "a").write_bytes(target.getvalue())
    with pytest.raises(Unsupported, match="a symbolic link"):
        scratch.unpacked(tmp_path / "a", wanted)
    assert left(home) == []


def test_memory_that_an_archive_may_take(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.formats.machine import compressed

    monkeypatch.setattr(compressed, "_MEMORY", 1 << 20)
    path = tmp_path / "a"
    path.write_bytes(lzma.compress(packed(MEMBERS), preset=9))  # whose dictionary takes 64 MiB
    with pytest.raises(Damaged, match=r"[Mm]emory"):
        scratch.unpacked(path, wanted)
    assert left(home) == []


@pytest.mark.parametrize("form", [lzma.FORMAT_XZ, lzma.FORMAT_ALONE])
def test_streams_of_xz_one_after_the_other(tmp_path: Path, form: int) -> None:
    import io

    from holdfast.formats.machine.compressed import _Lzma

    one, two = bytes(range(256)) * 9000, b"the second" * 1000
    data = lzma.compress(one, form) + (b"\0\0\0\0" + lzma.compress(two, form) if form == lzma.FORMAT_XZ else b"")
    for nbytes in (1 << 20, 1000):
        stream, parts = _Lzma(io.BufferedReader(io.BytesIO(data)), form), []  # type: ignore[arg-type]
        while part := stream.read(nbytes):
            parts.append(part)
        assert b"".join(parts) == one + (two if form == lzma.FORMAT_XZ else b"")
    stream = _Lzma(io.BufferedReader(io.BytesIO(data[:-20])), form)  # type: ignore[arg-type]
    with pytest.raises(EOFError, match="in the middle"):
        while stream.read(1 << 20):
            pass
