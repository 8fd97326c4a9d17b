"""LoRA adapters of peft, folded into their base and taken out again, beside peft's own merge."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import Mismatch, NotACheckpoint, Unsupported
from holdfast.tools import fold_lora

peft = pytest.importorskip("peft")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.ModuleDict({"q": nn.Linear(32, 48), "o": nn.Linear(48, 32)}) for _ in range(2))


def adapted(folder: Path, **options: object) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A base and an adapter below ``folder``; the weights of the base, and with the adapter as peft merges it."""
    torch.manual_seed(3)
    base = Model()
    weights = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    holdfast.save({"model": base}, folder / "base")
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["q", "tok"], "init_lora_weights": False, **options}
    model = peft.get_peft_model(base, peft.LoraConfig(**settings))
    model.save_pretrained(folder / "adapter")
    return weights, model.merge_and_unload().state_dict()


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True}, {"alpha_pattern": {"layers.1.q": 20}, "rank_pattern": {"q": 8}}],
    ids=["plain", "rslora", "patterns"],
)
def test_it_is_what_peft_makes(tmp_path: Path, options: dict[str, object]) -> None:
    weights, merged = adapted(tmp_path, **options)
    fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "folded")
    folded = holdfast.open(tmp_path / "folded").state_dict("model")["model"]
    assert folded.keys() == merged.keys()
    for name, tensor in folded.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-6)
    assert not torch.equal(folded["layers.0.q.weight"], weights["layers.0.q.weight"])
    assert torch.equal(folded["layers.0.o.weight"], weights["layers.0.o.weight"])

    fold_lora(tmp_path / "folded", tmp_path / "adapter", tmp_path / "out", scale=-1, to="torch")
    for name, tensor in torch.load(tmp_path / "out", weights_only=True)["model"].items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)


def test_a_sum_is_rounded_once(tmp_path: Path) -> None:
    weights, _ = adapted(tmp_path)
    fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "hub", to="huggingface", dtype=torch.bfloat16)
    adapter = holdfast.open(tmp_path / "adapter")
    a, b = (adapter.read(f"model/base_model.model.layers.1.q.lora_{side}.weight").double() for side in "AB")
    exact = weights["layers.1.q.weight"].double() + (b * 1.5) @ a
    folded = holdfast.open(tmp_path / "hub").read("model/layers.1.q.weight")
    assert torch.equal(folded, exact.to(torch.bfloat16))


def test_large_weights_pass_through_windows(tmp_path: Path) -> None:
    """A weight of several windows, whose borders lie inside of rows."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3001, 2003, bias=False))
    holdfast.save({"model": model}, tmp_path / "base")
    weight = model[0].weight.detach().clone()
    adapted_model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    adapted_model.save_pretrained(tmp_path / "adapter")
    a, b = (adapted_model.state_dict()[f"base_model.model.0.lora_{side}.default.weight"].double() for side in "AB")
    fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "folded")
    folded = holdfast.open(tmp_path / "folded").read("model/0.weight")
    torch.testing.assert_close(folded, (weight.double() + (b * 4) @ a).float(), rtol=1e-7, atol=0)


def test_what_is_no_plain_lora_is_refused(tmp_path: Path) -> None:
    adapted(tmp_path, use_dora=True, target_modules=["q"])
    with pytest.raises(Unsupported, match="LORA with use_dora: only plain LoRA is a sum of matrices"):
        fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "folded")
    assert not (tmp_path / "folded").exists()
    with pytest.raises(NotACheckpoint, match=r"has no adapter_config.json: give the folder that PeftModel"):
        fold_lora(tmp_path / "base", tmp_path / "base", tmp_path / "folded")


def test_another_base_is_refused_with_all_names(tmp_path: Path) -> None:
    adapted(tmp_path)
    other = Model()
    other.layers[1]["q"] = nn.Linear(16, 48)
    state = {name: tensor for name, tensor in other.state_dict().items() if not name.startswith("tok")}
    holdfast.save({"model": state}, tmp_path / "other")
    with pytest.raises(Mismatch, match=r"is not the base of the adapter") as raised:
        fold_lora(tmp_path / "other", tmp_path / "adapter", tmp_path / "folded")
    assert "layers.1.q.weight has shape [48, 16], the adapter's [48, 32]" in str(raised.value)
    assert "there is no tok.weight" in str(raised.value)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "peft_type": "IA3"}))
    with pytest.raises(Unsupported, match="an adapter of the kind IA3"):
        fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "folded")


def test_an_arbitrary_scale(tmp_path: Path) -> None:
    weights, merged = adapted(tmp_path)
    fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "half", scale=0.5)
    name = "layers.0.q.weight"
    half = holdfast.open(tmp_path / "half").read(f"model/{name}")
    torch.testing.assert_close(half, (weights[name] + merged[name]) / 2, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="scale is a finite number"):
        fold_lora(tmp_path / "base", tmp_path / "adapter", tmp_path / "x", scale=float("nan"))
