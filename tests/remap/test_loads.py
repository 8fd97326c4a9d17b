"""A model in one layout, loaded, read and converted into the other, with its optimizer, and back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import holdfast
from holdfast.errors import Mismatch
from holdfast.remap import Drop, Pad, Remap, Rename
from tests.remap.models import HUB_TO_NATIVE, Hub, Native, translated

NATIVE_TO_HUB = HUB_TO_NATIVE.inverse()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.fixture
def hub(tmp_path: Path) -> tuple[Hub, Path]:
    torch.manual_seed(0)
    model, folder = Hub(), tmp_path / "hub"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    return model, folder


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, torch.Tensor]:
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter]: state[key] for parameter, state in optimizer.state.items()}


def test_a_folder_is_read_as_the_other_layout(hub: tuple[Hub, Path]) -> None:
    model, folder = hub
    native = translated(model.state_dict())
    checkpoint = holdfast.open(folder, remap=HUB_TO_NATIVE)
    assert checkpoint.remap == HUB_TO_NATIVE
    assert {name.removeprefix("model/") for name in checkpoint.tensors} == set(native)
    for name, tensor in native.items():
        assert checkpoint.tensors[f"model/{name}"].shape == tuple(tensor.shape)
        assert torch.equal(checkpoint.read(f"model/{name}"), tensor)
    rows = checkpoint.read("model/layers.1.experts.gate_up", (slice(1, 3), slice(5, 20), slice(20, 30)))
    assert torch.equal(rows, native["layers.1.experts.gate_up"][1:3, 5:20, 20:30])
    assert checkpoint.saved_name("model/head.weight") == checkpoint.saved_name("model/tok.weight")
    for mmap in (False, True):
        assert same(checkpoint.state_dict("model", mmap=mmap)["model"], native)
    assert checkpoint.verify().nbytes == sum(t.nbytes for t in model.state_dict().values())


@pytest.mark.usefixtures("cached")
def test_a_live_model_takes_the_other_layout(hub: tuple[Hub, Path]) -> None:
    model, folder = hub
    native = Native()
    loaded = holdfast.load(folder, {"model": native}, remap=HUB_TO_NATIVE)
    assert same(native.state_dict(), translated(model.state_dict()))
    assert loaded.bytes_read == loaded.bytes_needed == sum(t.nbytes for t in model.state_dict().values())
    half = Native().to(torch.bfloat16)
    holdfast.load(folder, {"model": half}, remap=HUB_TO_NATIVE, cast=True)
    assert same(half.state_dict(), {name: t.bfloat16() for name, t in translated(model.state_dict()).items()})


def test_training_goes_on_in_the_other_layout(tmp_path: Path) -> None:
    torch.manual_seed(1)
    native = Native()
    optimizer = trained(native)
    holdfast.save({"model": native, "optim": optimizer, "step": 7}, tmp_path / "native")

    hub = Hub()
    theirs, state = torch.optim.AdamW(hub.parameters()), {"model": hub, "step": 0}
    holdfast.load(tmp_path / "native", state | {"optim": theirs}, remap=NATIVE_TO_HUB)
    assert same(translated(hub.state_dict()), native.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        made = translated(moments(hub, theirs, key))
        assert same({name: made[name] for name in made if name != "head.weight"}, moments(native, optimizer, key))
    assert {float(one["step"]) for one in theirs.state.values()} == {1.0}

    holdfast.save({"model": hub, "optim": theirs}, tmp_path / "hub")
    again = Native()
    last = torch.optim.AdamW(again.parameters())
    holdfast.load(tmp_path / "hub", {"model": again, "optim": last}, remap=HUB_TO_NATIVE)
    assert same(again.state_dict(), native.state_dict())
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert same(moments(again, last, key), moments(native, optimizer, key))


def test_steps_that_differ_do_not_become_one(tmp_path: Path) -> None:
    model = Hub()
    optimizer = trained(model)
    optimizer.state[model.layers[0].k_proj.weight]["step"] += 1
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "c")
    native = Native()
    into = {"model": native, "optim": torch.optim.AdamW(native.parameters())}
    with pytest.raises(Mismatch, match=r"q_proj.weight/step and .*k_proj.weight/step would become one"):
        holdfast.load(tmp_path / "c", into, remap=HUB_TO_NATIVE)


def _partly_frozen(tmp_path: Path) -> None:
    model = Hub()
    optimizer = trained(model)
    del optimizer.state[model.layers[0].q_proj.weight]
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "c")


def _in_two_groups(tmp_path: Path) -> None:
    model = Hub()
    keys = [layer.k_proj.weight for layer in model.layers]
    others = [one for one in model.parameters() if all(one is not key for key in keys)]
    optimizer = torch.optim.AdamW([{"params": keys, "weight_decay": 0.0}, {"params": others}])
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "c")


def _of_other_shapes(tmp_path: Path) -> None:
    model = Hub()
    optimizer = torch.optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "c")


@pytest.mark.parametrize(
    ("save", "why"),
    [
        (_partly_frozen, "goes together with layers.0.q_proj.weight, which is not there"),
        (_in_two_groups, "is made of parameters in several groups of optim: layers.0.q_proj"),
        (_of_other_shapes, "is not laid out like its parameter"),
    ],
)
def test_an_optimizer_that_cannot_follow_leaves_the_model_to_be_loaded(
    tmp_path: Path, save: Callable[[Path], None], why: str
) -> None:
    save(tmp_path)
    checkpoint = holdfast.open(tmp_path / "c", remap=HUB_TO_NATIVE)
    assert why in checkpoint.left_out["optim"] and not any(name.startswith("optim") for name in checkpoint.tensors)
    native = Native()
    holdfast.load(tmp_path / "c", {"model": native}, only="model", remap=HUB_TO_NATIVE)
    assert same(native.state_dict(), checkpoint.state_dict("model")["model"])
    with pytest.raises(Mismatch, match=r"Leave the optimizer out, as in only="):
        into = {"model": native, "optim": torch.optim.AdamW(native.parameters())}
        holdfast.load(tmp_path / "c", into, remap=HUB_TO_NATIVE)
    with pytest.raises(Mismatch, match=r"Leave the optimizer out, as in only="):
        holdfast.convert(tmp_path / "c", tmp_path / "native", remap=HUB_TO_NATIVE)
    converted = holdfast.convert(tmp_path / "c", tmp_path / "hub", to="huggingface", remap=HUB_TO_NATIVE)
    assert len(converted.tensors) + len(converted.tied) == len(native.state_dict())


@pytest.mark.parametrize("to", ["huggingface", "torch", "dcp", "holdfast"])
def test_conversions_go_by_the_map(tmp_path: Path, to: holdfast.export.work.To) -> None:
    torch.manual_seed(2)
    native, hub = Native(), Hub()
    holdfast.save({"model": native, "optim": trained(native)}, tmp_path / "native")
    holdfast.load(tmp_path / "native", {"model": hub}, only="model", remap=NATIVE_TO_HUB)
    converted = holdfast.convert(tmp_path / "native", tmp_path / "out", to=to, only="model", remap=NATIVE_TO_HUB)
    assert len(converted.tensors) == len(hub.state_dict())
    assert same(holdfast.open(tmp_path / "out").state_dict("model")["model"], hub.state_dict())
    if to == "huggingface":
        assert same(load_file(tmp_path / "out" / "model.safetensors"), hub.state_dict())
        with pytest.raises(Mismatch, match="opened under a map already"):
            holdfast.convert(holdfast.open(tmp_path / "out", remap=HUB_TO_NATIVE), tmp_path / "x", remap=HUB_TO_NATIVE)


def test_a_map_that_does_not_fit_is_refused_before_a_byte_is_read(hub: tuple[Hub, Path]) -> None:
    _, folder = hub
    native = Native()
    before = {name: tensor.clone() for name, tensor in native.state_dict().items()}
    rules = HUB_TO_NATIVE.rules
    dropping = Remap([Drop("layers.1.experts.3.w1.weight"), *rules], HUB_TO_NATIVE.values)
    with pytest.raises(Mismatch, match=r"w3.weight.* cannot be concatenated with .*layers.1.experts.0.w1.weight"):
        holdfast.load(folder, {"model": native}, remap=dropping)
    colliding = Remap([Rename("layers.0.v_proj.{p}", "layers.0.k_proj.{p}"), *rules], HUB_TO_NATIVE.values)
    with pytest.raises(Mismatch, match=r"two tensors would be called layers.0.k_proj.bias"):
        holdfast.load(folder, {"model": native}, remap=colliding)
    longer = Remap([*rules[:-1], Pad("tok.weight", 0, after=3), rules[-1]], HUB_TO_NATIVE.values)
    with pytest.raises(Mismatch, match=r"model/tok.weight: saved with shape \[53, 32\], here \[50, 32\]"):
        holdfast.load(folder, {"model": native}, remap=longer)
    without = Remap([rule for rule in rules if not isinstance(rule, Rename)], HUB_TO_NATIVE.values)
    with pytest.raises(Mismatch, match=r"model/layers.0.out.weight[\s\S]*model/layers.0.o_proj.weight|o_proj.weight"):
        holdfast.load(folder, {"model": native}, remap=without)
    assert same(native.state_dict(), before)


def test_a_vocabulary_is_made_longer(hub: tuple[Hub, Path]) -> None:
    model, folder = hub
    rules = HUB_TO_NATIVE.rules
    for pad, row in ((Pad("tok.weight", 0, after=14, value=0.5), None), (Pad("tok.weight", 0, after=14, like=-1), -1)):
        longer = Remap([*rules[:-1], pad, rules[-1]], HUB_TO_NATIVE.values)
        tensor = holdfast.open(folder, remap=longer).read("model/head.weight")
        assert torch.equal(tensor[:50], model.embed.weight)
        new = torch.full((14, 32), 0.5) if row is None else model.embed.weight[row].expand(14, 32)
        assert torch.equal(tensor[50:], new)
        cropped = holdfast.open(folder, remap=longer.inverse() @ longer)
        assert torch.equal(cropped.read("model/embed.weight"), model.embed.weight)
