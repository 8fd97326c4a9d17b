"""Every peer's checkpoint in a store: the same bits as on disk, with few requests and few bytes."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import holdfast
from holdfast.storage.local.local import Local
from holdfast.storage.store import Got, Listing, Store
from holdfast.storage.store_place import StorePlace
from tests.formats.truth import GOLDEN, NAMES, Truth, check, same

MIB = 1 << 20


class Counting:
    """A store that notes what is read of another. ``lists``: False for a web server."""

    def __init__(self, store: Store, *, lists: bool = True) -> None:
        self.store, self.lists = store, lists
        self.asked: list[tuple[str, str, int]] = []

    @property
    def url(self) -> str:
        return self.store.url

    def list(self, prefix: str, *, deep: bool) -> Listing:
        self.asked.append(("list", prefix, 0))
        if not self.lists:
            error = OSError("a web server lists nothing")
            error.unlisted = True  # type: ignore[attr-defined]
            raise error
        return self.store.list(prefix, deep=deep)

    def size(self, key: str) -> int | None:
        self.asked.append(("size", key, 0))
        return self.store.size(key)

    def get(self, key: str, begin: int = 0, end: int | None = None) -> Got:
        got = self.store.get(key, begin, end)
        self.asked.append(("get", key, len(memoryview(got.data))))
        return got

    def create(self, key: str, data: bytes) -> bool:
        raise AssertionError("a reader writes nothing")

    put = delete = create  # type: ignore[assignment]

    def count(self, kind: str) -> int:
        return Counter(k for k, *_ in self.asked)[kind]

    def fetched(self) -> int:
        return sum(nbytes for _, _, nbytes in self.asked)


def place(folder: Path, key: str = "", *, lists: bool = True) -> tuple[StorePlace, Counting]:
    store = Counting(Local(folder), lists=lists)
    return StorePlace(store, key), store


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if n % 3 == 0 else pytest.mark.slow) for n, name in enumerate(NAMES)]
)
def test_the_same_as_on_disk(name: str) -> None:
    where, store = place(GOLDEN, f"{name}/ckpt")
    files = sum(path.is_file() for path in Truth(name).path.rglob("*")) if Truth(name).path.is_dir() else 1
    checkpoint = check(name, where)
    local = holdfast.open(Truth(name).path)
    assert (checkpoint.format, checkpoint.step, checkpoint.world_size) == (local.format, local.step, local.world_size)
    assert checkpoint.reading == local.reading and checkpoint.values == local.values
    assert checkpoint.tensors.keys() == local.tensors.keys() and checkpoint.left_out.keys() == local.left_out.keys()
    # Below the folder itself at most three folders are listed, then all at once; small files are read once.
    assert store.count("list") <= 7 and store.count("size") <= 2
    assert store.count("get") <= 2 * files + 2
    assert checkpoint.attachments == local.attachments
    for attached in local.attachments:
        assert checkpoint.attachment(attached) == local.attachment(attached)
    before = store.fetched()
    stats, expected = checkpoint.verify(), local.verify()
    assert (stats.nbytes, stats.unverified, stats.read) == (expected.nbytes, expected.unverified, expected.read)
    assert store.fetched() >= before


def big(nbytes: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.int32).view(torch.float32)


def big_state() -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": big(24 * MIB).view(-1, 1024) + i for i in range(4)}


def save_torch(state: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save({"model": state, "step": 7}, folder / "big.pt")


def save_legacy(state: dict[str, torch.Tensor], folder: Path) -> None:
    torch.save({"model": state, "step": 7}, folder / "big.pt", _use_new_zipfile_serialization=False)


def save_safetensors(state: dict[str, torch.Tensor], folder: Path) -> None:
    save_file(state, folder / "model.safetensors")


def save_dcp(state: dict[str, torch.Tensor], folder: Path) -> None:
    dcp.save({"model": state}, checkpoint_id=folder)


@pytest.mark.parametrize("write", [save_torch, save_legacy, save_safetensors, save_dcp])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_only_what_is_wanted_is_fetched(write: Any, tmp_path: Path) -> None:
    state = big_state()
    write(state, tmp_path)
    where, store = place(tmp_path.parent, tmp_path.name)
    checkpoint = holdfast.open(where)
    assert {name.removeprefix("model/") for name in checkpoint.tensors} == state.keys()
    assert store.fetched() < 2 * MIB and store.count("get") <= 8
    for name, box, wanted in (
        ("layer.2.weight", None, state["layer.2.weight"]),
        ("layer.1.weight", [(1000, 3000)], state["layer.1.weight"][1000:3000]),
    ):
        opened = store.fetched()
        assert same(checkpoint.read(f"model/{name}", box), wanted)
        assert store.fetched() - opened < 1.1 * wanted.nbytes + 256 * 1024
    assert store.count("size") == 0 and store.count("list") <= 2


def test_tensors_are_looked_for_many_at_once(tmp_path: Path) -> None:
    state = {f"w{i:03}": torch.full((40_000,), float(i)) for i in range(200)}
    torch.save(state, tmp_path / "model.pt")
    where, store = place(tmp_path, "model.pt")
    checkpoint = holdfast.open(where)
    opened = len(store.asked)
    assert opened <= 6  # no header of a member is read to open it
    held = checkpoint.state_dict()["model"]
    assert all(same(held[name], tensor) for name, tensor in state.items())
    assert len(store.asked) - opened <= 2 * len(state)


def test_strided_and_shared_tensors(tmp_path: Path) -> None:
    whole = torch.randn(700, 500)
    state = {"t": whole.t(), "cut": whole[3:90, 5:77], "whole": whole, "same": whole, "flat": whole.view(-1)[7:19]}
    torch.save(state, tmp_path / "views.pt")
    checkpoint = holdfast.open(place(tmp_path, "views.pt")[0])
    assert all(same(checkpoint.read(f"model/{name}"), tensor.contiguous()) for name, tensor in state.items())
    assert checkpoint.manifest.aliases == {"model/same": "model/whole"}


def test_a_file_that_is_cut_short_after_it_was_opened(tmp_path: Path) -> None:
    torch.save({"a": big(4 * MIB)}, tmp_path / "model.pt")
    checkpoint = holdfast.open(place(tmp_path, "model.pt")[0])
    data = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(data[: 2 * MIB])
    with pytest.raises(holdfast.errors.Damaged, match=r"model\.pt ends at byte"):
        checkpoint.verify()
    (tmp_path / "model.pt").unlink()
    with pytest.raises(holdfast.errors.Damaged, match=r"model\.pt is missing"):
        checkpoint.verify()


def test_a_bit_that_flipped_is_found(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100.0), "b": torch.ones(7)}, tmp_path / "model.pt")
    data = bytearray((tmp_path / "model.pt").read_bytes())
    data[data.index(torch.arange(100.0).numpy().tobytes()) + 17] ^= 4
    (tmp_path / "model.pt").write_bytes(data)
    with pytest.raises(holdfast.errors.Damaged, match=r"model/a.*CRC-32"):
        holdfast.open(place(tmp_path, "model.pt")[0]).verify()


# Paths that mean more than themselves


def test_files_beside_a_file_and_templates(tmp_path: Path) -> None:
    for path in ("dcp_single/ckpt/.metadata", "hf_safetensors_bf16_sharded/ckpt/model.safetensors.index.json"):
        name = path.partition("/")[0]
        assert holdfast.open(place(GOLDEN, path)[0]).tensors.keys() == holdfast.open(Truth(name).path).tensors.keys()
    hfai = place(GOLDEN, "hfai_3r/ckpt/PART_001.pt")[0]
    assert hfai.is_file() and check("hfai_3r", hfai)
    tars = sorted(path.name for path in Truth("composer_tar_2r").path.rglob("*rank0*.tar"))
    where, store = place(GOLDEN, f"composer_tar_2r/ckpt/{tars[0].replace('rank0', 'rank{rank}')}")
    check("composer_tar_2r", where)
    assert {key for kind, key, _ in store.asked if kind == "list"} <= {
        "composer_tar_2r/ckpt", where.key, f"{where.key}/manifest.json", f"{where.key}/parts",
    }  # fmt: skip


def test_a_run_of_many_steps_is_not_listed_as_a_whole(tmp_path: Path) -> None:
    truth = Truth("ds_zero1_fp32_tied_2r")
    tag = (truth.path / "latest").read_text().strip()
    shutil.copytree(truth.path, tmp_path / "run")
    for step in range(100, 112):
        shutil.copytree(truth.path / tag, tmp_path / "run" / f"global_step{step}")
    where, store = place(tmp_path, "run")
    check(truth.name, where)
    assert ("list", f"run/{tag}", 0) in store.asked
    assert {key.partition("/")[2] for kind, key, _ in store.asked if kind == "get"} >= {"latest"}
    assert not any("global_step1" in key for _, key, _ in store.asked)


def test_links_that_lead_out_do_not_matter_but_names_do(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    (tmp_path / "run").mkdir()
    for name in ("../secret.safetensors", "/secret.safetensors", "a/../../secret.safetensors"):
        index = {"metadata": {}, "weight_map": {"a": name}}
        (tmp_path / "run" / "model.safetensors.index.json").write_text(json.dumps(index))
        where, store = place(tmp_path, "run")
        with pytest.raises(holdfast.errors.Damaged, match="no path inside"):
            holdfast.open(where)
        assert not any("secret" in key for _, key, _ in store.asked)


def test_a_store_that_fails(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    for verb in ("list", "size", "get"):
        where, store = place(tmp_path, "model.pt")

        def fail(*_: object, **__: object) -> None:
            raise OSError("503 Slow Down")

        setattr(store, verb, fail)
        with pytest.raises(holdfast.errors.StorageError, match=r"model\.pt.*503 Slow Down"):
            holdfast.open(where)


# Web servers, which list nothing


@pytest.mark.parametrize("name", ["hf_safetensors_bf16_sharded", "hf_safetensors_single_tied", "dcp_single"])
def test_a_folder_of_a_web_server(name: str) -> None:
    where, store = place(GOLDEN, f"{name}/ckpt", lists=False)
    check(name, where)
    assert store.count("size") < 150


@pytest.mark.parametrize("name", ["torchsave_zip_tied_views", "composer_pt"])
def test_a_file_of_a_web_server(name: str) -> None:
    (path,) = [path for path in Truth(name).path.rglob("*") if path.is_file()] or [Truth(name).path]
    where, _ = place(GOLDEN, path.relative_to(GOLDEN).as_posix(), lists=False)
    check(name, where)
