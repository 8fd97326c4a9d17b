"""torchsnapshot's folders: of every version that was released, and damaged in every way that a manifest can tell."""

from __future__ import annotations

import base64
import json
import math
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.formats.torchsnapshot import torchsnapshot
from tests.formats import packed, truth

METADATA = ".snapshot_metadata"


@pytest.mark.parametrize("name", [name for name in truth.NAMES if name.startswith("torchsnapshot_")])
def test_equals_the_truth(name: str) -> None:
    checkpoint = truth.check(name)
    assert (checkpoint.format, checkpoint.step, checkpoint.left_out) == ("torchsnapshot", 3, {})
    if checkpoint.world_size > 1:
        assert [checkpoint.per_rank("progress/per_rank", r) for r in range(checkpoint.world_size)] == [0, 10]
    checkpoint.verify()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("torchsnapshot_main_dtensor_4r", "0.1.0"),
        ("torchsnapshot_010_odd", "0.1.0"),
    ],
)
def test_equals_the_truth_of_other_versions(tmp_path: Path, name: str, version: str) -> None:
    ckpt = packed.unpacked(name, tmp_path)
    checkpoint = holdfast.open(ckpt)
    packed.check(checkpoint.state_dict(), ckpt)
    assert checkpoint.manifest.producer == {"torchsnapshot": version}
    assert checkpoint.left_out == {}
    checkpoint.verify()


def test_versions_before_0_1_0_are_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="before 0.1.0.*take it again"):
        holdfast.open(packed.unpacked("torchsnapshot_yaml_ddp_2r", tmp_path))


def test_values_and_keys_of_every_kind(tmp_path: Path) -> None:
    state = holdfast.open(packed.unpacked("torchsnapshot_010_odd", tmp_path)).state_dict()
    values = state["v"]
    assert values["nan"] != values["nan"] and values["inf"] == -math.inf and values["pi"] == math.pi
    assert (values["int"], values["big"], values["s"], values["empty"]) == (-5, 2**80, "str é ☃ 🙂", "")
    assert (values["by"], values["true"], values["none"]) == (b"\0\xff", True, None)
    assert (values["tup"], values["lst"], values["od"]) == ((1, 2.5, "x"), [1, [2, {"k": []}], {}], {"b": 1, "a": 2})
    keys = state["k"]["d"]
    assert (keys["a/b"], keys["c%2Fd"], keys["e%"], keys[5], keys[-3], keys[""]) == (1, 2, 3, "five", "minus", 16)
    assert keys["x" * 150] == 9 and keys["y " * 70] == 10 and keys["q'uo\"te"] == 11
    # Two models and two optimizers keep the names that they had.
    assert {"gen", "disc", "gopt", "dopt"} <= state.keys() and not {"model", "optimizer"} & state.keys()


# Which path


def test_the_metadata_file_names_the_snapshot(tmp_path: Path) -> None:
    ckpt = packed.unpacked("torchsnapshot_main_dtensor_4r", tmp_path)
    packed.check(holdfast.open(ckpt / METADATA).state_dict(), ckpt)


def test_the_newest_step_of_a_run_that_was_committed(tmp_path: Path) -> None:
    for name in ("epoch_0_step_9", "epoch_1_step_10", "epoch_1_step_9"):
        snapshot(tmp_path / "run" / name, {"p": {"at": name}})
    (tmp_path / "run" / "epoch_2_step_11" / "0").mkdir(parents=True)
    (tmp_path / "run" / "logs").mkdir()
    checkpoint = holdfast.open(tmp_path / "run")
    assert checkpoint.state_dict() == {"p": {"at": "epoch_1_step_10"}}
    assert checkpoint.reading == "epoch_1_step_10, the newest of 4 steps; epoch_2_step_11 is not complete"
    snapshot(tmp_path / "run" / "best_3", {"p": {"at": "best"}})
    with pytest.raises(holdfast.errors.NotACheckpoint, match="several series.*open one of them"):
        holdfast.open(tmp_path / "run")


def test_what_was_never_committed_is_no_checkpoint(tmp_path: Path) -> None:
    ckpt = packed.unpacked("torchsnapshot_main_dtensor_4r", tmp_path)
    (ckpt / METADATA).unlink()
    with pytest.raises(holdfast.errors.NotACheckpoint, match="never finished"):
        holdfast.open(ckpt)


def test_other_folders_are_left_to_others(tmp_path: Path) -> None:
    assert torchsnapshot.read(tmp_path) is None
    assert torchsnapshot.read(tmp_path / "nothing") is None
    (tmp_path / "file").write_bytes(b"x")
    assert torchsnapshot.read(tmp_path / "file") is None


# Damage


def snapshot(folder: Path, *items: dict[str, Any], world_size: int | None = None, **entries: dict[str, Any]) -> Path:
    """A snapshot with what each rank has: dicts, lists, tensors, and other values as entries of primitives."""
    manifest: dict[str, Any] = {}

    def put(at: str, value: Any) -> None:
        if isinstance(value, dict):
            manifest[at] = {"type": "dict", "keys": list(value)}
            for key, inner in value.items():
                put(f"{at}/{key}", inner)
        elif isinstance(value, list):
            manifest[at] = {"type": "list"}
            for i, inner in enumerate(value):
                put(f"{at}/{i}", inner)
        elif isinstance(value, torch.Tensor):
            (folder / at).parent.mkdir(parents=True, exist_ok=True)
            (folder / at).write_bytes(bytes(value.reshape(-1).view(torch.uint8).tolist()))
            manifest[at] = {
                "type": "Tensor", "location": at, "serializer": "buffer_protocol", "dtype": str(value.dtype),
                "shape": list(value.shape), "replicated": False, "byte_range": None,
            }  # fmt: skip
        else:
            kind = type(value).__name__
            text = base64.b64encode(struct.pack("<d", value)).decode() if kind == "float" else str(value)
            manifest[at] = {"type": kind, "serialized_value": text, "replicated": False, "readable": None}

    folder.mkdir(parents=True, exist_ok=True)
    for rank, held in enumerate(items):
        for key, value in held.items():
            put(f"{rank}/{key}", value)
    manifest.update(entries)
    write(folder, {"version": "0.1.0", "world_size": world_size or len(items), "manifest": manifest})
    return folder


def write(folder: Path, metadata: Any) -> None:
    (folder / METADATA).write_text(json.dumps(metadata))


def changed(folder: Path, change: Any) -> None:
    metadata = json.loads((folder / METADATA).read_text())
    change(metadata["manifest"])
    write(folder, metadata)


def copied(name: str, into: Path) -> Path:
    """A golden one that may be changed."""
    folder = into / name
    shutil.copytree(truth.Truth(name).path, folder)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return folder


def test_a_missing_file(tmp_path: Path) -> None:
    folder = copied("torchsnapshot_ddp_chunked_2r", tmp_path)
    batch = next((folder / "batched").iterdir())
    batch.unlink()
    with pytest.raises(holdfast.errors.Damaged, match=f"[a-z]+/.*: .*{batch.name}.*is missing"):
        holdfast.open(folder)


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    folder = copied("torchsnapshot_single_unbatched", tmp_path)
    weight = folder / "0" / "model" / "head.weight"
    weight.write_bytes(weight.read_bytes()[:-4])
    with pytest.raises(holdfast.errors.Damaged, match="model/head.weight: it has .* bytes"):
        holdfast.open(folder)


def test_an_entry_that_is_gone(tmp_path: Path) -> None:
    folder = copied("torchsnapshot_fsdp1_2r", tmp_path)
    changed(folder, lambda manifest: manifest.pop("1/model/head.weight"))
    with pytest.raises(holdfast.errors.Damaged, match="rank 1 says that model holds 'head.weight'"):
        holdfast.open(folder)


def test_a_rank_that_is_gone(tmp_path: Path) -> None:
    """Without the entries of the last rank every sharded tensor looks smaller, and whole."""
    folder = copied("torchsnapshot_fsdp1_2r", tmp_path)

    def drop(manifest: dict[str, Any]) -> None:
        for key in [key for key in manifest if key.startswith("1/")]:
            del manifest[key]

    changed(folder, drop)
    with pytest.raises(holdfast.errors.Damaged, match=r"no entries of ranks \[1\]"):
        holdfast.open(folder)


def test_a_shard_of_a_mesh_that_nobody_told(tmp_path: Path) -> None:
    folder = packed.unpacked("torchsnapshot_main_dtensor_4r", tmp_path)

    def drop(manifest: dict[str, Any]) -> None:
        del manifest["3/m/w00"]

    changed(folder, drop)
    with pytest.raises(holdfast.errors.Damaged, match="m/w00 lacks the shard of rank 3"):
        holdfast.open(folder)


def test_shards_with_a_hole(tmp_path: Path) -> None:
    folder = copied("torchsnapshot_fsdp1_2r", tmp_path)
    changed(folder, lambda manifest: manifest["0/model/head.weight"]["shards"].clear())
    with pytest.raises(holdfast.errors.Damaged, match="model/head.weight .* is not whole"):
        holdfast.open(folder)


@pytest.mark.parametrize("location", ["../outside", "/etc/hostname", "0/link", "0/../../outside", ""])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, location: str) -> None:
    folder = snapshot(tmp_path / "ckpt", {"p": {"x": torch.arange(3.0)}})
    (tmp_path / "outside").write_bytes(bytes(12))
    (folder / "0" / "link").symlink_to(tmp_path / "outside")
    changed(folder, lambda manifest: manifest["0/p/x"].update(location=location))
    with pytest.raises(holdfast.errors.Damaged, match="p/x: .*(outside|leads out|no path)"):
        holdfast.open(folder)


def test_an_entry_of_a_newer_version(tmp_path: Path) -> None:
    new = {"type": "Hologram", "location": "0/h", "replicated": False, "layers": 3}
    folder = snapshot(tmp_path, {"p": {"x": 1}}, **{"0/p/x": new})
    with pytest.raises(holdfast.errors.Unsupported, match="p/x: it is an entry of type 'Hologram'.*update holdfast"):
        holdfast.open(folder)


def test_quantized_tensors_and_unknown_objects_are_left_out_by_name(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, {"p": {"x": torch.arange(4, dtype=torch.int8), "own": 1, "y": 2}})
    torch.save(Unknown(), folder / "0" / "own")
    own = {"type": "object", "location": "0/own", "serializer": "torch_save", "obj_type": "U", "replicated": False}
    changed(folder, lambda manifest: manifest.update({"0/p/own": own}))
    changed(folder, lambda manifest: manifest["0/p/x"].update(dtype="torch.qint8", serializer="torch_save"))
    checkpoint = holdfast.open(folder)
    assert checkpoint.state_dict() == {"p": {"y": 2}}
    assert "quantized" in checkpoint.left_out["p/x"] and "Unknown" in checkpoint.left_out["p/own"]


class Unknown:
    """A class of a user's own."""


@pytest.mark.parametrize(
    "metadata",
    [b"", b"\0\1", b"{", b"[]", b"{}", b'{"version": "1", "world_size": 0, "manifest": {}}', b"version: *alias\n",
     b'{"version": "1", "world_size": 1, "manifest": {"7/x": {"type": "dict", "keys": []}}}',
     b'{"version": "1", "world_size": 1, "manifest": {"0/x": {"type": "dict", "keys": [["a"]]}}}'],
)  # fmt: skip
def test_a_manifest_that_is_none(tmp_path: Path, metadata: bytes) -> None:
    (tmp_path / METADATA).write_bytes(metadata)
    with pytest.raises(holdfast.errors.Damaged, match="no manifest of torchsnapshot"):
        holdfast.open(tmp_path)


# Several ranks


def test_what_each_rank_saved_for_itself(tmp_path: Path) -> None:
    same, big = torch.arange(5.0), torch.arange(4_000_000, dtype=torch.float32)
    folder = snapshot(
        tmp_path,
        {"p": {"same": same, "big": big, "own": torch.zeros(2), "lr": 0.5, "nan": math.nan, "only0": 7}},
        {"p": {"same": same, "big": big, "own": torch.ones(2), "lr": 0.25, "nan": math.nan}},
    )
    checkpoint = holdfast.open(folder)
    assert sorted(checkpoint.differing) == ["p/lr", "p/own"]
    state = checkpoint.state_dict()["p"]
    assert torch.equal(state["same"], same) and torch.equal(state["big"], big)
    assert state["only0"] == 7 and state["nan"] != state["nan"]
    assert [checkpoint.per_rank("p/lr", r) for r in range(2)] == [0.5, 0.25]
    assert [checkpoint.per_rank("p/own", r).tolist() for r in range(2)] == [[0, 0], [1, 1]]


def test_a_container_on_one_rank_and_a_value_on_another(tmp_path: Path) -> None:
    folder = snapshot(tmp_path, {"p": {"x": {"y": 1}}}, {"p": {"x": 1}})
    with pytest.raises(holdfast.errors.Unsupported, match="p/x is a container on some ranks"):
        holdfast.open(folder)
