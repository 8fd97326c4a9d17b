"""Orphans: all of a dead process go; nothing of a living one, of a checkpoint or of somebody else does."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.commit import folder as folders
from holdfast.formats.own import read_manifest
from holdfast.run.orphans import BENCH, collect
from holdfast.storage import store_place
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests.citing import save_on, state_of
from tests.damaging import contents_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        holdfast.save({"model": {"w": torch.arange(9000.0) * step}}, tmp_path / f"step-{step}", step=step)
    return tmp_path


def _dead(root: Path) -> Path:
    folder = shutil.copytree(root / "step-2", root / "step-3")
    (folder / "manifest.json").unlink()
    return folder


def test_a_dead_save_goes_and_a_living_one_stays(root: Path) -> None:
    folder = _dead(root)
    file = next((folder / "model").iterdir())
    lock = os.open(file, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_SH)
    done = collect(root, dry_run=False)
    assert not done.orphans and "under way" in done.spared[0].why and file.exists()
    os.close(lock)
    told = collect(root)
    assert told.orphans[0].files == 1 and told.nbytes == file.stat().st_size
    assert collect(root, dry_run=False).orphans == told.orphans and not folder.exists()
    for step in (1, 2):
        holdfast.tools.verify(root / f"step-{step}")


def test_strays_beside_a_checkpoint(root: Path) -> None:
    before = contents_of(root)
    stray = next((root / "step-1" / "model").iterdir())
    shutil.copy(stray, root / "step-2" / "model" / stray.name)
    (root / "step-2" / "notes.txt").write_text("mine")
    assert collect(root / "step-2", dry_run=False).orphans[0].files == 1
    (root / "step-2" / "notes.txt").unlink()
    assert contents_of(root) == before


@pytest.mark.slow
def test_a_finished_save_is_not_an_orphan(root: Path) -> None:
    script = (
        "import os, sys, torch, holdfast\n"
        "from holdfast import events\n"
        "def end(event):\n"
        "    if event.kind == 'phase' and event.task == 'commit': os._exit(1)\n"
        "events.install(end)\n"
        "with holdfast.Saver(worker='thread') as saver:\n"
        "    saver.save({'model': {'w': torch.ones(9000)}}, sys.argv[1]).wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", script, str(root / "step-4")], env=environment, timeout=240)
    assert (root / "step-4" / "parts").is_dir() and not (root / "step-4" / "manifest.json").exists()
    done = collect(root, dry_run=False)
    assert not done.orphans and "holdfast rescue" in done.spared[0].why
    holdfast.tools.rescue(root / "step-4")
    assert not collect(root).orphans


@pytest.mark.slow
def test_conversions_and_benchmarks_that_were_killed(root: Path) -> None:
    script = (
        "import os, signal, sys, holdfast\n"
        "from holdfast.export import work\n"
        "work.copy_units = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)\n"
        "holdfast.convert(sys.argv[1], sys.argv[2], to='huggingface')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(root / "step-1"), str(root / "hf")], env=environment, timeout=240
    )
    assert ended.returncode == -signal.SIGKILL and (root / "hf.partial").is_dir()
    (root / f"{BENCH}1").mkdir()
    (root / f"{BENCH}1" / "lock").write_bytes(b"")
    (root / "mine.partial").mkdir()
    (root / "mine.partial" / "data").write_text("mine")
    lock = os.open(root / "hf.partial" / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    assert "under way" in collect(root).spared[0].why
    os.close(lock)
    collect(root, dry_run=False)
    assert sorted(path.name for path in root.iterdir()) == ["mine.partial", "step-1", "step-2"]


def test_what_somebody_else_wrote_stays(root: Path) -> None:
    folder = _dead(root)
    (folder / "notes.txt").write_text("mine")
    (root / "other").mkdir()
    (root / "other" / "weights.safetensors").write_bytes(b"x")
    (root / "other" / "attachments").mkdir()
    (root / "other" / "attachments" / "a").write_text("mine")
    collect(root, dry_run=False)
    assert (folder / "notes.txt").exists() and (root / "other" / "attachments" / "a").exists()
    assert not list((folder).rglob("*.safetensors"))


def test_cited_files_are_no_orphans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, os.strerror(95))

    monkeypatch.setattr(os, "link", refuse)
    state = {"model": {"w": torch.arange(9000.0)}, "more": {"x": torch.ones(9000)}}
    first = holdfast.save(state, tmp_path / "step-1")
    state["more"]["x"] = torch.zeros(9000)
    holdfast.save(state, tmp_path / "step-2", base=first)
    (tmp_path / "step-1" / "manifest.json").unlink()
    assert collect(tmp_path, dry_run=False).orphans[0].files == 1
    holdfast.tools.verify(tmp_path / "step-2")


def test_in_a_store_what_is_young_stays() -> None:
    place = StorePlace(Memory(), "run")
    for step in (1, 2):
        holdfast.save({"model": {"w": torch.arange(900.0)}}, place / f"step-{step}")
    place.store.delete([(place / "step-2" / "manifest.json").key])
    done = collect(place, dry_run=False)
    assert not done.orphans and "six hours" in done.spared[0].why


def _sweeps(folder: Path) -> None:
    folders.sweep_dead(folder)


def _collects(folder: Path) -> None:
    collect(folder.parent, dry_run=False)


def _saves(folder: Path) -> None:
    with pytest.raises(holdfast.errors.StorageError, match="just committed"):
        folders.prepare(folder, overwrite=False)


@pytest.mark.parametrize("do", [_collects, _sweeps, _saves])
def test_a_save_that_commits_while_somebody_looks_stays(
    do: Callable[[Path], None], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, aside = root / "step-2" / "manifest.json", root / "aside"
    manifest.rename(aside)
    living = LocalPlace.living

    def commits(folder: LocalPlace, paths: list[str]) -> list[str]:
        if aside.exists():
            aside.rename(manifest)
        return living(folder, paths)

    monkeypatch.setattr(LocalPlace, "living", commits)
    do(root / "step-2")
    monkeypatch.undo()
    holdfast.tools.verify(root / "step-2")


def test_what_a_save_writes_while_somebody_sweeps_stays(root: Path) -> None:
    folder = _dead(root)
    dead = next((folder / "model").iterdir())
    living = dead.with_name(dead.name.replace(read_manifest(root / "step-2").save, "f" * 16))

    def begins(going: Sequence[str]) -> bool:
        living.write_bytes(b"of a save that begins now")
        return False

    assert folders.sweep_dead(folder, spares=begins)
    assert living.exists() and not dead.exists()


def test_a_save_that_replaces_one_while_somebody_sweeps_stays(root: Path) -> None:
    before = read_manifest(root / "step-2")
    holdfast.save({"model": {"w": torch.ones(9000)}}, root / "step-2", step=2, overwrite=True)
    assert not folders.sweep_beside(root / "step-2", before)
    holdfast.tools.verify(root / "step-2")


def test_an_empty_folder_of_parts_goes(root: Path) -> None:
    """A trainer may die between the last part, once it has committed, and their folder."""
    (root / "step-2" / "parts").mkdir()
    assert folders.sweep_beside(root / "step-2", read_manifest(root / "step-2"))
    assert not (root / "step-2" / "parts").exists()
    holdfast.tools.verify(root / "step-2")


def test_without_locks_only_what_is_old_is_dead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _dead(root)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "six hours" in collect(root, dry_run=False).spared[0].why
    assert not folders.sweep_dead(folder) and list(folder.rglob("*.safetensors"))
    for path in folder.rglob("*.safetensors"):
        os.utime(path, (0, 0))
    assert collect(root, dry_run=False).orphans and not folder.exists()


def test_a_conversion_that_begins_while_somebody_looks_goes_on(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "hf.partial").mkdir()
    (root / "hf.partial" / "lock").write_bytes(b"")
    (root / "hf.partial" / "content").mkdir()
    began: list[int] = []
    in_use = LocalPlace.in_use

    def begins(path: LocalPlace) -> bool:
        found = in_use(path)
        if not began:
            began.append(os.open(root / "hf.partial" / "lock", os.O_RDWR))
            fcntl.flock(began[0], fcntl.LOCK_EX)
        return found

    monkeypatch.setattr(LocalPlace, "in_use", begins)
    done = collect(root, dry_run=False)
    assert not done.orphans and "another process is converting" in done.spared[0].why
    assert (root / "hf.partial" / "content").is_dir()
    os.close(began[0])
    assert collect(root / "hf.partial", dry_run=False).orphans and not (root / "hf.partial").exists()


def test_what_is_called_like_a_conversion_and_is_none_stays(root: Path) -> None:
    (root / "mine.partial" / "content").mkdir(parents=True)
    (root / "mine.partial" / "content" / "data").write_text("mine")
    assert not collect(root, dry_run=False).orphans and (root / "mine.partial" / "content" / "data").exists()


def test_what_tells_that_an_upload_broke_off_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    place = StorePlace(Memory(), "models")
    place.store.put((place / "mine" / ".holdfast-converting").key, [b"x"], 1)
    monkeypatch.setattr(store_place, "LIVING", -1.0)
    done = collect(place, dry_run=False)
    assert not done.orphans and "upload" in done.spared[0].why


def test_what_a_swept_step_has_lent_is_no_save_under_way() -> None:
    root = StorePlace(Memory(), "run")
    save_on(state_of(1), root / "step-1")
    save_on(state_of(2, model=2), root / "step-2", root / "step-1")
    folders.delete_checkpoint(root / "step-1")
    for place in (root, root / "step-1"):
        done = collect(place)
        assert not done.orphans and ["step-2 reuses them" in one.why for one in done.spared] == [True]
    holdfast.tools.verify(root / "step-2")
