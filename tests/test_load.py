"""Loads: strict, in part, renamed, cast, lazy; and checkpoints that lie are refused with what to do."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast.load import PARTLY_FILLED
from holdfast.ondisk import blocks
from holdfast.testing import faults
from tests import pool


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(1)
    state = {
        "model": {"layers.0.weight": torch.randn(8, 4), "layers.1.weight": torch.randn(8, 4), "scale": torch.ones(3)},
        "optimizer": {"state": {"layers.0.weight": {"exp_avg": torch.randn(8, 4)}}},
        "step": 9,
        "config": {"lr": 0.1},
    }
    holdfast.save(state, tmp_path / "c")
    return tmp_path / "c"


def _target() -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": torch.zeros(8, 4), "layers.1.weight": torch.zeros(8, 4), "scale": torch.zeros(3)},
        "optimizer": {"state": {"layers.0.weight": {"exp_avg": torch.zeros(8, 4)}}},
        "step": 0,
        "config": {},
    }


def test_all(saved: Path) -> None:
    into = _target()
    loaded = holdfast.load(saved, into)
    assert loaded.step == 9 and into["step"] == 9 and into["config"] == {"lr": 0.1}
    assert torch.equal(into["model"]["layers.1.weight"], holdfast.open(saved).read("model/layers.1.weight"))
    assert set(loaded.restored) >= {"model/scale", "step", "config/lr"} and not loaded.skipped and not loaded.kept
    assert loaded.bytes_needed == 3 * 128 + 12 and loaded.bytes_unverified == 0


def _layers(*named: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = nn.Sequential()
    for i, name in enumerate(named):
        module.add_module(name, nn.Linear(4 + i, 5 + i))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return module, optimizer


def test_submodules_are_renamed_and_taken_by_their_names_with_their_optimizer(tmp_path: Path) -> None:
    model, optimizer = _layers("0", "1", "10")
    net, own = _layers("fc1", "1", "10")
    holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "c")
    rename = {"model/0": "model/fc1", "optimizer/state/0": "optimizer/state/fc1"}
    loaded = holdfast.load(tmp_path / "c", {"model": net, "optimizer": own}, rename=rename)
    assert loaded.renamed["model/0.weight"] == "model/fc1.weight" and len(loaded.renamed) == 8
    assert torch.equal(net.get_parameter("fc1.weight"), model.get_parameter("0.weight"))
    theirs, ours = (o.state_dict()["state"][0]["exp_avg"] for o in (optimizer, own))
    assert torch.equal(theirs, ours)
    part = holdfast.load(tmp_path / "c", {"model": _layers("0", "1", "10")[0]}, only="model/1")
    assert part.restored == ["model/1.weight", "model/1.bias"]
    to = tmp_path / "t"
    converted = holdfast.convert(tmp_path / "c", to, to="holdfast", only="model/0", rename={"model/0": "model/fc1"})
    assert sorted(converted.tensors) == ["model/fc1.bias", "model/fc1.weight"]
    assert set(holdfast.open(tmp_path / "c").state_dict("optimizer/state/0")["optimizer"]["state"]) == {
        "0.weight", "0.bias",
    }  # fmt: skip


@pytest.mark.parametrize("has_stepped", [False, True])
def test_state_of_a_parameter_that_has_another_size_here_is_refused(tmp_path: Path, has_stepped: bool) -> None:
    """Also if the parameter itself is left out; torch takes such state, and fails in a later step, or broadcasts it."""
    saved, trained = nn.Linear(4, 3), nn.Linear(4, 1)
    optimizers = [torch.optim.Adafactor(saved.parameters()), torch.optim.Adam(trained.parameters())]
    for module, optimizer in zip((saved, trained), optimizers, strict=True):
        module(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    holdfast.save({"model": saved, "factored": optimizers[0]}, tmp_path / "factored")
    again = nn.Linear(4, 3)
    own = torch.optim.Adafactor(again.parameters())
    holdfast.load(tmp_path / "factored", {"model": again, "factored": own})
    assert own.state[again.weight]["row_var"].shape == (3, 1)  # state of another shape than its parameter is as it was

    holdfast.save({"model": trained, "optimizer": optimizers[1]}, tmp_path / "c")
    wider = nn.Linear(4, 5)
    optimizer = torch.optim.Adam(wider.parameters())
    if has_stepped:
        wider(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(tmp_path / "c", {"model": wider, "optimizer": optimizer}, only="optimizer", missing="keep")
    said = str(caught.value)
    assert "optimizer/state/weight/exp_avg: saved with shape [1, 4], here [5, 4]" in said
    assert "optimizer/state/bias/exp_avg_sq: saved with shape [1], here [5]" in said and "4 differ" in said
    assert bool(optimizer.state) == has_stepped


@pytest.mark.parametrize("shapes", [((32, 16), (16, 32)), ((16, 16), (16, 16))])
def test_a_name_is_suggested_once_for_a_tensor_of_its_shape(tmp_path: Path, shapes: list[tuple[int, int]]) -> None:
    def layers(*names: str) -> dict[str, torch.Tensor]:
        both = zip(names, shapes, strict=True)
        return {f"{n}.{k}": t for n, s in both for k, t in (("weight", torch.ones(s)), ("bias", torch.ones(s[0])))}

    holdfast.save({"model": layers("0", "2")}, tmp_path / "c")
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(tmp_path / "c", {"model": layers("fc1", "fc2")})
    lines = str(caught.value).replace(" (phase match)", "").splitlines()
    pairs = {("fc1", "0"), ("fc2", "2")}
    for one, other in pairs:
        for kind in ("weight", "bias"):
            assert f"    model/{one}.{kind} (did you mean model/{other}.{kind}?)" in lines
            assert f"    model/{other}.{kind} (did you mean model/{one}.{kind}?)" in lines
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(tmp_path / "c", {"model": {"0.weight": torch.ones(shapes[0]), "1.weight": torch.ones(3, 5)}})
    assert "did you mean" not in str(caught.value)


def test_every_misfit_is_listed_at_once_and_nothing_changes(saved: Path) -> None:
    into = _target()
    into["model"]["layers.0.weight"] = torch.zeros(8, 5)
    into["model"]["scale"] = torch.zeros(3, dtype=torch.float64)
    into["model"]["layers.1.wieght"] = into["model"].pop("layers.1.weight")
    del into["config"]
    into["extra"] = {"a": 1}
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(saved, into)
    text = str(caught.value)
    assert "model/layers.0.weight: saved with shape [8, 4], here [8, 5]" in text
    assert "model/scale: saved as float32, here float64 (cast=True converts)" in text
    assert "model/layers.1.wieght (did you mean model/layers.1.weight?)" in text
    assert "config/lr" in text and "extra" in text and "nothing was changed" in text
    assert isinstance(caught.value, ValueError)
    assert into["step"] == 0 and not any(t.any() for t in into["model"].values())


def test_in_part_by_pattern(saved: Path) -> None:
    into = {"model": {"layers.0.weight": torch.zeros(8, 4), "scale": torch.zeros(3)}}
    loaded = holdfast.load(saved, into, only=["model/layers.0.*", "model/scale"])
    assert into["model"]["scale"].sum() == 3 and "model/layers.1.weight" in loaded.skipped and "step" in loaded.skipped
    one = _target()
    holdfast.load(saved, one, only="optimizer")
    assert one["optimizer"]["state"]["layers.0.weight"]["exp_avg"].any() and not one["model"]["scale"].any()
    assert one["step"] == 0
    with pytest.raises(holdfast.errors.Mismatch, match="model/layers.1.weight"):
        holdfast.load(saved, {"model": {"scale": torch.zeros(3)}}, only="model")


def test_renamed(saved: Path) -> None:
    into = {
        "net": {"blocks.0.weight": torch.zeros(8, 4), "blocks.1.weight": torch.zeros(8, 4), "scale": torch.zeros(3)}
    }
    loaded = holdfast.load(
        saved, into, only="model", rename=lambda n: n.replace("model/", "net/").replace("layers", "blocks")
    )
    assert into["net"]["blocks.1.weight"].any() and loaded.renamed["model/scale"] == "net/scale"
    into = {"net": _target()["model"]}
    holdfast.load(saved, into, only="model", rename={"model": "net"})
    assert into["net"]["scale"].sum() == 3
    with pytest.raises(holdfast.errors.Mismatch, match="same new name"):
        holdfast.load(saved, into, rename=lambda name: "x")


def test_a_pattern_that_fits_nothing_is_an_error_and_nothing_changes(saved: Path) -> None:
    into = _target()
    for only, told in [
        ("modle", r"'modle' \(did you mean model\?\)"),
        (["model", "optimiser"], r"'optimiser' \(did you mean optimizer\?\)"),
        (["model", "modle/*", "model/layer.0.weight"], r"'modle/\*' .*\n.*'model/layer.0.weight' .*/layers.0.weight"),
        (["*", "!optimizer"], "'!optimizer' .it cannot say what is left out"),
        ("", "only='' names nothing: leave it out"),
        ([], r"only=\[\] names nothing: leave it out"),
        (["model", ""], "has an empty name in it"),
    ]:  # fmt: skip
        with pytest.raises(holdfast.errors.Mismatch, match=told) as caught:
            holdfast.load(saved, into, only=only)
        assert isinstance(caught.value, ValueError)
    assert not any(t.any() for t in into["model"].values()) and into["step"] == 0
    with pytest.raises(
        holdfast.errors.Mismatch, match="only= fits nothing in the checkpoint .*\n.*'x'\n1 missing.*\n.*model/y"
    ):
        holdfast.load(saved, {"model": {**into["model"], "y": torch.zeros(1)}}, only=["model", "x"])


def test_a_pattern_may_fit_what_only_the_target_has(saved: Path) -> None:
    into = {**_target(), "ema": {"w": torch.ones(2)}, "none": nn.Identity()}
    with pytest.raises(holdfast.errors.Mismatch, match="1 missing from the checkpoint.*\n *ema/w"):
        holdfast.load(saved, into, only=["model", "ema"])
    loaded = holdfast.load(saved, into, only=["model", "ema", "none"], missing="keep")
    assert loaded.kept == ["ema/w"] and into["model"]["scale"].sum() == 3
    with pytest.raises(holdfast.errors.Mismatch, match="'ema'"):
        holdfast.load(saved, _target(), only=["model", "ema"], missing="keep")
    config: dict[str, Any] = {"config": {}}
    holdfast.load(saved, config, only="config/lr")
    assert config == {"config": {"lr": 0.1}}


def test_the_state_of_an_optimizer_that_has_not_stepped_may_be_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    holdfast.save(state, tmp_path / "c")
    loaded = holdfast.load(tmp_path / "c", state, only=["model", "optimizer/state"])
    assert loaded.restored == ["model/weight", "model/bias"] and not loaded.kept
    with pytest.raises(holdfast.errors.Mismatch, match="'optimizer/states'"):
        holdfast.load(tmp_path / "c", state, only=["model", "optimizer/states"])


def test_only_means_what_was_saved_whatever_it_is_renamed_to(saved: Path) -> None:
    into = {"net": _target()["model"], "config": {}}
    with pytest.raises(
        holdfast.errors.Mismatch, match="only= takes names as they were saved, and net/.* was saved as model/"
    ):
        holdfast.load(saved, into, only="net", rename={"model": "net"})
    assert not any(t.any() for t in into["net"].values())
    into["net"]["new"] = torch.zeros(2)
    for rename in ({"model": "net"}, lambda name: name.replace("model/", "net/")):
        with pytest.raises(holdfast.errors.Mismatch, match="net/new"):
            holdfast.load(saved, into, only="model", rename=rename)
        assert holdfast.load(saved, into, only="model", rename=rename, missing="keep").kept == ["net/new"]
    loaded = holdfast.load(saved, into["net"], only="model", rename={"model": ""}, missing="keep")
    assert loaded.renamed["model/scale"] == "scale" and loaded.kept == ["new"] and into["config"] == {}


def test_every_name_of_a_table_has_to_be_saved(saved: Path) -> None:
    into = {"net": _target()["model"]}
    with pytest.raises(
        holdfast.errors.Mismatch, match=r"rename= maps 'modle' \(did you mean model\?\), but no name of "
    ):
        holdfast.load(saved, into, only="model", rename={"modle": "net"})
    with pytest.raises(holdfast.errors.Mismatch, match="rename= maps 'opt', but"):
        holdfast.load(saved, into, only="model", rename={"model": "net", "opt": "optimizer"})
    holdfast.load(saved, into, only="model", rename={"model": "net", "optimizer": "opt"})
    assert into["net"]["scale"].sum() == 3, "a table may map what is not loaded"


def load_stages(path: str, only: dict[int, Any]) -> dict[str, Any]:
    """Each rank has a layer of its own; the second one has a head that was never saved."""
    rank = dist.get_rank()
    model = {
        f"layers.{rank}.weight": torch.zeros(8, 4),
        **({"head": torch.zeros(2)} if rank else {"scale": torch.zeros(3)}),
    }
    loaded = holdfast.load(path, {"model": model}, only=only[rank], missing="keep")
    return {"kept": loaded.kept, "changed": [key for key, tensor in model.items() if tensor.any()]}


def test_patterns_are_judged_for_all_ranks_together(saved: Path) -> None:
    stages = [
        {"kept": [], "changed": ["layers.0.weight", "scale"]},
        {"kept": ["model/head"], "changed": ["layers.1.weight"]},
    ]
    both = ["model/layers.*", "model/scale", "model/head"]
    assert pool.run(2, load_stages, str(saved), dict.fromkeys(range(2), both)) == stages
    its_own = {0: ["model/layers.0*", "model/l*", "model/scale"], 1: ["model/l*", "model/head", "model/scale"]}
    assert pool.run(2, load_stages, str(saved), its_own) == stages
    for only, told in [
        ({0: "modle", 1: "modle"}, "'modle' (did you mean model?)"), ({0: [], 1: both}, "only=[] names nothing"),
        ({0: both, 1: [*both, "model/haed"]}, "'model/haed' (did you mean model/"),
    ]:  # fmt: skip
        errors = pool.attempt(2, load_stages, str(saved), only)
        assert [error.kinds[0] for error in errors] == ["Mismatch"] * 2 and errors[0].text == errors[1].text
        assert told in errors[0].text


def test_missing_may_be_kept(saved: Path) -> None:
    into = _target()
    into["model"]["new"] = torch.full((2,), 5.0)
    loaded = holdfast.load(saved, into, missing="keep")
    assert loaded.kept == ["model/new"] and (into["model"]["new"] == 5).all() and into["step"] == 9
    with pytest.raises(ValueError, match='"error" or "keep"'):
        holdfast.load(saved, into, missing="ignore")  # type: ignore[arg-type]


def test_cast_says_so(saved: Path) -> None:
    into = _target()
    into["model"]["scale"] = torch.zeros(3, dtype=torch.float16)
    loaded = holdfast.load(saved, into, cast=True)
    assert loaded.cast == {"model/scale": ("float32", "float16")} and into["model"]["scale"].dtype is torch.float16


def test_module_keeps_identity_device_and_grad(tmp_path: Path) -> None:
    model, other = nn.Linear(3, 3), nn.Linear(3, 3)
    other.bias.requires_grad_(False)
    holdfast.save({"model": model}, tmp_path / "c")
    before = [(id(p), p.data_ptr(), p.requires_grad) for p in other.parameters()]
    holdfast.load(tmp_path / "c", {"model": other})
    assert [(id(p), p.data_ptr(), p.requires_grad) for p in other.parameters()] == before
    assert torch.equal(model.weight, other.weight)


def test_lists_of_modules_and_optimizers(tmp_path: Path) -> None:
    def pair() -> dict[str, Any]:
        nets = [nn.Linear(2, 2), nn.Linear(2, 2)]  # the same names in both: kept by position
        return {
            "nets": nets,
            "optimizers": {
                "a": torch.optim.Adam(nets[0].parameters()),
                "b": torch.optim.SGD(nets[1].parameters(), lr=1.0, momentum=0.9),
            },
        }

    state, into = pair(), pair()
    for net, optimizer in zip(state["nets"], state["optimizers"].values(), strict=True):
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    holdfast.save(state, tmp_path / "c")
    assert "nets/1/weight" in holdfast.open(tmp_path / "c").tensors
    assert "optimizers/b/state/weight/momentum_buffer" in holdfast.open(tmp_path / "c").tensors
    holdfast.load(tmp_path / "c", into)
    for a, b in zip(state["nets"], into["nets"], strict=True):
        assert torch.equal(a.weight, b.weight)
    for key in ("a", "b"):
        ours, theirs = state["optimizers"][key].state_dict(), into["optimizers"][key].state_dict()
        assert ours["param_groups"] == theirs["param_groups"]
        assert str(ours["state"]) == str(theirs["state"])


def test_optimizers_without_their_module_use_integer_ids(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    holdfast.save({"o": optimizer}, tmp_path / "c")
    assert set(holdfast.open(tmp_path / "c").tensors) == {
        f"o/state/{i}/{k}" for i in (0, 1) for k in ("step", "exp_avg", "exp_avg_sq")
    }
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    holdfast.load(tmp_path / "c", {"o": other})
    assert str(other.state_dict()["state"]) == str(optimizer.state_dict()["state"])


def test_optimizer_of_an_unknown_parameter(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([model.weight, nn.Parameter(torch.ones(7))], lr=1.0)
    with pytest.raises(holdfast.errors.Unsupported, match=r"parameter 1 \(shape \[7\]\) belongs to no module"):
        holdfast.save({"model": model, "optimizer": optimizer}, tmp_path / "c")


def test_tensor_learning_rate_and_scheduler(tmp_path: Path) -> None:
    def make(lr: float) -> dict[str, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(lr), capturable=False, foreach=False)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": torch.amp.GradScaler("cpu")}

    state, into = make(0.5), make(0.25)
    for _ in range(3):
        state["model"](torch.ones(1, 2)).sum().backward()
        state["optimizer"].step()
        state["scheduler"].step()
    holdfast.save(state, tmp_path / "c")
    lr = into["optimizer"].param_groups[0]["lr"]
    holdfast.load(tmp_path / "c", into)
    assert into["optimizer"].param_groups[0]["lr"] is lr
    assert torch.equal(lr, state["optimizer"].param_groups[0]["lr"])
    assert into["scheduler"].state_dict().keys() == state["scheduler"].state_dict().keys()
    assert into["scheduler"].last_epoch == 3 and into["scaler"].state_dict() == state["scaler"].state_dict()


def test_data_loader(tmp_path: Path) -> None:
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader() -> Any:
        return StatefulDataLoader(
            list(range(20)), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3)
        )

    ours = loader()
    batches = iter(ours)
    [next(batches) for _ in range(4)]
    holdfast.save({"data": ours}, tmp_path / "c")
    rest = [b.tolist() for b in batches]
    again = loader()
    holdfast.load(tmp_path / "c", {"data": again})
    assert [b.tolist() for b in again] == rest and len(rest) == 6


# Opened lazily


def test_open_reads_slices_only(tmp_path: Path) -> None:
    holdfast.save({"big": torch.arange(4_000_000.0).reshape(2000, 2000), "small": torch.ones(2)}, tmp_path / "c")
    checkpoint = holdfast.open(tmp_path / "c")
    info = checkpoint.tensors["big"]
    assert (info.shape, info.dtype, info.nbytes) == ((2000, 2000), torch.float32, 16_000_000)
    box = checkpoint.read("big", (slice(5, 8), slice(10, 20)))
    assert torch.equal(box, torch.arange(4_000_000.0).reshape(2000, 2000)[5:8, 10:20])
    assert torch.equal(checkpoint.read("big", [(1999, 2000)])[0, -1], torch.tensor(3_999_999.0))
    assert checkpoint.read("big", (slice(3, 3),)).shape == (0, 2000)
    with pytest.raises(holdfast.errors.Mismatch, match="does not lie"):
        checkpoint.read("big", ((0, 2001),))
    with pytest.raises(KeyError, match="did you mean small"):
        checkpoint.read("smal")
    assert checkpoint.state_dict(only="small").keys() == {"small"}


def counted_load(path: str) -> tuple[int, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = 4096 // world
    into = {"w": {f"t{i}": holdfast.Shard(torch.zeros(rows, 512), (4096, 512), (rank * rows, 0)) for i in range(6)}}
    loaded = holdfast.load(path, into)
    for i in range(6):
        assert (into["w"][f"t{i}"].tensor == torch.arange(4096.0)[rank * rows : (rank + 1) * rows, None] + i).all()
    return loaded.bytes_read, loaded.bytes_needed


def counted_save(path: str) -> None:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    size = -(-4096 // world)
    rows = torch.arange(4096.0)[rank * size : (rank + 1) * size, None].expand(-1, 512)
    holdfast.save({"w": {f"t{i}": holdfast.Shard(rows + i, (4096, 512), (rank * size, 0)) for i in range(6)}}, path)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 4), (3, 4), (4, 2), (2, 2)])
def test_resharded_load_reads_only_what_it_needs(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    pool.run(saved_by, counted_save, str(tmp_path / "c"))
    for read, needed in pool.run(loaded_by, counted_load, str(tmp_path / "c")):
        assert needed == 6 * 4096 * 512 * 4 // loaded_by and read <= 1.05 * needed


def test_partial_blocks_are_counted_or_checked(tmp_path: Path) -> None:
    tensor = torch.arange(6_000_000.0)  # 24 MB: three blocks
    holdfast.save({"t": tensor}, tmp_path / "c")
    file = next((tmp_path / "c").rglob("*.safetensors"))
    with file.open("r+b") as f:
        f.seek(4096 + 4_000_000)
        f.write(b"\xff\xff\xff\xff")
    part = {"t": holdfast.Shard(torch.zeros(2_000_000), (6_000_000,), (3_000_000,))}
    holdfast.load(tmp_path / "c", part, verify="blocks")  # the flipped block is not touched
    half = {"t": holdfast.Shard(torch.zeros(500_000), (6_000_000,), (0,))}
    loaded = holdfast.load(tmp_path / "c", half)
    assert loaded.bytes_unverified == 2_000_000, "told, since reading the whole block would cost four times the bytes"
    with pytest.raises(holdfast.errors.Damaged, match=r"is altered.* in t, "):
        holdfast.load(tmp_path / "c", half, verify="blocks")
    with pytest.raises(holdfast.errors.Damaged, match="is altered"):
        holdfast.load(tmp_path / "c", {"t": torch.zeros(6_000_000)})
    holdfast.load(tmp_path / "c", {"t": torch.zeros(6_000_000)}, verify=False)


# Checkpoints that lie


def test_not_a_checkpoint(tmp_path: Path) -> None:
    holdfast.save({"x": torch.ones(1)}, tmp_path / "run" / "step-1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web app"}')
    cases = {
        "nowhere": "there is nothing at",
        "run": "holds checkpoints but is none itself: open one of step-1",
        "run/step-2": "beside it are the checkpoints step-1",
        "run/step-1/manifest.json": "is a file of a checkpoint: give its folder",
        "empty": "no step was saved here yet",
        "other": "was not written by holdfast",
    }
    for path, says in cases.items():
        for use in (holdfast.open, lambda p: holdfast.load(p, {"x": torch.ones(1)})):
            with pytest.raises(holdfast.errors.NotACheckpoint, match=says) as caught:
                use(tmp_path / path)
            assert isinstance(caught.value, FileNotFoundError)
    (tmp_path / "run" / "step-1" / "manifest.json").unlink()
    with pytest.raises(holdfast.errors.NotACheckpoint, match="never committed"):
        holdfast.open(tmp_path / "run" / "step-1")


def _rewrite(path: Path, change: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["digest"]
    change(manifest)
    body = json.dumps(manifest, separators=(",", ":")).encode()[:-1]
    (path / "manifest.json").write_bytes(body + b',"digest":"' + blocks.digest(body).encode() + b'"}')


def test_version_from_the_future(saved: Path) -> None:
    _rewrite(saved, lambda m: m.update(version=3))
    with pytest.raises(holdfast.errors.Unsupported, match="format version 3, this holdfast reads versions 1 to 2"):
        holdfast.load(saved, _target())


def test_manifest_cut_or_altered_anywhere(saved: Path) -> None:
    data = (saved / "manifest.json").read_bytes()
    for length in [*range(0, len(data) - 1, 37), len(data) - 1]:
        (saved / "manifest.json").write_bytes(data[:length])
        with pytest.raises(holdfast.errors.Damaged):
            holdfast.open(saved)
    for at in range(60, len(data), 29):
        (saved / "manifest.json").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises((holdfast.errors.Damaged, holdfast.errors.Unsupported, holdfast.errors.NotACheckpoint)):
            holdfast.open(saved)


def test_manifest_that_leads_outside(saved: Path, tmp_path: Path) -> None:
    for path in ("../secret", "/etc/passwd", "a\\b", "model/../../x", ""):
        _rewrite(saved, lambda m, path=path: m["files"][0].__setitem__(0, path))
        with pytest.raises(holdfast.errors.Damaged, match="leaves the checkpoint"):
            holdfast.open(saved)


def load_into_target(path: str) -> None:
    holdfast.load(path, _target())


@pytest.mark.parametrize("how", ["truncated", "missing", "flipped data", "flipped header", "grown"])
def test_damaged_data_files(how: str, saved: Path) -> None:
    file = next((saved / "model").iterdir())
    data = bytearray(file.read_bytes())
    if how == "missing":
        file.unlink()
    elif how == "truncated":
        os.truncate(file, len(data) - 5)
    elif how == "grown":
        file.write_bytes(data + b"\0")
    else:
        data[-3 if how == "flipped data" else 100] ^= 4
        file.write_bytes(data)
    errors = pool.attempt(2, load_into_target, str(saved))
    assert errors[0].kinds == errors[1].kinds and errors[0].text == errors[1].text
    assert "Damaged" in errors[0].kinds and file.name in errors[0].text
    if how == "flipped data":
        assert "model" in errors[0].text and "scale" in errors[0].text
        assert errors[0].text.endswith(PARTLY_FILLED)
    with pytest.raises(holdfast.errors.Damaged, match=file.name) as caught:
        holdfast.open(saved).verify()
    assert PARTLY_FILLED not in str(caught.value)


def test_a_disk_that_fails_while_it_is_read_says_that_the_state_may_be_filled_in_part(saved: Path) -> None:
    with faults("read", error="EIO", under=saved / "model"), pytest.raises(holdfast.errors.StorageError) as caught:
        holdfast.load(saved, _target())
    assert str(caught.value).endswith(PARTLY_FILLED) and caught.value.errno == errno.EIO


def test_damage_that_is_found_before_anything_is_read_leaves_the_target_as_it_was(tmp_path: Path) -> None:
    holdfast.save({"t": torch.ones(3)}, tmp_path / "c")
    manifest = tmp_path / "c" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])
    with pytest.raises(holdfast.errors.Damaged) as caught:
        holdfast.load(tmp_path / "c", {"t": torch.zeros(3)})
    assert PARTLY_FILLED not in str(caught.value)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    import random

    state = {"a": torch.arange(900, dtype=torch.int16), "p": holdfast.PerRank({"k": [1, 2]})}
    holdfast.save(state, tmp_path / "c", files={"note": b"attached"})
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file()]
    chance = random.Random(5)
    for _ in range(300):
        file = chance.choice(files)
        data = bytearray(file.read_bytes())
        at = chance.randrange(len(data))
        data[at] ^= 1 << chance.randrange(8)
        original = file.read_bytes()
        file.write_bytes(data)
        with pytest.raises(holdfast.HoldfastError) as caught:
            holdfast.open(tmp_path / "c").verify()
        assert file.name in str(caught.value)
        file.write_bytes(original)
    holdfast.open(tmp_path / "c").verify()


@pytest.mark.parametrize("saved", ["the optimizer", "its state_dict"])
def test_a_state_dict_in_the_place_of_its_optimizer_is_named(saved: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer, fresh = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    given = optimizer if saved == "the optimizer" else optimizer.state_dict()
    holdfast.save({"model": model, "optimizer": given}, tmp_path / "c")
    theirs = (optimizer if saved == "the optimizer" else fresh).state_dict()
    with pytest.raises(holdfast.errors.Mismatch, match="under numbers is of a state_dict.*give the optimizer itself"):
        holdfast.load(tmp_path / "c", {"model": model, "optimizer": theirs})
    with pytest.raises(holdfast.errors.Mismatch) as caught:
        holdfast.load(tmp_path / "c", {"model": torch.nn.Linear(2, 2), "optimizer": fresh})
    assert "give the optimizer itself" not in str(caught.value)
    holdfast.load(tmp_path / "c", {"model": model, "optimizer": fresh})
