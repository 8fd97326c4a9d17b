"""`repair`: what somebody has comes back bit for bit, what nobody has is told, and nothing that is right is touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.storage.local import disk
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests.damaging import contents_of, flip, spots, state_of
from tests.marks import examples


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repair") / "step-1"
    holdfast.save(state_of(1, blocks=1), path, step=1, files={"config": b"depth: 3"})
    return path


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "c")
    return tmp_path / "c"


@given(data=st.data())
@settings(max_examples=examples(10))
def test_random_damage(data: st.DataObject, saved: Path, tmp_path_factory: Any) -> None:
    """With a copy all comes back bit for bit; without one exactly what was hit is told, and nothing changes."""
    copied = tmp_path_factory.mktemp("damage") / "c"
    shutil.copytree(saved, copied)
    there = list(spots(holdfast.open(copied)))
    hit = [there[n] for n in sorted(data.draw(st.sets(st.integers(0, len(there) - 1)), "blocks"))]
    for spot in hit:
        for at in data.draw(st.sets(st.integers(0, spot.nbytes - 1), min_size=1, max_size=3), "bytes"):
            flip(spot.file, spot.begin + at)
    damaged = contents_of(copied)
    alone = holdfast.tools.repair(copied)
    assert {(d.tensor, d.box, d.begin) for d in alone.left} == {(s.tensor, s.box, s.begin) for s in hit}
    assert not alone.mended and contents_of(copied) == damaged
    dry = holdfast.tools.repair(copied, sources=[saved], dry_run=True)
    assert dry.whole and contents_of(copied) == damaged
    done = holdfast.tools.repair(copied, sources=[saved])
    assert done.whole and sorted(done.mended) == sorted(dry.mended)
    assert {(m.file, m.begin, m.nbytes) for m in done.mended} == {(str(s.file), s.begin, s.nbytes) for s in hit}
    assert contents_of(copied) == contents_of(saved)


@pytest.mark.parametrize("how", ["missing", "cut", "grown", "header", "attachment", "folder"])
def test_files_come_back(how: str, copied: Path, saved: Path) -> None:
    file = next((copied / "model").iterdir())
    if how == "missing":
        file.unlink()
    elif how == "header":
        flip(file, 200)
        flip(file, 5000)  # and a block that could not be seen before
    elif how == "attachment":
        (copied / "attachments" / "config").write_bytes(b"")
    elif how == "folder":
        shutil.rmtree(copied / "model")
    else:
        os.truncate(file, file.stat().st_size + (1 if how == "grown" else -(6 << 20)))
    damaged = contents_of(copied)
    alone = holdfast.tools.repair(copied)
    if how == "grown":  # all that it should have is in it
        assert alone.whole and alone.mended and contents_of(copied) == contents_of(saved)
        return
    assert not alone.whole and contents_of(copied) == damaged
    assert how == "attachment" or "model/w" in alone.tensors
    assert holdfast.tools.repair(copied, sources=[saved], dry_run=True).whole and contents_of(copied) == damaged
    assert holdfast.tools.repair(copied, sources=[saved]).whole
    assert contents_of(copied) == contents_of(saved)


def test_what_nobody_has_stays_and_the_rest_comes_back(copied: Path, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "other")
    first, second, third = [s for s in spots(holdfast.open(copied)) if s.file.parent.name == "model"][:3]
    for folder in (copied, tmp_path / "other"):
        flip(folder / second.file.relative_to(copied), second.begin)
    flip(first.file, first.begin)
    flip(third.file, third.begin)
    done = holdfast.tools.repair(copied, sources=[tmp_path / "other"])
    assert [(d.tensor, d.begin) for d in done.left] == [(second.tensor, second.begin)]
    assert {m.begin for m in done.mended} == {first.begin, third.begin}
    assert done.tensors == (second.tensor,)
    # A file that is missing is not put there with a hole in it.
    first.file.unlink()
    done = holdfast.tools.repair(copied, sources=[tmp_path / "other"])
    assert not done.whole and not first.file.exists()
    assert not [p for p in copied.rglob("*") if p.name.endswith(".tmp")]
    # The next source has it.
    done = holdfast.tools.repair(copied, sources=[tmp_path / "other", saved])
    assert done.whole and contents_of(copied) == contents_of(saved)
    assert {str(Path(m.source).parents[1]) for m in done.mended} == {str(tmp_path / "other"), str(saved)}


def test_a_neighbour_gives_what_did_not_change(copied: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    for step in (2, 3):
        holdfast.save({"extra": torch.ones(7), **state_of(step, blocks=1)}, root / f"step-{step}", step=step)
    frozen = [s for s in spots(holdfast.open(copied)) if s.tensor == "frozen/w"]
    weight = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    before = contents_of(copied)
    flip(frozen[1].file, frozen[1].begin)
    done = holdfast.tools.repair(copied, sources=[root])
    assert done.whole and contents_of(copied) == before and "step-2" in done.mended[0].source
    flip(weight.file, weight.begin)
    assert holdfast.tools.repair(copied, sources=[root]).tensors == ("model/w",)


def test_the_checkpoint_itself_may_have_it_twice(tmp_path: Path) -> None:
    alike = torch.randn(3000, 100)
    holdfast.save({"a": {"w": alike}, "b": {"w": alike.clone()}}, tmp_path / "c")
    before = contents_of(tmp_path / "c")
    flip(next((tmp_path / "c" / "a").iterdir()), 100_000)
    done = holdfast.tools.repair(tmp_path / "c")
    assert done.whole and "/b/" in done.mended[0].source and contents_of(tmp_path / "c") == before


def test_steps_that_share_a_file_are_mended_together(saved: Path, copied: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    shutil.copytree(copied, linked, copy_function=os.link)
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    flip(spot.file, spot.begin)
    assert not holdfast.tools.verify(linked, raises=False).whole
    number = spot.file.stat().st_ino
    assert holdfast.tools.repair(copied, sources=[saved]).whole
    assert spot.file.stat().st_ino == number and holdfast.tools.verify(linked).whole


def test_nothing_is_written_through_a_link(saved: Path, copied: Path, tmp_path: Path) -> None:
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    flip(spot.file, spot.begin)
    outside = tmp_path / "outside.safetensors"
    shutil.move(spot.file, outside)
    spot.file.symlink_to(outside)
    theirs = outside.read_bytes()
    assert holdfast.tools.repair(copied, sources=[saved]).whole
    assert not spot.file.is_symlink() and outside.read_bytes() == theirs
    assert contents_of(copied) == contents_of(saved)


def test_only_bad_bytes_are_written_over(saved: Path, copied: Path) -> None:
    hit = list(spots(holdfast.open(copied)))[::3]
    for spot in hit:
        flip(spot.file, spot.begin)
    written: set[tuple[str, int, int]] = set()

    def note(call: disk.Call, do: Any) -> Any:
        assert call.verb not in ("replace", "delete", "cut", "create", "link")
        if call.verb == "write":
            written.add((call.path, call.offset, len(call.data)))
        return do()

    with disk.hooked(note):
        assert holdfast.tools.repair(copied, sources=[saved]).whole
    assert written == {(str(s.file), s.begin, s.nbytes) for s in hit}


def test_a_place_that_the_disk_refuses(saved: Path, copied: Path) -> None:
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    flip(spot.file, spot.begin)

    def fail(call: disk.Call, do: Any) -> Any:
        if call.verb == "write" and call.path == str(spot.file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return do()

    def refuse(call: disk.Call, do: Any) -> Any:
        if call.verb == "write" and call.path == str(spot.file):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return do()

    with disk.hooked(refuse), pytest.raises(holdfast.errors.StorageError, match="read-only"):
        holdfast.tools.repair(copied, sources=[saved])
    number = spot.file.stat().st_ino
    written_anew = fail_only_in_place(fail, number)
    with disk.hooked(written_anew):
        assert holdfast.tools.repair(copied, sources=[saved]).whole
    assert spot.file.stat().st_ino != number and contents_of(copied) == contents_of(saved)


def fail_only_in_place(fail: Any, number: int) -> Any:
    """The file that is written anew may be told by its final name; the old one is told by its number."""
    return lambda call, do: fail(call, do) if call.fd >= 0 and os.fstat(call.fd).st_ino == number else do()


def test_what_is_written_wrong_is_not_taken_for_mended(saved: Path, copied: Path) -> None:
    spot = next(s for s in spots(holdfast.open(copied)) if s.tensor == "model/w")
    flip(spot.file, spot.begin)

    def lie(call: disk.Call, do: Any) -> Any:
        return len(call.data) if call.verb == "write" else do()

    with disk.hooked(lie):
        done = holdfast.tools.repair(copied, sources=[saved])
    assert not done.whole and done.tensors == ("model/w",)


def test_stores_give_and_take(saved: Path, copied: Path) -> None:
    store = StorePlace(Memory(), "run/step-1")
    holdfast.copy(saved, store)
    for spot in list(spots(holdfast.open(copied)))[::2]:
        flip(spot.file, spot.begin)
    broken = StorePlace(Memory(), "x/step-1")
    for path, data in contents_of(copied).items():
        broken.store.put((broken / path).key, [data], len(data))
    assert holdfast.tools.repair(copied, sources=[store]).whole and contents_of(copied) == contents_of(saved)
    assert not holdfast.tools.repair(broken).whole
    dry = holdfast.tools.repair(broken, sources=[store], dry_run=True)
    assert dry.whole and not holdfast.tools.verify(broken, raises=False).whole
    broken.store.delete([next(p for p in broken.rglob("*") if "frozen" in p.key).key])
    assert holdfast.tools.repair(broken, sources=[store]).whole
    assert {p.key.partition("step-1/")[2]: p.read_bytes() for p in broken.rglob("*")} == contents_of(saved)


def test_what_is_no_source_is_told(saved: Path, copied: Path, tmp_path: Path) -> None:
    flip(next((copied / "model").iterdir()), 5000)
    with pytest.raises(holdfast.errors.NotACheckpoint, match="no folder of checkpoints"):
        holdfast.tools.repair(copied, sources=[tmp_path / "nothing"])
    with pytest.raises(holdfast.errors.NotACheckpoint, match="rescue"):
        holdfast.tools.repair(tmp_path / "nothing", sources=[saved])
    flip(copied / "manifest.json", 300)
    with pytest.raises(holdfast.errors.Damaged, match="rescue"):
        holdfast.tools.repair(copied, sources=[saved])


# A process that dies in its middle


CALLS = ("create", "write", "sync", "replace", "sync folder", "reserve")


def damage_all(folder: Path) -> None:
    blocks = list(spots(holdfast.open(folder)))
    for spot in blocks[::2]:
        flip(spot.file, spot.begin)
    flip(next((folder / "state").iterdir()), 100)  # a header
    next((folder / "frozen").iterdir()).unlink()
    (folder / "attachments" / "config").write_bytes(b"depth: 9")


def dies(folder: Path, source: Path, nth: int) -> bool:
    """Repair in a process that is killed before its nth call that changes a disk; False if it came to its end."""
    child = os.fork()
    if child == 0:
        left = nth

        def kill(call: disk.Call, do: Any) -> Any:
            nonlocal left
            left -= call.verb in CALLS
            if not left:
                if call.verb == "write":
                    os.pwrite(call.fd, bytes(memoryview(call.data)[: len(call.data) // 2]), call.offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return do()

        code = 1
        try:
            with disk.hooked(kill):
                code = 0 if holdfast.tools.repair(folder, sources=[source]).whole else 3
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def killed_everywhere(copied: Path, source: Path) -> Iterator[int]:
    damage_all(copied)
    damaged = copied.parent / "damaged"
    shutil.copytree(copied, damaged)
    for nth in range(1, 100):
        shutil.rmtree(copied)
        shutil.copytree(damaged, copied)
        if not dies(copied, source, nth):
            return
        yield nth


@pytest.mark.slow
def test_killed_in_its_middle_it_leaves_nothing_worse(saved: Path, copied: Path) -> None:
    deaths = 0
    before: set[tuple[str, str, int]] | None = None
    for deaths in killed_everywhere(copied, saved):
        now = {(d.file, d.tensor or d.value, d.begin) for d in holdfast.tools.verify(copied, raises=False).damages}
        if before is None:
            before = now  # the first death is before anything was written
        # A header that is right again shows the blocks behind it, each of which was hit by it before.
        assert {(file, name) for file, name, _ in now} <= {(file, name) for file, name, _ in before}
        assert holdfast.tools.repair(copied, sources=[saved]).whole
        there = {path: data for path, data in contents_of(copied).items() if not path.endswith(".tmp")}
        assert there == contents_of(saved)
    assert deaths >= 10
