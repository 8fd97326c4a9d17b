"""OLMo's five layouts: what the real library wrote, every world size and shape, and files that are not whole."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import holdfast
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, Unsupported
from holdfast.formats.olmo import olmo
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import olmo_made as made
from tests.formats.truth import GOLDEN, NAMES, check, same
from tests.marks import examples

GOLDEN_NAMES = [name for name in NAMES if name.startswith("olmo_")]
TENSORS = {"a.w": torch.randn(5, 3), "a.b": torch.randn(2), "c": torch.randn(9, 2, 2)}


def golden(name: str, into: Path) -> Path:
    """A copy of a golden checkpoint, to be altered."""
    return LocalPlace(shutil.copytree(GOLDEN / name / "ckpt", into / "step3"))


# What OLMo itself wrote


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_what_olmo_wrote_comes_out_whole(name: str) -> None:
    checkpoint = check(name)
    assert (checkpoint.format, checkpoint.step, checkpoint.world_size) == ("OLMo", 3, 2)
    assert checkpoint.attachment("config.yaml") == (GOLDEN / name / "ckpt" / "config.yaml").read_bytes()
    assert not checkpoint.left_out
    assert checkpoint.verify().nbytes > 200_000
    state = checkpoint.state_dict()
    assert state["epoch"] == 0 and state["checkpoints"] == ["runs/step2"]
    version, words, gauss = state["rng"]["python"]  # as random.setstate takes it
    assert (version, len(words), gauss) == (3, 625, None)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_every_layout_converts_to_ours(name: str, tmp_path: Path) -> None:
    holdfast.convert(GOLDEN / name / "ckpt", tmp_path / "ours")
    assert holdfast.open(tmp_path / "ours").format == "holdfast"
    check(name, tmp_path / "ours")


# Flat parameters


blocks = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), max_size=4)
models = st.tuples(blocks.filter(bool), st.lists(blocks.filter(bool), max_size=2))


@settings(max_examples=examples(25), deadline=None)
@given(models, st.integers(1, 9), st.booleans(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_flat_parameters_of_any_shapes_and_world_size(
    tmp_path_factory: pytest.TempPathFactory, model: Any, world: int, old: bool, dtype: torch.dtype
) -> None:
    root, inner = model
    shapes: made.Shapes = {"": root, **{f"block{i}": found for i, found in enumerate(inner)}}
    folder = LocalPlace(tmp_path_factory.mktemp("local")) / "step5"
    made.write_local(folder, shapes, world, old=old, dtype=dtype)
    checkpoint = holdfast.open(folder)
    state, truth = checkpoint.state_dict(), made.optimizer_truth(made.model_of(shapes))
    assert state["model"].keys() == dict(made.model_of(shapes).named_parameters()).keys()
    for name, parameter in made.model_of(shapes, dtype).named_parameters():
        assert same(state["model"][name], parameter.detach()), name
        for key, tensor in truth[name].items():
            assert same(state["optimizer"]["state"][name][key], tensor), (name, key)
    groups = state["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [list(truth)[::2], list(truth)[1::2]]
    assert (checkpoint.world_size, checkpoint.step, state["epoch"]) == (world, 5, 1)
    shutil.rmtree(folder)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    made.write_local(tmp_path / "step5", {"": [(4, 3), (5,)]}, 3, old=True, dtype=torch.float32)
    return tmp_path / "step5"


def altered(path: Path, change: Any) -> None:
    held = torch.load(path, weights_only=False)
    change(held)
    torch.save(held, path)


def handle_of(held: Any) -> Any:
    return held["modules"][0]["handles"][0]


def refused(path: Path, *words: str, kind: type[HoldfastError] = Damaged) -> None:
    with pytest.raises(kind) as caught:
        holdfast.open(path)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_missing_and_mixed_rank_files_are_named(local: Path) -> None:
    shutil.copy(local / "model/rank2.pt", local / "model/rank3.pt")
    refused(local, "3 ranks", "rank3.pt", "two saves")
    (local / "model/rank3.pt").unlink()
    (local / "optim/rank1.pt").rename(local / "kept")
    refused(local, "optim", "rank1.pt is missing")
    (local / "kept").rename(local / "optim/rank1.pt")
    (local / "model/rank2.pt").unlink()
    refused(local, "model", "rank2.pt is missing")
    (local / "metadata.yaml").unlink()  # the trainers tell of a third rank too
    refused(local, "model", "rank2.pt is missing")
    shutil.rmtree(local / "train")  # then nothing does, but a third of the model is gone
    refused(local, "2 ranks", "rank2.pt", "two saves")


def test_a_shard_table_that_leaves_a_hole_or_goes_beyond_its_data(local: Path) -> None:
    whole = (local / "model/rank1.pt").read_bytes()

    def shorter(held: Any) -> None:
        handle_of(held)["flat_param._shard_param_offsets"] = ((6, 10),)

    altered(local / "model/rank1.pt", shorter)
    refused(local, "optim/rank1.pt", "p0")
    shutil.rmtree(local / "optim")
    refused(local, "model/p0", "1 of 12 elements are in no box")

    def longer(held: Any) -> None:
        handle_of(held)["flat_param._shard_param_offsets"] = ((6, 12),)

    altered(local / "model/rank1.pt", longer)
    refused(local, "rank1.pt", "p0 of shape [4, 3]")

    def none(held: Any) -> None:
        del handle_of(held)["flat_param._shard_param_offsets"]

    altered(local / "model/rank1.pt", none)
    refused(local, "rank1.pt", "shard table")
    (local / "model/rank1.pt").write_bytes(whole[:-200])
    refused(local, "rank1.pt")


def test_an_optimizer_of_another_save_is_refused(local: Path) -> None:
    kept = (local / "optim/rank2.pt").read_bytes()
    altered(local / "optim/rank2.pt", lambda held: held["param_groups"][0].update(lr=9.0))
    refused(local, "optim/rank2.pt", "param_groups")
    (local / "optim/rank2.pt").write_bytes(kept)
    altered(local / "optim/rank2.pt", lambda held: held["state"][1].update(exp_avg=torch.zeros(3)))
    refused(local, "optim/rank2.pt", "exp_avg of p1", "[3]")
    for rank in range(3):
        altered(local / f"optim/rank{rank}.pt", lambda held: held["param_groups"][1].pop("param_names"))
    refused(local, "param_names", kind=Unsupported)


def test_scalars_that_differ_are_taken_from_the_first_and_told(local: Path, caplog: pytest.LogCaptureFixture) -> None:
    altered(local / "optim/rank2.pt", lambda held: held["state"][0].update(grad_norm_exp_avg=torch.tensor(0.5)))
    with caplog.at_level("WARNING", "holdfast"):
        state = holdfast.open(local).state_dict("optimizer")
    assert state["optimizer"]["state"]["p0"]["grad_norm_exp_avg"] == 0.25
    assert "grad_norm_exp_avg of p0" in caplog.text and "rank2.pt" in caplog.text


# ShardedTensors


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_sharded_tensors_of_any_world_size(world: int, tmp_path: Path) -> None:
    made.write_legacy(tmp_path, TENSORS, world)
    checkpoint = holdfast.open(tmp_path)
    state = checkpoint.state_dict()
    for name, tensor in TENSORS.items():
        assert same(state["model"][name], tensor)
        assert same(state["optimizer"]["state"][name]["exp_avg"], tensor + 1)
    assert state["model"]["seen"] == 3 and state["optimizer"]["param_groups"][0]["params"] == list(TENSORS)
    assert checkpoint.world_size == world
    if world > 1:
        assert checkpoint.differing == ["rng/python", "rng/torch"]
        assert checkpoint.per_rank("rng/python", world - 1) == (3, tuple(range(world - 1, world + 8)), None)
        assert checkpoint.per_rank("rng/torch", 1).tolist() == [1] * 9


def test_hybrid_sharding_pickles_dtensors(tmp_path: Path) -> None:
    for rank in range(4):
        with made.rank_of(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2))
            chunk = TENSORS["a.w"].split(3)[rank % 2].clone()
            tensor = DTensor.from_local(
                chunk, mesh, [Replicate(), Shard(0)], run_check=False, shape=torch.Size((5, 3)), stride=(3, 1)
            )
            made.save({"model": {"a.w": tensor}, **made.trainer(rank, 4)}, tmp_path / f"rank{rank}.pt")
    assert same(holdfast.open(tmp_path).read("model/a.w"), TENSORS["a.w"])


def test_legacy_files_that_are_not_whole(tmp_path: Path) -> None:
    made.write_legacy(tmp_path, TENSORS, 3)
    (tmp_path / "rank1.pt").rename(tmp_path / "kept")
    refused(tmp_path, "rank1.pt is missing", "3 ranks")
    with made.rank_of(1, 3):
        other = made.legacy_state({**TENSORS, "a.w": torch.zeros(6, 3)}, 1, 3)
        made.save(other, tmp_path / "rank1.pt")
        refused(tmp_path, "model/a.w is seen differently by the ranks")
        short = made.legacy_state(TENSORS, 1, 3)
        short["model"]["a.w"]._local_shards.clear()
        made.save(short, tmp_path / "rank1.pt")
    refused(tmp_path, "model/a.w", "6 of 15 elements")


def test_opening_many_ranks_reads_what_describes_them_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    genuine = os.pread

    def counted(fd: int, nbytes: int, begin: int) -> bytes:
        found = genuine(fd, nbytes, begin)
        read.append(len(found))
        return found

    monkeypatch.setattr(os, "pread", counted)
    costs = {}
    for world in (16, 64):
        big = {"w": torch.zeros(world * 16, 1024)}  # 64 KiB a rank and tensor
        made.write_legacy(tmp_path / str(world), big, world)
        read.clear()
        checkpoint = holdfast.open(tmp_path / str(world))
        costs[world] = (sum(read), len(read))
        assert same(checkpoint.read("model/w", [(0, 3)]), big["w"][:3])
    # Each rank's pickle tells the shards of all ranks, 0.1 KiB each; its tensors have 128 KiB.
    assert 0 < costs[64][0] < 64 * 40_000
    assert 0 < costs[64][1] <= 4 * costs[16][1] + 8


# Safetensors


def encoded(state: dict[Any, Any], path: Path) -> None:
    """As OLMo's state_dict_to_safetensors_file."""
    flat: dict[str, torch.Tensor] = {}

    def walk(node: dict[Any, Any], keys: tuple[Any, ...]) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, (*keys, key))
                continue
            tensor = isinstance(value, torch.Tensor)
            name = base64.urlsafe_b64encode(pickle.dumps(((*keys, key), not tensor))).decode()
            flat[name] = value if tensor else torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)

    walk(state, ())
    save_file(flat, path)


def test_encoded_safetensors_are_taken_before_pt_files(tmp_path: Path) -> None:
    encoded({"a.w": torch.ones(2), "a.b": torch.zeros(3)}, tmp_path / "model.safetensors")
    torch.save({"a.w": torch.zeros(2)}, tmp_path / "model.pt")
    optimizer = {
        "state": {0: {"step": torch.tensor(2.0)}, 1: {"exp_avg": torch.ones(3)}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.95), "foreach": None, "params": [0, 1]}],
    }
    encoded(optimizer, tmp_path / "optim.safetensors")
    torch.save({"global_step": 4, "epoch": 0}, tmp_path / "other.pt")  # what train.pt was called before
    checkpoint = holdfast.open(tmp_path)
    state = checkpoint.state_dict()
    assert state["model"]["a.w"].tolist() == [1, 1] and state["model"].keys() == {"a.w", "a.b"}
    assert state["optimizer"]["param_groups"] == [{**optimizer["param_groups"][0]}]
    assert state["optimizer"]["state"][1]["exp_avg"].tolist() == [1, 1, 1]  # no names are told: the numbers stay
    assert (checkpoint.step, state["epoch"]) == (4, 0)
    alone = holdfast.open(tmp_path / "optim.safetensors")
    assert alone.state_dict().keys() == {"optimizer"} and "alone" in alone.reading


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (LocalPlace("executed"),))


def test_nothing_pickled_in_safetensors_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    encoded({"state": {}, "param_groups": [{"lr": Evil()}]}, tmp_path / "optim.safetensors")
    encoded({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, "optim.safetensors", kind=HoldfastError)
    key = base64.urlsafe_b64encode(pickle.dumps(((Evil(),), False))).decode()
    save_file({**load_file(tmp_path / "model.safetensors"), key: torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "optim.safetensors").unlink()
    refused(tmp_path, "model.safetensors", kind=HoldfastError)
    assert not (tmp_path / "executed").exists()


def test_plain_safetensors_are_left_to_others(tmp_path: Path) -> None:
    save_file({"model.w": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.yaml").write_text("a: 1\n")
    assert olmo.read(tmp_path) is None
    assert olmo.read(tmp_path / "model.safetensors") is None
    torch.save({"anything": 1}, tmp_path / "rank0.pt")
    assert olmo.read(tmp_path) is None
    assert olmo.read(tmp_path / "nothing") is None


# OLMo-core 0.1


def write_core(folder: Path, index: dict[str, Any], files: dict[str, dict[str, torch.Tensor]]) -> Path:
    folder.mkdir(parents=True)
    for name, held in files.items():
        save_file(held, folder / name)
    (folder / "metadata.json").write_text(json.dumps({"tensors": index}))
    return folder


def spec(*runs: tuple[int, int]) -> dict[str, Any]:
    return {"flattened_offsets": runs, "local_shape": None, "global_offset": None}


def test_flat_runs_and_boxes_of_olmo_core(tmp_path: Path) -> None:
    w, d = torch.arange(20.0).view(4, 5), torch.arange(12.0).view(4, 3)
    parts = {"a": w.flatten()[[0, 1, 2, 15, 16, 17, 18, 19]], "b": w.flatten()[3:15]}
    index = {
        "w": {"shape": [4, 5], "is_sharded": True, "dtype": "F32",
              "shard_spec_per_file": {"a": spec((0, 3), (15, 20)), "b": spec((3, 15)), "c": spec((0, 0))}},
        "d": {"shape": [4, 3], "is_sharded": True, "dtype": "F32", "shard_spec_per_file": {
            "a": {"local_shape": [4, 2], "global_offset": [0, 0]},
            "b": {"local_shape": [4, 1], "global_offset": [0, 2]}}},
        "old": {"shape": [2], "is_sharded": False, "dtype": "I64", "flattened_offsets_per_file": {"b": [0, 2]}},
    }  # fmt: skip
    held = {"a": {"w": parts["a"], "d": d[:, :2].flatten()}, "b": {"w": parts["b"], "d": d[:, 2].contiguous()}}
    held["b"]["old"] = torch.tensor([5, 6])
    folder = write_core(tmp_path / "model", index, held)
    state = holdfast.open(folder).state_dict()["model"]
    assert same(state["w"], w) and same(state["d"], d) and state["old"].tolist() == [5, 6]
    assert holdfast.open(tmp_path).state_dict()["model"].keys() == state.keys()


@pytest.mark.parametrize(
    ("file", "told", "words"),
    [
        ("../outside", spec((0, 4)), ["metadata.json", "outside"]),
        ("/etc/hostname", spec((0, 4)), ["metadata.json"]),
        ("link", spec((0, 4)), ["link"]),
        ("gone", spec((0, 4)), ["gone", "missing"]),
        ("a", spec((0, 3)), ["w has 3 elements in a"]),
        ("a", spec((0, 5)), ["w of shape [4]", "0:5 in a"]),
        ("a", spec((-1, 3)), ["w of shape [4]", "-1:3 in a"]),
        ("a", {"local_shape": [2], "global_offset": [0, 0]}, ["which part of w is in a"]),
        ("a", {"flattened_offsets": None}, ["which part of w is in a"]),
    ],
)
def test_an_index_that_contradicts_the_files(file: str, told: Any, words: list[str], tmp_path: Path) -> None:
    index = {"w": {"shape": [4], "is_sharded": True, "dtype": "F32", "shard_spec_per_file": {file: told}}}
    folder = write_core(tmp_path / "model", index, {"a": {"w": torch.ones(4)}})
    save_file({"w": torch.ones(4)}, tmp_path / "outside")
    (folder / "link").symlink_to(tmp_path / "outside")
    refused(folder, *words)


def test_groups_of_olmo_core_that_are_missing(tmp_path: Path) -> None:
    folder = golden("olmo_olmocore_2r", tmp_path) / "optim"
    index = json.loads((folder / "metadata.json").read_text())
    del index["tensors"]["param_group1"]
    (folder / "metadata.json").write_text(json.dumps(index))
    refused(folder.parent, "2 parameter groups")


# Which path is which, and the trainers


def test_ranks_without_a_trainers_file_take_that_of_rank_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = golden("olmo_torch_new_2r", tmp_path)
    altered(folder / "train/rank1.pt", lambda held: held["rng"].update(python=(3, (1, 2), None)))
    assert holdfast.open(folder).differing == ["rng/python"]
    assert holdfast.open(folder).per_rank("rng/python", 1) == (3, (1, 2), None)
    (folder / "train/rank1.pt").unlink()
    with caplog.at_level("WARNING", "holdfast"):
        checkpoint = holdfast.open(folder)
    assert checkpoint.world_size == 2 and not checkpoint.differing and "rank 1" in caplog.text
    (folder / "train/rank0.pt").rename(folder / "train/rank1.pt")
    refused(folder, "train/rank0.pt is missing")
    shutil.rmtree(folder / "train")
    assert holdfast.open(folder).state_dict().keys() == {"model", "optimizer"}
    (folder / "model_and_optim/.metadata").unlink()
    with pytest.raises(NotACheckpoint):
        holdfast.open(folder)


def test_a_runs_folder_leads_to_its_newest_checkpoint(tmp_path: Path) -> None:
    first = golden("olmo_full_fsdp_2r", tmp_path)
    first.rename(tmp_path / "step20-unsharded")
    golden("olmo_local_2r", tmp_path).rename(tmp_path / "step20")
    golden("olmo_full_ddp_2r", tmp_path).rename(tmp_path / "step3-unsharded")
    (tmp_path / "step100-tmp").mkdir()
    (tmp_path / "step30").mkdir()  # a save that never finished
    found = holdfast.open(tmp_path)
    assert "step20, the last of" in found.reading and "step30 never finished" in found.reading
    assert "layout local" in found.reading
    (tmp_path / "latest-unsharded").symlink_to("step3-unsharded")
    assert "latest-unsharded" in holdfast.open(tmp_path).reading and "step20" in holdfast.open(tmp_path).reading
    (tmp_path / "latest").symlink_to("step20")
    assert holdfast.open(tmp_path).reading.startswith("latest in the run's folder, which is step20")
    assert holdfast.open(tmp_path / "latest-unsharded").reading == "layout full"
    assert check("olmo_full_fsdp_2r", tmp_path / "step20-unsharded").step == 3


@pytest.mark.parametrize("name", ["rank{rank}.pt", "rank0.pt", "rank1.pt"])
def test_a_rank_file_stands_for_all_of_them(name: str) -> None:
    checkpoint = check("olmo_torch_legacy_2r", GOLDEN / "olmo_torch_legacy_2r" / "ckpt" / name)
    assert "all ranks' files" in checkpoint.reading and "config.yaml" in checkpoint.attachments
