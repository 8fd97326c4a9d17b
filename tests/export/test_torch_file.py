"""Conversions to one file of torch's: what `torch.load(weights_only=True)` makes of it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

import holdfast
from tests.export import states


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_torch_loads_all_of_it(mmap: bool, source: Path, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    converted = holdfast.convert(source, path, to="torch")
    loaded = torch.load(path, weights_only=True, mmap=mmap)
    states.same(loaded, states.whole(holdfast.open(source)))
    head, emb = loaded["model"]["head.weight"], loaded["model"]["emb.weight"]
    assert head.untyped_storage().data_ptr() == emb.untyped_storage().data_ptr(), "tied tensors share their storage"
    assert converted.left_out == ["attachments/config.json", "attachments/tokenizer/merges.txt"]
    assert converted.nbytes == path.stat().st_size
    assert 0 < converted.bytes_unverified <= states.wide(1).nbytes, "only the columns are read without their blocks"


def test_every_sum_in_the_archive_is_right(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "state.pt", to="torch", dtype=torch.float16)
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        assert archive.testzip() is None
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    assert torch.equal(loaded["model"]["rows.weight"], states.wide(0).half())
    assert loaded["numbers"][3].dtype == torch.float16 and loaded["kinds"]["int8"].dtype == torch.int8


def test_into_a_module(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.BatchNorm1d(7))
    holdfast.save({"model": module}, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "m.pt", to="torch", rename=lambda name: name.removeprefix("model/"))
    other = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.BatchNorm1d(7))
    other.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    states.same(dict(other.state_dict()), dict(module.state_dict()))


@pytest.mark.slow
def test_many_small_tensors(tmp_path: Path) -> None:
    state = {"w": {f"t{i}": torch.full((i % 7, 3), float(i)) for i in range(2000)}}
    holdfast.save(state, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "m.pt", to="torch")
    states.same(torch.load(tmp_path / "m.pt", weights_only=True), state)


def test_what_torch_could_not_load_is_told_before_anything_is_copied(tmp_path: Path) -> None:
    holdfast.save({"w": torch.ones(3), "a": {"huge": 1 << 4000}}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Unsupported, match="a/huge: an integer of 4001 bits.*only="):
        holdfast.convert(tmp_path / "c", tmp_path / "m.pt", to="torch")
    assert not list(tmp_path.glob("m.pt*"))
    holdfast.convert(tmp_path / "c", tmp_path / "m.pt", to="torch", only="w")
    assert torch.load(tmp_path / "m.pt")["w"].sum() == 3
