"""What programs pass to torch's functions, and what they look for afterwards: writers, planners, `.metadata`."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException

import holdfast
from holdfast import dcp
from holdfast.dcp import hint
from holdfast.engine.folder import HINT
from tests import pool

STATE = {"w": torch.arange(4.0), "app": {"n": 1, "list": [1, 2]}}


def loaded(**options: Any) -> dict[str, Any]:
    into = {"w": torch.zeros(4), "app": {"n": 0, "list": [0, 0]}}
    dcp.load(into, **options)
    return into


def as_saved(state: dict[str, Any]) -> bool:
    return torch.equal(state["w"], STATE["w"]) and state["app"] == STATE["app"]


class Doubling(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data * 2 if isinstance(data, torch.Tensor) else data


class Halving(dcp.DefaultLoadPlanner):
    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        tensor /= 2


@pytest.mark.parametrize("call", ["save", "async_save"])
@pytest.mark.parametrize("form", ["name", "position"])
@pytest.mark.parametrize("kinds", ["torch", "holdfast"])
def test_writers_and_readers_by_name_and_by_position(tmp_path: Path, call: str, form: str, kinds: str) -> None:
    path = tmp_path / "c"
    writer = dcp.FileSystemWriter(path, thread_count=2) if kinds == "torch" else dcp.Writer(path)
    reader = dcp.FileSystemReader(path) if kinds == "torch" else dcp.Reader(path)
    save = getattr(dcp, call)
    done = save(STATE, writer) if form == "position" else save(STATE, storage_writer=writer)
    if call == "async_save":
        done.result()
    if form == "position":
        into = {"w": torch.zeros(4), "app": {"n": 0, "list": [0, 0]}}
        dcp.load(into, reader)
        assert as_saved(into)
    assert as_saved(loaded(storage_reader=reader))


def test_a_writer_that_may_not_overwrite(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointException, match="already holds a committed checkpoint"):
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "c", overwrite=False))
    with pytest.raises(TypeError, match="given twice"):
        dcp.save(STATE, dcp.Writer(tmp_path / "d"), storage_writer=dcp.Writer(tmp_path / "d"))


def test_fsspec_by_its_path(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("torch.distributed.checkpoint._fsspec_filesystem", exc_type=ImportError)
    dcp.save(STATE, storage_writer=fsspec.FsspecWriter(f"{tmp_path}/c"))
    assert as_saved(loaded(storage_reader=fsspec.FsspecReader(f"{tmp_path}/c")))


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_planners_of_ones_own_plan(tmp_path: Path, call: str) -> None:
    done = getattr(dcp, call)(STATE, checkpoint_id=tmp_path / "c", planner=Doubling())
    if call == "async_save":
        done.result()
    assert torch.equal(holdfast.open(tmp_path / "c").read("w"), STATE["w"] * 2)
    assert as_saved(loaded(checkpoint_id=tmp_path / "c", planner=Halving()))


@pytest.mark.parametrize(
    "planner",
    [
        dcp.DefaultSavePlanner(flatten_state_dict=False),
        dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True, enable_plan_caching=True),
    ],
)
def test_arguments_of_torchs_planner(tmp_path: Path, planner: dcp.DefaultSavePlanner) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c", planner=planner)
    assert as_saved(loaded(checkpoint_id=tmp_path / "c", planner=dcp.DefaultLoadPlanner(flatten_state_dict=False)))


def test_errors_are_torchs_too(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict") as caught:
        dcp.load({"v": torch.ones(2)}, checkpoint_id=tmp_path / "c")
    error = caught.value
    assert isinstance(error, holdfast.Mismatch) and error.failures == {0: (error, error.failures[0][1])}
    assert "Traceback" not in str(error)
    with pytest.raises(CheckpointException, match="is code"):
        dcp.save({"f": print}, checkpoint_id=tmp_path / "d")
    with pytest.raises(CheckpointException, match="is code") as caught:
        dcp.async_save({"f": print}, checkpoint_id=tmp_path / "d").result()
    assert isinstance(caught.value, holdfast.SaveFailed)
    with pytest.raises(CheckpointException, match="there is nothing at"):
        dcp.load({"w": torch.ones(4)}, checkpoint_id=tmp_path / "none")


# `.metadata`


def save_on_ranks(path: str, call: str) -> tuple[bool, str]:
    if call == "Writer":
        torch_dcp.save(STATE, storage_writer=dcp.Writer(path))
    elif call == "save":
        dcp.save(STATE, checkpoint_id=path)
    else:
        dcp.async_save(STATE, checkpoint_id=path).result()
    there = os.path.isfile(os.path.join(path, HINT))
    meta = dcp.Reader(path).read_metadata()
    return there, f"{meta.version} {meta.storage_meta.save_id if meta.storage_meta else None}"


@pytest.mark.parametrize("call", ["save", "async_save", "Writer"])
def test_programs_that_look_for_it_find_it_on_every_rank(tmp_path: Path, call: str) -> None:
    told = pool.run(2, save_on_ranks, str(tmp_path / "c"), call)
    assert told[0] == told[1] and told[0][0]
    version, save_id = told[0][1].split()
    assert version == "1.0.0" and uuid.UUID(save_id)


def test_torchs_own_reader_knows_what_is_there_and_says_who_can_load_it(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    torch_dcp.save(STATE, checkpoint_id=tmp_path / "theirs")
    ours, theirs = (torch_dcp.FileSystemReader(tmp_path / n).read_metadata() for n in ("c", "theirs"))
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.planner_data == theirs.planner_data
    assert ours.storage_data.keys() == theirs.storage_data.keys() and ours.version == theirs.version
    with pytest.raises(CheckpointException, match=r"load this checkpoint with holdfast\.dcp\.load"):
        torch_dcp.load({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "c")


def test_it_goes_with_the_checkpoint_and_torchs_own_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        dcp.save({**STATE, "step": step}, checkpoint_id=tmp_path / "c")  # over the one before
        holdfast.open(tmp_path / "c").verify()
    folder = tmp_path / "c"
    (folder / "manifest.json").unlink()
    for load in (loaded, lambda checkpoint_id: holdfast.open(checkpoint_id)):
        with pytest.raises(holdfast.NotACheckpoint):
            load(checkpoint_id=folder)
    dcp.save(STATE, checkpoint_id=folder)  # over what a save left that never committed, or lost its manifest
    assert as_saved(loaded(checkpoint_id=folder))
    root = tmp_path / "run"
    with holdfast.CheckpointManager(root, every=1, keep=holdfast.Keep(last=1), name="step-{step}") as manager:
        dcp.save(STATE, checkpoint_id=root / "step-1")
        manager.save(2, {"w": torch.ones(2)})
    assert [path.name for path in root.glob("step-*")] == ["step-2"], "nothing of the first is left behind"
    torch_dcp.save(STATE, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(holdfast.SaveFailed, match="holds other files"):
        dcp.save(STATE, checkpoint_id=tmp_path / "theirs")
    assert as_saved(loaded(checkpoint_id=tmp_path / "theirs"))


def test_a_copy_has_it_too_and_another_save_in_its_place_does_not(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    holdfast.copy(tmp_path / "c", tmp_path / "copy")
    assert (tmp_path / "copy" / HINT).read_bytes() == (tmp_path / "c" / HINT).read_bytes()
    holdfast.save({"other": torch.ones(2)}, tmp_path / "copy", overwrite=True)
    assert not (tmp_path / "copy" / HINT).exists(), "it would tell of tensors that are gone"
    torch_dcp.save(STATE, checkpoint_id=tmp_path / "theirs")
    shutil.copy(tmp_path / "theirs" / HINT, tmp_path / "c" / HINT)  # a file of torch's own is nobody's but its own
    holdfast.copy(tmp_path / "c", tmp_path / "second")
    assert not (tmp_path / "second" / HINT).exists()


def test_a_hint_that_cannot_be_written_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no hint today")

    monkeypatch.setattr(hint, "describe", fail)
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    dcp.async_save(STATE, checkpoint_id=tmp_path / "d").result()
    assert as_saved(loaded(checkpoint_id=tmp_path / "c")) and as_saved(loaded(checkpoint_id=tmp_path / "d"))
    assert "no hint today" in caplog.text and not (tmp_path / "c" / HINT).exists()
