"""What torch.save wrote, under everybody's keys and names: read as it was meant, and nothing executed."""

from __future__ import annotations

import argparse
import collections
import enum
import io
import logging
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType

import holdfast
from holdfast.formats.sources import File
from tests import pool
from tests.formats import truth
from tests.formats.truth import GOLDEN, Truth, leaves, module_of, same

BOTH = pytest.mark.parametrize("new", [True, False], ids=["zip", "legacy"])


def trained(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer after one step."""
    torch.manual_seed(seed)
    model = nn.Sequential(collections.OrderedDict(one=nn.Linear(4, 3), norm=nn.BatchNorm1d(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    model(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def equal(found: Any, told: Any) -> bool:
    """Whether two trees are the same to the last bit."""
    a, b = dict(leaves(found)), dict(leaves(told))
    return a.keys() == b.keys() and all(
        same(a[key], value) if isinstance(value, torch.Tensor) else type(a[key]) is type(value) and a[key] == value
        for key, value in b.items()
    )


def opened(path: Path, tree: Any, **how: Any) -> holdfast.Checkpoint:
    torch.save(tree, path, **how)
    return holdfast.open(path)


MODEL, OPTIMIZER = trained()
WEIGHTS, STATE = MODEL.state_dict(), OPTIMIZER.state_dict()


# One file


@pytest.mark.parametrize("name", [n for n in truth.NAMES if n.startswith(("torchsave_", "fsdp1_full"))])
def test_the_golden_ones(name: str) -> None:
    checkpoint = truth.check(name)
    checkpoint.verify()
    files = list((GOLDEN / name / "ckpt").iterdir())
    if len(files) == 1:
        assert truth.check(name, files[0]).step == 3


@BOTH
@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("name", ["checkpoint.pt", "epoch=1-step=20.ckpt", "ep0-ba3", "model.pth.tar", "a b.bin"])
def test_a_file_of_any_name(name: str, protocol: int, new: bool, tmp_path: Path) -> None:
    tree = {"model": dict(WEIGHTS), "optimizer": STATE, "step": 7, "args": {"lr": 0.1}, "none": None}
    checkpoint = opened(tmp_path / name, tree, pickle_protocol=protocol, _use_new_zipfile_serialization=new)
    assert equal(checkpoint.state_dict(), tree)
    assert (checkpoint.step, checkpoint.format, checkpoint.world_size) == (7, "torch.save", 1)
    assert equal(holdfast.open(tmp_path).state_dict(), tree)


@pytest.mark.parametrize(
    "key", ["model", "state_dict", "model_state_dict", "model_state", "module", "net", "network", "weights", "params"]
)
@pytest.mark.parametrize("own", ["optimizer", "optim", "optimizer_state_dict", "opt", "last_optimizer_state"])
def test_customary_keys(key: str, own: str, tmp_path: Path) -> None:
    state = opened(tmp_path / "c.pt", {key: dict(WEIGHTS), own: STATE, "epoch": 3}).state_dict()
    assert equal(state, {"model": dict(WEIGHTS), "optimizer": STATE, "epoch": 3})


@pytest.mark.parametrize(
    ("key", "value"),
    [("step", 3), ("global_step", 3), ("iteration", 3), ("iter_num", 3), ("num_updates", 3), ("step", torch.tensor(3))],
)
def test_customary_names_of_the_step(key: str, value: Any, tmp_path: Path) -> None:
    assert opened(tmp_path / "c.pt", {"model": dict(WEIGHTS), key: value}).step == 3


def test_lightning(tmp_path: Path) -> None:
    tree = {
        "epoch": 1, "global_step": 20, "pytorch-lightning_version": "2.4.0", "state_dict": dict(WEIGHTS),
        "loops": {"fit_loop": {"state_dict": {}}}, "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": None}},
        "optimizer_states": [STATE], "lr_schedulers": [{"last_epoch": 1}], "hyper_parameters": {"width": 4},
    }  # fmt: skip
    checkpoint = opened(tmp_path / "last.ckpt", tree)
    state = checkpoint.state_dict()
    assert checkpoint.step == 20
    assert equal(state.pop("model"), dict(WEIGHTS)) and equal(state.pop("optimizer"), STATE)
    assert state == {k: v for k, v in tree.items() if k not in ("state_dict", "optimizer_states")}
    two = opened(tmp_path / "two.ckpt", {**tree, "optimizer_states": [STATE, trained(1)[1].state_dict()]}).state_dict()
    assert [o["param_groups"][0]["lr"] for o in two["optimizer"]] == [0.1, 0.2]


def test_several_optimizers_and_models_keep_their_keys(tmp_path: Path) -> None:
    other, its = trained(1)
    tree = {"G": dict(WEIGHTS), "D": dict(other.state_dict()), "opt_G": STATE, "opt_D": its.state_dict()}
    state = opened(tmp_path / "gan.pt", tree).state_dict()
    assert equal(state["G"], tree["G"]) and equal(state["D"], tree["D"])
    assert equal(state["optimizer"], {"opt_G": tree["opt_G"], "opt_D": tree["opt_D"]})
    state = opened(tmp_path / "both.pt", {"model": dict(WEIGHTS), "state_dict": tree["D"]}).state_dict()
    assert equal(state["model"], {"model": dict(WEIGHTS), "state_dict": tree["D"]})


def test_averages_keep_their_key_under_plain_names(tmp_path: Path) -> None:
    wrapped = {f"module.{k}": v for k, v in WEIGHTS.items()}
    state = opened(tmp_path / "c.pt", {"state_dict": wrapped, "state_dict_ema": wrapped, "arch": "x"}).state_dict()
    assert equal(state["model"], dict(WEIGHTS)) and equal(state["state_dict_ema"], dict(WEIGHTS))


def test_a_model_key_that_names_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        state = opened(tmp_path / "c.pt", {"model": "vit", "state_dict": dict(WEIGHTS), "optimizer": None}).state_dict()
    assert equal(state, {"model_": "vit", "model": dict(WEIGHTS), "optimizer": None}) and "'model_'" in caplog.text


@BOTH
def test_a_bare_state_dict(new: bool, tmp_path: Path) -> None:
    tree = {**WEIGHTS, "one._extra_state": {"scale": 2.0}}
    checkpoint = opened(tmp_path / "model.pt", tree, _use_new_zipfile_serialization=new)
    assert equal(checkpoint.state_dict(), {"model": tree})
    other, _ = trained(1)
    holdfast.load(tmp_path / "model.pt", {"model": other}, only=["model/one.weight", "model/one.bias", "model/norm.*"])
    assert all(same(a, b) for a, b in zip(other.state_dict().values(), WEIGHTS.values(), strict=True))


def test_a_bare_optimizer_state(tmp_path: Path) -> None:
    assert equal(opened(tmp_path / "o.pt", STATE).state_dict(), {"optimizer": STATE})


def test_names_that_the_groups_tell(tmp_path: Path) -> None:
    model, _ = trained()
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1, momentum=0.9)
    optimizer.step()
    found = opened(tmp_path / "o.pt", optimizer.state_dict()).state_dict()["optimizer"]
    assert list(found["state"]) == found["param_groups"][0]["params"] == [n for n, _ in model.named_parameters()]


def test_a_step_that_is_a_number_becomes_a_tensor(tmp_path: Path) -> None:
    tree = {"state": {0: {"step": 12, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    assert same(opened(tmp_path / "o.pt", tree).read("optimizer/state/0/step"), torch.tensor(12.0))


def test_other_things_at_the_top(tmp_path: Path) -> None:
    assert same(opened(tmp_path / "t.pt", torch.arange(3)).read("state"), torch.arange(3))
    assert opened(tmp_path / "l.pt", [1, "a"]).values == {"state": [1, "a"]}
    assert opened(tmp_path / "n.pt", argparse.Namespace(lr=0.1, step=2)).values == {"lr": 0.1, "step": 2}


@BOTH
def test_views_and_ties(new: bool, tmp_path: Path) -> None:
    whole = torch.arange(60.0)
    views = {
        "whole": whole, "tail": whole[40:], "transposed": whole[:24].view(4, 6).T, "every_other": whole[1:30:2],
        "number": whole[3], "empty": whole[:0].view(0, 3),
        "expanded": whole[5].expand(2, 3), "conv": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    }  # fmt: skip
    tree = {"model": {**WEIGHTS, "tied": WEIGHTS["one.weight"]}, "views": views}
    checkpoint = opened(tmp_path / "c.pt", tree, _use_new_zipfile_serialization=new)
    assert equal(checkpoint.state_dict(), tree)
    assert checkpoint.saved_name("model/tied") == "model/one.weight"
    assert torch.equal(checkpoint.read("views/transposed", [(2, 4), (1, 3)]), views["transposed"][2:4, 1:3])


def test_names_of_wrappers(tmp_path: Path) -> None:
    compiled = {f"_orig_mod.{k}": v for k, v in WEIGHTS.items()}
    wrapped = {f"module._orig_mod.{k}": v for k, v in WEIGHTS.items()}
    for tree in (compiled, wrapped, {"model": wrapped}):
        assert equal(opened(tmp_path / "c.pt", tree).state_dict(), {"model": dict(WEIGHTS)})


def test_a_dtensor_that_is_whole_on_this_rank(tmp_path: Path) -> None:
    results = pool.run(2, save_dtensors, tmp_path)
    assert same(holdfast.open(tmp_path / "whole-1.pt").read("model/w"), results[1])
    with pytest.raises(
        holdfast.errors.Unsupported, match=r"part-1\.pt: w is a DTensor of which this file holds one rank's"
    ):
        holdfast.open(tmp_path / "part-1.pt")


def save_dtensors(folder: Path) -> torch.Tensor:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(6.0).reshape(3, 2)
    for name, placement in (("whole", Replicate()), ("part", Shard(0))):
        tensor = distribute_tensor(whole, mesh, [placement])
        torch.save({"model": {"w": tensor}}, folder / f"{name}-{dist.get_rank()}.pt")
    return whole


def test_opening_reads_no_tensor_and_a_slice_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.randn(1000, 1000)
    torch.save({"model": {"w": wide, "v": wide + 1}}, tmp_path / "c.pt")
    read: list[int] = []
    before = File.read
    monkeypatch.setattr(File, "read", lambda self, begin, nbytes: read.append(nbytes) or before(self, begin, nbytes))
    checkpoint = holdfast.open(tmp_path / "c.pt")
    assert sum(read) < 20_000
    counted: list[int] = []
    monkeypatch.setattr("holdfast.read.read.ReadStats.add", lambda self, nbytes: counted.append(nbytes))
    assert same(checkpoint.read("model/w", [(500, 501)]), wide[500:501])
    assert 4000 <= sum(counted) < 50_000


# FSDP1's full state


def fsdp1() -> tuple[Truth, dict[str, torch.Tensor], dict[str, Any]]:
    told = Truth("fsdp1_full_2r")
    model, optimizer = (torch.load(told.path / f"{n}tinygpt-1.pt", weights_only=True) for n in ("", "AdamW-"))
    return told, model, optimizer


def test_fsdp1_state_in_one_file_or_two(tmp_path: Path) -> None:
    told, weights, state = fsdp1()
    torch.save({"model": weights, "optim": state}, tmp_path / "both.pt")
    truth.check(told.name, tmp_path / "both.pt")
    torch.save(weights, tmp_path / "both.pt")
    torch.save(state, tmp_path / "optim.pt")
    assert truth.check(told.name, tmp_path).reading == "both.pt, optim.pt"


def test_fsdp1_state_by_index(tmp_path: Path) -> None:
    told, weights, state = fsdp1()
    model = module_of(told)
    rekeyed = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model)
    torch.save({"model": weights, "optim": rekeyed}, tmp_path / "c.pt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    holdfast.load(tmp_path / "c.pt", {"model": model, "optimizer": optimizer})
    own = dict(model.named_parameters())
    wrong = [why for (n, k), t in told.optimizer.items() if (why := t.fault(optimizer.state[own[n]][k]))]
    assert len(told.optimizer) == 96 and not wrong, wrong


# Folders of a few files


def test_a_folder_of_parts(tmp_path: Path) -> None:
    for name, part in (("weights", dict(WEIGHTS)), ("adam", STATE), ("progress", {"global_step": 4, "epoch": 1})):
        torch.save(part, tmp_path / f"{name}.pt")
    torch.save(torch.get_rng_state(), tmp_path / "rng.pt")
    (tmp_path / "config.yaml").write_text("a: 1")
    (tmp_path / "log.csv.gz").write_bytes(b"\x1f\x8b")
    checkpoint = holdfast.open(tmp_path)
    state = checkpoint.state_dict()
    assert equal(state["model"], dict(WEIGHTS)) and equal(state["optimizer"], STATE)
    assert state["progress"] == {"global_step": 4, "epoch": 1} and checkpoint.step == 4
    assert same(state["rng"]["state"], torch.get_rng_state())
    assert list(checkpoint.attachments) == ["config.yaml"]


def test_a_whole_one_and_more(tmp_path: Path) -> None:
    torch.save({"model": dict(WEIGHTS), "optimizer": STATE, "step": 2}, tmp_path / "checkpoint.pt")
    torch.save({"names": ["a"]}, tmp_path / "classes.pt")
    state = holdfast.open(tmp_path).state_dict()
    assert equal(state, {"model": dict(WEIGHTS), "optimizer": STATE, "step": 2, "classes": {"names": ["a"]}})


def test_models_of_a_folder(tmp_path: Path) -> None:
    for name in ("model.pt", "ema.pt"):
        torch.save(dict(WEIGHTS), tmp_path / name)
    assert set(holdfast.open(tmp_path).state_dict()) == {"model", "ema"}
    (tmp_path / "model.pt").rename(tmp_path / "generator.pt")
    assert set(holdfast.open(tmp_path).state_dict()["model"]) == {"generator", "ema"}


@pytest.mark.parametrize(
    "names", [["tinygpt-1.pt", "tinygpt-2.pt"], ["epoch=0.ckpt", "epoch=1.ckpt"], ["best.pt", "final.pt"]]
)
def test_a_folder_of_several_is_refused_unless_one_is_the_last(names: list[str], tmp_path: Path) -> None:
    for i, name in enumerate(names):
        torch.save({"model": dict(WEIGHTS), "step": i}, tmp_path / name)
    with pytest.raises(holdfast.errors.NotACheckpoint, match=f"open one of {names[0]}, {names[1]}"):
        holdfast.open(tmp_path)
    torch.save({"model": dict(WEIGHTS), "step": 9}, tmp_path / "last.ckpt")
    checkpoint = holdfast.open(tmp_path)
    assert checkpoint.step == 9 and checkpoint.reading == f"last.ckpt, and not {', '.join(names)}"
    (tmp_path / "last.ckpt").unlink()
    (tmp_path / "last.ckpt").symlink_to(names[0])
    assert holdfast.open(tmp_path).step == 0


def test_a_link_out_of_the_folder_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c").mkdir()
    torch.save(dict(WEIGHTS), tmp_path / "c" / "model.pt")
    torch.save(STATE, tmp_path / "out.pt")
    (tmp_path / "c" / "optim.pt").symlink_to("../out.pt")
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert set(holdfast.open(tmp_path / "c").state_dict()) == {"model"}
    assert "optim.pt is left out" in caplog.text


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("text")
    with zipfile.ZipFile(tmp_path / "some.zip", "w") as archive:
        archive.writestr("a/b.txt", "text")
    for path in (tmp_path, tmp_path / "notes", tmp_path / "some.zip", tmp_path / "none.pt"):
        with pytest.raises(holdfast.errors.NotACheckpoint):
            holdfast.open(path)


# What is refused


def test_buffers_and_signals(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"abcdef")
    buffer.seek(3)
    state = {"model": {"a": torch.ones(2)}, "extra": {"buffer": buffer, "on": signal.SIGTERM}}
    torch.save(state, tmp_path / "a.pt")
    assert holdfast.open(tmp_path / "a.pt").values["extra"] == {"buffer": b"abcdef", "on": 15}


class Kind(enum.Enum):
    A = 1


@BOTH
@pytest.mark.parametrize("what", ["a module of torch", "a module of ours", "an object of ours", "under model"])
def test_pickled_objects(what: str, new: bool, tmp_path: Path) -> None:
    class_of_ours = module_of(Truth("torchsave_zip_frozen"))
    class_of_ours.__class__ = Ours
    tree = {
        "a module of torch": MODEL, "a module of ours": class_of_ours, "an object of ours": {"kind": Kind.A},
        "under model": {"model": MODEL, "epoch": 1},
    }[what]  # fmt: skip
    with pytest.raises(holdfast.errors.Unsupported, match=r"state_dict\(\) instead") as caught:
        opened(tmp_path / "c.pt", tree, _use_new_zipfile_serialization=new)
    assert "c.pt" in str(caught.value)


class Ours(nn.Module):
    pass


class Trap:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('executed')",))


@BOTH
def test_nothing_is_executed(new: bool, tmp_path: Path) -> None:
    with pytest.raises(holdfast.errors.Unsupported, match="nothing was executed"):
        opened(tmp_path / "c.pt", {"model": dict(WEIGHTS), "x": Trap()}, _use_new_zipfile_serialization=new)


def test_torchscript(tmp_path: Path) -> None:
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "c.pt"))
    with pytest.raises(holdfast.errors.Unsupported, match=r"TorchScript.*state_dict\(\) instead"):
        holdfast.open(tmp_path / "c.pt")


@BOTH
def test_a_file_cut_short(new: bool, tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": {"w": torch.randn(50, 50)}, "step": 1}, path, _use_new_zipfile_serialization=new)
    data = path.read_bytes()
    for length in (*range(30, 400, 37), len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(holdfast.errors.Damaged):
            holdfast.open(path).verify()
