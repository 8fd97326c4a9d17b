"""The map to torchtitan: the tensors of its adapters, the same logits, back without a change, and optimizers along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.remap import Remap, torchtitan
from holdfast.remap import transformers as transformers_map
from tests.remap.families import FAMILIES, hub_folder, model_of
from tests.remap.reference_titan import Titan, from_hf
from tests.remap.test_loads import moments, same, trained

pytest.importorskip("transformers", minversion="5.0")
safetensors = pytest.importorskip("safetensors.torch")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])


def titan_of(family: str, config: Any, pairs: bool | None = None) -> Titan:
    one = FAMILIES[family]
    return Titan(config, one.pairs if pairs is None else pairs, list(one.experts))


def with_bias(family: str, titan: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a model of torchtitan has and the hub does not: zeros, except for DeepSeek-V3, where the hub has it."""
    names = [f"layers.{i}.moe.expert_bias_E" for i, count in enumerate(FAMILIES[family].experts) if count]
    return {name: torch.zeros(4) for name in names} | titan


@pytest.mark.usefixtures("cached")
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    model, hub = model_of(family), hub_folder(family, tmp_path / "hub")
    remap, titan = torchtitan(tmp_path / "hub"), titan_of(family, model.config)
    assert remap == torchtitan(model.config) == torchtitan(model.config.to_dict()) == Remap.from_json(remap.to_json())
    assert remap.inverse().inverse() == remap
    proof = remap.check(hub, titan.state_dict())
    added = (
        {name for name in titan.state_dict() if name.endswith("expert_bias_E")} if family != "deepseek_v3" else set()
    )
    assert not proof.left_over and not proof.cast and set(proof.made_up) == added
    assert proof.repeated == (("model.embed_tokens.weight",) if model.config.tie_word_embeddings else ())

    loaded = holdfast.load(tmp_path / "hub", {"model": titan}, remap=remap)
    wanted = with_bias(family, from_hf(hub, model.config, FAMILIES[family].pairs))
    assert same(titan.state_dict(), wanted)
    assert loaded.bytes_read == sum(tensor.nbytes for tensor in hub.values())
    with torch.no_grad():
        torch.testing.assert_close(titan(TOKENS), model(TOKENS).logits, rtol=1e-4, atol=1e-4)

    holdfast.save({"model": titan}, tmp_path / "titan")
    options: dict[str, Any] = {"to": "huggingface", "remap": remap.inverse(), "extras": tmp_path / "hub"}
    holdfast.convert(tmp_path / "titan", tmp_path / "back", only="model", **options)
    assert same(safetensors.load_file(tmp_path / "back" / "model.safetensors"), hub)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_older_names(family: str, tmp_path: Path) -> None:
    """The releases 0.2: `state_dict_adapter.py` of the tag v0.2.2."""
    hub = hub_folder(family, tmp_path)
    now, before = torchtitan(tmp_path), torchtitan(tmp_path, version="0.2")
    changes = {
        "attention.qkv_linear.": "attention.", "routed_experts.inner_experts.w1_EFD": "experts.w1",
        "routed_experts.inner_experts.w2_EDF": "experts.w2", "routed_experts.inner_experts.w3_EFD": "experts.w3",
        "expert_bias_E": "expert_bias", "lm_head.weight": "output.weight",
    }  # fmt: skip
    wanted = {}
    for name, node in now.resolve(hub).items():
        for change, older in changes.items():
            name = name.replace(change, older)
        wanted[name] = node
    made = before.resolve(hub)
    assert made == wanted
    both = now @ before.inverse()
    assert both.inverse().inverse() == both


@pytest.mark.parametrize("family", ["qwen3_tied", "llama"])
def test_the_other_rotary(family: str, tmp_path: Path) -> None:
    """Qwen3 with pairs, whose norms of queries and keys follow, and Llama with halves: the same logits."""
    model, pairs = model_of(family), not FAMILIES[family].pairs
    model.save_pretrained(tmp_path)
    titan = titan_of(family, model.config, pairs)
    remap = torchtitan(model.config, rotary="pairs" if pairs else "halves")
    holdfast.load(tmp_path, {"model": titan}, remap=remap)
    with torch.no_grad():
        torch.testing.assert_close(titan(TOKENS), model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_training_goes_on(tmp_path: Path) -> None:
    """A step of torchtitan's model and optimizer, resumed in transformers, and the other way."""
    model = model_of("qwen3_tied")
    remap, titan = torchtitan(model.config), titan_of("qwen3_tied", model.config)
    optimizer = trained(titan)
    holdfast.save({"model": titan, "optim": optimizer, "step": 7}, tmp_path / "titan")
    theirs = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optim": theirs, "step": 0}
    holdfast.load(tmp_path / "titan", state, remap=remap.inverse())
    assert state["step"] == 7
    assert same(from_hf(model.state_dict(), model.config, False), titan.state_dict())
    for key in ("exp_avg", "exp_avg_sq"):
        made = from_hf(moments(model, theirs, key), model.config, False)
        mine = moments(titan, optimizer, key)
        assert same({name: made[name] for name in mine}, mine)


def test_experts_of_a_live_model(tmp_path: Path) -> None:
    """transformers has stacked gates and ups, torchtitan stacks of each: one map after the other."""
    model = model_of("qwen3_moe")
    optimizer = trained(model)
    holdfast.save({"model": model, "optim": optimizer}, tmp_path / "live")
    titan = titan_of("qwen3_moe", model.config)
    theirs = torch.optim.AdamW(titan.parameters())
    remap = torchtitan(model.config) @ transformers_map(model).inverse()
    holdfast.load(tmp_path / "live", {"model": titan, "optim": theirs}, remap=remap)
    with torch.no_grad():
        torch.testing.assert_close(titan(TOKENS), model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    gates = moments(model, optimizer, "exp_avg")["model.layers.0.mlp.experts.gate_up_proj"]
    made = moments(titan, theirs, "exp_avg")
    at = "layers.0.moe.routed_experts.inner_experts"
    assert torch.equal(torch.cat([made[f"{at}.w1_EFD"], made[f"{at}.w3_EFD"]], 1), gates)


def test_layers_that_predict_further_tokens(tmp_path: Path) -> None:
    """DeepSeek-V3's last layer, as the adapter's ``_map_from_hf_layer_key`` names it."""
    config = model_of("deepseek_v3").config
    hub = {
        f"model.layers.3.{name}.weight": torch.ones(2)
        for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "mlp.gate")
    }
    made = torchtitan(config).resolve(hub)
    names = ("enorm", "hnorm", "eh_proj", "mtp_norm", "attention_norm", "moe.router.gate")
    assert list(made) == [f"mtp_layers.0.{name}.weight" for name in names]
    assert list(torchtitan(config).inverse().resolve(made)) == list(hub)
