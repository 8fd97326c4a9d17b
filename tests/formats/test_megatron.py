"""Megatron-core's torch_dist: its own files, and files of the same form for what those of a tiny model leave out."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from tests import pool
from tests.formats.truth import check, leaves, same

pytestmark = pytest.mark.filterwarnings("ignore")

# With gloo ranks in the grid that Megatron's would have: (what varies first, what varies last) of four.
MESH = (2, 2)


def write(path: str, tensors: dict[str, tuple[list[int], list[Any]]], objects: dict[str, Any], common: Any) -> None:
    """A folder as dist_checkpointing leaves it: ``tensors`` count up from 0, sharded by placements over `MESH`."""
    mesh = init_device_mesh("cpu", MESH)
    state: dict[str, Any] = {}
    for key, (shape, placements) in tensors.items():
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        state[key] = distribute_tensor(whole, mesh, placements)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save({**state, **{key: [value] for key, value in objects.items()}}, checkpoint_id=path, planner=planner)
    if dist.get_rank() == 0:
        torch.save(common, f"{path}/common.pt")
        (Path(path) / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))


def written(path: Path, tensors: dict[str, Any], objects: dict[str, Any] | None = None, **common: Any) -> Path:
    common = {"iteration": 9, "args": argparse.Namespace(world_size=4, lr=0.1), **common}
    pool.run(4, write, str(path), tensors, objects or {}, common)
    return path


def counting(shape: list[int]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


ONE = [Replicate(), Replicate()]


@pytest.mark.parametrize("name", ["megatron_flat_tp2", "megatron_stacked_bf16_tp2"])
def test_golden(name: str) -> None:
    checkpoint = check(name)
    assert checkpoint.format == "Megatron-core torch_dist" and "iter_0000003" in checkpoint.reading
    state = checkpoint.state_dict()
    assert state["args"]["hidden_size"] == 24 and state["checkpoint_version"] == 3.0 and checkpoint.step == 3
    rng = [value for key, value in leaves(state["rng_state"]) if key.endswith("torch_rng_state")]
    assert len(rng) == 2 and all(value.numel() == 5056 for value in rng)
    checkpoint.verify()


def test_layers_and_experts_out_of_their_stacks(tmp_path: Path) -> None:
    tensors = {
        "decoder.layers.mlp.linear_fc1.weight": ([4, 6, 3], [Shard(0), Shard(0)]),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": ([2, 2, 3, 5], [Shard(0), Shard(1)]),
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight": ([4, 6, 3], [Shard(0), Shard(0)]),
        "decoder.final_layernorm.weight": ([6], ONE),
        "output_layer.weight": ([8, 3], [Shard(0), Replicate()]),
        "decoder.layers.1.odd.weight": ([6], ONE),  # layers that are not alike are saved one by one
    }
    state = holdfast.open(written(tmp_path / "iter_0000009", tensors)).state_dict()
    stacked, experts = counting([4, 6, 3]), counting([2, 2, 3, 5])
    told = {f"decoder.layers.{n}.mlp.linear_fc1.weight": stacked[n] for n in range(4)}
    assert state["optimizer"]["state"].keys() == told.keys()
    assert all(same(state["optimizer"]["state"][fqn]["exp_avg"], value) for fqn, value in told.items())
    name = "decoder.layers.{}.mlp.experts.experts.{}.linear_fc1.weight"
    told |= {name.format(n, e): experts[n, e] for n in range(2) for e in range(2)}
    told |= {"decoder.final_layernorm.weight": counting([6]), "output_layer.weight": counting([8, 3])}
    told |= {"decoder.layers.1.odd.weight": counting([6])}
    assert state["model"].keys() == told.keys() and all(same(state["model"][k], v) for k, v in told.items())


def test_what_is_no_stack(tmp_path: Path) -> None:
    # One row a chunk, but no list of layers; a list of layers, but whole.
    tensors = {"experts.bias": ([2, 3], [Shard(0), Replicate()]), "layers.scale": ([2, 3], ONE)}
    state = holdfast.open(written(tmp_path / "iter_0000009", tensors)).state_dict()
    assert {k: tuple(v.shape) for k, v in state["model"].items()} == {"experts.bias": (2, 3), "layers.scale": (2, 3)}


def test_flattened_ranges(tmp_path: Path) -> None:
    # A grid of 2 x 1 shards of [3, 5], each flattened and cut in two among data-parallel ranks.
    key = "optimizer.state.fp32_param.output_layer.weight"
    tensors = {"output_layer.weight": ([6, 5], ONE), key: ([2, 1, 15], [Shard(0), Shard(2)])}
    path = written(tmp_path / "iter_0000009", tensors)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.mcore_data = {key: {"nd_reformulated_orig_global_shape": (6, 5)}}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    state = holdfast.open(path).state_dict()
    assert same(state["model"]["output_layer.weight"], counting([6, 5])) and "output_layer.weight" in state["module"]
    metadata.mcore_data[key]["nd_reformulated_orig_global_shape"] = (6, 6)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(holdfast.errors.Damaged, match="no shards of"):
        holdfast.open(path)


def test_gated_halves(tmp_path: Path) -> None:
    names = ["module.decoder.layers.0.mlp.linear_fc1.weight", "module.weight"]
    tensors = {
        f"{prefix}{names[0]}_{half}": ([4, 3], ONE) for prefix in ("", "optimizer.state.exp_avg.") for half in "wv"
    }
    state = holdfast.open(written(tmp_path / "iter_0000009", {**tensors, names[1]: ([2], ONE)})).state_dict()
    whole, fqn = torch.cat([counting([4, 3])] * 2), "decoder.layers.0.mlp.linear_fc1.weight"
    assert state["model"].keys() == {fqn, "weight"} and same(state["model"][fqn], whole)
    assert same(state["optimizer"]["state"][fqn]["exp_avg"], whole)


def test_objects_in_their_places(tmp_path: Path) -> None:
    objects: dict[str, Any] = {f"rng_state/shard_{p}.{t}_2.2": {"seed": 10 * p + t} for p in range(2) for t in range(2)}
    objects |= {f"decoder.layers.fc._extra_state/shard_{n}_3": f"layer {n}" for n in range(3)}
    objects |= {"head._extra_state/shard_0_1": "head"}
    path = written(tmp_path / "iter_0000009", {"head.weight": ([2, 2], ONE)}, objects)
    state = holdfast.open(path).state_dict()
    assert state["rng_state"] == [[{"seed": 0}, {"seed": 1}], [{"seed": 10}, {"seed": 11}]]
    assert [state["model"][f"decoder.layers.{n}.fc._extra_state"] for n in range(3)] == [f"layer {n}" for n in range(3)]
    assert state["model"]["head._extra_state"] == "head"
    objects.pop("rng_state/shard_1.0_2.2")
    with pytest.raises(holdfast.errors.Damaged, match="rng_state"):
        holdfast.open(written(tmp_path / "b", {"head.weight": ([2, 2], ONE)}, objects))


@pytest.mark.parametrize("chained", [False, True])
def test_settings_and_steps(tmp_path: Path, chained: bool) -> None:
    group = {"lr": 0.5, "betas": (0.9, 0.95)}
    part = {
        "optimizer": {"state": {"common_step": torch.tensor(4.0)}, "param_groups": [group]},
        "grad_scaler": {"s": 1},
    }
    common = {0: part, 1: {**part, "grad_scaler": {}}} if chained else part
    prefix = "chained_1." if chained else ""
    tensors = {"a.weight": ([2], ONE), f"{prefix}optimizer.state.exp_avg.a.weight": ([2], ONE)}
    checkpoint = holdfast.open(written(tmp_path / "iter_0000009", tensors, optimizer=common))
    held = checkpoint.state_dict()["optimizer"]
    assert checkpoint.world_size == 4 and checkpoint.step == 9
    assert same(held["state"]["a.weight"]["step"], torch.tensor(4.0)) and held["grad_scaler"] == {"s": 1}
    # One group has all parameters; of several Megatron does not tell which has which.
    assert held["param_groups"] == ([group, group] if chained else [{**group, "params": ["a.weight"]}])


def test_flat_buffers_stay(tmp_path: Path) -> None:
    at = "optimizer.distributed.dp_group_idx_0"
    objects = {f"{at}.optimizer/shard_0_1": {"param_groups": [{"lr": 0.5, "step": 2}]}}
    tensors = {"a.weight": ([2], ONE), f"{at}.gbuf_idx_0.bucket_idx_0.exp_avg": ([8], [Shard(0), Replicate()])}
    checkpoint = holdfast.open(
        written(tmp_path / "iter_0000009", tensors, objects, optimizer={"param_state_sharding_type": "dp_reshardable"})
    )
    held = checkpoint.state_dict()["optimizer"]
    assert same(held["distributed"]["dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"], counting([8]))
    assert held["param_groups"][0]["lr"] == 0.5 and "flat buffers" in checkpoint.reading


def test_paths(tmp_path: Path) -> None:
    path = written(tmp_path / "iter_0000009", {"a.weight": ([2], ONE)})
    assert holdfast.open(path).step == 9
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("9\n")
    assert holdfast.open(tmp_path).step == holdfast.open(tmp_path / "latest_checkpointed_iteration.txt").step == 9
    path.rename(tmp_path / "release")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="names iteration '9'"):
        holdfast.open(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert "release" in holdfast.open(tmp_path).reading
    (tmp_path / "release" / "metadata.json").unlink()
    with pytest.raises(holdfast.errors.NotACheckpoint, match="never finished"):
        holdfast.open(tmp_path / "release")


def test_other_formats_of_megatron(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(holdfast.errors.Unsupported, match="'zarr'"):
        holdfast.open(tmp_path)
    (tmp_path / "metadata.json").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    (tmp_path / "iter_0000005" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(holdfast.errors.Unsupported, match="old format"):
        holdfast.open(tmp_path)


def test_without_common(tmp_path: Path) -> None:
    path = written(tmp_path / "iter_0000009", {"a.weight": ([2], ONE)})
    (path / "common.pt").unlink()
    with pytest.raises(holdfast.errors.Damaged, match=r"common\.pt is missing"):
        holdfast.open(path)
