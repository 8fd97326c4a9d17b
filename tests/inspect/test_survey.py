"""Roots in every state that a run may leave them in, of ours and of others, on disk and in a store."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.commit.folder import delete_checkpoint
from holdfast.formats.own import read_manifest
from holdfast.inspect.history import Past
from holdfast.inspect.survey import Step, survey
from holdfast.inspect.usage import usage_of_root
from holdfast.ondisk import part
from holdfast.ondisk.part import Part
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests.citing import save_on, state_of
from tests.damaging import contents_of, flip
from tests.formats.truth import GOLDEN


def by_name(root: Any, **how: Any) -> dict[str, Step]:
    return {step.name: step for step in survey(root, **how)}


def data_file(folder: Path) -> Path:
    return sorted(folder.rglob("*.safetensors"))[0]


def make_pending(folder: Path) -> None:
    """As if the first rank had died right before its commit."""
    record = read_manifest(folder)
    files = [(str(f.path), f.bytes, f.header_bytes, f.header_digest) for f in record.data_files]
    (folder / "parts").mkdir()
    told = Part(save=record.save, rank=0, world_size=1, files=files, manifest=record)
    (folder / part.file_name(0, record.save)).write_bytes(part.encode(told))
    (folder / "manifest.json").unlink()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which each step is in another state."""
    root = LocalPlace(tmp_path_factory.mktemp("run"))
    for step in range(1, 9):
        holdfast.save(state_of(step), root / f"step-{step}", step=step, files={"a.txt": b"x" * 100})
    (root / "step-2" / "manifest.json").write_text('{"format":"holdfast","ver')
    data_file(root / "step-3").unlink()
    with data_file(root / "step-4").open("ab") as file:
        file.write(b"x")
    make_pending(root / "step-5")
    (root / "step-6" / "manifest.json").unlink()
    flip(data_file(root / "step-7"), 100)
    holdfast.tools.drop(root / "step-8", "optimizer")
    (root / "logs").mkdir()
    (root / "logs" / "out.txt").write_text("hello")
    (root / "notes.txt").write_text("hello")
    return root


def test_each_state_is_told(run: Path) -> None:
    before = contents_of(run)
    found = by_name(run)
    assert {name: step.health for name, step in found.items()} == {
        "step-1": "whole", "step-2": "damaged", "step-3": "damaged", "step-4": "damaged", "step-5": "pending",
        "step-6": "unfinished", "step-7": "whole", "step-8": "whole",
    }  # fmt: skip
    assert [step.step for step in survey(run)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert found["step-8"].lost == ("optimizer",) and found["step-1"].lost == ()
    assert "truncated" in found["step-2"].fault and "is missing" in found["step-3"].fault
    assert "instead of" in found["step-4"].fault and f"holdfast rescue {run}/step-5" in found["step-5"].fault
    whole = found["step-1"]
    assert whole.nbytes == whole.own == holdfast.open(run / "step-1").nbytes + 100
    assert (whole.world_size, whole.format, whole.run) == (1, "holdfast", holdfast.open(run / "step-1").run)
    assert found["step-5"].nbytes == found["step-1"].nbytes - 100 and whole.created.startswith("20")  # type: ignore[union-attr]
    assert by_name(run, headers=True)["step-7"].health == "damaged"
    assert contents_of(run) == before


def test_what_is_pending_can_be_recovered(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-5", tmp_path / "step-5")
    holdfast.tools.recover(tmp_path / "step-5")
    assert [step.health for step in survey(tmp_path)] == ["whole"]


def test_what_is_being_written(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-6", tmp_path / "step-6")
    held = data_file(tmp_path / "step-6").open_locked()
    try:
        assert by_name(tmp_path)["step-6"].health == "writing"
    finally:
        os.close(held)
    assert by_name(tmp_path)["step-6"].health == "unfinished"


def test_steps_that_borrow(tmp_path: Path) -> None:
    save_on(state_of(1), tmp_path / "step-1")
    save_on(state_of(2), tmp_path / "step-2", tmp_path / "step-1")
    save_on(state_of(3, model=1), tmp_path / "step-3", tmp_path / "step-2")
    found = by_name(tmp_path)
    assert found["step-1"].own == found["step-1"].nbytes == found["step-3"].nbytes
    assert found["step-2"].own < found["step-3"].own < found["step-3"].nbytes
    data_file(tmp_path / "step-1").unlink()
    assert {step.health for step in survey(tmp_path)} == {"damaged"}


def test_metrics_of_a_manager(tmp_path: Path) -> None:
    manager = holdfast.CheckpointManager(tmp_path, every=1, keep=holdfast.Keep(last=9))
    for step, metric in ((3, 0.5), (7, None)):
        manager.save(step, {"model": {"w": torch.zeros(3)}}, metric=metric)
    manager.close()
    assert [(step.step, step.metric) for step in survey(tmp_path)] == [(3, 0.5), (7, None)]


def test_tiers(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-1", tmp_path / "fast" / "step-1")
    shutil.copytree(run / "step-1", tmp_path / "fast" / "step-2")
    data_file(tmp_path / "fast" / "step-2").unlink()
    shutil.copytree(run / "step-1", tmp_path / "store" / "step-1")
    found = [(s.name, s.tier, s.health) for s in survey(tmp_path / "store", fast=tmp_path / "fast")]
    assert found == [("step-1", "fast", "whole"), ("step-1", "store", "whole"), ("step-2", "fast", "damaged")]
    # A folder that a manager has marked as its fast tier has the files of its own node alone.
    (tmp_path / "fast" / ".holdfast-tier.json").write_text("{}")
    assert by_name(tmp_path / "fast")["step-2"].health == "partly here"


def test_a_root_that_is_one_checkpoint(run: Path) -> None:
    (found,) = survey(run / "step-1")
    assert (found.name, found.health, found.step) == ("", "whole", 1)


NAMES = sorted(path.parent.name for path in GOLDEN.glob("*/expected.json"))
QUICK = ("composer_tar_2r", "dcp_single", "ds_zero1_bf16opt_2r", "megatron_flat_tp2", "torchsave_zip_frozen")


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_every_format(name: str, tmp_path: Path) -> None:
    source = GOLDEN / name / "ckpt"
    (alone,) = survey(source) if source.is_dir() else (None,)
    shutil.copytree(source, tmp_path / "step-12")
    (found,) = survey(tmp_path)
    opened = holdfast.open(source)
    assert (found.health, found.format, found.nbytes) == ("opens", opened.format, opened.nbytes)
    assert found.step == (12 if opened.step is None else opened.step) and found.name == "step-12"
    assert alone is not None and alone.format == opened.format


def test_a_folder_of_several_formats(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-1", tmp_path / "ours")
    shutil.copytree(GOLDEN / "dcp_single" / "ckpt", tmp_path / "theirs")
    torch.save({"model": {"w": torch.zeros(3)}}, tmp_path / "last.pt")
    (tmp_path / "readme.md").write_text("x")
    found = by_name(tmp_path)
    assert {name: step.format for name, step in found.items()} == {
        "ours": "holdfast", "theirs": "torch.distributed.checkpoint", "last.pt": "torch.save",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["composer_tar_2r", "dcp_hf_sharded_2r"])
def test_folders_whose_names_are_numbers(name: str, tmp_path: Path) -> None:
    for folder in ("0", "2", "3"):  # what is told of how these are read has such numbers in it
        shutil.copytree(GOLDEN / name / "ckpt", tmp_path / folder)
    assert {step.name: step.health for step in survey(tmp_path)} == {"0": "opens", "2": "opens", "3": "opens"}


def test_links_that_lead_nowhere(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-1", tmp_path / "step-1")
    shutil.copytree(run / "step-6", tmp_path / "step-6")
    for folder in (tmp_path, tmp_path / "step-1", tmp_path / "step-6"):
        (folder / "circle").symlink_to("circle")
        (folder / "nothing").symlink_to("gone")
    found = by_name(tmp_path)
    assert {n: s.health for n, s in found.items()} == {"step-1": "whole", "step-6": "unfinished"}
    assert usage_of_root(tmp_path).leavings > 0


def test_a_fast_tier_that_is_not_there(run: Path, tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is no folder .*/fast"):
        survey(run, fast=tmp_path / "fast")


def test_one_that_is_broken_hides_no_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(GOLDEN / "dcp_single" / "ckpt", tmp_path / name)
    (tmp_path / "a" / ".metadata").write_bytes((tmp_path / "a" / ".metadata").read_bytes()[:99])
    found = by_name(tmp_path)
    assert found["a"].health in ("damaged", "unreadable") and found["a"].fault and found["b"].health == "opens"


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.NotACheckpoint, match="no step was saved here yet"):
        survey(tmp_path)
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is nothing at"):
        survey(tmp_path / "none")


def test_a_data_set_beside_a_run_is_not_walked(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-6", tmp_path / "run" / "step-6")
    deep = tmp_path / "run" / "data" / "a" / "b" / "c" / "d"
    deep.mkdir(parents=True)
    (deep / "x.bin").write_text("x")
    listed: list[str] = []

    def note(call: disk.Call, do: Callable[[], Any]) -> Any:
        listed.extend([call.path] * (call.verb == "list"))
        return do()

    with disk.hooked(note):
        assert [step.name for step in survey(tmp_path / "run")] == ["step-6"]
        assert "data" in {name for path in listed for name in LocalPlace(path).parts}
        with pytest.raises(
            holdfast.errors.NotACheckpoint, match="holds no manifest.json, and no checkpoint of a format"
        ):
            holdfast.open(tmp_path / "run" / "data")
        with pytest.raises(holdfast.errors.NotACheckpoint, match="saves that never committed, step-6"):
            Past(tmp_path / "run").look()
    assert not [path for path in listed if LocalPlace(path).is_relative_to(deep.parent)]


def test_in_a_store(run: Path, tmp_path: Path) -> None:
    store = Memory()
    for name in ("step-1", "step-6", "step-7"):
        for file in sorted((run / name).rglob("*")):
            if file.is_file():
                data = file.read_bytes()
                store.put(f"runs/{file.relative_to(run)}", [data], len(data))
    root = StorePlace(store, "runs")
    found = by_name(root)
    # In a store nobody can tell a save that died a moment ago from one that is under way.
    assert {n: s.health for n, s in found.items()} == {"step-1": "whole", "step-6": "writing", "step-7": "whole"}
    assert by_name(root, headers=True)["step-7"].health == "damaged"
    assert [s.name for s in survey(root / "step-1")] == [""]
    with pytest.raises(holdfast.errors.NotACheckpoint, match="there is nothing at"):
        survey(StorePlace(store, "elsewhere"))


def test_a_swept_step_whose_files_others_borrow_is_neither_dead_nor_written(tmp_path: Path) -> None:
    for root in (tmp_path, StorePlace(Memory(), "run")):
        save_on(state_of(1), root / "step-1")
        for step in (2, 3):
            save_on(state_of(step, model=step), root / f"step-{step}", root / "step-1")
        delete_checkpoint(root / "step-1")
        found = by_name(root)
        assert {name: step.health for name, step in found.items()} == {
            "step-1": "lent", "step-2": "whole", "step-3": "whole",
        }  # fmt: skip
        assert "since step-2, step-3 reuse them" in found["step-1"].fault
        assert by_name(root / "step-1")[""].health == "lent"
        stray = next(iter(save_on(state_of(1, model=9), root / "other").data_files)).path
        (root / "step-1" / stray).write_small(b"x")  # a save there, of whichever kind, is told as before
        assert by_name(root)["step-1"].health == ("writing" if isinstance(root, StorePlace) else "unfinished")
