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
from holdfast.commit.folder import HINT
from holdfast.dcp import arguments, flattened
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
    torchs_words = "Checkpoint already exists: .*already holds a committed checkpoint"
    with pytest.raises(CheckpointException, match=torchs_words) as caught:
        dcp.save(STATE, storage_writer=dcp.FileSystemWriter(tmp_path / "c", overwrite=False))
    assert isinstance(caught.value, holdfast.SaveFailed)
    with pytest.raises(CheckpointException, match=torchs_words):
        dcp.async_save(STATE, storage_writer=dcp.Writer(tmp_path / "c", overwrite=False)).result()
    with pytest.raises(CheckpointException, match=torchs_words):
        torch_dcp.save(STATE, storage_writer=dcp.Writer(tmp_path / "c", overwrite=False))
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


def test_storages_of_ones_own_go_with_torchs_engine_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments._say_whose.cache_clear()
    tensors = {"w": torch.arange(4.0), "v": torch.ones(2, 2)}
    for call in (dcp.save, dcp.async_save):
        path = str(tmp_path / call.__name__)
        done = call(tensors, storage_writer=dcp.HuggingFaceStorageWriter(path))
        if call is dcp.async_save:
            done.result()
        assert [file.suffix for file in Path(path).glob("model-*")] == [".safetensors"]
        assert not (Path(path) / "manifest.json").exists()
        into = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        dcp.load(into, storage_reader=dcp.HuggingFaceStorageReader(path))
        assert all(torch.equal(into[name], tensor) for name, tensor in tensors.items())
    said = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
    assert len(said) == 2 and all("HuggingFaceStorage" in text and "not holdfast's" in text for text in said), said


def test_a_url_that_names_no_storage_is_an_error_as_of_holdfast_and_as_of_torch(tmp_path: Path) -> None:
    for call in (dcp.save, dcp.async_save, dcp.load):
        for kind in (ValueError, RuntimeError):
            with pytest.raises(kind, match="Cannot detect which storage abc://abc names: .* no store for abc"):
                call(STATE, checkpoint_id="abc://abc")


def test_the_planner_of_a_load_tells_what_is_there(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    planner = dcp.DefaultLoadPlanner()
    loaded(checkpoint_id=tmp_path / "c", planner=planner)
    assert planner.metadata is not None and planner.metadata.version == "1.0.0"
    assert set(planner.metadata.state_dict_metadata) == {"w", "app.n", "app.list"}


def test_a_tensor_of_another_size_is_told_in_torchs_words(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointException, match=r"Size mismatch: 1 differ:\n *w: saved with shape \[4\], here \[5\]"):
        dcp.load({"w": torch.zeros(5)}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"w": "a value"}, checkpoint_id=tmp_path / "c")
    assert "Size mismatch" not in str(caught.value)


@pytest.mark.parametrize("written", ["holdfast", "torch"])
def test_one_file_of_torch_save_is_made_of_a_checkpoint(tmp_path: Path, written: str) -> None:
    model = torch.nn.Linear(2, 2)
    state = {**STATE, "model": model.state_dict(), "many": [torch.ones(2), torch.zeros(3)]}
    (dcp if written == "holdfast" else torch_dcp).save(state, checkpoint_id=tmp_path / "c")
    dcp.format_utils.dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt")
    assert as_saved(found) and found.keys() == state.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(found["model"][name], tensor)
    assert [tensor.shape for tensor in found["many"]] == [(2,), (3,)]
    with pytest.raises(CheckpointException, match="there is nothing at"):
        dcp.format_utils.dcp_to_torch_save(tmp_path / "none", tmp_path / "none.pt")


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
    assert isinstance(error, holdfast.errors.Mismatch) and error.failures == {0: (error, error.failures[0][1])}
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


def ids_on_ranks(path: str, call: str) -> list[str | None]:
    """The id of a save, as its writer, holdfast's reader and torch's have it."""
    writer: Any = dcp.Writer(path) if call == "Writer" else dcp.FileSystemWriter(path)
    save = torch_dcp.save if call == "Writer" else dcp.save
    save(STATE, storage_writer=writer, planner=Doubling() if call == "planner" else None)
    reader = dcp.Reader(path)
    known, hint_says = (r.read_metadata().storage_meta for r in (reader, torch_dcp.FileSystemReader(path)))
    assert known is not None and hint_says is not None and known.load_id == reader.load_id
    assert str(known.checkpoint_id) == str(hint_says.checkpoint_id) == path
    return [writer.save_id, known.save_id, hint_says.save_id]


@pytest.mark.parametrize("call", ["save", "planner", "Writer"])
def test_writers_know_the_id_that_readers_tell(tmp_path: Path, call: str) -> None:
    told = pool.run(2, ids_on_ranks, str(tmp_path / "c"), call)
    assert len({save_id for ids in told for save_id in ids}) == 1 and uuid.UUID(told[0][0])


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
    for one in theirs.state_dict_metadata.values():
        if hasattr(getattr(one, "properties", None), "strides"):  # of torch 2.15; ours is read by older ones too
            one.properties.strides = None
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
        with pytest.raises(holdfast.errors.NotACheckpoint):
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

    monkeypatch.setattr(flattened, "describe", fail)
    dcp.save(STATE, checkpoint_id=tmp_path / "c")
    dcp.async_save(STATE, checkpoint_id=tmp_path / "d").result()
    assert as_saved(loaded(checkpoint_id=tmp_path / "c")) and as_saved(loaded(checkpoint_id=tmp_path / "d"))
    assert "no hint today" in caplog.text and not (tmp_path / "c" / HINT).exists()
