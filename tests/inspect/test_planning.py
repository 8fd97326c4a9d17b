"""Plans against what real ranks counted when they loaded, and meshes against torch's own cutting."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from msgspec.structs import replace
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

import holdfast
from holdfast.inspect import planning
from holdfast.inspect.mesh import Mesh, parse_mesh, parse_rule
from holdfast.inspect.planning import _Planning, plan
from holdfast.plan import share_plan
from holdfast.plan.spread import WHOLE, boxes_held
from holdfast.read.shared import demand, pass_on, share
from holdfast.storage.memory import Memory
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.formats.truth import GOLDEN
from tests.inspect import plan_trials

BUFFERS = "*/scale=replicate"
PARALLEL = [BUFFERS, "*up.weight*=0", "*up.bias*=0", "*down.weight*=1", "*=tp:replicate"]
TARGETS = {
    "DDP 2": ("ddp=4", []),
    "FSDP2 4": ("fsdp=4", [BUFFERS]),
    "HSDP 2x2": ("replicate=2,fsdp=2", [BUFFERS]),
    "FSDP2 x TP 2x2": ("fsdp=2,tp=2", PARALLEL),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("plan") / "ckpt")
    pool.run(4, plan_trials.save, path, "FSDP2 x TP 2x2")
    return path


@pytest.fixture
def small() -> Iterator[None]:
    """Sharing of whatever can be shared, as the ranks of `plan_trials` do."""
    with (
        patch.object(share, "LEAST", 1), patch.object(share, "PART", 0.0), patch.object(demand, "SHORTEST", 1),
        patch.object(pass_on, "SHORTEST_SLICE", 64), patch.object(share_plan, "BLOCK", 256),
        patch.object(pass_on, "LONGEST", 512), patch.object(pass_on, "MEMORY", 2048),
    ):  # fmt: skip
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("how", ["off", "auto"])
@pytest.mark.parametrize("layout", TARGETS)
@pytest.mark.slow_cases("DDP 2-off", "FSDP2 4-off", "HSDP 2x2-off")
def test_what_real_ranks_counted(saved: str, layout: str, how: str) -> None:
    text, rules = TARGETS[layout]
    found = plan(
        holdfast.open(saved), parse_mesh(text), rules=[parse_rule(rule) for rule in rules], node_size=2,
        share=how == "auto",
    )  # fmt: skip
    counted = pool.run(4, plan_trials.load, saved, layout, how, 2)
    assert [(rank.needed, rank.read, rank.received) for rank in found.ranks] == [tuple(c) for c in counted]
    assert found.shares == (how == "auto")
    assert [node.read for node in found.nodes] == [sum(c[1] for c in counted[at : at + 2]) for at in (0, 2)]


@pytest.mark.parametrize("shape", [(16, 6), (7, 5), (3,), (2, 9), (0, 4), ()])
@pytest.mark.parametrize(
    ("text", "rule"),
    [("fsdp=4,tp=2", "*=0"), ("fsdp=3,tp=2", "*=1"), ("replicate=2,fsdp=3", ""), ("tp=2,fsdp=3", "*=0")],
)
def test_cut_as_torch_cuts(shape: tuple[int, ...], text: str, rule: str) -> None:
    mesh = parse_mesh(text)
    rules = [parse_rule(rule)] if rule and (not rule.endswith("1") or len(shape) > 1) else []
    spread = mesh.spread("w", shape, rules or ([parse_rule("*=tp:replicate")] if rule else []))
    if spread == WHOLE:
        assert not shape
        return
    cut = int(rule[-1]) if rules else None
    for rank in range(mesh.ranks):
        placements, coordinate, left = [], [], rank
        for size in reversed(mesh.sizes):
            left, at = divmod(left, size)
            coordinate.insert(0, at)
        for axis, name in enumerate(mesh.names):
            tp_inside = cut == 0 and name == "fsdp" and "tp" in mesh.names[axis:]
            kind = {"tp": Replicate() if cut is None else Shard(cut), "fsdp": Shard(0), "replicate": Replicate()}[name]
            placements.append(_StridedShard(0, split_factor=2) if tp_inside else kind)
        local, offset = _compute_local_shape_and_global_offset(shape, mesh.sizes, coordinate, placements)
        boxes = boxes_held(shape, spread, rank)
        assert sum(box.size for box in boxes) == torch.Size(local).numel()
        if boxes and not any(isinstance(p, _StridedShard) for p in placements):
            assert (boxes[0].offsets, boxes[0].lengths) == (tuple(offset), tuple(local))


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("model/layers.0.self_attn.q_proj.weight", 0), ("model/layers.0.self_attn.o_proj.weight", 1),
        ("model/layers.0.mlp.down_proj.weight", 1), ("optimizer/state/layers.0.mlp.gate_proj.weight/exp_avg", 0),
        ("model/layers.0.self_attn.q_proj.bias", 0), ("model/layers.0.self_attn.o_proj.bias", None),
        ("model/layers.0.input_layernorm.weight", None), ("model/embed_tokens.weight", 0), ("model/lm_head.weight", 0),
        ("model/h.0.attn.c_proj.weight", 1), ("model/h.0.mlp.c_fc.weight", 0), ("model/blocks.0.wo.weight", 1),
        ("model/norm.weight", None), ("model/rope.freqs", None), ("model/layers.1.mlp.dense_4h_to_h.weight", 1),
    ],
)  # fmt: skip
def test_what_tensor_parallelism_cuts_by_default(name: str, dim: int | None) -> None:
    spread = Mesh(("tp",), (4,)).spread(name, (64,) if name.endswith(("bias", "norm.weight")) else (64, 64))
    assert (None if spread == WHOLE else spread.splits[0].dim) == dim  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mesh", "ranks", "said"),
    [
        ("fsdp", None, "no number of ranks"), ("pp=4", None, "pipeline"), ("fsdp=0", None, "no number"),
        ("", None, "say which"),
        ("fsdp=2,fsdp=2", None, "twice"), ("fsdp=4", 8, "has 4 ranks, not 8"), ("fsdp=x", None, "no number"),
        ("fsdp=1000000", None, "at most 65,536"), ("fsdp=4096,tp=4096", None, "at most 65,536"),
        ("", 1 << 40, "at most 65,536"), ("fsdp=" + "9" * 5000, None, "no number"),
    ],
)  # fmt: skip
def test_meshes_that_are_none(mesh: str, ranks: int | None, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_mesh(mesh, ranks)


@pytest.mark.parametrize("text", ["", "x", "x=", "=1", "x=y", "x=ddp:1", "x=1.5"])
def test_rules_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no rule"):
        parse_rule(text)


def test_a_rule_beyond_the_shape() -> None:
    with pytest.raises(ValueError, match="has no axis 2"):
        parse_mesh("tp=2").spread("w", (3, 4), [parse_rule("w=2")])
    assert parse_mesh("tp=2").spread("w", (3, 4), [parse_rule("w=-1")]).splits[0].dim == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["dcp_fsdp2_tp_2x2", "composer_targz_2r", "ds_zero3_fp32_2r", "hf_safetensors_bf16_sharded"]
)
def test_other_formats(name: str) -> None:
    checkpoint = holdfast.open(GOLDEN / name / "ckpt")
    found = plan(checkpoint, parse_mesh("fsdp=3,tp=2"), only="model")
    whole = plan(checkpoint, parse_mesh("ddp=2"), only="model")
    assert whole.needed == 2 * whole.state and whole.read >= whole.needed
    assert found.state == whole.state <= found.needed < whole.needed
    assert len(found.ranks) == 6 and all(rank.read >= rank.needed for rank in found.ranks)


def test_in_a_store(tmp_path: Path) -> None:
    place = StorePlace(Memory(), "run/step-1")
    holdfast.save({"model": {"w": torch.zeros(100, 100)}}, place)
    found = plan(holdfast.open(place), parse_mesh("fsdp=4"))
    assert [rank.needed for rank in found.ranks] == [10_000] * 4 and found.requests == 8


def test_nothing_is_touched_of_what_would_be_read(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.zeros(1000, 100)}}, tmp_path / "c")
    path = next((tmp_path / "c" / "model").iterdir())
    data = bytearray(path.read_bytes())
    data[5000:] = b"x" * len(data[5000:])
    path.write_bytes(data)
    assert plan(holdfast.open(tmp_path / "c"), parse_mesh("fsdp=2")).needed == 400_000


def test_what_is_alike_is_cut_once_for_each_rank(tmp_path: Path) -> None:
    checkpoint = holdfast.save({"model": {f"w{i}": torch.zeros(8, 2) for i in range(300)}}, tmp_path / "c")
    asked = 0

    def counted(*arguments: Any) -> Any:
        nonlocal asked
        asked += 1
        return boxes_held(*arguments)

    with patch.object(planning, "boxes_held", counted):
        found = plan(checkpoint, parse_mesh("fsdp=16"), node_size=3, share=False)
    assert asked == 16 and found.needed == found.state
    assert [node.node for node in found.nodes] == [*range(6)] and sum(n.needed for n in found.nodes) == found.needed


def test_a_tensor_larger_than_memory(tmp_path: Path) -> None:
    checkpoint = holdfast.save({"model": {"w": torch.zeros(8, 2)}}, tmp_path / "c")
    record = replace(checkpoint.manifest.tensors["model/w"], shape=(1 << 20, 1 << 20))
    assert _Planning(checkpoint, parse_mesh("fsdp=2"), {"model/w": record}, [], 8, True).memory.nbytes == 4 << 40


def test_no_tensor_fits(tmp_path: Path) -> None:
    holdfast.save({"model": {"w": torch.zeros(3)}}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Mismatch, match=r"no tensor that fits 'modle' \(did you mean model\?\)"):
        plan(holdfast.open(tmp_path / "c"), parse_mesh("fsdp=2"), only=["model", "modle"])
