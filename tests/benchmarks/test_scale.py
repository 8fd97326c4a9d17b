"""The simulator of many ranks: its states are those that torch makes, and its figures that are no times stay small."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import scale, scale_dcp, scale_picture, scale_report
from benchmarks import scale_states as states
from benchmarks.scale import mesh_of
from benchmarks.scale_load import load
from benchmarks.scale_report import Cell
from benchmarks.scale_save import save
from benchmarks.scale_states import Model, Sharding, World
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected, collect
from holdfast.state.leaves import layout_of, owned_values

SMALL = states.llama("small", depth=4, width=64, inner=208, kv=16, vocabulary=99)
EXPERTS = states.mixture(
    "small experts", depth=2, width=24, experts=8, hidden=16, dense=32, query=12, heads=1, vocabulary=40,
    dtype="float32",
)  # fmt: skip


def _module(world: World, rank: int) -> nn.Module:
    """The parameters of a rank's stage as modules of their own names, not yet sharded."""
    root = nn.Module()
    for parameter in world.parameters(world.stage(rank)):
        *path, last = parameter.name.split(".")
        at = root
        for key in path:
            if key not in dict(at.named_children()):
                at.add_module(key, nn.Module())
            at = at.get_submodule(key)
        at.register_parameter(last, nn.Parameter(torch.zeros(parameter.shape)))
    return root


def _linear(module: nn.Module, name: str) -> None:
    """Put a Linear, or what else tensor parallelism knows, in the place of a module with one weight."""
    *path, last = name.split(".")
    parent = module.get_submodule(".".join(path))
    weight = parent.get_submodule(last).weight
    like: nn.Module
    if "embed" in last:
        like = nn.Embedding(*weight.shape)
    elif weight.dim() == 1:
        like = nn.RMSNorm(weight.shape[0])
    else:
        like = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    setattr(parent, last, like)


def _sharded(world: World, rank: int) -> nn.Module:
    """The same parameters, sharded by torch."""
    sharding, model = world.sharding, _module(world, rank)
    axes = {"pp": sharding.stages, "replicas": sharding.replicas, "shards": sharding.shards, "tp": sharding.tensor}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    data: Any = ("replicas", "shards") if sharding.replicas > 1 else ("shards",)
    if sharding.tensor > 1:
        for name, module in list(model.named_modules()):
            if "weight" in dict(module.named_parameters(recurse=False)):
                _linear(model, name)
        plan: dict[str, Any] = {}
        for parameter in world.parameters(world.stage(rank)):
            name = parameter.name.removesuffix(".weight")
            rows = RowwiseParallel(input_layouts=Replicate()) if "embed" in name else RowwiseParallel()
            one = SequenceParallel() if parameter.cut is None else rows
            plan[name] = ColwiseParallel() if parameter.cut == 0 and "embed" not in name else one
        parallelize_module(model, mesh["tp"], plan)
    if sharding.experts > 1:
        inner = init_device_mesh(
            "cpu", (sharding.replicas, sharding.shards // sharding.experts, sharding.experts),
            mesh_dim_names=("replicas", "outer", "experts"),
        )  # fmt: skip
        outer: Any = ("replicas", "outer") if sharding.replicas > 1 else ("outer",)
        for name, module in list(model.named_modules()):
            if name.endswith(".experts"):
                for key, parameter in list(module.named_parameters(recurse=False)):
                    cut = distribute_tensor(parameter.detach(), inner["experts"], [Shard(0)])
                    module.register_parameter(key, nn.Parameter(cut))
                fully_shard(module, mesh=inner[outer], shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=mesh[data])


@contextmanager
def _as_rank(rank: int, size: int) -> Iterator[Ranks]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield Ranks(rank, size, None, tuple(range(size)))
    finally:
        dist.destroy_process_group()


def _torchs(world: World, rank: int) -> Collected:
    with _as_rank(rank, world.sharding.world) as ranks:
        model = _sharded(world, rank)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        return collect({"model": model, "optimizer": optimizer, "step": 1000}, ranks)


SHARDINGS = [
    (SMALL, Sharding("FSDP", 8)),
    (SMALL, Sharding("HSDP", 8, replicas=2)),
    (SMALL, Sharding("3-D", 8, stages=2, tensor=2)),
    (EXPERTS, Sharding("EP", 8, replicas=2, experts=2)),
]


@pytest.mark.parametrize(("model", "sharding"), SHARDINGS, ids=[s.name for _, s in SHARDINGS])
@pytest.mark.parametrize("rank", [1, 6])
@pytest.mark.slow_cases("1-EP")
def test_a_simulated_rank_is_what_torch_makes(model: Model, sharding: Sharding, rank: int) -> None:
    world = World(model, sharding)
    expected, found = _torchs(world, rank), world.collected(rank)
    assert {e.name: (e.dtype, e.shape, e.spread) for e in found.entries.values()} == {
        e.name: (e.dtype, e.shape, e.spread) for e in expected.entries.values()
    }
    for name, entry in expected.entries.items():
        assert [(v.box, v.tensor.shape) for v in found.entries[name].views] == [
            (v.box, v.tensor.shape) for v in entry.views
        ]
    assert (found.values, found.containers, found.aliases, found.changes.plain, found.changes.buffers) == (
        expected.values, expected.containers, expected.aliases, expected.changes.plain, expected.changes.buffers
    )  # fmt: skip
    assert owned_values(found) == owned_values(expected)
    assert {t.name: (t.alias, t.empty) for t in layout_of(found).tensors} == {
        t.name: (t.alias, t.empty) for t in layout_of(expected).tensors
    }


@pytest.mark.parametrize(("model", "sharding"), SHARDINGS, ids=[s.name for _, s in SHARDINGS])
def test_ranks_of_one_layout_are_told_apart_from_others(model: Model, sharding: Sharding) -> None:
    world = World(model, sharding)
    for rank in range(sharding.world):
        assert layout_of(world.collected(rank)) == world.layouts[world.layout_of[rank]]


DENSE = states.llama("dense", depth=6, width=8192, inner=28672, kv=1024, vocabulary=128256)
MIXTURE = replace(states.MIXTURE, parameters=tuple(p for p in states.MIXTURE.parameters if p.layer < 6), depth=6)
WORLDS = [
    (DENSE, states.fsdp), (DENSE, states.hsdp), (DENSE, states.three_d), (MIXTURE, states.expert)
]  # fmt: skip


@pytest.mark.parametrize(("model", "sharding"), WORLDS, ids=["FSDP", "HSDP", "3-D", "EP"])
@pytest.mark.fast_cases("FSDP")
def test_what_64_ranks_plan_stays_small(model: Model, sharding: Any) -> None:
    saved = save(World(model, sharding(64)), memory=False)
    cost = saved.cost
    # Decoding has proved that the cells of each tensor tile it; here are the bytes.
    assert sum(file.bytes - file.header_bytes for file in saved.record.data_files) == model.nbytes
    assert cost.tensors == model.tensors
    assert cost.balance <= 1.05 * cost.best_balance
    assert cost.manifest_share <= 1.5
    assert cost.later_note_bytes <= 256
    for size in (64, 32, 8):
        loaded = load(saved, World(model, sharding(size)), [0, size - 1])
        assert loaded.read <= 1.02


@pytest.mark.slow
def test_figures_become_tables_bars_and_a_picture() -> None:
    cells = []
    for size in (8, 16):
        world = World(SMALL, Sharding("FSDP", size))
        saved = save(world)
        loads = [load(saved, World(SMALL, Sharding("FSDP", size // share)), [0]) for share in (1, 8)]
        cells.append(Cell(SMALL.name, "FSDP", size, SMALL.nbytes, saved.cost, loads, mesh=mesh_of(world.sharding)))
    cells[0].dcp = scale_dcp.plan(World(SMALL, Sharding("FSDP", 8)))
    bars = scale_report.judge(cells)
    assert all(bar.measured is not None for bar in bars)
    text = scale_report.as_markdown(cells, {"machine": "some", "torch": "2"})
    assert "16 shards" in text and text.count("\n|---|") == 3  # saves, restarts, DCP
    assert text.endswith("|\n\n") and "\n\n\n" not in text
    picture = scale_picture.draw(cells)
    assert {node.tag.rpartition("}")[2] for node in ElementTree.fromstring(picture).iter()} >= {
        "path",
        "circle",
        "text",
    }


def test_figures_take_the_place_of_those_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "DOCS", tmp_path)
    page = tmp_path / "scale.md"
    page.write_text(f"before\n\n{scale.BEGIN}\n\nold\n\n{scale.END}\n\nafter\n")
    scale.write_docs("|new|\n\n", "<svg/>")
    assert page.read_text() == f"before\n\n{scale.BEGIN}\n\n|new|\n\n{scale.END}\n\nafter\n"
    assert (tmp_path / "scale.svg").read_text() == "<svg/>"


@pytest.mark.parametrize("sharding", [Sharding("FSDP", 8), Sharding("HSDP", 8, replicas=2)], ids=["FSDP", "HSDP"])
def test_torchs_planner_is_asked_about_the_same_shards(sharding: Sharding) -> None:
    planned: list[Any] = []
    made = DefaultSavePlanner.create_local_plan

    def noting(self: Any) -> Any:
        plan = made(self)
        planned.append({(i.index.fqn, tuple(i.tensor_data.chunk.sizes)) for i in plan.items if i.tensor_data})
        return plan

    world = World(SMALL, sharding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DefaultSavePlanner, "create_local_plan", noting)
        cost = scale_dcp.plan(world)
    assert cost.metadata_bytes > 0 and len(planned) == 8
    for rank, shards in enumerate(planned):
        held = {
            (name.replace("/", "."), view.box.lengths)
            for name, entry in world.collected(rank).entries.items()
            for view in entry.views
        }
        assert {shard for shard in shards if 0 not in shard[1]} == held
