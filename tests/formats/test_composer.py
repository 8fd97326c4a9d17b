"""Composer: real checkpoints against their truth, every way to name one, and archives with the files of DeepSpeed."""

from __future__ import annotations

import bz2
import gc
import gzip
import lzma
import os
import re
import shutil
import tarfile
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import holdfast
from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.storage.local.local_place import LocalPlace
from tests.formats import truth
from tests.formats.deepspeed_made import Run, run_of, zero3, zero12
from tests.formats.test_deepspeed import SHAPES
from tests.formats.test_deepspeed import check as check_run
from tests.formats.truth import GOLDEN, same

NAMES = [name for name in truth.NAMES if name.startswith("composer_")]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def first(name: str) -> Path:
    return min((GOLDEN / name / "ckpt").iterdir())


@pytest.mark.parametrize("name", NAMES)
def test_golden(name: str) -> None:
    checkpoint = truth.check(name)  # the folder
    assert checkpoint.format.startswith("Composer")
    assert checkpoint.step == 3
    assert not checkpoint.left_out
    assert truth.check(name, first(name)).reading == ""
    rank = str(first(name)).replace("rank0", "rank{rank}")
    assert truth.check(name, LocalPlace(rank)).reading == first(name).name
    rng = checkpoint.state_dict()["rng"]
    assert len(rng) == checkpoint.manifest.world_size == truth.Truth(name).facts["world_size"]
    assert {"python", "numpy", "torch"} <= rng[-1].keys()


def test_values_of_both_ages() -> None:
    old = holdfast.open(first("composer_pt")).state_dict()
    assert old["timer"]["Timer"]["batch"] == 3 and old["rank_zero_seed"] == 11
    assert old["schedulers"]["LambdaLR"]["last_epoch"] == 3
    assert set(old["optimizer"]["state"]) == set(range(32))  # its integers, which a live optimizer knows
    new = holdfast.open(first("composer_032_pt_2r"))
    state = new.state_dict()
    assert state["timestamp"]["Timestamp"]["sample"] == 12 and state["run_name"] == "tiny"
    assert new.manifest.producer["composer"] == "0.32.1"
    assert isinstance(next(iter(state["optimizer"]["state"])), str)


def test_deepspeed_in_archives_of_both_ranks(tmp_path: Path) -> None:
    name = "composer_ds_zero1_tar_2r"
    source = GOLDEN / name / "ckpt"
    for path in (source / "ep0-ba3-rank1.tar", source / "ep0-ba3-rank0.tar"):
        checkpoint = truth.check(name, path)
        assert checkpoint.format == "Composer with DeepSpeed"
        state = checkpoint.state_dict()
        assert state["timer"]["Timer"]["batch"] == 3 and state["global_steps"] == 3 and len(state["rng"]) == 2
    shutil.copy(source / "ep0-ba3-rank0.tar", tmp_path)
    with pytest.raises(Damaged, match=r"saved as one of 2: some are missing.*ep0-ba3-rank0\.tar; if those of other"):
        holdfast.open(tmp_path / "ep0-ba3-rank0.tar")
    (tmp_path / "ep0-ba3-rank0.tar").rename(tmp_path / "aside")
    shutil.copy(source / "ep0-ba3-rank1.tar", tmp_path)
    with pytest.raises(NotACheckpoint, match=r"should hold composer_states\.pt"):
        holdfast.open(tmp_path / "ep0-ba3-rank1.tar")


# Archives of any number of ranks


def states(step: int = 3, ranks: int = 1, **more: Any) -> dict[str, Any]:
    held = {"schedulers": {}, "timestamp": {"Timestamp": {"batch": step, "epoch": 1}}, "rank_zero_seed": 5, **more}
    return {"state": held, "rng": [{"torch": torch.arange(4) + rank} for rank in range(ranks)]}


def archives(folder: Path, files: dict[str, Any], world: int, name: str, tree: dict[str, Any] | None = None) -> None:
    """One archive for each rank, as Composer packs a folder for temporary files."""
    for rank in range(world):
        with tempfile.TemporaryDirectory() as temporary:
            inside = LocalPlace(temporary)
            (inside / "deepspeed").mkdir()
            for file, content in files.items():
                told = re.match(r"(?:bf16_)?zero_pp_rank_(\d+)", file)
                if rank == (int(told[1]) if told else 0):
                    torch.save(content, inside / "deepspeed" / file)
            if rank == 0:
                torch.save(states(ranks=world) if tree is None else tree, inside / "composer_states.pt")
                (inside / "latest").write_text("deepspeed")
                (inside / "zero_to_fp32.py").write_text("pass")
            target = folder / name.format(rank=rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            mode = {".tar": "w", ".gz": "w:gz", ".tgz": "w:gz", ".bz2": "w:bz2"}.get(target.suffix, "w:xz")
            with tarfile.open(target, mode) as archive:  # type: ignore[call-overload]
                archive.add(inside, arcname="")


@pytest.mark.parametrize("world", [1, 3, 12])
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("extension", ["tar", "tar.gz"])
def test_deepspeed_on_any_number_of_ranks(tmp_path: Path, world: int, stage: int, extension: str) -> None:
    run = run_of(SHAPES, 2)
    run.dtype, run.frozen = torch.bfloat16, {"frozen": torch.rand(5).bfloat16()}
    files = zero3(run, world) if stage == 3 else zero12(run, world)
    archives(tmp_path / "run", files, world, f"ep0-ba3-rank{{rank}}.{extension}")
    for path in ("", f"ep0-ba3-rank0.{extension}", f"ep0-ba3-rank{{rank}}.{extension}"):
        checkpoint = check_run(run, tmp_path / "run" / path)
        assert checkpoint.manifest.world_size == world and checkpoint.step == 3
        assert [each["torch"][0].item() for each in checkpoint.state_dict()["rng"]] == list(range(world))


@pytest.mark.parametrize("extension", ["tar", "tgz", "tar.bz2", "tar.lzma", "tar.xz"])
@pytest.mark.fast_cases("tar", "tgz", "tar.xz")
def test_every_extension(tmp_path: Path, home: Path, extension: str) -> None:
    run = run_of(SHAPES)
    archives(tmp_path, zero12(run, 2), 2, f"x{{rank}}rank{{rank}}.{extension}")
    check_run(run, tmp_path / f"x{{rank}}rank{{rank}}.{extension}")
    gc.collect()
    scratch = home / f"holdfast-scratch-{os.geteuid()}"
    assert not scratch.exists() or not any(scratch.iterdir())


def test_a_folder_for_each_rank(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    archives(tmp_path, zero12(run, 3), 3, "rank{rank}/ckpt.tar")
    check_run(run, tmp_path / "rank{rank}" / "ckpt.tar")
    with pytest.raises(Damaged, match=r"open the template that leads to all of them, with \{rank\}"):
        holdfast.open(tmp_path / "rank0" / "ckpt.tar")


def test_an_archive_of_another_save(tmp_path: Path) -> None:
    run = run_of(SHAPES)
    archives(tmp_path, zero12(run, 2), 2, "ep0-ba3-rank{rank}.tar")
    shutil.copy(tmp_path / "ep0-ba3-rank1.tar", tmp_path / "ep0-ba3-rank2.tar")
    with pytest.raises(Damaged, match="which .*has too: one is of another save"):
        holdfast.open(tmp_path / "ep0-ba3-rank0.tar")
    shutil.copy(tmp_path / "ep0-ba3-rank0.tar", tmp_path / "ep0-ba3-rank2.tar")
    with pytest.raises(Damaged, match="2 of them does"):
        holdfast.open(tmp_path / "ep0-ba3-rank0.tar")


# Files of one process


def model_tree(step: int = 3, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.rand(1, 3)).sum().backward()
    optimizer.step()
    tree = states(step)
    tree["state"] |= {"model": net.state_dict(), "optimizers": {"AdamW": optimizer.state_dict()}}
    return tree


def test_the_newest_of_a_folder(tmp_path: Path) -> None:
    for epoch, batch in ((0, 9), (1, 10), (1, 100), (0, 2)):
        torch.save(model_tree(batch), tmp_path / f"ep{epoch}-ba{batch}-rank0.pt")
    (tmp_path / "notes.txt").write_text("ba9999-rank0")
    checkpoint = holdfast.open(tmp_path)
    assert (checkpoint.step, checkpoint.reading) == (100, "ep1-ba100-rank0.pt, the newest of 4 saves")
    checkpoint = holdfast.open(tmp_path / "ep{epoch}-ba{batch}-rank{rank}.pt")
    assert (checkpoint.step, checkpoint.reading) == (100, "ep1-ba100-rank0.pt, the newest of 4 saves")
    assert holdfast.open(tmp_path / "ep0-ba{batch}-rank{rank}.pt").step == 9
    assert holdfast.open(tmp_path / "ep0-ba2-rank{rank}.pt").step == 2
    (tmp_path / "latest-rank0.pt").symlink_to("ep1-ba10-rank0.pt")  # after going back, say
    checkpoint = holdfast.open(tmp_path)
    assert checkpoint.step == 10
    assert checkpoint.reading == "latest-rank0.pt, the newest of 4 saves (a link to ep1-ba10-rank0.pt)"
    assert holdfast.open(tmp_path / "latest-rank{rank}.pt").step == 10
    (tmp_path / "latest-rank0.pt").unlink()
    (tmp_path / "latest-rank0.pt").symlink_to("ep9-ba900-rank0.pt")  # deleted since
    assert holdfast.open(tmp_path).step == 100


def test_links_of_every_rank(tmp_path: Path) -> None:
    old, run = run_of(SHAPES, seed=1), run_of(SHAPES)
    archives(tmp_path, zero12(old, 2), 2, "ep0-ba3-rank{rank}.tar")
    archives(tmp_path, zero12(run, 2), 2, "ep0-ba6-rank{rank}.tar", states(6))
    for rank, batch in enumerate([6, 3]):  # the second rank's link is not renewed yet
        (tmp_path / f"latest-rank{rank}").symlink_to(f"ep0-ba{batch}-rank{rank}.tar")
    for path in (tmp_path, tmp_path / "latest-rank0", tmp_path / "latest-rank{rank}"):
        assert check_run(run, path).step == 6


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress], ids=["gz", "bz2", "xz"])
def test_a_packed_file(tmp_path: Path, pack: Any) -> None:
    tree = model_tree()
    torch.save(tree, tmp_path / "whole.pt")
    path = tmp_path / "ep0-ba3-rank0.pt.packed"
    path.write_bytes(pack((tmp_path / "whole.pt").read_bytes()))
    state = holdfast.open(path).state_dict()
    assert same(state["model"]["weight"], tree["state"]["model"]["weight"])


def test_weights_alone(tmp_path: Path) -> None:
    tree = {"state": {"model": {"module.w": torch.rand(3)}, "integrations": {}, "metadata": {"device": "cpu"}}}
    torch.save(tree, tmp_path / "final.pt")  # of 0.32: without rng
    state = holdfast.open(tmp_path / "final.pt").state_dict()
    assert same(state["model"]["w"], tree["state"]["model"]["module.w"])
    assert state["metadata"] == {"device": "cpu"} and "rng" not in state


def test_several_optimizers_and_keys_of_ours(tmp_path: Path) -> None:
    tree = model_tree()
    tree["state"]["optimizers"]["SGD"] = {"state": {}, "param_groups": [{"lr": 0.5, "params": [0, 1]}]}
    tree["state"]["module"] = "mine"
    torch.save(tree, tmp_path / "a")
    state = holdfast.open(tmp_path / "a").state_dict()
    assert state["optimizers"].keys() == {"AdamW", "SGD"} and "optimizer" not in state
    assert state["optimizers"]["SGD"]["param_groups"][0]["lr"] == 0.5
    assert state["state"] == {"module": "mine"}


def test_into_a_live_model(tmp_path: Path) -> None:
    tree = model_tree()
    torch.save(tree, tmp_path / "ep0-ba3-rank0")
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=9.0)
    loaded = holdfast.load(tmp_path / "ep0-ba3-rank0", {"model": net, "optimizer": optimizer})
    assert same(net.weight.data, tree["state"]["model"]["weight"])
    assert same(optimizer.state[net.weight]["exp_avg"], tree["state"]["optimizers"]["AdamW"]["state"][0]["exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 1e-3
    assert loaded is not None


def test_shards_of_dcp(tmp_path: Path) -> None:
    for step in (2, 4):
        tree = model_tree(step, seed=step)
        saved = tree["state"]["optimizers"]["AdamW"]
        names = ["weight", "bias"]
        saved["state"] = {names[i]: leaf for i, leaf in saved["state"].items()}
        saved["param_groups"][0]["params"] = names
        torch_dcp.save(tree, checkpoint_id=str(tmp_path / f"ep0-ba{step}"), no_dist=True)
    (tmp_path / "latest-rank0.pt").symlink_to("ep0-ba4")
    for path in (
        tmp_path,
        tmp_path / "ep0-ba4",
        tmp_path / "ep0-ba4" / ".metadata",
        tmp_path / "ep0-ba4" / "__0_0.distcp",
    ):
        checkpoint = holdfast.open(path)
        state = checkpoint.state_dict()
        assert (checkpoint.format, checkpoint.step) == ("Composer", 4)
        assert same(state["model"]["weight"], tree["state"]["model"]["weight"])
        assert same(state["optimizer"]["state"]["bias"]["exp_avg"], saved["state"]["bias"]["exp_avg"])
        assert state["rng"][0]["torch"].tolist() == [0, 1, 2, 3]
    assert holdfast.open(tmp_path / "ep{epoch}-ba{batch}").step == 4


# What is not Composer's, or cannot be read


def test_files_of_others_are_left_to_others(tmp_path: Path) -> None:
    weights = OrderedDict(w=torch.rand(2))
    for name, tree in {
        "trainer": {"state": {"epoch": 1}, "model": weights},
        "only state": {"state": {"model": weights, "optimizer": {}}},
        "optimizer": torch.optim.SGD([torch.rand(2)]).state_dict(),
        "weights": weights,
    }.items():
        torch.save(tree, tmp_path / "ep0-ba3-rank0.pt")
        checkpoint = holdfast.open(tmp_path / "ep0-ba3-rank0.pt")
        assert not checkpoint.format.startswith("Composer"), name


def test_archives_of_others(tmp_path: Path) -> None:
    for name, mode in (("photos.tar", "w"), ("photos.tar.gz", "w:gz")):
        with tarfile.open(tmp_path / name, mode) as archive:  # type: ignore[call-overload]
            archive.add(__file__, "cat.jpg")
        with pytest.raises(NotACheckpoint):
            holdfast.open(tmp_path / name)
    with pytest.raises(NotACheckpoint):
        holdfast.open(tmp_path)
    with pytest.raises(NotACheckpoint):
        holdfast.open(tmp_path / "nothing-{rank}.tar")
    with pytest.raises(NotACheckpoint):
        holdfast.open(tmp_path / "broken-{rank")


@pytest.mark.parametrize("cut", [0.2, 0.9])
@pytest.mark.parametrize("name", ["composer_tar_2r", "composer_targz_2r", "composer_tarbz2_weights"])
def test_cut_off(tmp_path: Path, home: Path, name: str, cut: float) -> None:
    data = first(name).read_bytes()
    path = tmp_path / first(name).name
    path.write_bytes(data[: int(len(data) * cut)])
    with pytest.raises(Damaged, match="truncated"):
        holdfast.open(path)
    scratch = home / f"holdfast-scratch-{os.geteuid()}"
    assert not scratch.exists() or not any(scratch.iterdir())


def test_no_archive_by_that_name(tmp_path: Path) -> None:
    (tmp_path / "ep0-ba3-rank0.tar").write_bytes(b"x" * 2000)
    with pytest.raises(Damaged, match="no tar archive"):
        holdfast.open(tmp_path)
    torch.save({"w": torch.rand(2)}, tmp_path / "ep0-ba3-rank0.tar", _use_new_zipfile_serialization=False)
    assert "w" in holdfast.open(tmp_path / "ep0-ba3-rank0.tar").state_dict()["model"]  # as in checkpoint.pth.tar


def test_packed_but_no_archive(tmp_path: Path) -> None:
    (tmp_path / "ep0-ba3-rank0.tar.gz").write_bytes(gzip.compress(b"x" * 2000))
    with pytest.raises(Damaged, match="no tar archive"):
        holdfast.open(tmp_path / "ep0-ba3-rank0.tar.gz")


def test_members_that_lead_out(tmp_path: Path) -> None:
    torch.save(model_tree(), tmp_path / "states")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "states", "composer_states.pt")
        archive.add(tmp_path / "states", "deepspeed/../../x")
    with pytest.raises(Damaged, match="a name that no file in an archive"):
        holdfast.open(tmp_path / "a.tar")


class ShardedTensor:
    """Pickled under torch's name."""

    __module__, __qualname__ = "torch.distributed._shard.sharded_tensor.api", "ShardedTensor"


def test_shards_of_torch_1_13(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed._shard.sharded_tensor.api as api

    monkeypatch.setattr(api, "ShardedTensor", ShardedTensor)
    tree = model_tree()
    tree["state"]["model"]["weight"] = ShardedTensor()
    torch.save(tree, tmp_path / "ep0-ba3-rank0.pt")
    with pytest.raises(Unsupported, match="weight is a torch.*ShardedTensor: each rank saved its own shards"):
        holdfast.open(tmp_path / "ep0-ba3-rank0.pt")


def test_the_run_is_converted(tmp_path: Path) -> None:
    run: Run = run_of(SHAPES, 2)
    archives(tmp_path / "run", zero12(run, 3), 3, "ep0-ba3-rank{rank}.tar.gz")
    holdfast.convert(tmp_path / "run", tmp_path / "ours")
    checkpoint = holdfast.open(tmp_path / "ours")
    assert checkpoint.format == "holdfast"
    assert [n for n, t in run.model.items() if not same(checkpoint.state_dict()["model"][n], t)] == []
