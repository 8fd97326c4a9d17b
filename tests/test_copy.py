"""Copies between homes of a checkpoint: proved, bounded, gone on with after a kill, and never half a target."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.commit import folder
from holdfast.commit.transfer import copy_files
from holdfast.copy import Copied, copy
from holdfast.formats.own import read_manifest
from holdfast.ondisk import manifest
from holdfast.storage.local.local import Local
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.memory import Memory
from holdfast.storage.place import Place
from holdfast.storage.store import Buffer, Got, Listing
from holdfast.storage.store_place import StorePlace
from holdfast.storage.wrappers import throttled
from holdfast.storage.wrappers.retrying import transient
from tests import pool
from tests.citing import is_state, save_on, state_of
from tests.export import states
from tests.patience import wait_until

GOLDEN = LocalPlace(__file__).parent / "golden" / "v1"
CONFIG = {"config.json": b'{"layers": 2}', "vocab/words.txt": b"a b c"}


def save(path: Path, step: int, *, mib: int = 20, files: dict[str, bytes] = CONFIG) -> Path:
    """A checkpoint with one large file, some small ones, and many small tensors."""
    generator = torch.Generator().manual_seed(step)
    state = {
        "model": {
            "w": torch.randn(mib << 18, generator=generator),
            **{f"b{n}": torch.full((n,), float(step)) for n in range(1, 40)},
        },
        "optimizer": {"m": torch.randn(1000, generator=generator), "lr": 0.1},
        "extra": {"seen": holdfast.PerRank([1, 2])},
        "step": step,
    }
    holdfast.save(state, path, files=files)
    return path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = LocalPlace(tmp_path_factory.mktemp("run"))
    for step in (1, 2):
        save(root / f"step-{step}", step)
    return root


@pytest.fixture
def source(kept: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may harm."""
    return LocalPlace(shutil.copytree(kept / "step-1", tmp_path / "run" / "step-1"))


def bytes_of(checkpoint: Place) -> int:
    return sum(len(data) for data in content(checkpoint).values()) - len((checkpoint / "manifest.json").read_bytes())


def content(path: Place) -> dict[str, bytes]:
    if isinstance(path, Path):
        return states.files(path)
    keys = [entry.key for entry in path.store.list(path.key, deep=True).files]
    return {key.removeprefix(f"{path.key}/"): StorePlace(path.store, key).read_bytes() for key in keys}


def is_no_checkpoint(path: Place) -> bool:
    with pytest.raises(holdfast.errors.NotACheckpoint):
        holdfast.open(path)
    return True


def large(path: Path) -> Path:
    (found,) = (path / "model").iterdir()
    return found


class Harmed(Memory):
    """A store with a hook before each get, and one at each chunk of a put."""

    on_get: Callable[[str, int, bytes], bytes] = staticmethod(lambda key, begin, data: data)
    on_chunk: Callable[[str], None] = staticmethod(lambda key: None)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        got = super().get(key, begin, end)
        return Got(self.on_get(key, begin, bytes(got.data)), got.nbytes)

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        def hooked() -> Iterable[Buffer]:
            for chunk in chunks:
                self.on_chunk(key)
                yield chunk

        super().put(key, hooked(), nbytes)


# From anywhere to anywhere


def test_the_same_bytes_between_disks_and_stores(kept: Path, tmp_path: Path) -> None:
    source, memory, other = kept / "step-1", StorePlace(Memory(), "a/b"), StorePlace(Memory(), "")
    nbytes = bytes_of(source)
    for one, next_one in [
        (source, tmp_path / "x" / "copy"),
        (source, memory),
        (memory, other),
        (other, tmp_path / "y"),
    ]:
        copied = copy(one, next_one)
        assert content(next_one) == content(source)
        assert copied.committed and copied.stats.nbytes == nbytes and copied.stats.skipped == 0
        assert copied.stats.unverified == 0
        holdfast.open(next_one).verify()
    again = holdfast.load(tmp_path / "y", {"model": {"b3": torch.zeros(3)}}, only="model/b3")
    assert again is not None


def test_a_checkpoint_of_a_released_version(tmp_path: Path) -> None:
    copy(GOLDEN, tmp_path / "copy")
    assert content(tmp_path / "copy") == content(GOLDEN)


def test_links_and_relative_paths(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(kept / "step-1")
    (tmp_path / "disk").mkdir()
    (tmp_path / "away").symlink_to(tmp_path / "disk")
    monkeypatch.chdir(tmp_path)
    copy("link", "away/copy")
    assert content(tmp_path / "disk" / "copy") == content(kept / "step-1")


def test_progress_is_told(kept: Path, tmp_path: Path) -> None:
    events: list[holdfast.events.Event] = []
    with holdfast.events.listen(events.append):
        copy(kept / "step-1", tmp_path / "copy")
        copy(kept / "step-1", tmp_path / "copy")
    ends = [event for event in events if event.kind == "end" and event.task == "copy"]
    assert [(event.done, event.total) for event in ends] == [(bytes_of(kept / "step-1"),) * 2] * 2


def test_borrowed_files_become_its_own(kept: Path, tmp_path: Path) -> None:
    root = LocalPlace(shutil.copytree(kept, tmp_path / "run"))
    record, lender = read_manifest(root / "step-2"), read_manifest(root / "step-1")
    mine, theirs = record.data_files, lender.data_files
    rows = [
        manifest.file_row(b._replace(path=f"../step-1/{b.path}", save=lender.save) if "model" in b.path else a)
        for a, b in zip(mine, theirs, strict=True)
    ]
    large(root / "step-2").unlink()
    (root / "step-2" / "manifest.json").write_bytes(manifest.encode(msgspec.structs.replace(record, files=rows)))
    memory = StorePlace(Memory(), "far/step-2")
    for one, target in [(root / "step-2", memory), (memory, tmp_path / "alone")]:
        copy(one, target)
        found = holdfast.open(target)
        found.verify()
        assert torch.equal(found.read("model/w"), holdfast.open(root / "step-1").read("model/w"))
        assert torch.equal(found.read("optimizer/m"), holdfast.open(root / "step-2").read("optimizer/m"))
        assert not any(".." in file.path or file.save for file in found.manifest.data_files)
    assert not copy(tmp_path / "alone", root / "step-2").committed, "they are the same checkpoint"


# Steps that share files


@pytest.mark.parametrize("links", [True, False])
def test_a_copy_of_a_step_that_cites_is_whole_by_itself(links: bool, tmp_path: Path) -> None:
    root, states = tmp_path / "run", {1: state_of(1), 2: state_of(2, model=1), 3: state_of(3, model=1, head=2)}
    for step, state in states.items():
        save_on(state, root / f"step-{step}", root / f"step-{step - 1}" if step > 1 else None, links=links)
    store = StorePlace(Memory(), "far/step-3")
    first = copy(root / "step-3", store)
    assert first.stats.files == 4 and read_manifest(store).save == read_manifest(root / "step-3").save
    again = copy(root / "step-3", store)
    assert not again.committed and again.stats.files == 0 and again.stats.skipped == 4
    copy(store, tmp_path / "back")
    shutil.rmtree(root / "step-1")
    shutil.rmtree(root / "step-2")
    for path in (store, tmp_path / "back"):
        is_state(path, states[3])
    if links:
        is_state(root / "step-3", states[3])
    else:
        with pytest.raises(holdfast.errors.Damaged, match="step-3 reuses|is missing"):
            copy(root / "step-3", tmp_path / "broken")
        assert is_no_checkpoint(tmp_path / "broken")


def test_overwriting_a_cited_checkpoint_by_a_copy_spares_what_is_cited(kept: Path, tmp_path: Path) -> None:
    root, states = tmp_path / "run", {1: state_of(1), 2: state_of(2, model=1)}
    save_on(states[1], root / "step-1")
    save_on(states[2], root / "step-2", root / "step-1")
    copy(kept / "step-1", root / "step-1", overwrite=True)
    is_state(root / "step-2", states[2])
    holdfast.open(root / "step-1").verify()


def test_a_conversion_reads_what_is_cited_and_replaces_no_cited_checkpoint(tmp_path: Path) -> None:
    states = {1: state_of(1), 2: state_of(2, model=1)}
    for root in (tmp_path / "run", StorePlace(Memory(), "run")):
        save_on(states[1], root / "step-1")
        save_on(states[2], root / "step-2", root / "step-1")
        holdfast.convert(root / "step-2", tmp_path / "out", overwrite=True)
        is_state(tmp_path / "out", states[2])
        with pytest.raises(holdfast.errors.StorageError, match="checkpoints beside it reuse"):
            holdfast.convert(tmp_path / "out", root / "step-1", overwrite=True)
        holdfast.convert(tmp_path / "out", root / "step-2", overwrite=True)
        is_state(root / "step-1", states[1])
        is_state(root / "step-2", states[2])


def test_a_copy_of_a_checkpoint_that_has_lost_sections(tmp_path: Path) -> None:
    holdfast.save(state_of(3), tmp_path / "whole")
    copy(tmp_path / "whole", tmp_path / "part")
    holdfast.tools.drop(tmp_path / "part", "optimizer")
    copy(tmp_path / "part", StorePlace(Memory(), "far"))
    with pytest.raises(holdfast.errors.StorageError, match="same save"):
        copy(tmp_path / "whole", tmp_path / "part")
    copy(tmp_path / "whole", tmp_path / "part", overwrite=True)
    is_state(tmp_path / "part", state_of(3))


# What is wrong is not committed


HARM = {
    "block": (lambda path: flip(large(path), -5), "another checksum"),
    "header": (lambda path: flip(large(path), 40), "altered header"),
    "length": (lambda path: flip(large(path), 0), "altered header"),
    "small file": (lambda path: flip(next((path / "optimizer").iterdir()), -1), "another checksum"),
    "cut": (lambda path: os.truncate(large(path), 1 << 20), "the manifest says"),
    "missing": (lambda path: large(path).unlink(), "is missing"),
    "attachment": (lambda path: flip(path / "attachments" / "config.json", 3), "its digest"),
    "no attachment": (lambda path: (path / "attachments" / "config.json").unlink(), "is missing"),
    "manifest": (lambda path: flip(path / "manifest.json", 100), "manifest.json"),
}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("far", [False, True], ids=["disk", "store"])
def test_damage_at_the_source_is_told_and_nothing_is_committed(
    harm: str, far: bool, kept: Path, source: Path, tmp_path: Path
) -> None:
    target: Place = StorePlace(Memory(), "copy") if far else tmp_path / "copy"
    do, text = HARM[harm]
    do(source)
    with pytest.raises(holdfast.errors.Damaged, match=text) as caught:
        copy(source, target)
    assert str(source) in str(caught.value)
    assert is_no_checkpoint(target)
    shutil.rmtree(source)
    shutil.copytree(kept / "step-1", source)
    copy(source, target)
    assert content(target) == content(source), "and once it is mended the copy goes on"


def test_a_bit_that_flips_on_the_way_is_read_again(kept: Path, tmp_path: Path) -> None:
    store, flipped = Harmed(), set()
    copy(kept / "step-1", StorePlace(store, "far"))

    def harm(key: str, begin: int, data: bytes) -> bytes:
        if (key, begin) in flipped:
            return data
        flipped.add((key, begin))
        return data[:-1] + bytes([data[-1] ^ 1])

    store.on_get = harm
    copy(StorePlace(store, "far"), tmp_path / "copy")
    assert len(flipped) > 6, "the manifest, headers, blocks and attachments"
    assert content(tmp_path / "copy") == content(kept / "step-1")


def test_an_upload_that_breaks_off_is_made_again(kept: Path) -> None:
    store, broken = Harmed(), []

    def breaks(key: str) -> None:
        if "model" in key and len(broken) < 2:
            broken.append(key)
            raise transient(OSError(errno.ECONNRESET, "the connection is gone"))

    store.on_chunk = breaks
    events: list[holdfast.events.Event] = []
    with holdfast.events.listen(events.append):
        copy(kept / "step-1", StorePlace(store, "far"))
    assert content(StorePlace(store, "far")) == content(kept / "step-1") and len(broken) == 2
    assert events[-1].done == events[-1].total


def test_a_store_that_refuses_stops_all_and_says_which_file(kept: Path) -> None:
    store = Harmed()

    def refuse(key: str) -> None:
        if "model" in key:
            raise PermissionError(errno.EACCES, "not for you")

    store.on_chunk = refuse
    with pytest.raises(holdfast.errors.StorageError, match=r"cannot write memory://\d+/far/model/.*not for you"):
        copy(kept / "step-1", StorePlace(store, "far"))
    assert is_no_checkpoint(StorePlace(store, "far"))


def test_a_full_disk(small_disk: Path, kept: Path) -> None:
    with pytest.raises(holdfast.errors.StorageError, match="disk is full") as caught:
        copy(kept / "step-1", small_disk / "copy")
    assert caught.value.errno == errno.ENOSPC
    assert is_no_checkpoint(small_disk / "copy")
    assert not list(small_disk.rglob("*.tmp"))


def test_a_manifest_that_says_more_than_we_know_is_not_cut_short(source: Path, tmp_path: Path) -> None:
    path = source / "manifest.json"
    body = path.read_bytes().rpartition(b',"digest"')[0]
    path.write_bytes(manifest.seal(body + b',"signature":"x"}'))
    holdfast.open(source)
    with pytest.raises(holdfast.errors.Unsupported, match="newer"):
        copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


# Again, and in part


def test_what_is_there_is_not_copied_again(kept: Path, tmp_path: Path) -> None:
    source, target = kept / "step-1", StorePlace(Memory(), "far")
    first = copy(source, target)
    again = copy(source, target)
    assert first.committed and not again.committed
    assert again.stats.files == 0 and again.stats.skipped_bytes == first.stats.nbytes == bytes_of(source)
    gone = (target / large(source).relative_to(source).as_posix()).key
    target.store.delete([gone])
    mended = copy(source, target)
    assert not mended.committed and mended.stats.files == 1 and mended.stats.nbytes == large(source).stat().st_size
    target.store.put(gone, [b"short"], 5)
    assert copy(source, target).stats.files == 1
    assert content(target) == content(source)


def copy_and_be_killed(source: str, target: str, after: int) -> None:
    def kill(event: holdfast.events.Event) -> None:
        if event.kind == "advance" and event.done >= after:
            os.kill(os.getpid(), signal.SIGKILL)

    with holdfast.events.listen(kill):
        copy(source, target)


@pytest.mark.parametrize(
    "share", [pytest.param(0.0, marks=pytest.mark.slow), 0.5, pytest.param(1.0, marks=pytest.mark.slow)]
)
def test_killed_it_has_committed_nothing_and_goes_on(share: float, kept: Path, tmp_path: Path) -> None:
    source, target = kept / "step-1", tmp_path / "copy"
    total = bytes_of(source)
    (died,) = pool.attempt(1, copy_and_be_killed, str(source), str(target), int(share * total))
    pool.close(1)
    assert died.kinds == ["Killed"]
    assert is_no_checkpoint(target)
    resumed = copy(source, target)
    assert resumed.committed and resumed.stats.nbytes + resumed.stats.skipped_bytes == total
    assert resumed.stats.skipped > 0, "small files come first or at the same time"
    found = {path: data for path, data in content(target).items() if not path.endswith(".tmp")}
    assert found == content(source)


def test_half_files_of_killed_copies_are_swept(kept: Path, tmp_path: Path) -> None:
    left = tmp_path / "copy" / "model" / f".holdfast-{'0' * 16}.tmp"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    copy(kept / "step-1", tmp_path / "copy")
    assert content(tmp_path / "copy") == content(kept / "step-1")


def test_only_some_files_and_no_commit(kept: Path, tmp_path: Path) -> None:
    record, landed = read_manifest(kept / "step-1"), []
    stats = copy_files(
        kept / "step-1", tmp_path / "copy", record, only=lambda path: "model" in path, landed=landed.append
    )
    assert stats.files == 1 and [path.partition("/")[0] for path in landed] == ["model"]
    assert is_no_checkpoint(tmp_path / "copy")
    rest = copy(kept / "step-1", tmp_path / "copy")
    assert rest.stats.skipped == 1 and content(tmp_path / "copy") == content(kept / "step-1")


# What is at the target


@pytest.mark.parametrize("far", [False, True], ids=["disk", "store"])
def test_another_checkpoint_is_replaced_only_when_told(far: bool, kept: Path, tmp_path: Path) -> None:
    target: Place = StorePlace(Memory(), "far") if far else tmp_path / "copy"
    copy(kept / "step-1", target)
    with pytest.raises(
        holdfast.errors.StorageError, match="already holds another checkpoint.*overwrite=True"
    ) as caught:
        copy(kept / "step-2", target)
    assert caught.value.errno == errno.EEXIST and content(target) == content(kept / "step-1")
    copied = copy(kept / "step-2", target, overwrite=True)
    found = holdfast.open(target)
    found.verify()
    assert copied.committed and found.step == 2
    assert found.attachment("config.json") == CONFIG["config.json"]
    old = set(content(kept / "step-1")) - {"manifest.json"}
    assert not old & set(content(target)), "what only the replaced one named is gone"
    assert not copy(kept / "step-2", target, overwrite=True).committed
    copy(target, tmp_path / "third")
    assert holdfast.open(tmp_path / "third").attachment("vocab/words.txt") == b"a b c"


def test_until_the_last_step_the_replaced_checkpoint_is_whole(tmp_path: Path, kept: Path) -> None:
    two = save(tmp_path / "two", 2, mib=1, files={"config.json": b"another"})
    store = Harmed()
    target = StorePlace(store, "far")
    copy(kept / "step-1", target)
    before = content(target)

    def fail(key: str) -> None:
        if key.endswith("manifest.json"):
            raise OSError(errno.EIO, "gone")

    store.on_chunk = fail
    with pytest.raises(holdfast.errors.StorageError):
        copy(two, target, overwrite=True)
    assert before.items() <= content(target).items()
    assert holdfast.open(target).attachment("config.json") == CONFIG["config.json"]
    del store.on_chunk
    assert copy(two, target, overwrite=True).stats.files == 0, "all was there"
    assert holdfast.open(target).attachment("config.json") == b"another"
    holdfast.open(target).verify()


def test_a_target_of_others_is_refused(kept: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for name, text in [("file", "is a file"), ("folder", "holds other files")]:
        with pytest.raises(holdfast.errors.StorageError, match=text) as caught:
            copy(kept / "step-1", tmp_path / name, overwrite=True)
        assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "folder" / "notes.txt").read_text() == "mine"
    for inside in (kept / "step-1", kept / "step-1" / "copy"):
        with pytest.raises(ValueError, match="lies in it"):
            copy(kept / "step-1", inside)


def test_leavings_of_a_dead_save_do_not_stop_it_and_those_of_a_living_one_do(kept: Path, tmp_path: Path) -> None:
    left = tmp_path / "copy" / "model" / "00000-of-00001.00000000000000aa.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")

    fd, _ = left.with_name("00000-of-00001.00000000000000ab.safetensors").open_to_write(10)
    with pytest.raises(holdfast.errors.StorageError, match="right now"):
        copy(kept / "step-1", tmp_path / "copy")
    os.close(fd)
    copy(kept / "step-1", tmp_path / "copy")
    holdfast.open(tmp_path / "copy").verify()


def test_a_sweeper_spares_what_is_being_copied(kept: Path, tmp_path: Path) -> None:
    target = tmp_path / "copy"
    swept: list[bool] = []

    def sweep(event: holdfast.events.Event) -> None:
        if event.kind == "advance" and event.done == event.total:  # of the file that comes last
            wait_until(lambda: any(target.glob("*/*.safetensors")))
            folder.sweep_dead(target)
            swept.append(True)

    with holdfast.events.listen(sweep):
        copy(kept / "step-1", target)
    assert swept and len(list(target.glob("*/*.safetensors"))) > 1
    holdfast.open(target).verify()


class Cleaned(Memory):
    """A store in which something deletes an optimizer's files whenever one looks what is there."""

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.delete([entry.key for entry in super().list("far/optimizer", deep=True).files])
        return super().list(prefix, deep=deep)


def test_files_that_vanish_from_the_target_are_missed_before_the_commit(kept: Path) -> None:
    target = StorePlace(Cleaned(), "far")
    with pytest.raises(holdfast.errors.StorageError, match="was deleted while"):
        copy(kept / "step-1", target)
    assert is_no_checkpoint(target)


def test_a_source_that_is_deleted_meanwhile(source: Path, tmp_path: Path) -> None:
    def delete(event: holdfast.events.Event) -> None:
        if event.kind == "start" and event.task == "copy":
            folder.delete_checkpoint(source)

    with (
        holdfast.events.listen(delete),
        pytest.raises(holdfast.errors.NotACheckpoint, match="deleted while it was copied"),
    ):
        copy(source, tmp_path / "copy")


# Several at once


def test_the_same_copy_twice_at_once(kept: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        done = list(threads.map(lambda _: copy(kept / "step-1", tmp_path / "copy"), range(3)))
    assert content(tmp_path / "copy") == content(kept / "step-1")
    assert all(isinstance(one, Copied) for one in done)


@pytest.mark.parametrize("far", [False, True], ids=["disk", "store"])
@pytest.mark.fast_cases("disk")
def test_of_two_checkpoints_for_one_target_one_wins_and_is_whole(far: bool, tmp_path: Path) -> None:
    sources = [save(tmp_path / f"s{n}", n, mib=1, files={f"{n}.txt": b"x"}) for n in range(3)]
    for attempt in range(5):
        target: Place = StorePlace(Memory(), "far") if far else tmp_path / f"copy-{attempt}"
        start = threading.Barrier(len(sources))

        def work(source: Path) -> Copied | holdfast.errors.StorageError:
            start.wait()
            try:
                return copy(source, target)
            except holdfast.errors.StorageError as error:
                return error

        with ThreadPoolExecutor(len(sources)) as threads:
            results = list(threads.map(work, sources))
        winners = [one for one in results if isinstance(one, Copied)]
        assert len(winners) <= 1, results
        assert all(one.errno == errno.EEXIST for one in results if isinstance(one, holdfast.errors.StorageError)), (
            results
        )
        if winners:
            holdfast.open(target).verify()


# Many steps, foreign sources, limits


def test_a_folder_of_checkpoints_step_by_step(kept: Path, tmp_path: Path) -> None:
    root, far = LocalPlace(shutil.copytree(kept, tmp_path / "run")), StorePlace(Memory(), "backup/run")
    save(root / "step-10", 10, mib=1)
    (root / "step-11" / "model").mkdir(parents=True)
    (root / "logs").mkdir()
    (root / "logs" / "log.txt").write_text("not copied")
    began: list[str] = []
    with holdfast.events.listen(lambda event: began.append(event.path) if event.kind == "start" else None):
        copied = copy(root, far)
    steps = ["step-1", "step-2", "step-10"]
    assert [path.rpartition("/")[2] for path in began] == list(copied.steps) == steps
    assert copied.committed and copied.stats.nbytes == sum(bytes_of(root / step) for step in steps)
    assert set(content(far)) == {f"{step}/{path}" for step in steps for path in content(root / step)}
    save(root / "step-12", 12, mib=1)
    again = copy(root, far)
    assert [name for name, one in again.steps.items() if one.committed] == ["step-12"]
    assert again.stats.nbytes == bytes_of(root / "step-12")
    copy(far, tmp_path / "back")
    assert content(tmp_path / "back" / "step-12") == content(root / "step-12")


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    torch.save({"w": torch.zeros(3)}, tmp_path / "model.pt")
    for source in (tmp_path / "empty", tmp_path / "none", tmp_path / "model.pt", StorePlace(Memory(), "none")):
        with pytest.raises(holdfast.errors.NotACheckpoint, match=r"holdfast\.convert reads others"):
            copy(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def test_bandwidth_is_paid_for_every_byte_once(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(throttled, "monotonic", lambda: now[0])
    monkeypatch.setattr(throttled, "sleep", sleep)
    copy(kept / "step-1", tmp_path / "copy", bandwidth=1e6)
    assert bytes_of(kept / "step-1") / 1e6 - 1 < now[0]


class Tracked(bytearray):
    """Bytes that tell when nothing refers to them any more."""


class Lent(Local):
    """A local store that counts the bytes of what it has handed out and is still held."""

    held = peak = 0
    lock = threading.Lock()

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        got = super().get(key, begin, end)
        data = Tracked(got.data)
        weakref.finalize(data, self._count, -len(data))
        self._count(len(data))
        return Got(data, got.nbytes)

    def _count(self, nbytes: int) -> None:
        with self.lock:
            self.held += nbytes
            self.peak = max(self.peak, self.held)


class Slow(Memory):
    """A store that has eight chunks on their way at a time, as clients have, takes each slowly, and keeps none."""

    def put(self, key: str, chunks: Iterable[Buffer], nbytes: int) -> None:
        sending: deque[Buffer] = deque(maxlen=8)
        for chunk in chunks:
            sending.append(chunk)
            del chunk
            time.sleep(0.02)


@pytest.mark.slow
def test_memory_stays_bounded(tmp_path: Path) -> None:
    state: dict[str, Any] = {f"part{n}": {"w": torch.full((40 << 20,), float(n))} for n in range(3)}  # 160 MiB each
    record = holdfast.save(state, tmp_path / "large").manifest
    lent = Lent(tmp_path)
    copy_files(StorePlace(lent, "large"), StorePlace(Slow(), "far"), record)
    assert 64 << 20 < lent.peak < 256 << 20
    assert lent.held == 0
