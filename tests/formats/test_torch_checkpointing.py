"""Meta's torch_checkpointing: with metadata and without, whole and in pieces, of every layout that it writes."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.errors import Damaged
from holdfast.formats.torch_checkpointing import torch_checkpointing
from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.formats import packed, truth
from tests.formats.truth import same

METADATA = "metadata.pkl"


@pytest.mark.parametrize("name", [name for name in truth.NAMES if name.startswith("torchckpt_")])
def test_equals_the_truth(name: str) -> None:
    checkpoint = truth.check(name)
    assert (checkpoint.format, checkpoint.step, checkpoint.left_out) == ("torch_checkpointing", 3, {})
    checkpoint.verify()


def test_fsdp2_over_tensor_parallel_in_safetensors(tmp_path: Path) -> None:
    ckpt = packed.unpacked("torchckpt_tp_fsdp2_safetensors_4r", tmp_path)
    checkpoint = holdfast.open(ckpt)
    packed.check(checkpoint.state_dict(), ckpt)
    assert (checkpoint.step, checkpoint.world_size, checkpoint.left_out) == (7, 4, {})
    assert checkpoint.state_dict()["cfg"] == {"a": [1, 2]}  # of rank_<n>/cfg.json
    assert [checkpoint.per_rank("train/rank", r) for r in range(4)] == [0, 1, 2, 3]
    assert sorted(checkpoint.attachments) == [f"note_{r}.txt" for r in range(4)]  # of no item that can be told
    assert checkpoint.attachment("note_2.txt") == b"hello"
    checkpoint.verify()


# Without metadata


def save_plain(folder: str) -> dict[str, torch.Tensor]:
    """As the library saves where no item has a resharder: torch.save of each item, of each rank."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    torch.save(model.state_dict(), f"{folder}/model_{rank}.pt")
    torch.save(torch.full((9,), rank, dtype=torch.uint8), f"{folder}/rng_{rank}.pt")
    torch.save(12, f"{folder}/step_{rank}.pt")
    LocalPlace(folder, f"train_{rank}.json").write_text(json.dumps({"epoch": 3}))
    return {k: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for k, v in model.state_dict().items()}


def test_files_of_ranks_without_metadata(tmp_path: Path) -> None:
    whole = pool.run(3, save_plain, str(tmp_path))[0]
    checkpoint = holdfast.open(tmp_path)
    model = checkpoint.state_dict()["model"]
    assert model.keys() == whole.keys() and all(same(model[name], tensor) for name, tensor in whole.items())
    assert (checkpoint.step, checkpoint.world_size, checkpoint.differing) == (12, 3, ["rng"])
    assert [checkpoint.per_rank("rng", r)[0].item() for r in range(3)] == [0, 1, 2]
    assert checkpoint.state_dict()["train"] == {"epoch": 3}
    (tmp_path / "model_2.pt").unlink()
    with pytest.raises(Damaged, match="model/.* is not whole with what ranks .0, 1. hold"):
        holdfast.open(tmp_path)
    for path in tmp_path.glob("*_1.*"):
        path.unlink()
    assert torch_checkpointing.read(tmp_path) is None  # numbers with gaps are no ranks


def test_pieces_without_metadata_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        save_file({"w": torch.full((3, 2), float(rank))}, tmp_path / f"model_{rank}.safetensors")
        torch.save(torch.full((3,), rank, dtype=torch.uint8), tmp_path / f"rng_{rank}.pt")
        torch.save({i: torch.zeros(2) for i in range(9)}, tmp_path / f"whole_{rank}.pt")
    with pytest.raises(holdfast.errors.Unsupported, match="differ between its files.*save with a resharder"):
        holdfast.open(tmp_path)


@pytest.mark.parametrize(
    "names",
    [["epoch_0.pt"], ["epoch_0.pt", "epoch_1.pt"], ["model_0.pt", "optimizer.pt"], ["model_1.pt", "model_2.pt"],
     ["model_000.pt"], ["part_0.pt", "part_1.pt"], ["model_0.json"]],
)  # fmt: skip
def test_other_files_with_numbers_are_left_to_others(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert torch_checkpointing.read(tmp_path) is None


# Metadata


def dtensor(shape: list[int], mesh: list[int], *placements: dict[str, Any]) -> dict[str, Any]:
    ranks = tuple(range(torch.zeros(mesh).numel()))
    spec = {"device_type": "cpu", "mesh_shape": tuple(mesh), "mesh_data": ranks, "mesh_dim_names": None}
    data = {
        "global_shape": shape,
        "dtype": "torch.float32",
        "stride": [1],
        "mesh_spec": spec,
        "placements": list(placements),
    }
    return {"sharding_metadata": {"type": "DTensorShardingMetadata", "data": data}, "ranks": ranks}


def boxes(shape: list[int], rank: int, *parts: tuple[list[int], list[int], list[int]]) -> dict[str, Any]:
    at, local, sizes = (list(column) for column in zip(*parts, strict=True))
    data = {"global_shape": shape, "global_offsets": at, "local_offsets": local, "local_sizes": sizes, "dtype": "x"}
    return {"sharding_metadata": {"type": "default_tensor_v1", "data": data}, "ranks": (rank,)}


def layout(path: str) -> dict[str, Any]:
    return {"file_path": path, "serialization_format": {"type": "SafetensorsSerialization"}}


def write(folder: Path, world_size: int, items: dict[str, Any], files: dict[str, Any], version: str = "2.0") -> Path:
    metadata = {
        item: {
            "nested_path_to_metadata": {json.dumps(keys): groups for keys, groups in paths},
            "rank_to_layout_info": files[item],
        }
        for item, paths in items.items()
    }
    folder.mkdir(exist_ok=True)
    found = {"metadata": metadata, "world_size": world_size, "version": version}
    if version == "1.0":
        found["metadata"] = {json.dumps([i, *keys]): groups for i, paths in items.items() for keys, groups in paths}
        found["rank_to_layout_info_mappings"] = {r: {i: files[i][r] for i in items} for r in range(world_size)}
        del found["version"]
    (folder / METADATA).write_bytes(pickle.dumps(found))
    return folder


SHARD = {"type": "Shard", "dim": 0}
WHOLE = torch.arange(15.0).reshape(5, 3)


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_metadata_of_both_versions(tmp_path: Path, version: str) -> None:
    """Names are ways joined by dots; a dot in a name is told from one between two."""
    paths = [
        (["layer.0.weight"], [dtensor([5, 3], [2], SHARD)]),
        (["more", "a.b", 0], [dtensor([4], [2], {"type": "Replicate"})]),
    ]
    write(tmp_path, 2, {"net": paths}, {"net": {r: layout(f"deep/er/{r}.safetensors") for r in range(2)}}, version)
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for r in range(2):
        held = {"layer.0.weight": WHOLE[3 * r : 3 * r + 3].clone(), "more.a.b.0": torch.ones(4)}
        save_file(held, tmp_path / "deep" / "er" / f"{r}.safetensors")
    checkpoint = holdfast.open(tmp_path / METADATA)
    state = checkpoint.state_dict()
    assert same(state["net"]["layer.0.weight"], WHOLE) and same(state["net"]["more"]["a.b"][0], torch.ones(4))
    assert checkpoint.manifest.producer == {"torch_checkpointing": f"metadata {version}"}


def test_tensors_that_tell_their_boxes_themselves(tmp_path: Path) -> None:
    groups = [
        boxes([5, 3], 0, ([0, 0], [0, 0], [2, 3]), ([4, 1], [2, 1], [1, 2])),
        boxes([5, 3], 1, ([2, 0], [0, 0], [2, 3]), ([4, 0], [3, 2], [1, 1])),
    ]
    write(tmp_path, 2, {"model": [(["w"], groups)]}, {"model": {0: None, 1: None}})
    torch.save({"w": torch.cat([WHOLE[:2], WHOLE[4:]])}, tmp_path / "model_0.pt")
    torch.save({"w": torch.cat([WHOLE[2:4], torch.zeros(1, 3), WHOLE[4:].flip(1)])}, tmp_path / "model_1.pt")
    assert same(holdfast.open(tmp_path).state_dict()["model"]["w"], WHOLE)


def saved(folder: Path) -> Path:
    """A model of two ranks in safetensors."""
    files = {"model": {r: layout(f"model_{r}.safetensors") for r in range(2)}}
    write(folder, 2, {"model": [(["w"], [dtensor([5, 3], [2], SHARD)])]}, files)
    for r in range(2):
        save_file({"w": WHOLE[3 * r : 3 * r + 3].clone()}, folder / f"model_{r}.safetensors")
    return folder


def test_the_newest_complete_step_of_a_run(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        saved(tmp_path / f"step_{step}")
        (tmp_path / f"step_{step}" / "step_0.pt").unlink(missing_ok=True)
        torch.save(step, tmp_path / f"step_{step}" / "step_0.pt")
    (tmp_path / "step_11" / "model_1.safetensors").unlink()
    saved(tmp_path / "tmp_step_12")
    checkpoint = holdfast.open(tmp_path)
    assert checkpoint.step == 10
    assert checkpoint.reading == "step_10, the newest of 3 steps; step_11 is not complete"
    with pytest.raises(Damaged, match="model_1.safetensors.*is missing"):
        holdfast.open(tmp_path / "step_11")
    assert "tmp_" in holdfast.open(tmp_path / "tmp_step_12").reading
    one = holdfast.open(tmp_path / "step_9" / "model_1.safetensors")
    assert one.step == 9 and "model_1.safetensors is part of" in one.reading


def test_links_that_lead_out_of_the_folder_are_not_followed(tmp_path: Path) -> None:
    folder = saved(tmp_path / "ckpt")
    torch.save(1, tmp_path / "outside.pt")
    (folder / "more_0.pt").symlink_to(tmp_path / "outside.pt")
    (folder / "root").symlink_to("/")
    checkpoint = holdfast.open(folder)
    assert list(checkpoint.state_dict()) == ["model"] and not checkpoint.attachments


def test_files_of_any_name(tmp_path: Path) -> None:
    """What the format is, is told by the bytes."""
    files = {"model": {r: layout(f"weights-of-{r}") for r in range(2)}}
    write(tmp_path, 2, {"model": [(["w"], [dtensor([5, 3], [2], SHARD)])]}, files)
    for r in range(2):
        save_file({"w": WHOLE[3 * r : 3 * r + 3].clone()}, tmp_path / f"weights-of-{r}")
    assert same(holdfast.open(tmp_path).state_dict()["model"]["w"], WHOLE)


def test_an_item_that_one_rank_alone_has(tmp_path: Path) -> None:
    write(tmp_path, 2, {"ema": [(["w"], [dtensor([5, 3], [2], {"type": "Replicate"})])]}, {"ema": {0: None, 1: None}})
    torch.save({"w": WHOLE}, tmp_path / "ema_0.pt")
    assert same(holdfast.open(tmp_path).state_dict()["ema"]["w"], WHOLE)
    (tmp_path / "ema_0.pt").unlink()
    with pytest.raises(Damaged, match="ema_0.pt.*is missing"):
        holdfast.open(tmp_path)


def test_a_tensor_that_the_metadata_calls_a_replica_and_is_none(tmp_path: Path) -> None:
    """The library calls every plain tensor replicated."""
    write(tmp_path, 2, {"m": [(["w"], [dtensor([3], [2], {"type": "Replicate"})])]}, {"m": {0: None, 1: None}})
    for r in range(2):
        torch.save({"w": torch.full((3,), float(r))}, tmp_path / f"m_{r}.pt")
    checkpoint = holdfast.open(tmp_path)
    assert checkpoint.differing == ["m/w"] and checkpoint.per_rank("m/w", 1).tolist() == [1, 1, 1]


# Damage


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda m: m.update(version="3.0"), holdfast.errors.Unsupported, "version '3.0'.*update holdfast"),
        (lambda m: m.update(world_size="2"), Damaged, "not whole.*world size"),
        (lambda m: m["metadata"]["model"].pop("rank_to_layout_info"), Damaged, "not whole"),
        (lambda m: group(m).update(type="Hologram"), Damaged, "type 'Hologram', which is not known"),
        (lambda m: group(m)["data"]["placements"][0].update(type="Partial"), Damaged, "placement 'Partial'"),
        (lambda m: group(m)["data"]["placements"][0].update(dim=5), Damaged, "cut as it cannot be"),
        (lambda m: group(m)["data"].update(global_shape=[6, 3]), Damaged, r"has shape|shape \[2, 3\]"),
        (lambda m: group(m)["data"]["mesh_spec"].update(mesh_shape=(3,)), Damaged, "mesh of sizes"),
        (lambda m: files_of(m).update({1: layout("../x")}), Damaged, "no path"),
        (lambda m: files_of(m).update({1: layout("/x")}), Damaged, "no path"),
        (lambda m: files_of(m).pop(1), Damaged, "is not whole with what"),
    ],
)  # fmt: skip
def test_metadata_that_is_wrong(tmp_path: Path, change: Any, error: Any, text: str) -> None:
    folder = saved(tmp_path)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    change(metadata)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    with pytest.raises(error, match=text):
        holdfast.open(folder)


def files_of(metadata: dict[str, Any]) -> dict[int, Any]:
    return metadata["metadata"]["model"]["rank_to_layout_info"]


def group(metadata: dict[str, Any]) -> dict[str, Any]:
    return metadata["metadata"]["model"]["nested_path_to_metadata"]['["w"]'][0]["sharding_metadata"]


def test_another_program_s_metadata_is_left_to_others(tmp_path: Path) -> None:
    for content in (pickle.dumps([1, 2]), pickle.dumps({"metadata": 1}), pickle.dumps(shutil.copy)):
        (tmp_path / METADATA).write_bytes(content)
        assert torch_checkpointing.read(tmp_path) is None


def test_truncated_metadata(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / METADATA).write_bytes((folder / METADATA).read_bytes()[:-20])
    with pytest.raises(Damaged, match="metadata.pkl"):
        holdfast.open(folder)


def test_a_file_cut_short(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    path = folder / "model_1.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(Damaged, match="model_1.safetensors"):
        holdfast.open(folder)
