"""Conversions to our own format: what `holdfast.load` and `verify` make of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.ondisk import datafile
from tests import format_reader
from tests.export import states


def test_all_comes_over(source: Path, tmp_path: Path) -> None:
    converted = holdfast.convert(source, tmp_path / "c")
    before, after = holdfast.open(source), holdfast.open(tmp_path / "c")
    after.verify()
    states.same(states.whole(after), states.whole(before))
    assert (after.step, after.world_size) == (7, 2) and after.manifest.run == before.manifest.run
    assert after.manifest.created == before.manifest.created and after.manifest.save != before.manifest.save
    assert after.manifest.aliases == {"model/head.weight": "model/emb.weight"}
    assert after.attachments == before.attachments and after.attachment("tokenizer/merges.txt") == b"a b"
    assert converted.nbytes == sum(len(data) for data in states.files(tmp_path / "c").values())
    assert not converted.left_out and not converted.skipped and not converted.renamed and not converted.cast
    assert all(record.cells is None for record in after.records.values()), "every tensor is whole"


def test_the_file_of_a_model_loads_straight(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c", only="model")
    (file,) = (tmp_path / "c" / "model").iterdir()
    loaded = load_file(file)
    assert torch.equal(loaded["rows.weight"], states.wide(0)) and loaded["seen"] == 12


def test_another_reader_of_the_format_agrees(source: Path, tmp_path: Path) -> None:
    """The reader of the tests knows the format from its page alone."""
    holdfast.convert(source, tmp_path / "c")
    found = format_reader.read(tmp_path / "c")
    assert found.manifest["world_size"] == 2 and torch.equal(found.tensors["model/rows.weight"], states.wide(0))
    states.same(found.per_rank["mine"], states.whole(holdfast.open(source))["mine"])


def test_blocks_of_a_sharded_source_are_all_checked(source: Path, tmp_path: Path) -> None:
    """Rows are read by whole blocks wherever the target's own blocks end; columns only if that is asked for."""
    rows = holdfast.convert(source, tmp_path / "rows", only="model")
    assert rows.bytes_unverified == 0
    columns = holdfast.convert(source, tmp_path / "columns", only="optimizer", verify="blocks")
    assert columns.bytes_unverified == 0
    assert torch.equal(holdfast.open(tmp_path / "columns").read("optimizer/columns"), states.wide(1))


def test_files_are_bounded(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c", max_shard_bytes=3000)
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    states.same(states.whole(checkpoint), states.whole(holdfast.open(source)))
    model = [f for f in checkpoint.manifest.data_files if f.path.startswith("model/")]
    assert len(model) > 1 and all(datafile.save_of(f.path) for f in checkpoint.manifest.data_files)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e5m2], ids=str)
@pytest.mark.fast_cases("torch.bfloat16")
def test_cast(dtype: torch.dtype, source: Path, tmp_path: Path) -> None:
    converted = holdfast.convert(source, tmp_path / "c", dtype=dtype, only=["model", "optimizer"])
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    for name, wanted in [("model/rows.weight", states.wide(0)), ("optimizer/columns", states.wide(1))]:
        assert torch.equal(checkpoint.read(name).to(torch.float64), wanted.to(dtype).to(torch.float64))
        assert converted.cast[name] == ("float32", str(dtype).removeprefix("torch."))
    assert checkpoint.tensors["model/seen"].dtype == torch.int64 and "model/seen" not in converted.cast


def test_renamed_and_in_part(source: Path, tmp_path: Path) -> None:
    converted = holdfast.convert(
        source,
        tmp_path / "c",
        only=["model", "layers", "step"],
        rename={"model": "net", "layers/1": "layers/2"},
        step=9,
    )
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    assert set(checkpoint.state_dict()) == {"net", "layers", "step"} and checkpoint.step == 9
    assert checkpoint.manifest.aliases == {"net/head.weight": "net/emb.weight"}
    layers = checkpoint.state_dict()["layers"]
    assert isinstance(layers, list) and layers[1] is None and layers[2]["w"].shape == (2, 2)
    assert converted.renamed["model/seen"] == "net/seen" and "optimizer/columns" in converted.skipped


def test_only_the_second_name_of_a_tied_tensor(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c", only="model/head.weight")
    checkpoint = holdfast.open(tmp_path / "c")
    assert list(checkpoint.tensors) == ["model/head.weight"] and not checkpoint.manifest.aliases
    assert torch.equal(checkpoint.read("model/head.weight"), states.small()["model"]["head.weight"])


def test_values_alone(source: Path, tmp_path: Path) -> None:
    holdfast.convert(source, tmp_path / "c", only=["config", "rng"])
    checkpoint = holdfast.open(tmp_path / "c")
    checkpoint.verify()
    states.same(checkpoint.state_dict()["config"], states.small()["config"])
    states.same(checkpoint.per_rank("rng", 1), holdfast.open(source).per_rank("rng", 1))


def test_the_same_source_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        holdfast.convert(source, tmp_path / name)
    assert states.files(tmp_path / "a") == states.files(tmp_path / "b")
    holdfast.convert(source, tmp_path / "c", only="model")
    saves = {holdfast.open(tmp_path / name).manifest.save for name in "abc"}
    assert len(saves) == 2, "another selection is another save"
