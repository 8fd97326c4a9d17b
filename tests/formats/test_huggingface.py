"""Weights in Hugging Face's layouts: every type, every way to cut them into files, and everything that may be wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import holdfast
from holdfast.formats.huggingface import huggingface
from holdfast.formats.sources import File
from holdfast.storage.local.local_place import LocalPlace
from tests import pool
from tests.formats import truth
from tests.formats.truth import same

A, B, C = torch.arange(12.0).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16), torch.tensor(7)


def header(entries: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A safetensors file from its header, right or wrong."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text + data


def sharded(folder: Path, stem: str = "model", first: int = 1) -> Path:
    """Three files of one tensor each, with an index."""
    files = {name: f"{stem}-0000{first + i}-of-00003.safetensors" for i, name in enumerate("abc")}
    for name, tensor in zip("abc", (A, B, C), strict=True):
        save_file({name: tensor}, folder / files[name], {"format": "pt"})
    told = {"metadata": {"total_size": 66}, "weight_map": files}
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(told))
    return folder


def holds(path: Path, **tensors: torch.Tensor) -> holdfast.Checkpoint:
    checkpoint = holdfast.open(path)
    state = checkpoint.state_dict()["model"]
    assert state.keys() == tensors.keys() and all(same(state[k], v) for k, v in tensors.items())
    return checkpoint


# What is right is read


@pytest.mark.parametrize("name", [n for n in truth.NAMES if n.startswith(("hf_", "dcp_hf_"))])
def test_the_golden_ones(name: str) -> None:
    checkpoint = truth.check(name)
    checkpoint.verify()
    folder = truth.GOLDEN / name / "ckpt"
    for index in folder.glob("*.json"):
        truth.check(name, index)
    if (folder / "sharded").is_dir():
        assert truth.check(name, folder / "sharded").world_size == 2
    if name == "dcp_hf_sharded_2r":
        assert checkpoint.world_size == 2 and truth.check(name, next(folder.glob("shard-00002-*"))).reading


TYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float4_e2m1fn_x2",
]  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_every_type(kind: str, tmp_path: Path) -> None:
    dtype = getattr(torch, kind)
    raw = torch.randint(0, 2 if kind == "bool" else 255, (3, 4 * dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype)
    save_file({"t": tensor, "empty": tensor[:0].clone()}, tmp_path / "model.safetensors")
    checkpoint = holds(tmp_path, t=tensor, empty=tensor[:0])
    found = checkpoint.read("model/t", [(1, 3), (1, 3)])
    assert torch.equal(found.contiguous().view(torch.uint8), raw[1:3, dtype.itemsize : 3 * dtype.itemsize])


def test_a_type_that_torch_lacks_is_told_and_the_rest_is_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.safetensors"
    six = {"dtype": "F6_E2M3", "shape": [2, 4], "data_offsets": [0, 6]}
    path.write_bytes(header({"six": six, "x": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]}}, bytes(8)))
    with caplog.at_level(logging.WARNING, "holdfast"):
        checkpoint = holds(path, x=torch.zeros(2, dtype=torch.uint8))
    assert list(checkpoint.left_out) == ["model/six"] and "model/six" in caplog.text


def test_one_file_of_any_name(tmp_path: Path) -> None:
    save_file({"module._orig_mod.a": A, "module.b": B}, tmp_path / "weights", {"format": "pt", "note": "ä"})
    checkpoint = holds(tmp_path / "weights", a=A, b=B)
    assert checkpoint.values["metadata"] == {"format": "pt", "note": "ä"} and checkpoint.format == "safetensors"


@pytest.mark.parametrize("name", ["adapter_model", "diffusion_pytorch_model.fp16", "model.fp16", "anything"])
def test_one_file_in_a_folder(name: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / f"{name}.safetensors")
    holds(tmp_path, a=A)


def test_shards_with_an_index(tmp_path: Path) -> None:
    checkpoint = holds(sharded(tmp_path), a=A, b=B, c=C)
    assert checkpoint.values["metadata"] == {"total_size": 66, "format": "pt"}
    assert list(checkpoint.tensors) == ["model/a", "model/b", "model/c"], "in the order of the index"
    holds(tmp_path / "model.safetensors.index.json", a=A, b=B, c=C)


def test_headers_that_say_different_things(tmp_path: Path) -> None:
    for i, name in enumerate("ab", 1):
        save_file({name: A}, tmp_path / f"model-{i}-of-2.safetensors", {"format": "pt", "who": name})
    assert holds(tmp_path, a=A, b=A).values["metadata"] == {
        "format": "pt", "who": {"model-1-of-2.safetensors": "a", "model-2-of-2.safetensors": "b"},
    }  # fmt: skip


@pytest.mark.parametrize("first", [0, 1])
def test_shards_without_an_index(first: int, tmp_path: Path) -> None:
    (sharded(tmp_path, first=first) / "model.safetensors.index.json").unlink()
    holds(tmp_path, a=A, b=B, c=C)


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("model.safetensors.index.fp16.json", "model.fp16-00001-of-00001.safetensors"),
        ("diffusion_pytorch_model.safetensors.index.fp16.json", "diffusion_pytorch_model-1-of-1.fp16.safetensors"),
    ],
)  # fmt: skip
def test_variants(index: str, shard: str, tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / shard)
    (tmp_path / index).write_text(json.dumps({"weight_map": {"a": shard}}))
    assert holds(tmp_path, a=A).reading == ""


def test_one_shard_alone_says_that_it_is_one_of_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        checkpoint = holds(sharded(tmp_path) / "model-00002-of-00003.safetensors", b=B)
    assert "one of 3" in checkpoint.reading and "one of 3" in caplog.text


def test_bin_files(tmp_path: Path) -> None:
    torch.save({"a": A, "tied": A, "b": B}, tmp_path / "pytorch_model.bin")
    checkpoint = holds(tmp_path, a=A, tied=A, b=B)
    assert checkpoint.saved_name("model/tied") == "model/a"
    holds(tmp_path / "pytorch_model.bin", a=A, tied=A, b=B)


def test_sharded_bin_files(tmp_path: Path) -> None:
    torch.save({"a": A, "extra._extra_state": None}, tmp_path / "pytorch_model-00001-of-00002.bin")
    torch.save({"b": B}, tmp_path / "pytorch_model-00002-of-00002.bin")
    told = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    told["extra._extra_state"] = told["a"]
    assert holdfast.open(tmp_path).state_dict()["model"]["extra._extra_state"] is None
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": told}))
    assert same(holdfast.open(tmp_path).read("model/b"), B)
    assert "one of 2" in holdfast.open(tmp_path / told["b"]).reading


def test_safetensors_are_preferred_and_what_is_not_read_is_said(tmp_path: Path) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    save_file({"a": A.half()}, tmp_path / "model.fp16.safetensors")
    torch.save({"a": -A}, tmp_path / "pytorch_model.bin")
    reading = holds(tmp_path, a=A).reading
    assert reading == "model.safetensors, and not model.fp16.safetensors, pytorch_model.bin"


def test_configuration_and_tokenizer_are_attached(tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json", "tokenizer.model", "merges.txt", ".gitattributes", "x.onnx"):
        (tmp_path / name).write_text(name)
    checkpoint = holds(sharded(tmp_path), a=A, b=B, c=C)
    assert sorted(checkpoint.attachments) == ["config.json", "generation_config.json", "merges.txt", "tokenizer.model"]
    assert checkpoint.reading == "model.safetensors.index.json, and not x.onnx"
    assert checkpoint.attachment("config.json") == b"config.json"


def test_opening_reads_headers_and_a_slice_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(1000, 1000)
    save_file({"w": wide, "v": wide + 1}, tmp_path / "model.safetensors")
    read: list[int] = []
    before = File.read
    monkeypatch.setattr(File, "read", lambda self, begin, nbytes: read.append(nbytes) or before(self, begin, nbytes))
    checkpoint = holdfast.open(tmp_path)
    assert sum(read) < 500
    counted: list[int] = []
    monkeypatch.setattr("holdfast.read.read.ReadStats.add", lambda self, nbytes: counted.append(nbytes))
    assert same(checkpoint.read("model/w", [(500, 501)]), wide[500:501])
    assert 4000 <= sum(counted) < 50_000


def test_it_loads_into_a_module_whose_weights_are_tied(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(3, 4), torch.nn.Linear(4, 3, bias=False)
            self.head.weight = self.embed.weight

    save_file({"embed.weight": A}, tmp_path / "model.safetensors", {"format": "pt"})
    module = Tied()
    holdfast.load(tmp_path, {"model": module})
    assert same(module.head.weight.detach(), A)


# What a trainer leaves beside


def test_a_trainers_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoint-20"
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    folder.mkdir()
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    save_file(dict(module.state_dict()), folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 20, "_last_lr": [0.1]}, folder / "scheduler.pt")
    for rank in range(3):
        torch.save({"python": (3, (1, 2), None), "cpu": torch.full((4,), rank)}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 20, "log_history": [{"loss": NaN}], "epoch": 1.5}')
    checkpoint = holdfast.open(tmp_path / "run")
    assert checkpoint.reading == "checkpoint-20, the newest of 2 steps"
    assert (checkpoint.step, checkpoint.world_size, checkpoint.differing) == (20, 3, ["rng_state"])
    assert torch.equal(checkpoint.per_rank("rng_state", 2)["cpu"], torch.full((4,), 2))
    assert checkpoint.values["scheduler"] == {"last_epoch": 20, "_last_lr": [0.1]}
    assert checkpoint.values["trainer_state"]["epoch"] == 1.5 and not checkpoint.attachments
    other = torch.nn.Linear(4, 3)
    live = torch.optim.AdamW(other.parameters(), lr=0.5)
    holdfast.load(folder, {"model": other, "optimizer": live})
    assert same(live.state[other.weight]["exp_avg"], optimizer.state[module.weight]["exp_avg"])
    assert live.param_groups[0]["lr"] == 0.1
    (folder / "rng_state_1.pth").unlink()
    with pytest.raises(holdfast.errors.Damaged, match="rng_state_1 is missing"):
        holdfast.open(folder)


def test_several_models_and_optimizers_of_accelerate(tmp_path: Path) -> None:
    osd = torch.optim.SGD([torch.nn.Parameter(A)], lr=0.1).state_dict()
    for i, tensor in enumerate((A, B)):
        save_file({"w": tensor}, tmp_path / f"model{f'_{i}' * bool(i)}.safetensors")
        torch.save(osd, tmp_path / f"optimizer{f'_{i}' * bool(i)}.bin")
    state = holdfast.open(tmp_path).state_dict()
    assert same(state["model"]["model"]["w"], A) and same(state["model"]["model_1"]["w"], B)
    assert state["optimizer"]["optimizer_1"]["param_groups"][0]["lr"] == 0.1


def test_models_that_fsdp_saved_in_parts(tmp_path: Path) -> None:
    dcp.save({"model": {"w": A}}, checkpoint_id=tmp_path / "pytorch_model_fsdp_0", no_dist=True)
    state = {"optimizer": {"state": {"w": {"exp_avg": A + 1}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}
    dcp.save(state, checkpoint_id=tmp_path / "optimizer_0", no_dist=True)
    torch.save({"last_epoch": 2}, tmp_path / "scheduler.bin")
    checkpoint = holds(tmp_path, w=A)
    assert (
        same(checkpoint.read("optimizer/state/w/exp_avg"), A + 1) and checkpoint.values["scheduler"]["last_epoch"] == 2
    )


def test_arguments_of_an_unknown_class_do_not_keep_the_weights_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"a": A}, tmp_path / "model.safetensors")
    torch.save(Path, tmp_path / "training_args.bin")
    holds(tmp_path, a=A)
    torch.save(holds, tmp_path / "training_args.bin")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert list(holds(tmp_path, a=A).left_out) == ["training_args"]
    assert "training_args is left out" in caplog.text


# The cache of Hugging Face


def cached(root: Path) -> Path:
    """A repository of a cache as huggingface_hub makes it; returns the snapshot."""
    repository = root / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    for folder in (snapshot, repository / "blobs", repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("c" * 40)
    (root / "made").mkdir()
    for i, path in enumerate(sorted(sharded(root / "made").iterdir())):
        digest = f"{i}" * 64
        path.rename(repository / "blobs" / digest)
        (snapshot / path.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


def test_a_snapshot(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    holds(snapshot, a=A, b=B, c=C)
    checkpoint = holds(snapshot.parent.parent, a=A, b=B, c=C)
    assert checkpoint.reading == f"the snapshot {'c' * 40}"
    holds(snapshot / "model.safetensors.index.json", a=A, b=B, c=C)


def test_a_snapshot_over_blobs_that_repositories_share(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    store = tmp_path / "blobs" / "ab"
    store.mkdir(parents=True)
    blob = snapshot.parent.parent / "blobs" / ("0" * 64)
    blob.rename(store / ("ab" + "0" * 62))
    blob.symlink_to(f"../../blobs/ab/{'ab' + '0' * 62}")
    holds(snapshot, a=A, b=B, c=C)


@pytest.mark.parametrize("where", ["blobs/plain-name", "secret/" + "0" * 64, "blobs/../../" + "0" * 64])
def test_a_snapshot_that_leads_elsewhere(where: str, tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    repository = snapshot.parent.parent
    target = LocalPlace(os.path.normpath(repository / where))
    target.parent.mkdir(exist_ok=True)
    shutil.copy(repository / "blobs" / ("0" * 64), target)
    link = snapshot / "model-00001-of-00003.safetensors"
    link.unlink()
    link.symlink_to(target)
    with pytest.raises(holdfast.errors.Damaged, match="leads out"):
        holdfast.open(snapshot)


def test_blobs_that_are_a_link_themselves(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(holdfast.errors.Damaged, match="leads out"):
        holdfast.open(snapshot)


# What is wrong is told


def index_of(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "x/../../secret.safetensors", "", ".", "a\\b"]
)
def test_an_index_that_names_a_file_outside(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    save_file({"a": A}, tmp_path / "secret.safetensors")
    index_of(sharded(folder), lambda told: told["weight_map"].update(a=name))
    with pytest.raises(holdfast.errors.Damaged, match="is no path inside"):
        holdfast.open(folder)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_that_is_a_link_out_of_the_folder(indexed: bool, tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    path = sharded(folder) / "model-00001-of-00003.safetensors"
    path.rename(tmp_path / "out.safetensors")
    path.symlink_to("../out.safetensors")
    if not indexed:
        (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(holdfast.errors.Damaged, match="leads out of the folder"):
        holdfast.open(folder)


def test_an_attachment_that_is_a_link_out_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (tmp_path / "secret").write_text("secret")
    (sharded(folder) / "config.json").symlink_to("../secret")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert not holds(folder, a=A, b=B, c=C).attachments
    assert "config.json is not attached" in caplog.text


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_missing_shard(indexed: bool, number: int, tmp_path: Path) -> None:
    (sharded(tmp_path) / f"model-0000{number}-of-00003.safetensors").unlink()
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(
        holdfast.errors.Damaged, match=f"0000{number}-of-00003.*is missing" if indexed else f"{number} is missing"
    ):
        holdfast.open(tmp_path)


INDEXES = {
    r"says that 'd' is in model-00001-of-00003.safetensors, which does not hold it": lambda t: t["weight_map"].update(
        d="model-00001-of-00003.safetensors"
    ),
    r"says that 'a' is in model-00002-of-00003": lambda t: t["weight_map"].update(a="model-00002-of-00003.safetensors"),
    r"is no index of weights": lambda t: t.pop("weight_map"),
    r"is an index of no weights": lambda t: t.update(weight_map={}),
    r"no index of weights: Expected `str`": lambda t: t["weight_map"].update(a=1),
}


@pytest.mark.parametrize("text", INDEXES)
def test_an_index_that_disagrees(text: str, tmp_path: Path) -> None:
    index_of(sharded(tmp_path), INDEXES[text])
    with pytest.raises(holdfast.errors.Damaged, match=text):
        holdfast.open(tmp_path)


def test_an_index_that_lists_too_little(tmp_path: Path) -> None:
    save_file({"a": A, "more": B}, sharded(tmp_path) / "model-00001-of-00003.safetensors")
    with pytest.raises(
        holdfast.errors.Damaged, match=r"does not list 'more', which model-00001-of-00003\.safetensors holds"
    ):
        holdfast.open(tmp_path)


@pytest.mark.parametrize("indexed", [True, False])
def test_a_name_that_two_files_hold(indexed: bool, tmp_path: Path) -> None:
    save_file({"b": B, "a": A}, sharded(tmp_path) / "model-00002-of-00003.safetensors")
    if not indexed:
        (tmp_path / "model.safetensors.index.json").unlink()
    holds(tmp_path, a=A, b=B, c=C)
    for other in (A + 1, A[:2].clone(), A.half(), A.reshape(-1).clone()):
        save_file({"b": B, "a": other}, tmp_path / "model-00002-of-00003.safetensors")
        with pytest.raises(holdfast.errors.Damaged, match="both hold 'a', and not the same"):
            holdfast.open(tmp_path)


@pytest.mark.parametrize("names", [("x", "y"), ("lora_a", "model_1")])
def test_several_weights_and_none_is_the_likeliest(names: tuple[str, str], tmp_path: Path) -> None:
    for name in names:
        save_file({"a": A}, tmp_path / f"{name}.safetensors")
    with pytest.raises(
        holdfast.errors.NotACheckpoint, match=rf"open one of {names[0]}\.safetensors, {names[1]}\.safetensors"
    ):
        holdfast.open(tmp_path)


def test_a_pipeline_of_diffusers(tmp_path: Path) -> None:
    (tmp_path / "unet").mkdir()
    (tmp_path / "model_index.json").write_text("{}")
    save_file({"a": A}, tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="open one of its models, of unet"):
        holdfast.open(tmp_path)
    holds(tmp_path / "unet", a=A)


def test_the_pointer_of_git_lfs(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\nsize 9\n"
        (tmp_path / name).write_text(text)
        with pytest.raises(holdfast.errors.Damaged, match="git lfs pull"):
            holdfast.open(tmp_path)
        (tmp_path / name).unlink()


U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
HEADERS = {
    "empty": b"",
    "no room for a header": b"\x01\0\0",
    "length beyond the file": (1000).to_bytes(8, "little") + b"{}",
    "length of exabytes": (1 << 62).to_bytes(8, "little") + b"{}",
    "no JSON": header(b"{" + b"a" * 20),
    "a list": header(b"[]"),
    "an entry without a type": header({"a": {"shape": [4], "data_offsets": [0, 4]}}, bytes(4)),
    "negative offsets": header({"a": {**U8, "data_offsets": [-4, 0]}}, bytes(4)),
    "backwards": header({"a": {**U8, "data_offsets": [4, 0]}}, bytes(4)),
    "negative shape": header({"a": {**U8, "shape": [-2, -2]}}, bytes(4)),
    "shape too large": header({"a": {**U8, "shape": [1 << 62, 1 << 62]}}, bytes(4)),
    "beyond the file": header({"a": {**U8, "shape": [8], "data_offsets": [0, 8]}}, bytes(4)),
    "overlap": header({"a": U8, "b": {**U8, "data_offsets": [2, 6]}}, bytes(6)),
    "the same bytes twice": header({"a": U8, "b": U8}, bytes(4)),
    "a hole": header({"a": U8, "b": {**U8, "data_offsets": [6, 10]}}, bytes(10)),
    "bytes that nobody describes": header({"a": U8}, bytes(9)),
    "truncated": header({"a": U8}, bytes(3)),
    "half a byte": header({"a": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)),
    "metadata that is no text": header({"__metadata__": {"a": 1}, "a": U8}, bytes(4)),
    "a fraction": header({"a": {**U8, "shape": [4.5]}}, bytes(4)),
    "no UTF-8": header(b'{"\xff": {}}'),
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_broken_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(HEADERS[what])
    for target in (path, tmp_path):
        with pytest.raises(holdfast.errors.Damaged, match=r"model\.safetensors"):
            holdfast.open(target)


def test_a_type_from_the_future(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header({"a": {**U8, "dtype": "F3"}}, bytes(4)))
    with pytest.raises(holdfast.errors.Unsupported, match=r"'a' is of type 'F3'"):
        holdfast.open(tmp_path)


def test_a_file_cut_at_any_byte(tmp_path: Path) -> None:
    whole = (sharded(tmp_path) / "model-00001-of-00003.safetensors").read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(holdfast.errors.Damaged):
            holdfast.open(path)


@pytest.mark.slow
def test_a_bit_flipped_anywhere_in_a_header_raises_what_is_ours(tmp_path: Path) -> None:
    whole = (sharded(tmp_path) / "model-00001-of-00003.safetensors").read_bytes()
    path = tmp_path / "flipped.safetensors"
    for at in range(len(whole) - A.nbytes):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            with contextlib.suppress(holdfast.HoldfastError):
                holdfast.open(path).state_dict()


def test_no_weights_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "nothing"):
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.open(path)


def test_a_data_file_of_ours_is_read_only_if_it_is_whole(tmp_path: Path) -> None:
    holdfast.save({"model": {"a": A}}, tmp_path / "one")
    checkpoint = holds(next((tmp_path / "one" / "model").iterdir()), a=A)
    assert "metadata" not in checkpoint.values
    holdfast.save({"model": {"a": A.to(torch.complex128)}}, tmp_path / "two")  # a type that safetensors cannot name
    with pytest.raises(holdfast.errors.NotACheckpoint, match=f"open that, {tmp_path / 'two'}"):
        holdfast.open(next((tmp_path / "two" / "model").iterdir()))


# The writer of torch.distributed.checkpoint, by real ranks


def whole() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(13, 5, generator=generator), "b.bias": torch.randn(3, generator=generator).bfloat16(),
        "c": torch.randn(4, 9, 2, generator=generator), "scale": torch.tensor(2.5), "few": torch.randn(2, 17),
        "count": torch.tensor(7), "ints": torch.arange(11), "none": torch.zeros(0, 3),
    }  # fmt: skip


def save_on_ranks(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    world, tensors = dist.get_world_size(), whole()
    if kind == "joined":
        tensors = {k: v for k, v in tensors.items() if v.is_floating_point()}
    mesh = init_device_mesh("cpu", (world,))
    placed = {"c": Shard(1), "few": Shard(1), "scale": Replicate()}
    state: dict[str, Any] = {
        k: v if k in ("count", "none") else distribute_tensor(v, mesh, [placed.get(k, Shard(0))])
        for k, v in tensors.items()
    }
    if kind == "meshes":
        twice = init_device_mesh("cpu", (2, 2))
        state["a.weight"] = distribute_tensor(tensors["a.weight"], twice, [Shard(0), Shard(0)])
        state["c"] = distribute_tensor(tensors["c"], twice, [Shard(1), Shard(0)])
        state["few"] = distribute_tensor(tensors["few"], twice, [Replicate(), Shard(1)])
    files = {k: 1 + i % 3 for i, k in enumerate(state)}
    writer = HuggingFaceStorageWriter(
        str(folder), save_distributed=True, enable_consolidation=kind in ("joined", "crashed"),
        fqn_to_index_mapping=None if kind in ("sharded", "crashed") else files,
    )  # fmt: skip
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.api.CheckpointException:
        assert kind == "crashed", kind  # torch cannot join tensors of integers
    return tensors


WRITTEN = [*((w, kind) for w in (2, 3, 4) for kind in ("sharded", "files", "joined", "crashed")), (4, "meshes")]


@pytest.mark.parametrize(("world", "kind"), WRITTEN)
def test_what_ranks_wrote(world: int, kind: str, tmp_path: Path) -> None:
    expected = pool.run(world, save_on_ranks, tmp_path / "ckpt", kind)[0]
    if kind == "crashed":
        found = huggingface.read(tmp_path / "ckpt")
        assert found is not None and "sharded/" in found.reading and found.state["model"].keys() == expected.keys()
    checkpoint = holds(tmp_path / "ckpt" / ("sharded" if kind == "crashed" else ""), **expected)
    if kind != "joined":
        assert checkpoint.world_size == world
    for name, tensor in expected.items():
        box = [(n // 3, max(n - 1, n // 3)) for n in tensor.shape]
        assert same(checkpoint.read(f"model/{name}", box), tensor[tuple(slice(*b) for b in box)])


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    pool.run(3, save_on_ranks, tmp_path / "ckpt", "sharded")
    return tmp_path / "ckpt"


def test_a_rank_in_the_middle_is_missing(ranks: Path) -> None:
    next(ranks.glob("shard-00002-*")).unlink()
    with pytest.raises(holdfast.errors.Damaged, match="not whole"):
        holdfast.open(ranks)


def test_two_saves_mixed(ranks: Path, tmp_path: Path) -> None:
    pool.run(2, save_on_ranks, tmp_path / "other", "sharded")
    path = next((tmp_path / "other").glob("shard-00002-*"))
    shutil.copy(path, ranks / path.name)
    with pytest.raises(holdfast.errors.Damaged):
        holdfast.open(ranks)


def rewrite(path: Path, change: Callable[[dict[str, str]], Any]) -> None:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    told = json.loads(data[8 : 8 + length])
    change(told["__metadata__"])
    path.write_bytes(header(told, data[8 + length :]))


OFFSETS = {
    "is not valid": lambda m: m.update(DCP_SHARDING_INFO="{"),
    "does not say where 'few'": lambda m: m.update(DCP_SHARDING_INFO=m["DCP_SHARDING_INFO"].replace("few", "fewer")),
    "does not say where": lambda m: m.update(DCP_SHARDING_INFO='{"a.weight": {"saved_offsets": [-1, 0]}}'),
    "version 2.0 of": lambda m: m.update(DCP_VERSION="2.0"),
    "not whole": lambda m: m.update(DCP_SHARDING_INFO=m["DCP_SHARDING_INFO"].replace("[5, 0]", "[6, 0]")),
}


@pytest.mark.parametrize("text", OFFSETS)
def test_offsets_that_make_no_sense(ranks: Path, text: str) -> None:
    rewrite(next(ranks.glob("shard-00002-*")), OFFSETS[text])
    with pytest.raises((holdfast.errors.Damaged, holdfast.errors.Unsupported), match=text):
        holdfast.open(ranks)


def test_the_data_files_of_our_own_save_are_no_weights(tmp_path: Path) -> None:
    """Without the manifest above them nobody knows whether they are whole, or of one save."""
    holdfast.save({"model": {"w": torch.ones(4)}}, tmp_path / "c")
    with pytest.raises(holdfast.errors.NotACheckpoint, match="open the folder above"):
        holdfast.open(tmp_path / "c" / "model")
    (tmp_path / "c" / "manifest.json").unlink()
    for path in (tmp_path / "c", tmp_path / "c" / "model"):
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.open(path)
