"""Scrubbing: what rots on the disk is found and mended beside training, and nothing that is well is disturbed."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.run.scrub import NOTE, Scrubbing
from holdfast.run.steps import Steps
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from tests.damaging import contents_of, flip
from tests.patience import wait_until

NAME = "step-{step}"


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": torch.full((500,), float(step))}, "frozen": {"f": torch.arange(900.0)}, "step": step}


def managed(root: Path, **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(
        root, every=1, name=NAME, keep=holdfast.Keep(last=9), worker="none", signals=(), **options
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with managed(tmp_path / "run") as manager:
        for step in (1, 2, 3):
            manager.step(step, state_of(step))
    return tmp_path / "run"


def data_of(root: Path, step: int, section: str) -> Path:
    return next((root / f"step-{step}" / section).iterdir())


def test_all_steps_are_checked_the_newest_first(root: Path) -> None:
    seen: list[str] = []

    def note(call: disk.Call, do: Any) -> Any:
        if call.verb == "read" and call.path.endswith(".safetensors"):
            seen.append(LocalPlace(call.path).parents[1].name)
        return do()

    with managed(root) as manager, disk.hooked(note):
        checked = manager.scrub().wait(240)
    assert [one.step for one in checked] == [3, 2, 1] and all(one.whole for one in checked)
    assert list(dict.fromkeys(seen)) == ["step-3", "step-2", "step-1"]
    assert set(msgspec.json.decode((root / NOTE).read_bytes())["steps"]) == {"step-1", "step-2", "step-3"}


def test_damage_is_told_and_another_step_is_restored(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    flip(data_of(root, 3, "model"), 5000)
    with managed(root) as manager:
        with caplog.at_level(logging.WARNING, "holdfast"):
            found = manager.scrub().wait(240)[0]
        assert (found.step, found.whole, found.tensors) == (3, False, ("model/w",))
        assert "step-3 is damaged" in caplog.text and "model/w" in caplog.text
        into = state_of(0)
        loaded = manager.restore(into, only="frozen")
        assert loaded is not None and loaded.step == 2, "although what is asked for of step 3 is whole"
        # Saved anew it is another checkpoint, of which nothing bad is known.
        manager.save(3, state_of(3), overwrite=True)
        loaded = manager.restore(into)
        assert loaded is not None and loaded.step == 3


def test_if_all_are_damaged_loading_decides(root: Path) -> None:
    for step in (1, 2, 3):
        flip(data_of(root, step, "frozen"), 5000)
    with managed(root) as manager:
        assert not any(one.whole for one in manager.scrub().wait(240))
        loaded = manager.restore(state_of(0), only="model")
        assert loaded is not None and loaded.step == 3


def test_neighbours_mend(root: Path) -> None:
    before = contents_of(root)
    flip(data_of(root, 3, "frozen"), 5000)
    with managed(root) as manager:
        found = manager.scrub(repair=True).wait(240)[0]
    assert found.whole and found.mended == 3600
    del (after := contents_of(root))[NOTE]
    assert after == before


def test_what_was_found_whole_of_late_is_not_read_again(root: Path) -> None:
    with managed(root) as manager:
        first = manager.scrub(every=3600.0)
        wait_until(lambda: len(first.checked) == 3)
    flip(data_of(root, 2, "model"), 5000)
    with managed(root) as manager:
        manager.save(4, state_of(4))
        again = manager.scrub(every=3600.0)
        wait_until(lambda: bool(again.checked))
        again.stop()
        assert [one.step for one in again.checked] == [4]
        assert [one.step for one in manager.scrub().wait(240) if not one.whole] == [2], "without every= all are read"


def test_it_waits_while_a_save_is_under_way(root: Path) -> None:
    busy = threading.Event()
    busy.set()
    looked = threading.Event()
    reads: list[str] = []

    def note(call: disk.Call, do: Any) -> Any:
        if call.verb == "read" and call.offset >= 4096 and call.path.endswith(".safetensors"):
            reads.append(call.path)
        return do()

    def is_busy() -> bool:
        looked.set()
        return busy.is_set()

    with disk.hooked(note):
        scrubbing = Scrubbing(
            Steps(root, NAME), every=None, rate=1e9, repair=False, sources=lambda name: [], busy=is_busy
        )
        assert looked.wait(240)
        looked.clear()
        assert looked.wait(240) and not reads
        busy.clear()
        assert len(scrubbing.wait(240)) == 3 and reads


def test_closing_ends_it(root: Path) -> None:
    manager = managed(root)
    slow = manager.scrub(rate=1.0)
    manager.close()
    assert slow.done and len(slow.wait()) < 3
    with pytest.raises(ValueError, match="rate"):
        manager.scrub(rate=0)


def test_a_step_that_retention_takes_is_not_called_damaged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    def take(call: disk.Call, do: Any) -> Any:
        if call.verb == "open" and "step-3/model" in call.path:
            shutil.rmtree(root / "step-3", ignore_errors=True)
        return do()

    with managed(root) as manager, disk.hooked(take), caplog.at_level(logging.WARNING, "holdfast"):
        assert [one.step for one in manager.scrub().wait(240)] == [2, 1]
    assert "damaged" not in caplog.text


def test_a_section_that_is_dropped_meanwhile_is_not_called_damaged(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dropped: list[int] = []

    def drop(call: disk.Call, do: Any) -> Any:
        if call.verb == "open" and "step-3/frozen" in call.path and not dropped:
            dropped.append(1)
            holdfast.tools.drop(root / "step-3", "frozen")
        return do()

    with managed(root) as manager, disk.hooked(drop), caplog.at_level(logging.WARNING, "holdfast"):
        assert [one.step for one in manager.scrub().wait(240)] == [2, 1]
        assert all(one.whole for one in manager.scrub().wait(240))
    assert dropped and "damaged" not in caplog.text


def test_a_manifest_that_rots_is_told(root: Path) -> None:
    flip(root / "step-2" / "manifest.json", 300)
    with managed(root) as manager:
        found = {one.step: one.whole for one in manager.scrub().wait(240)}
    assert found == {1: True, 2: False, 3: True}


def test_steps_in_a_store_behind_a_fast_tier(tmp_path: Path) -> None:
    with managed(tmp_path / "store", fast=tmp_path / "fast", upload=holdfast.storage.Upload(every=1)) as manager:
        for step in (1, 2):
            manager.step(step, state_of(step))
    file = data_of(tmp_path / "store", 2, "model")
    before = file.read_bytes()
    flip(file, 5000)
    with managed(tmp_path / "store", fast=tmp_path / "fast") as manager:
        checked = manager.scrub(repair=True).wait(240)
    assert [(one.step, one.whole, one.mended) for one in checked] == [(2, True, 2000), (1, True, 0)]
    assert file.read_bytes() == before
