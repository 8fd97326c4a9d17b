"""Local: links, leavings of killed processes, folders that come and go, full disks; the rest is in the contract."""

from __future__ import annotations

import array
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import holdfast
from holdfast.errors import StorageError
from holdfast.storage.local.local import Local
from holdfast.storage.memory import Memory
from holdfast.storage.store import Buffer, Store
from holdfast.storage.store_place import StorePlace

_: Store = Local("anywhere")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "inner" / "root"


@pytest.fixture
def store(root: Path) -> Local:
    return Local(root)


def put(store: Store, key: str, content: bytes) -> None:
    store.put(key, [content], len(content))


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_place_of_it_is_called_by_its_path(store: Local, root: Path) -> None:
    assert str(StorePlace(store, "a/b")) == str(root / "a/b")
    assert store.url == str(root)


def test_files_are_what_is_on_disk(store: Local, root: Path) -> None:
    put(store, "a/b", b"put")
    store.create("a/c", b"created")
    assert (root / "a/b").read_bytes() == b"put" and (root / "a/c").read_bytes() == b"created"
    (root / "a/d").write_bytes(b"by hand")
    told = store.list("", deep=True).files
    assert [(entry.key, entry.nbytes) for entry in told] == [("a/b", 3), ("a/c", 7), ("a/d", 7)]
    assert store.list("a", deep=False).files[2].modified == (root / "a/d").stat().st_mtime


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Local("here")
    monkeypatch.chdir("/")
    put(store, "f", b"x")
    assert (tmp_path / "here/f").read_bytes() == b"x"


def test_there_is_nothing_in_a_root_that_is_not_there(store: Local, root: Path) -> None:
    assert store.list("", deep=True) == store.list("", deep=False) == store.list("a/b", deep=True) == ([], [])
    assert store.size("f") is None
    store.delete(["f", "a/f"])
    assert not root.parent.exists(), "looking and deleting make no folders"


# Keys

WRONG = ["", "/", "/etc/passwd", "a/", "a//b", ".", "..", "../f", "a/../../f", "a/..", "./f", "a/./f", "a\0b"]


@pytest.mark.parametrize("kind", [Local, Memory])
@pytest.mark.parametrize("key", WRONG)
def test_what_is_no_key_is_refused(key: str, kind: type[Local] | type[Memory], tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"outside")
    store: Store = Local(tmp_path / "root") if kind is Local else Memory()
    for verb in (
        lambda: store.size(key),
        lambda: store.get(key),
        lambda: store.create(key, b"x"),
        lambda: store.put(key, [b"x"], 1),
        lambda: store.delete(["good", key]),
        lambda: store.list(key or "/", deep=True),
    ):
        with pytest.raises(ValueError, match="is no key for"):
            verb()
    assert everything(tmp_path) == {"f"}


def test_links_are_followed_within_the_root_only(store: Local, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    put(store, "step-7/model", b"model")
    (root / "latest").symlink_to("step-7")
    (root / "model").symlink_to(root / "step-7/model")
    (root / "out").symlink_to(outside)
    (root / "stolen").symlink_to(outside / "secret")
    (root / "nowhere").symlink_to("absent")

    assert bytes(store.get("model").data) == bytes(store.get("latest/model").data) == b"model"
    assert store.size("model") == 5
    assert [entry.key for entry in store.list("latest", deep=True).files] == ["latest/model"]
    for verb in (
        lambda: store.size("stolen"),
        lambda: store.get("stolen"),
        lambda: store.get("out/secret"),
        lambda: store.create("out/new", b"x"),
        lambda: store.put("out/secret", [b"x"], 1),
        lambda: store.delete(["out/secret"]),
        lambda: store.list("out", deep=True),
    ):
        with pytest.raises(StorageError, match=f"a link leads out of {root}, to {outside}") as caught:
            verb()
        assert str(root) in str(caught.value)
    assert (outside / "secret").read_bytes() == b"secret" and everything(outside) == {"secret"}

    # A copy of all that is listed fails loudly, rather than to lack a file; linked folders are listed where they lie.
    assert [entry.key for entry in store.list("", deep=True).files] == ["model", "step-7/model", "stolen"]
    assert store.list("", deep=False).folders == ["step-7"]


def test_a_link_is_replaced_or_deleted_and_not_what_it_leads_to(store: Local, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    root.mkdir(parents=True)
    for name in ("a", "b", "c"):
        (root / name).symlink_to(outside)
    put(store, "a", b"new")
    store.delete(["b"])
    assert store.create("c", b"created") is False
    assert outside.read_bytes() == b"outside"
    assert not (root / "a").is_symlink() and everything(root) == {"a", "c"}


def test_a_root_that_is_a_link_is_the_folder_it_leads_to(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    store = Local(tmp_path / "link")
    put(store, "a/f", b"x")
    assert (tmp_path / "real/a/f").read_bytes() == b"x"
    store.delete(["a/f"])
    assert everything(tmp_path) == {"real", "link"}


def test_a_file_in_the_way_of_a_folder_is_said(store: Local, root: Path) -> None:
    put(store, "a", b"file")
    assert store.size("a/b") is None
    with pytest.raises(FileNotFoundError):
        store.get("a/b")
    with pytest.raises(StorageError, match=str(root / "a")):
        put(store, "a/b", b"x")
    put(store, "folder/f", b"x")
    with pytest.raises(StorageError, match=str(root / "folder")):
        put(store, "folder", b"x")
    assert everything(root) == {"a", "folder", "folder/f"}


# Folders come with the first file, and go with the last


def test_empty_folders_go_with_the_last_file(store: Local, root: Path) -> None:
    for key in ("a/b/c/f", "a/b/g", "h/f"):
        put(store, key, b"x")
    store.delete(["a/b/c/f"])
    assert everything(root) == {"a", "a/b", "a/b/g", "h", "h/f"}
    store.delete(["a/b/g", "h/f"])
    assert root.is_dir() and not everything(root)


def test_an_upload_that_fails_leaves_no_folder(store: Local, root: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise InterruptedError

    with pytest.raises(InterruptedError):
        store.put("a/b/f", chunks(), 2)
    assert not everything(root)


def test_files_come_while_others_take_their_folder_away(store: Local, root: Path) -> None:
    def work(n: int) -> None:
        for turn in range(60):
            key = f"a/b/{n}-{turn}"
            if turn % 2:
                put(store, key, b"x")
            else:
                assert store.create(key, b"x") is True
            store.delete([key])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not everything(root)


# What fails


@pytest.mark.parametrize("call", ["fsync", "pwrite", "replace"])
@pytest.mark.parametrize("older", [None, b"older"])
def test_a_write_that_fails_leaves_what_was_there(
    call: str, older: bytes | None, store: Local, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if older is not None:
        put(store, "a/f", older)
    before = everything(root)

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        # Making the folder syncs too, and is named then; else the file is.
        with pytest.raises(StorageError, match=f"{root}.*Input/output error") as caught:
            put(store, "a/f", b"newer")
    assert caught.value.errno == errno.EIO
    if older is not None:
        assert everything(root) == before and bytes(store.get("a/f").data) == older
    else:
        assert not [path for path in root.rglob("*") if path.is_file()]


def test_everything_is_synced_before_it_is_said_to_be_there(
    store: Local, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this order: the bytes, the name, the folder."""
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace

    def sync(fd: int) -> None:
        steps.append(f"sync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        fsync(fd)

    def rename(source: Path, target: Path) -> None:
        steps.append(f"rename {Path(source).name} {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", rename)
    put(store, "a/f", b"x")
    temporary = steps[-2].split()[1]
    assert steps[-3:] == [f"sync {temporary}", f"rename {temporary} f", "sync a"]
    assert "sync root" in steps[:-3], "the new folder has its name in the one above"


def test_errors_of_chunks_are_raised_as_they_are(store: Local) -> None:
    error = OSError(errno.ECONNRESET, "from another store")

    def chunks() -> Iterator[bytes]:
        yield b"x"
        raise error

    with pytest.raises(OSError) as caught:
        store.put("f", chunks(), 2)
    assert caught.value is error


def test_a_full_disk_is_found_before_a_chunk_is_taken(small_disk: Path) -> None:
    store = Local(small_disk / "root")
    taken = []

    def chunks() -> Iterator[bytes]:
        for n in range(20):
            taken.append(n)
            yield bytes(1 << 20)

    with pytest.raises(StorageError, match="the disk is full: free space") as caught:
        store.put("a/f", chunks(), 20 << 20)
    assert caught.value.errno == errno.ENOSPC and not taken
    assert not everything(small_disk / "root")
    put(store, "a/f", bytes(1 << 20))


@pytest.mark.parametrize("announced", [1 << 20, 10])
def test_more_bytes_than_announced_are_an_error_too(announced: int, store: Local, root: Path) -> None:
    with pytest.raises(ValueError, match=f"cannot write {root}/f: {announced} bytes were announced, 11 given"):
        store.put("f", [b"hello world"], announced)
    assert not everything(root)


# Temporary files

WRITER = """
import sys, types

holdfast = sys.modules["holdfast"] = types.ModuleType("holdfast")  # without torch, which takes seconds
holdfast.__path__ = [sys.argv[2]]
from holdfast.storage.local.local import Local

def chunks():
    yield bytes(1000)
    print("began", flush=True)
    sys.stdin.read()
    yield bytes(1000)

Local(sys.argv[1]).put("a/f", chunks(), 2000)
print("done", flush=True)
"""


@pytest.fixture
def writer(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process in the middle of an upload."""
    command = [sys.executable, "-c", WRITER, str(root), str(Path(holdfast.__file__).parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "began\n"
        yield process
        process.kill()


def test_uploads_under_way_are_not_seen(store: Local, root: Path, writer: subprocess.Popen[str]) -> None:
    (name,) = [path.name for path in (root / "a").iterdir()]
    assert store.list("", deep=True) == ([], []) and store.list("a", deep=False) == ([], [])
    for verb in (lambda: store.size(f"a/{name}"), lambda: store.get(f"a/{name}"), lambda: store.delete([f"a/{name}"])):
        with pytest.raises(ValueError, match="names like this are its temporary files"):
            verb()
    put(store, "a/g", b"x")
    os.utime(root / "a" / name, (1, 1))
    store.delete(["a/g"])
    assert (root / "a" / name).exists(), "it is old, but its writer lives"
    out, _ = writer.communicate("", timeout=240)
    assert out == "done\n" and store.size("a/f") == 2000 and everything(root) == {"a", "a/f"}


def test_leavings_of_a_killed_writer_go_with_the_next_delete(
    store: Local, root: Path, writer: subprocess.Popen[str]
) -> None:
    writer.kill()
    writer.wait(240)
    (left,) = (root / "a").iterdir()
    put(store, "a/g", b"x")
    store.delete(["a/g"])
    assert left.exists(), "so young it may be of a writer whose lock does not show, on another node"
    os.utime(left, (1, 1))
    store.delete(["a/g"])
    assert not everything(root)


def test_chunks_are_written_from_memory_of_any_kind(store: Local) -> None:
    chunks: list[Buffer] = [array.array("I", [1, 2]), memoryview(b"abc"), bytearray(b"de"), b""]
    store.put("f", chunks, 13)
    assert bytes(store.get("f").data) == array.array("I", [1, 2]).tobytes() + b"abcde"


def test_a_read_that_is_cut_short_is_an_error(store: Local, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, "f", bytes(1000))
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:300]], at) if at < 600 else 0)
    with pytest.raises(StorageError, match=f"cannot read {root}/f: the file ended at byte 600"):
        store.get("f")
    assert len(store.get("f", 0, 550).data) == 550  # type: ignore[arg-type]
