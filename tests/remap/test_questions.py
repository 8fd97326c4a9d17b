"""Every question to a checkpoint under a map has the answer that a save in the other layout would have given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint import Checkpoint
from holdfast.dcp.flattened import describe
from holdfast.errors import Damaged, Mismatch
from holdfast.inspect.compare import compare, compare_names
from holdfast.inspect.layout import Layouts
from holdfast.inspect.mesh import parse_mesh, parse_rule
from holdfast.inspect.planning import plan
from holdfast.inspect.statistics import statistics, statistics_of_all
from holdfast.inspect.usage import modules, usage
from holdfast.ondisk.box import whole
from holdfast.plan.spread import boxes_held
from holdfast.read.read import read_boxes
from holdfast.read.source import ReadStats
from holdfast.read.wanted import Wanted
from holdfast.remap import Cast, Concatenate, Constant, Pad, Remap
from holdfast.view.checkpoint import checkpoint_page, contents
from holdfast.view.diff import diff_page
from tests.damaging import flip
from tests.remap.models import HUB_TO_NATIVE, Hub, translated

REMAP = Remap(
    [
        *HUB_TO_NATIVE.rules[:-1],
        Pad("tok.weight", 0, after=6, value=0.25),
        HUB_TO_NATIVE.rules[-1],
        Constant("scale", (3, 5), value=2.0),
        Cast("norm.bias", "bfloat16"),
    ],
    HUB_TO_NATIVE.values,
)
"""Composed tensors, renamed ones, a tied and padded one, a made up one and a cast one."""


def native_of(hub: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    native = translated(hub)
    longer = torch.cat([native["tok.weight"], torch.full((6, native["tok.weight"].shape[1]), 0.25)])
    return native | {
        "tok.weight": longer, "head.weight": longer, "scale": torch.full((3, 5), 2.0),
        "norm.bias": native["norm.bias"].bfloat16(),
    }  # fmt: skip


def state_of(model: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"model": model, "step": 7, "sizes": [1, 2], "rng": holdfast.PerRank({"seed": torch.arange(3)})}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """The same model, saved in one layout and opened under the map, and saved in the other layout."""
    root = tmp_path_factory.mktemp("questions")
    torch.manual_seed(3)
    hub = {name: tensor.detach() for name, tensor in Hub().state_dict().items()}
    files = {"config.json": b"{}"}
    holdfast.save(state_of(hub), root / "hub", step=7, files=files)
    holdfast.save(state_of(native_of(hub)), root / "native", step=7, files=files)
    return holdfast.open(root / "hub", remap=REMAP), holdfast.open(root / "native")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]) for name, tensor in one.items()
    )


def test_what_it_holds(both: tuple[Checkpoint, Checkpoint]) -> None:
    mapped, native = both
    assert mapped.tensors.keys() == native.tensors.keys()
    for name, info in native.tensors.items():
        assert (info.dtype, info.shape, info.nbytes) == tuple(
            getattr(mapped.tensors[name], what) for what in ("dtype", "shape", "nbytes")
        )
        assert mapped.tensors[name].boxes == info.boxes
    assert mapped.values == native.values and mapped.value("step") == 7
    assert mapped.differing == native.differing == ["rng"]
    assert torch.equal(mapped.per_rank("rng", 0)["seed"], torch.arange(3))
    assert mapped.attachments == native.attachments and mapped.attachment("config.json") == b"{}"
    assert (mapped.step, mapped.format, mapped.world_size) == (7, "holdfast", 1)


def test_tensors(both: tuple[Checkpoint, Checkpoint]) -> None:
    mapped, native = both
    truth = native.state_dict()["model"]
    for name in truth:
        full = f"model/{name}"
        assert torch.equal(mapped.read(full), truth[name])
        box = tuple(slice(n // 3, n - n // 4) for n in truth[name].shape)
        assert torch.equal(mapped.read(full, box), truth[name][box])
        strided = torch.empty(truth[name].shape[::-1], dtype=torch.float64).permute(*range(truth[name].dim())[::-1])
        assert torch.equal(mapped.read(full, into=strided, cast=True), truth[name].double())
    with pytest.raises(Mismatch, match=r"does not lie in model/scale of shape \[3, 5\]"):
        mapped.read("model/scale", ((0, 4),))
    for mmap in (False, True):
        state = mapped.state_dict(mmap=mmap)
        assert same(state["model"], truth) and state["sizes"] == [1, 2]
        assert state["model"]["head.weight"] is state["model"]["tok.weight"]
    given = {name: torch.zeros_like(tensor) for name, tensor in truth.items() if name != "head.weight"}
    filled = mapped.state_dict("model", into={"model": given})["model"]
    assert same(filled, truth) and filled["head.weight"] is given["tok.weight"]
    assert same(mapped.state_dict("model/scale", into={"model/scale": given["scale"].zero_()})["model"],
                {"scale": torch.full((3, 5), 2.0)})  # fmt: skip


def test_comparisons(both: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    mapped, native = both
    for pair in ((mapped, native), (native, mapped), (mapped, mapped)):
        assert {d.status for d in compare(*pair)} == {d.status for d in compare_names(*pair)} == {"same"}
    model = {name: tensor.clone() for name, tensor in native.state_dict()["model"].items()}
    model["layers.1.qkv.weight"][40, 3] += 1
    model["scale"][2, 4] = 3
    model["tok.weight"][55, 0] = 9
    del model["head.weight"]
    holdfast.save(state_of(model), tmp_path / "other")
    other = holdfast.open(tmp_path / "other")
    odd = {d.name: d for d in compare(mapped, other) if d.status != "same"}
    assert {name: d.status for name, d in odd.items()} == {
        "model/layers.1.qkv.weight": "changed", "model/scale": "changed", "model/tok.weight": "changed",
        "model/head.weight": "only in a",
    }  # fmt: skip
    assert odd["model/scale"].largest == 1.0
    assert "layers.1.qkv.weight" in diff_page(mapped, other)


def test_statistics(both: tuple[Checkpoint, Checkpoint]) -> None:
    mapped, native = both
    names = list(native.tensors)
    assert list(statistics_of_all(mapped, names)) == list(statistics_of_all(native, names))
    assert statistics(mapped, "model/layers.0.experts.gate_up", bins=5).counts == (
        statistics(native, "model/layers.0.experts.gate_up", bins=5).counts
    )


def test_sizes_and_modules(both: tuple[Checkpoint, Checkpoint]) -> None:
    mapped, native = both
    one, other = usage(mapped), usage(native)
    assert (one.tensors, one.by_section, one.by_dtype) == (other.tensors, other.by_section, other.by_dtype)
    assert usage(mapped, only="*scale").tensors == 60
    assert modules(mapped).nbytes == modules(native).nbytes


@pytest.mark.parametrize("mesh", ["fsdp=2", "fsdp=3", "fsdp=2,tp=2", "ddp=2"])
def test_what_a_mesh_would_read(both: tuple[Checkpoint, Checkpoint], mesh: str) -> None:
    mapped, native = both
    shape = parse_mesh(mesh)
    rules = [parse_rule(rule) for rule in ("*bias=tp:replicate", "*norm*=tp:replicate", "*=tp:1") if "tp" in mesh]
    planned = plan(mapped, shape, rules=rules, verify=False)
    assert not planned.shares and planned.state == plan(native, shape, rules=rules).state
    headers = sum(file.header_bytes for file in mapped.manifest.data_files)
    for rank in planned.ranks:
        fresh = holdfast.open(mapped.path, remap=REMAP)
        wanted = [
            Wanted(fresh.saved_name(name), record, box, torch.empty(box.lengths, dtype=mapped.tensors[name].dtype))
            for name, record in fresh.manifest.tensors.items()
            for box in boxes_held(record.shape, shape.spread(name, record.shape, rules), rank.rank)
        ]
        stats = read_boxes(fresh.files, wanted, verify=False)
        assert rank.needed == stats.needed  # what is made up is not read
        assert rank.read <= stats.read <= rank.read + headers


def test_layouts(both: tuple[Checkpoint, Checkpoint]) -> None:
    layouts = Layouts(both[0])
    assert str(layouts.of("model/layers.0.qkv.weight")) == "made of 3 tensors, rank 0"
    assert [name for name, _ in layouts.boxes("model/layers.0.qkv.bias")] == [
        "model/layers.0.q_proj.bias[0:32]", "model/layers.0.k_proj.bias[0:16]", "model/layers.0.v_proj.bias[0:16]"
    ]  # fmt: skip
    assert str(layouts.of("model/layers.0.out.weight")) == "whole, rank 0"
    assert str(layouts.of("model/scale")) == "made up" and not layouts.boxes("model/scale")


def test_damage_is_told_by_what_it_hits(both: tuple[Checkpoint, Checkpoint], tmp_path: Path) -> None:
    model = Hub()
    holdfast.save({"model": model}, tmp_path / "c")
    mapped = holdfast.open(tmp_path / "c", remap=REMAP)
    assert mapped.verify().whole
    record = holdfast.open(tmp_path / "c").records["model/embed.weight"]
    index, piece, _ = mapped.files.piece(0, "model/embed.weight", whole(record.shape), record, ReadStats())
    flip(Path(str(mapped.files.path(index))), piece.begin + 8)
    verified = holdfast.open(tmp_path / "c", remap=REMAP).verify(raises=False)
    assert [damage.tensor for damage in verified.damages] == ["model/embed.weight"]
    assert set(verified.tensors) == {"model/tok.weight", "model/head.weight"}
    with pytest.raises(Damaged, match=r"hits model/embed.weight"):
        mapped.verify()
    with pytest.raises(Damaged, match=r"embed.weight"):
        mapped.read("model/head.weight")
    assert mapped.read("model/layers.0.qkv.weight").shape == (64, 32)


def test_a_missing_file_is_seen_before_memory_is_taken(tmp_path: Path) -> None:
    """A made tensor lies in several files: all of them are looked at."""
    parts = {f"layers.0.{x}_proj.bias": torch.randn(8) for x in "qkv"}
    holdfast.save({"model": parts}, tmp_path / "c")
    holdfast.convert(tmp_path / "c", tmp_path / "cut", max_shard_bytes=32)
    mapped = holdfast.open(tmp_path / "cut", remap=Remap([Concatenate([*parts], "qkv")]))
    assert torch.equal(mapped.read("model/qkv"), torch.cat([*parts.values()]))
    assert Layouts(mapped).of("model/qkv").files == 3
    Path(str(mapped.files.path(2))).unlink()
    with pytest.raises(Damaged, match="is missing"):
        holdfast.open(tmp_path / "cut", remap=mapped.remap).prove(["model/qkv"])


def test_torch_sees_it_as_it_would_the_other(both: tuple[Checkpoint, Checkpoint]) -> None:
    first, second = (describe(checkpoint).metadata for checkpoint in both)
    assert first.state_dict_metadata == second.state_dict_metadata and first.planner_data == second.planner_data


def test_the_page(both: tuple[Checkpoint, Checkpoint]) -> None:
    data = contents(both[0])
    rows = {row[0]: row for row in data["tensors"]}
    assert rows["model/layers.1.qkv.bias"][6] == [f"model/layers.1.{x}_proj.bias" for x in "qkv"]
    assert rows["model/tok.weight"][6] == ["model/embed.weight"]
    assert rows["model/scale"][6] == [] and rows["model/norm.weight"][6] is None
    assert data["health"].kind == "good" and data["aliases"] == {"model/head.weight": "model/tok.weight"}
    assert "q_proj.weight" in checkpoint_page(both[0], stats="model/scale")
