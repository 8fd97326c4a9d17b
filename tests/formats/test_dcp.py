"""Checkpoints of torch.distributed.checkpoint: torch's own files, in every layout, whole, broken and dangerous."""

from __future__ import annotations

import importlib
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldProperties
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import holdfast
from holdfast.formats.dcp.dcp import read_folder
from holdfast.formats.sources import File
from holdfast.storage.local.local import Local
from holdfast.storage.store_place import StorePlace
from tests import pool
from tests.formats.truth import GOLDEN, NAMES, check, same

GOLDENS = [name for name in NAMES if name.startswith("dcp_") and "_hf_" not in name and "zstd" not in name]

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str) -> None:
    checkpoint = check(name)
    assert checkpoint.format == "torch.distributed.checkpoint" and checkpoint.step == 3
    checkpoint.verify()


def test_compressed() -> None:
    pytest.importorskip("zstandard")
    check("dcp_fsdp2_zstd_2r").verify()


def test_compressed_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def missing(name: str, package: str | None = None) -> Any:
        if name == "zstandard":
            raise ImportError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(holdfast.errors.Unsupported, match="pip install"):
        holdfast.open(GOLDEN / "dcp_fsdp2_zstd_2r" / "ckpt").state_dict()


# What training loops write


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    """One process writes a checkpoint."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if options:
            dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))
        else:
            dcp.save(state, checkpoint_id=path)


def trained(*, sharded: bool = False, flat: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state dicts of a model and an AdamW with two groups after a step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    if sharded:
        fully_shard(model)
    matrices, vectors = [[p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    return value


def write_titan(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What torchtitan saves: the model at the top, the optimizer flattened."""
    model, optimizer = trained(sharded=True, flat=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    beside = {
        "lr_scheduler": {"last_epoch": 4}, "train_state": {"step": torch.tensor(4, dtype=torch.int32)},
        "dataloader": {f"dp_rank_{rank}": b"%d" % rank, "world_size": world},
    }  # fmt: skip
    dcp.save({**model, "optimizer": optimizer, **beside}, checkpoint_id=path)
    model, optimizer = trained(sharded=True)
    return full(model), full(optimizer)


def equal(held: dict[str, Any], told: dict[str, Any]) -> bool:
    return held.keys() == told.keys() and all(
        equal(held[k], v) if isinstance(v, dict) else same(held[k], v) for k, v in told.items()
    )


def test_torchtitan(tmp_path: Path) -> None:
    model, optimizer = pool.run(2, write_titan, str(tmp_path / "step-4"))[0]
    shutil.copytree(tmp_path / "step-4", tmp_path / "step-10")
    (tmp_path / "step-11").mkdir()  # one that never finished
    checkpoint = holdfast.open(tmp_path)
    assert "step-10" in checkpoint.reading and checkpoint.world_size == 2 and checkpoint.step == 4
    state = checkpoint.state_dict()
    assert equal(state["model"], model) and equal(state["optimizer"]["state"], optimizer["state"])
    assert state["optimizer"]["param_groups"] == optimizer["param_groups"]
    assert state["dataloader"] == {"dp_rank_0": b"0", "dp_rank_1": b"1", "world_size": 2}
    assert state["lr_scheduler"] == {"last_epoch": 4}


def test_only_a_model(tmp_path: Path) -> None:
    model, _ = trained()
    save({**model, "rng": torch.get_rng_state()}, tmp_path / "a")
    state = holdfast.open(tmp_path / "a").state_dict()
    assert equal(state["model"], model) and state.keys() == {"model", "rng"}


@pytest.mark.parametrize(("name", "step"), [("step-12", 12), ("step_12", 12), ("steps-12", None), ("12", None)])
def test_a_step_that_the_folder_alone_names(tmp_path: Path, name: str, step: int | None) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / name)
    assert holdfast.open(tmp_path / name).step == step


@pytest.mark.parametrize("flat", [False, True])
def test_other_keys(tmp_path: Path, flat: bool) -> None:
    model, optimizer = trained(flat=flat)
    save({"net": model, "opt": optimizer, "iteration": 7}, tmp_path / "a")
    checkpoint = holdfast.open(tmp_path / "a")
    assert "'net' is the model" in checkpoint.reading and "'opt' is the optimizer" in checkpoint.reading
    assert checkpoint.step == 7
    state, (_, told) = checkpoint.state_dict(), trained()
    assert equal(state["model"], model) and equal(state["optimizer"]["state"], told["state"])
    assert state["optimizer"]["param_groups"] == told["param_groups"]


def test_several_keep_their_keys(tmp_path: Path) -> None:
    model, optimizer = trained()
    save({"app": {"gen": model, "disc": model, "opt_g": optimizer, "opt_d": optimizer}}, tmp_path / "a")
    state = holdfast.open(tmp_path / "a").state_dict()["app"]
    assert equal(state["gen"], model) and equal(state["opt_d"]["state"], optimizer["state"])


def test_unusual_leaves(tmp_path: Path) -> None:
    leaves = {
        "scalar": torch.tensor(5), "empty": torch.empty(0, 3), "part": torch.arange(100.0)[10:20],
        "flags": torch.tensor([True, False]), "complex": torch.ones(2, dtype=torch.complex64),
        "eighth": torch.ones(3, dtype=torch.float8_e4m3fn), "row": torch.zeros(4, 1).expand(4, 1),
    }  # fmt: skip
    values = {"list": [1, {"deep": torch.arange(4)}, [2.5, None]], "tuple": (1, "two"), "text": "ä", "big": b"x" * 99}
    save({"model": leaves, "values": values}, tmp_path / "a")
    state = holdfast.open(tmp_path / "a").state_dict()
    assert equal(state["model"], leaves)
    assert torch.equal(state["values"]["list"][1].pop("deep"), torch.arange(4))
    assert state["values"] == {**values, "list": [1, {}, [2.5, None]]}


def test_strides(tmp_path: Path) -> None:
    # What torch saves of a transposed parameter, or of one in channels_last: told only once it is read.
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    state = {"turned": torch.arange(12.0).view(3, 4).t(), "plain": torch.ones(2), "images": images}
    save({"model": state}, tmp_path / "a")
    for path in (tmp_path / "a", StorePlace(Local(tmp_path), "a")):
        checkpoint = holdfast.open(path)
        assert equal(checkpoint.state_dict()["model"], state)
        assert torch.equal(checkpoint.read("model/turned", [(1, 3)]), state["turned"][1:3])
        assert checkpoint.verify().nbytes == sum(tensor.nbytes for tensor in state.values())


@pytest.mark.parametrize("legacy", [False, True])
def test_older_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool) -> None:
    # Up to 2.3 dicts without tensors were one object; there was no version, and the classes lay elsewhere.
    monkeypatch.setattr("torch.distributed.checkpoint._version._derived_version", "2_3")
    if legacy:
        monkeypatch.setattr(torch, "save", partial(torch.save, _use_new_zipfile_serialization=False))
    model, optimizer = trained()
    save({"model": model, "optim": optimizer, "train": {"step": 3, "list": [{"a": 1}]}}, tmp_path / "a")
    monkeypatch.undo()

    def age(metadata: Any) -> None:
        del metadata.version, metadata.storage_meta
        for told in metadata.state_dict_metadata.values():
            if hasattr(told, "properties"):
                told.properties = OldProperties(dtype=told.properties.dtype)

    altered(tmp_path / "a", age)
    checkpoint = holdfast.open(tmp_path / "a")
    state = checkpoint.state_dict()
    assert equal(state["model"], model) and equal(state["optimizer"]["state"], optimizer["state"])
    assert state["optimizer"]["param_groups"] == optimizer["param_groups"] and checkpoint.step == 3
    assert state["train"] == {"step": 3, "list": [{"a": 1}]}


def write_own(path: str) -> None:
    """Each rank saves by itself; some values are its own."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    sharded = distribute_tensor(torch.arange(22.0).view(11, 2), mesh, [Shard(0)])
    copied = distribute_tensor(torch.arange(6.0), mesh, [Replicate()])
    state = {"model": {"a": sharded, "b": copied}, "rng": torch.full((3,), rank), "who": [rank], "same": 5}
    dcp.save(state, checkpoint_id=path, use_collectives=False)


def test_without_collectives(tmp_path: Path) -> None:
    path = tmp_path / "a"
    pool.run(4, write_own, str(path))
    checkpoint = holdfast.open(path)
    assert checkpoint.world_size == 4 and sorted(checkpoint.differing) == ["rng", "who"]
    state = checkpoint.state_dict()
    assert torch.equal(state["model"]["a"], torch.arange(22.0).view(11, 2)) and state["same"] == 5
    assert torch.equal(state["model"]["b"], torch.arange(6.0))
    assert [checkpoint.per_rank("who", rank) for rank in range(4)] == [[0], [1], [2], [3]]
    assert [checkpoint.per_rank("rng", rank).tolist() for rank in range(4)] == [[rank] * 3 for rank in range(4)]
    (path / "__1.metadata").unlink()
    with pytest.raises(holdfast.errors.Damaged, match=r"__1\.metadata is missing"):
        holdfast.open(path)


# What is read


def load_share(path: str) -> tuple[int, int, bool]:
    """Load a replica's and a shard's worth; (bytes read, bytes needed, whether the values are right)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    told = torch.arange(4 << 18, dtype=torch.float32).view(1024, 1024)
    wide = distribute_tensor(torch.zeros(1024, 1024), mesh, [Shard(0)])
    tall = distribute_tensor(torch.zeros(1024, 1024), mesh, [Shard(1)])
    loaded = holdfast.load(path, {"model": {"wide": wide, "tall": tall}})
    right = torch.equal(wide.full_tensor(), told) and torch.equal(tall.full_tensor(), told + 1)
    return loaded.bytes_read, loaded.bytes_needed, right


def test_ranks_read_their_shares(tmp_path: Path) -> None:
    told = torch.arange(4 << 18, dtype=torch.float32).view(1024, 1024)
    save({"model": {"wide": told, "tall": told + 1}}, tmp_path / "a")
    results = pool.run(4, load_share, str(tmp_path / "a"))
    assert all(right for *_, right in results)
    assert [needed for _, needed, _ in results] == [2 << 20] * 4
    # Columns are a quarter of each row, too near to each other to be worth requests of their own.
    assert all(read <= 1.1 * (1 << 20) + (4 << 20) for read, *_ in results)


def load_rows(path: str) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wide = distribute_tensor(torch.zeros(1024, 1024), mesh, [Shard(0)])
    loaded = holdfast.load(path, {"model": {"wide": wide}})
    return loaded.bytes_read, loaded.bytes_needed


def test_rows_cost_what_they_weigh(tmp_path: Path) -> None:
    save({"model": {"wide": torch.rand(1024, 1024)}}, tmp_path / "a")
    for read, needed in pool.run(4, load_rows, str(tmp_path / "a")):
        assert read <= 1.1 * needed


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    real = File.read

    def read(self: File, begin: int, nbytes: int) -> bytes:
        sizes.append(nbytes)
        return real(self, begin, nbytes)

    monkeypatch.setattr(File, "read", read)
    return sizes


def test_opening_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"model": {f"{i}.weight": torch.rand(1 << 16) for i in range(20)}, "step": 3}, tmp_path / "a")
    sizes = counted(monkeypatch)
    checkpoint = holdfast.open(tmp_path / "a")
    assert len(checkpoint.tensors) == 20 and sum(sizes) < 1.2 * (tmp_path / "a" / ".metadata").stat().st_size + 4096
    sizes.clear()
    piece = checkpoint.read("model/3.weight", [(5, 9)])
    assert piece.shape == (4,) and sum(sizes) <= 2048 and len(sizes) == 2  # the ends of one archive


# What is broken


def made(tmp_path: Path) -> Path:
    save({"model": {"0.weight": torch.rand(40, 30), "0.bias": torch.rand(40)}, "step": 3}, tmp_path / "a")
    return tmp_path / "a"


def altered(path: Path, change: Callable[[Any], None]) -> None:
    """Rewrite the metadata of a checkpoint."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def place_of(metadata: Any, key: str) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == key)


def test_unfinished(tmp_path: Path) -> None:
    path = made(tmp_path)
    (path / ".metadata").unlink()
    with pytest.raises(holdfast.errors.NotACheckpoint, match="never finished"):
        holdfast.open(path)


def test_missing_file(tmp_path: Path) -> None:
    path = made(tmp_path)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(holdfast.errors.Damaged, match=r"__0_0\.distcp is missing"):
        holdfast.open(path)


def test_truncated_file(tmp_path: Path) -> None:
    path = made(tmp_path)
    os.truncate(path / "__0_0.distcp", 3000)
    with pytest.raises(holdfast.errors.Damaged, match=r"__0_0\.distcp has 3000 bytes, but .* truncated"):
        holdfast.open(path)


def test_altered_bytes(tmp_path: Path) -> None:
    path = made(tmp_path)
    data = path / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    at = content.index(holdfast.open(path).read("model/0.weight").numpy().tobytes())
    content[at + 99] ^= 1
    data.write_bytes(content)
    with pytest.raises(holdfast.errors.Damaged, match="CRC"):
        holdfast.open(path).verify()


def test_hole(tmp_path: Path) -> None:
    path = made(tmp_path)
    altered(path, lambda m: m.state_dict_metadata["model.0.weight"].chunks.clear())
    with pytest.raises(holdfast.errors.Damaged, match=r"0\.weight"):
        holdfast.open(path)


def test_no_place(tmp_path: Path) -> None:
    path = made(tmp_path)
    altered(path, lambda m: m.storage_data.pop(MetadataIndex("model.0.bias", (0,))))
    with pytest.raises(holdfast.errors.Damaged, match=r"does not say where model\.0\.bias"):
        holdfast.open(path)


def test_another_tensor_in_its_place(tmp_path: Path) -> None:
    path = made(tmp_path)

    def swap(metadata: Any) -> None:
        a, b = place_of(metadata, "model.0.weight"), place_of(metadata, "model.0.bias")
        b.offset, b.length = a.offset, a.length

    altered(path, swap)
    with pytest.raises(holdfast.errors.Damaged, match=r"model\.0\.bias at byte .* there is float32 \[40, 30\]"):
        holdfast.open(path).read("model/0.bias")


@pytest.mark.parametrize("name", ["../b/__0_0.distcp", "{}/b/__0_0.distcp", "link", ""])
def test_files_outside(tmp_path: Path, name: str) -> None:
    path = made(tmp_path)
    shutil.copytree(path, tmp_path / "b")
    (path / "link").symlink_to(tmp_path / "b" / "__0_0.distcp")
    altered(path, lambda m: setattr(place_of(m, "step"), "relative_path", name.format(tmp_path)))
    with pytest.raises(holdfast.errors.Damaged, match="outside|without a name"):
        holdfast.open(path)


def test_newer_version(tmp_path: Path) -> None:
    path = made(tmp_path)
    altered(path, lambda m: setattr(m, "version", "2.0.0"))
    with pytest.raises(holdfast.errors.Unsupported, match=re.escape("2.0.0")):
        holdfast.open(path)


def test_unknown_extension(tmp_path: Path) -> None:
    path = made(tmp_path)
    altered(path, lambda m: setattr(place_of(m, "model.0.bias"), "transform_descriptors", ["rot13@home/1"]))
    with pytest.raises(holdfast.errors.Unsupported, match="rot13"):
        holdfast.open(path).read("model/0.bias")


class Mine:
    """A class of a training script."""


def test_code_is_left_out(tmp_path: Path) -> None:
    save({"model": {"0.weight": torch.ones(3)}, "hooks": {"own": Mine(), "n": 1}}, tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mine, "__new__", lambda *_: pytest.fail("it was made"))
        checkpoint = holdfast.open(tmp_path / "a")
    state = checkpoint.state_dict()
    assert torch.equal(state["model"]["0.weight"], torch.ones(3)) and state["hooks"] == {"n": 1}
    assert [*checkpoint.left_out] == ["hooks/own"] and "Mine" in checkpoint.left_out["hooks/own"]


def test_metadata_that_executes(tmp_path: Path) -> None:
    path = made(tmp_path)

    class Bomb:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "boom"),))

    altered(path, lambda m: setattr(m, "planner_data", Bomb()))
    with pytest.raises(holdfast.errors.Unsupported, match="mkdir"):
        holdfast.open(path)
    assert not (tmp_path / "boom").exists()


def test_key_paths_that_contradict(tmp_path: Path) -> None:
    path = made(tmp_path)
    altered(path, lambda m: m.planner_data.update({"step": ("model",)}))
    with pytest.raises(holdfast.errors.Damaged, match="key path"):
        holdfast.open(path)


def test_flat_and_nested(tmp_path: Path) -> None:
    state = read_folder(made(tmp_path))
    assert state.flat.keys() == {"model.0.weight", "model.0.bias", "step"} and state.flat["step"] == 3
    assert state.tree["model"]["0.bias"] is state.flat["model.0.bias"]
