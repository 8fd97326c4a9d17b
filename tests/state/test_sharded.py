"""Sharded leaves on real ranks: DTensors of every placement, explicit shards, pipeline stages, PerRank, sub-groups."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import holdfast
from tests import pool

SHAPES = [(7,), (5, 6), (4, 3, 5), (1, 9), (2, 0), (3,)]


def _full(shape: tuple[int, ...], number: int) -> torch.Tensor:
    return torch.arange(float(torch.tensor(shape).prod())).reshape(shape) + number


def _placements(mesh_dims: int, ndim: int) -> list[tuple[Any, ...]]:
    choices = [Replicate(), *(Shard(d) for d in range(ndim))]
    return list(itertools.product(choices, repeat=mesh_dims))


def _distributed(mesh: Any, zero: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for number, shape in enumerate(SHAPES):
        full = _full(shape, number)
        for placements in _placements(mesh.ndim, len(shape)):
            tensor = distribute_tensor(torch.zeros_like(full) if zero else full, mesh, placements)
            state[f"{number} {placements}"] = tensor
    return state


def dtensors_everywhere(path: str, mesh_shape: tuple[int, ...]) -> list[str]:
    """Save DTensors of all placements on one mesh, load them into each other's placements."""
    mesh = init_device_mesh("cpu", mesh_shape)
    holdfast.save({"t": _distributed(mesh, zero=False)}, path)
    target = _distributed(mesh, zero=True)
    # Each placement is loaded from what another one saved.
    keys = {n: [k for k in target if k.startswith(f"{n} ")] for n in range(len(SHAPES))}
    rename = {f"t/{a}": f"t/{b}" for group in keys.values() for a, b in zip(group, reversed(group), strict=True)}
    from holdfast.ondisk import names

    escaped = {f"t/{names.escape(a[2:])}": f"t/{names.escape(b[2:])}" for a, b in rename.items()}
    holdfast.load(path, {"t": target}, rename=lambda name: escaped.get(name, name))
    return [k for k, v in target.items() if not torch.equal(v.full_tensor(), _full(SHAPES[int(k[0])], int(k[0])))]


@pytest.mark.parametrize(
    ("world", "mesh"),
    [pytest.param(3, (3,), marks=pytest.mark.slow), (4, (2, 2)), pytest.param(8, (2, 2, 2), marks=pytest.mark.slow)],
    ids=str,
)
def test_every_placement(world: int, mesh: tuple[int, ...], tmp_path: Path) -> None:
    assert pool.run(world, dtensors_everywhere, str(tmp_path / "c"), mesh) == [[]] * world
    opened = holdfast.open(tmp_path / "c")
    for name in opened.tensors:
        number = int(name.split("/")[1][0])
        assert torch.equal(opened.read(name), _full(SHAPES[number], number)), name


def strided(path: str) -> list[int]:
    """A strided shard whose local rows are not one run, as a lone _StridedShard makes them."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(13.0 * 3).reshape(13, 3)
    state, rows = {}, []
    for name, placements in {
        "fsdp x tp": (_StridedShard(0, split_factor=2), Shard(0)),
        "alone": (_StridedShard(0, split_factor=3), Replicate()),
        "on the right": (Shard(0), _StridedShard(0, split_factor=2)),
    }.items():
        local = full
        coordinate = mesh.get_coordinate()
        for axis, placement in enumerate(placements):
            if not isinstance(placement, Replicate):
                parts, _ = placement._split_tensor(local, 2, with_padding=False, contiguous=True)
                local = parts[coordinate[axis]]
        state[name] = DTensor.from_local(
            local.clone(), mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
        )
        rows.append(len(local))
    holdfast.save(state, path)
    before = {k: v.to_local().clone() for k, v in state.items()}
    for v in state.values():
        v.to_local().zero_()
    holdfast.load(path, state)
    assert all(torch.equal(v.to_local(), before[k]) for k, v in state.items())
    return rows


def test_strided_shards(tmp_path: Path) -> None:
    pool.run(4, strided, str(tmp_path / "c"))
    full = torch.arange(13.0 * 3).reshape(13, 3)
    for name in holdfast.open(tmp_path / "c").tensors:
        assert torch.equal(holdfast.open(tmp_path / "c").read(name), full), name


def refused(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    bad = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    holdfast.save({"a": {"sum": bad}}, path)


def test_partial_is_refused(tmp_path: Path) -> None:
    for error in pool.attempt(2, refused, str(tmp_path / "c")):
        assert {"SaveFailed", "Unsupported", "TypeError"} <= set(error.kinds)
        assert "a/sum has placement Partial" in error.text and "redistribute" in error.text
    assert not (tmp_path / "c").exists()


def explicit(path: str) -> torch.Tensor:
    """An embedding cut by columns, rows of a table held twice, loaded back as whole tensors."""
    rank = dist.get_rank()
    table = torch.arange(40.0).reshape(5, 8)
    mine = holdfast.Shard(table[:, rank * 2 : rank * 2 + 2].clone(), (5, 8), (0, rank * 2))
    half = rank % 2
    twice = holdfast.Shard(table[half * 2 : half * 3 + 2].clone(), (5, 8), (half * 2, 0))
    holdfast.save({"columns": mine, "rows": twice}, path)
    into = {"columns": torch.zeros(5, 8), "rows": torch.zeros(5, 8)}
    holdfast.load(path, into)
    assert torch.equal(into["columns"], table) and torch.equal(into["rows"], table)
    other = holdfast.Shard(torch.zeros(5, 2), (5, 8), (0, (3 - rank) * 2))
    holdfast.load(path, {"columns": other}, only="columns")
    assert torch.equal(other.tensor, table[:, (3 - rank) * 2 : (3 - rank) * 2 + 2])
    return table


def test_explicit_shards(tmp_path: Path) -> None:
    table = pool.run(4, explicit, str(tmp_path / "c"))[0]
    assert torch.equal(holdfast.open(tmp_path / "c").read("columns", (slice(1, 3), slice(1, 7))), table[1:3, 1:7])


def with_hole(path: str, overlap: bool) -> None:
    rank = dist.get_rank()
    start = rank * 2 - (1 if overlap and rank else 0)
    holdfast.save({"x": {"w": holdfast.Shard(torch.ones(2), (5,), (start,))}}, path)


@pytest.mark.parametrize(("overlap", "says"), [(False, "in no box"), (True, "overlap")])
def test_holes_and_overlaps(overlap: bool, says: str, tmp_path: Path) -> None:
    for error in pool.attempt(2, with_hole, str(tmp_path / "c"), overlap):
        assert "Mismatch" in error.kinds and "x/w" in error.text and says in error.text
    assert not (tmp_path / "c").exists()


def legacy_sharded_tensor(path: str) -> None:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=[f"rank:{r}/cpu" for r in range(dist.get_world_size())])
    made = sharded_tensor.zeros(spec, 7, 3)
    for shard in made.local_shards():
        shard.tensor.copy_(torch.arange(21.0).reshape(7, 3)[shard.metadata.shard_offsets[0] :][: shard.tensor.shape[0]])
    holdfast.save({"legacy": made}, path)
    fresh = sharded_tensor.zeros(spec, 7, 3)
    holdfast.load(path, {"legacy": fresh})
    for a, b in zip(made.local_shards(), fresh.local_shards(), strict=True):
        assert torch.equal(a.tensor, b.tensor)


def test_sharded_tensor(tmp_path: Path) -> None:
    pool.run(3, legacy_sharded_tensor, str(tmp_path / "c"))
    assert torch.equal(holdfast.open(tmp_path / "c").read("legacy"), torch.arange(21.0).reshape(7, 3))


class Stage(nn.Module):
    """Layers first:last of a model of four, as a pipeline rank holds them."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(3, 3) for i in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x


def _stage_state(chunks: list[range], steps: int) -> dict[str, Any]:
    stages = [Stage(c) for c in chunks]
    optimizers = []
    for stage in stages:
        named = dict(stage.named_parameters())
        # Layer 0 has a group of its own, so that stages differ in their groups.
        groups = [
            {"params": [p for n, p in named.items() if "0" in n], "weight_decay": 0.0, "lr": 0.5},
            {"params": [p for n, p in named.items() if "weight" in n and "0" not in n], "weight_decay": 0.1},
            {"params": [p for n, p in named.items() if "bias" in n and "0" not in n], "weight_decay": 0.0},
        ]
        optimizers.append(torch.optim.Adam([g for g in groups if g["params"]], lr=0.1))
    for _ in range(steps):
        for stage, optimizer in zip(stages, optimizers, strict=True):
            stage(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"model": stages, "optimizer": optimizers}


def _facts(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage, optimizer in zip(state["model"], state["optimizer"], strict=True):
        for name, parameter in stage.named_parameters():
            entry = optimizer.state[parameter]
            group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
            found[name] = [
                parameter.detach().clone(),
                entry["exp_avg"].clone(),
                entry["step"].clone(),
                group["lr"],
                group["weight_decay"],
            ]
    return found


def pipeline_save(path: str) -> dict[str, Any]:
    """Two ranks, two chunks each (interleaved): rank 0 has layers 0 and 2, rank 1 layers 1 and 3."""
    rank = dist.get_rank()
    torch.manual_seed(rank)
    state = _stage_state([range(rank, rank + 1), range(rank + 2, rank + 3)], steps=2)
    holdfast.save(state, path)
    return _facts(state)


def pipeline_load(path: str, steps: int) -> dict[str, Any]:
    """Three ranks with another cut: 0-1, 2, 3; or one process with all."""
    cut = [range(0, 2), range(2, 3), range(3, 4)][dist.get_rank()] if dist.is_initialized() else range(0, 4)
    state = _stage_state([cut], steps)
    holdfast.load(path, state)
    return _facts(state)


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh optimizer", "stepped optimizer"])
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_pipeline_stages(world: int, steps: int, tmp_path: Path) -> None:
    saved: dict[str, Any] = {}
    for facts in pool.run(2, pipeline_save, str(tmp_path / "c")):
        saved.update(facts)
    loaded: dict[str, Any] = {}
    for facts in pool.run(world, pipeline_load, str(tmp_path / "c"), steps):
        loaded.update(facts)
    assert saved.keys() == loaded.keys() and len(saved) == 8
    for name, facts in saved.items():
        for a, b in zip(facts, loaded[name], strict=True):
            assert torch.equal(torch.as_tensor(a), torch.as_tensor(b)), name


def per_rank_save(path: str) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    loader = holdfast.PerRank({"position": rank * 10, "shuffle": torch.full((2,), rank)}, elsewhere="first")
    ours = holdfast.PerRank(f"rank {rank}")
    summed = holdfast.PerRank(rank + 1, elsewhere=lambda values, rank, world: (sum(values), rank, world))
    holdfast.save({"loader": loader, "ours": ours, "deep": {"sum": summed}, "rng": holdfast.RNG()}, path)


def per_rank_load(path: str, only: str) -> dict[str, Any]:
    into: dict[str, Any] = {
        "loader": holdfast.PerRank(None, elsewhere="first"),
        "ours": holdfast.PerRank(None),
        "deep": {"sum": holdfast.PerRank(0, elsewhere=lambda values, rank, world: (sum(values), rank, world))},
        "rng": holdfast.RNG(),
    }
    holdfast.load(path, into, only=only.split(","))
    return {
        "loader": into["loader"].value, "ours": into["ours"].value, "sum": into["deep"]["sum"].value,
        "drawn": torch.rand(3).tolist(),
    }  # fmt: skip


def test_per_rank_values(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    pool.run(3, per_rank_save, path)
    expected = []
    for rank in range(3):
        torch.manual_seed(rank)
        expected.append(torch.rand(3).tolist())
    for rank, got in enumerate(pool.run(3, per_rank_load, path, "*")):
        assert got["loader"]["position"] == rank * 10 and torch.equal(got["loader"]["shuffle"], torch.full((2,), rank))
        assert got["ours"] == f"rank {rank}" and got["sum"] == rank + 1 and got["drawn"] == expected[rank]
    four = pool.run(4, per_rank_load, path, "loader,deep,rng")
    again = pool.run(4, per_rank_load, path, "loader,deep,rng")
    for rank, got in enumerate(four):
        assert got["loader"]["position"] == 0 and got["sum"] == (6, rank, 4)
    # Old ranks go on with their own streams; the new one has a stream of its own, the same at each restart.
    assert [got["drawn"] for got in four[:3]] == expected
    assert four[3]["drawn"] not in expected and four[3]["drawn"] == again[3]["drawn"]
    for error in pool.attempt(2, per_rank_load, path, "*"):
        assert "Mismatch" in error.kinds and "ours: saved by 3 ranks" in error.text and "elsewhere" in error.text
    assert holdfast.open(path).per_rank("ours", 2) == "rank 2"


def on_a_subgroup(path: str) -> str:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        holdfast.save({"x": torch.arange(8000.0), "me": holdfast.PerRank(dist.get_rank())}, path, group=group)
        into = {"x": torch.zeros(8000), "me": holdfast.PerRank(None)}
        holdfast.load(path, into, group=group)
        assert into["me"].value == dist.get_rank()
        return f"{into['x'].sum().item()}"
    try:
        holdfast.save({"x": torch.ones(1)}, path + "-no", group=group)
    except holdfast.errors.Mismatch as error:
        return str(error)
    return "saved outside of the group"


def test_sub_group(tmp_path: Path) -> None:
    results = pool.run(4, on_a_subgroup, str(tmp_path / "c"))
    assert results[1] == results[3] == f"{torch.arange(8000.0).sum().item()}"
    assert "not in the group" in results[0] and holdfast.open(tmp_path / "c").world_size == 2
    assert len(list((tmp_path / "c" / "state").iterdir())) == 2


def share_of_ddp(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64), nn.Embedding(100, 64))
    holdfast.save({"model": model}, path)


def test_replicas_are_spread_by_bytes(tmp_path: Path) -> None:
    pool.run(4, share_of_ddp, str(tmp_path / "c"))
    manifest = holdfast.open(tmp_path / "c").manifest
    sizes = [f.bytes - f.header_bytes for f in manifest.data_files]
    assert len(sizes) == 4 and max(sizes) <= 1.05 * sum(sizes) / 4


def local_state_optimizer(path: str) -> None:
    """An optimizer that keeps plain tensors of the local shape beside DTensor parameters, as fused kernels do."""
    mesh = init_device_mesh("cpu", (2,))
    full = torch.arange(12.0).reshape(4, 3)
    parameter = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    module = nn.Module()
    module.weight = parameter
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer.state[parameter]["buffer"] = parameter.to_local().detach() * 2
    holdfast.save({"m": module, "o": optimizer}, path)


def test_local_optimizer_state_is_a_shard_not_a_replica(tmp_path: Path) -> None:
    pool.run(2, local_state_optimizer, str(tmp_path / "c"))
    assert torch.equal(
        holdfast.open(tmp_path / "c").read("o/state/weight/buffer"), torch.arange(12.0).reshape(4, 3) * 2
    )


def wrong_width(path: str, kind: str, only: str) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    def make(width: int) -> dict[str, Any]:
        layer = nn.Linear(width, width)
        flat = partial(FullyShardedDataParallel, use_orig_params=kind == "FSDP1, original parameters")
        model = fully_shard(layer) if kind == "FSDP2" else flat(layer, device_id=torch.device("cpu"))
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

    state = make(8)
    state["model"](torch.ones(1, 8)).sum().backward()
    state["optimizer"].step()
    holdfast.save(state, path)
    into = make(4)
    try:
        holdfast.load(path, into, only=only)
    except holdfast.errors.Mismatch as error:
        return f"{error} {len(into['optimizer'].state)}"
    return "loaded"


@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1", "FSDP1, original parameters"])
@pytest.mark.parametrize("only", ["*", "optimizer"])
def test_a_model_of_another_size_is_a_mismatch(tmp_path: Path, kind: str, only: str) -> None:
    text = pool.run(2, wrong_width, str(tmp_path / "c"), kind, only)[1]
    assert ("model/weight: saved with shape [8, 8], here [4, 4]" in text and "model/bias" in text) == (only == "*")
    assert "optimizer/state/weight/exp_avg: saved with shape [8, 8], here [4, 4]" in text
    assert "optimizer/state/bias/exp_avg_sq: saved with shape [8], here [4]" in text
    assert text.endswith(" 0"), "the optimizer is as empty as before"


def uneven_fsdp_over_tp(path: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def make(value: torch.Tensor) -> nn.Module:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Linear(9, 3, bias=False))
        with torch.no_grad():
            model[0].weight.copy_(value.reshape(9, 4))
            model[1].weight.copy_(value[:27].reshape(3, 9))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        return fully_shard(model, mesh=mesh["dp"])

    model, other = make(torch.arange(36.0)), make(torch.zeros(36))
    holdfast.save({"model": model}, path)
    holdfast.load(path, {"model": other})
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())


@pytest.mark.slow
def test_uneven_fsdp_over_tensor_parallel(tmp_path: Path) -> None:
    """Rows 5 and 4 of the tensor parallel halves over 4 shards: the last shard of one half is empty, not the other."""
    pool.run(8, uneven_fsdp_over_tp, str(tmp_path / "c"))
    opened = holdfast.open(tmp_path / "c")
    assert torch.equal(opened.read("model/0.weight"), torch.arange(36.0).reshape(9, 4))
    assert torch.equal(opened.read("model/1.weight"), torch.arange(27.0).reshape(3, 9))


def same_groups_on_every_stage(path: str, save: bool) -> list[float]:
    rank = dist.get_rank()
    stage = Stage(range(rank, rank + 1))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.25 if save else 0.5)
    state = {"model": stage, "optimizer": optimizer}
    holdfast.save(state, path) if save else holdfast.load(path, state)
    return [group["lr"] for group in optimizer.param_groups]


def test_stages_with_equal_settings_keep_their_parameters_names(tmp_path: Path) -> None:
    pool.run(2, same_groups_on_every_stage, str(tmp_path / "c"), True)
    groups = holdfast.open(tmp_path / "c").values["optimizer"]["param_groups"]
    assert [g["params"] for g in groups] == [["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]]
    assert pool.run(2, same_groups_on_every_stage, str(tmp_path / "c"), False) == [[0.25], [0.25]]
