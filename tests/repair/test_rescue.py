"""`rescue`: a manifest made anew says what the lost one said, or says what it cannot; half a save is never one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.formats.own import read_manifest
from holdfast.ondisk import part
from holdfast.run.keep import Keep
from holdfast.run.retention import KeptSteps
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.damaging import contents_of, flip
from tests.ondisk.test_format import thread_save


def state_of(step: int) -> dict[str, Any]:
    shared = torch.full((3, 3), float(step))
    return {
        "model": {
            "w": torch.arange(60.0).view(12, 5) + step, "half": torch.ones(7, dtype=torch.bfloat16), "tied": shared,
            "too": shared, "n": torch.tensor(step), "none": torch.zeros(0, 4),
            "c": torch.ones(2, dtype=torch.complex64),
        },
        "optimizer": {"state": [{"m": torch.full((4,), step)}, {"m": torch.zeros(2)}], "lr": 0.5},
        "bias": torch.arange(3) + step,
        "step": step,
        "rng": holdfast.PerRank({"k": [step], "t": torch.arange(4)}),
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        holdfast.save(state_of(step), tmp_path / f"step-{step}", step=step, files={"config": b"deep"})
    return tmp_path


def alike(folder: Any, step: int) -> None:
    opened, expected = holdfast.open(folder), state_of(step)
    for key in ("w", "half", "tied", "n", "none", "c"):
        assert torch.equal(opened.read(f"model/{key}"), expected["model"][key]), key
    assert torch.equal(opened.read("bias"), expected["bias"])
    assert torch.equal(opened.read("optimizer/state/0/m"), expected["optimizer"]["state"][0]["m"])
    assert opened.per_rank("rng", 0)["k"] == [step]
    assert opened.verify().whole


def test_from_headers_alone(run: Path) -> None:
    lost = read_manifest(run / "step-2")
    (run / "step-2" / "manifest.json").unlink()
    done = holdfast.tools.rescue(run / "step-2")
    assert (done.origin, done.save, done.step, done.tensors) == ("headers", lost.save, 2, len(lost.tensors))
    assert not done.damages and any("values" in text for text in done.lost)
    alike(run / "step-2", 2)
    made = read_manifest(run / "step-2")
    assert made.tensors == {**made.tensors, **lost.tensors} and "without values" in made.producer["rescued"]
    assert made.per_rank == lost.per_rank and made.attachments == lost.attachments
    assert sorted(map(str, made.files)) == sorted(map(str, lost.files))


def test_a_neighbour_gives_values_and_what_was_tied(run: Path) -> None:
    lost = read_manifest(run / "step-2")
    (run / "step-2" / "manifest.json").unlink()
    done = holdfast.tools.rescue(run / "step-2", like=run / "step-1")
    made = read_manifest(run / "step-2")
    for key in ("run", "step", "tensors", "containers", "aliases", "per_rank", "attachments", "world_size"):
        assert getattr(made, key) == getattr(lost, key), key
    assert list(made.tensors) == list(lost.tensors)
    assert holdfast.open(run / "step-2").values["step"] == 1, "it is the neighbour's, and that is told"
    assert any("step 1" in text for text in done.lost) and "rescued" in made.producer
    assert "state['step'] is 1 too: set it to the step of this save after a load" in done.lost
    into = state_of(0)
    holdfast.load(run / "step-2", into)
    assert torch.equal(into["model"]["too"], state_of(2)["model"]["too"])


def test_a_copy_gives_all(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "step-2", tmp_path / "copy")
    flip(run / "step-2" / "manifest.json", 200)
    damaged = (run / "step-2" / "manifest.json").read_bytes()
    done = holdfast.tools.rescue(run / "step-2", like=tmp_path / "copy")
    assert done.origin == "copy"
    there = contents_of(run / "step-2")
    assert there.pop("manifest.json.damaged") == damaged
    assert there == contents_of(tmp_path / "copy")


def test_the_damaged_manifest_is_not_in_the_way_of_a_later_save(run: Path) -> None:
    flip(run / "step-1" / "manifest.json", 200)
    holdfast.tools.rescue(run / "step-1")
    steps = KeptSteps(run, "step-{step}")
    steps.clean(())
    assert (run / "step-1" / "manifest.json.damaged").exists()
    steps.prune(Keep(last=1).verdict({1: None, 2: None}), {1, 2})
    assert not (run / "step-1").exists()
    flip(run / "step-2" / "manifest.json", 200)
    holdfast.tools.rescue(run / "step-2")
    (run / "step-2" / "manifest.json").unlink()
    holdfast.save(state_of(2), run / "step-2", step=2)
    assert not (run / "step-2" / "manifest.json.damaged").exists()


def test_a_good_manifest_is_left_alone(run: Path) -> None:
    before = contents_of(run)
    with pytest.raises(holdfast.errors.StorageError, match="needs no rescue"):
        holdfast.tools.rescue(run / "step-2")
    (run / "step-1" / "manifest.json").write_text('{"somebody": "else"}')
    with pytest.raises(holdfast.errors.NotACheckpoint, match="not written by holdfast"):
        holdfast.tools.rescue(run / "step-1")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="nothing to rescue"):
        holdfast.tools.rescue(run / "nothing")
    before["step-1/manifest.json"] = b'{"somebody": "else"}'
    assert contents_of(run) == before


def save_on_ranks(path: str, step: int) -> None:
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    full = torch.arange(60.0).view(12, 5) + step
    rows = 12 // size
    state = {
        "model": {"w": holdfast.Shard(full[rank * rows : (rank + 1) * rows], (12, 5), (rank * rows, 0))},
        "few": {"only": torch.ones(3)},
        "step": step,
        "rng": holdfast.PerRank(rank),
    }
    holdfast.save(state, path, step=step)


def test_pieces_of_many_ranks(tmp_path: Path) -> None:
    for step in (1, 2):
        pool.run(3, save_on_ranks, str(tmp_path / f"step-{step}"), step)
    lost = read_manifest(tmp_path / "step-2")
    (tmp_path / "step-2" / "manifest.json").unlink()
    with pytest.raises(holdfast.errors.Mismatch, match="section few, has no file of 2 of 3 ranks.*like="):
        holdfast.tools.rescue(tmp_path / "step-2")
    assert not (tmp_path / "step-2" / "manifest.json").exists()
    done = holdfast.tools.rescue(tmp_path / "step-2", like=tmp_path / "step-1")
    made = read_manifest(tmp_path / "step-2")
    assert not done.damages and made.tensors.keys() == lost.tensors.keys()
    opened = holdfast.open(tmp_path / "step-2")
    assert torch.equal(opened.read("model/w"), torch.arange(60.0).view(12, 5) + 2)
    assert [opened.per_rank("rng", rank) for rank in range(3)] == [0, 1, 2]
    # With a file lost there is no checkpoint to be had of it.
    (tmp_path / "step-2" / "manifest.json").unlink()
    next((tmp_path / "step-2" / "model").glob("00001*")).unlink()
    for like in (None, tmp_path / "step-1"):
        with pytest.raises(holdfast.errors.Damaged, match=r"model/w of shape \[12, 5\] is not whole: 20 of 60"):
            holdfast.tools.rescue(tmp_path / "step-2", like=like)
    assert not (tmp_path / "step-2" / "manifest.json").exists()


def test_a_section_that_is_gone_is_seen_beside_a_neighbour(run: Path) -> None:
    (run / "step-2" / "manifest.json").unlink()
    shutil.rmtree(run / "step-2" / "optimizer")
    with pytest.raises(holdfast.errors.Damaged, match="optimizer/state/0/m, which the neighbour has"):
        holdfast.tools.rescue(run / "step-2", like=run / "step-1")
    assert any("nobody knows" in text for text in holdfast.tools.rescue(run / "step-2").lost)


def test_another_model_is_no_neighbour(run: Path, tmp_path: Path) -> None:
    holdfast.save({**state_of(3), "bias": torch.arange(4)}, tmp_path / "other")
    (run / "step-2" / "manifest.json").unlink()
    with pytest.raises(holdfast.errors.Mismatch, match=r"bias is int64 \[3\] here and int64 \[4\] there"):
        holdfast.tools.rescue(run / "step-2", like=tmp_path / "other")


def test_saves_are_not_mixed(run: Path) -> None:
    ours, theirs = read_manifest(run / "step-2"), read_manifest(run / "step-1")
    for file in theirs.data_files:
        shutil.copy(run / "step-1" / file.path, run / "step-2" / file.path)
    (run / "step-2" / "manifest.json").unlink()
    with pytest.raises(holdfast.errors.Mismatch, match=f"files of saves .*{theirs.save}"):
        holdfast.tools.rescue(run / "step-2")
    # Half of one save does not become whole by the other.
    (run / "step-2" / ours.data_files[0].path).unlink()
    done = holdfast.tools.rescue(run / "step-2", like=run / "step-1")
    assert done.save == theirs.save
    alike(run / "step-2", 1)


def test_headers_that_lie_are_found(run: Path) -> None:
    """A header has no sum of its own once the manifest is lost: what it says is held against the bytes."""
    (run / "step-2" / "manifest.json").unlink()
    file = next((run / "step-2" / "model").iterdir())
    data = file.read_bytes()
    at = data.index(b'"sums":"') + 8
    file.write_bytes(data[:at] + b"0000" + data[at + 4 :])
    done = holdfast.tools.rescue(run / "step-2")
    assert done.damages and done.damages[0].tensor.startswith("model/")
    (run / "step-2" / "manifest.json").unlink()
    file.write_bytes(data.replace(b'"rank":"0"', b'"rank":"1"'))
    with pytest.raises(holdfast.errors.Damaged, match="its header says that it is of save, rank and section"):
        holdfast.tools.rescue(run / "step-2")
    file.write_bytes(data[:-1])
    with pytest.raises(holdfast.errors.Damaged, match="cannot be used"):
        holdfast.tools.rescue(run / "step-2")


def test_what_the_first_rank_left(tmp_path: Path) -> None:
    """Of two ranks the second died before its part was written, or its part is lost; its files are there."""
    path = tmp_path / "c"
    thread_save(2, lambda rank: state_of(2), path)
    lost = read_manifest(path)
    drafted = msgspec.structs.replace(lost, files=[[file, 0, 0, ""] for file, *_ in lost.files])
    left = part.Part(save=lost.save, rank=0, world_size=2, files=[], manifest=drafted)
    (path / "manifest.json").unlink()
    (path / "parts").mkdir()
    (path / part.file_name(0, lost.save)).write_bytes(part.encode(left))
    done = holdfast.tools.rescue(path)
    assert done.origin == "parts" and not done.lost and read_manifest(path) == lost
    assert not (path / "parts").exists()


def test_in_a_store(run: Path) -> None:
    place = StorePlace(Memory(), "run/step-2")
    holdfast.copy(run / "step-2", place)
    place.store.delete([(place / "manifest.json").key])
    done = holdfast.tools.rescue(place, like=run / "step-1")
    assert done.step == 2
    alike(place, 2)
