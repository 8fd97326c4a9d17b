"""The map to Megatron-core: the tensors of its converters, the same logits, back without a change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import NotACheckpoint, Unsupported
from holdfast.remap import Constant, Drop, Remap, megatron, torchtitan
from tests.remap.families import FAMILIES, hub_folder, model_of
from tests.remap.reference_megatron import Megatron, from_hf
from tests.remap.test_loads import same
from tests.remap.test_torchtitan import TOKENS, titan_of

pytest.importorskip("transformers", minversion="5.0")


def model_in(path: Path, remap: Remap | None = None) -> dict[str, torch.Tensor]:
    return holdfast.open(path, remap=remap).state_dict("model")["model"]


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, tmp_path: Path) -> None:
    hub, config = hub_folder(family, tmp_path / "hub"), model_of(family).config
    remap = megatron(tmp_path / "hub", make_vocab_size_divisible_by=1)
    wanted = from_hf(hub, config)
    assert same(model_in(tmp_path / "hub", remap), wanted)
    assert remap.check(hub, wanted).is_exact and remap.inverse().check(wanted, hub).is_exact
    assert remap.inverse().inverse() == remap == Remap.from_json(remap.to_json())
    holdfast.save({"model": wanted | {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.empty(0)}}, tmp_path / "m")
    assert same(model_in(tmp_path / "m", remap.inverse()), hub)

    titan = titan_of(family, config)
    holdfast.load(tmp_path / "hub", {"model": titan}, remap=torchtitan(config))
    holdfast.save({"model": titan}, tmp_path / "titan")
    assert same(model_in(tmp_path / "titan", remap @ torchtitan(config).inverse()), wanted)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_live_models(family: str, tmp_path: Path) -> None:
    """Layers of Megatron's own, and both ways to hold experts."""
    hub = hub_folder(family, tmp_path)
    saved = megatron(tmp_path).resolve(hub)
    changes = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
        "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
        "experts.experts.": "experts.local_experts.",
    }
    wanted = {}
    for name, node in saved.items():
        for change, local in changes.items():
            name = name.replace(change, local)
        wanted[name] = node
    local = megatron(tmp_path, fused_norms=False, experts="sequential")
    assert local.resolve(hub) == wanted
    grouped = megatron(tmp_path, experts="grouped")
    made = grouped.resolve(hub)
    assert ("decoder.layers.1.mlp.experts.linear_fc1.weight3" in made) == (FAMILIES[family].experts[1] > 0)
    assert list(made.values()) == list(saved.values())
    for one in (local, grouped):
        assert (
            one.inverse().resolve({name: torch.empty(node.shape) for name, node in one.resolve(hub).items()}).keys()
            == hub.keys()
        )


@pytest.mark.parametrize("family", ["llama", "llama_bias_head_dim", "mistral", "qwen2", "qwen3_tied"])
def test_the_same_logits(family: str, tmp_path: Path) -> None:
    """With a padded vocabulary, which the way back leaves out."""
    model, hub = model_of(family), hub_folder(family, tmp_path / "hub")
    live = Megatron(model.config, 64)
    remap = megatron(model.config, make_vocab_size_divisible_by=16, tensor_model_parallel_size=2)
    proof = remap.check(hub, live.state_dict())
    padded = {"embedding.word_embeddings.weight", "output_layer.weight"} & live.state_dict().keys()
    assert set(proof.made_up) == padded
    assert not proof.left_over and not proof.repeated
    holdfast.load(tmp_path / "hub", {"model": live}, remap=remap)
    with torch.no_grad():
        logits = live(TOKENS)
        torch.testing.assert_close(logits[..., :50], model(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert not logits[..., 50:].any()
    holdfast.save({"model": live}, tmp_path / "live")
    assert same(model_in(tmp_path / "live", remap.inverse()), hub)


def test_a_checkpoint_of_megatron(tmp_path: Path) -> None:
    """Its stacks of layers and of experts, as holdfast reads torch_dist."""
    from torch.distributed.tensor import Shard

    from tests.formats.test_megatron import ONE, counting, written

    config = model_of("mixtral").config
    shapes: dict[str, tuple[list[int], Any]] = {
        "embedding.word_embeddings.weight": ([64, 32], ONE),
        "decoder.layers.self_attention.linear_qkv.weight": ([4, 64, 32], [Shard(0), Shard(0)]),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": ([2, 2, 48, 32], [Shard(0), Shard(1)]),
    }
    path = written(tmp_path / "iter_0000009", shapes)
    hub = model_in(path, megatron(config, make_vocab_size_divisible_by=64).inverse())
    assert torch.equal(hub["model.embed_tokens.weight"], counting([64, 32])[:50])
    groups = counting([4, 64, 32])[3].reshape(2, 4, 8, 32)
    for name, part in {"q": groups[:, :2], "k": groups[:, 2], "v": groups[:, 3]}.items():
        assert torch.equal(hub[f"model.layers.3.self_attn.{name}_proj.weight"], part.reshape(-1, 32))
    expert = counting([2, 2, 48, 32])[1, 0]
    assert torch.equal(hub["model.layers.1.block_sparse_moe.experts.0.w3.weight"], expert[24:])
    assert len(hub) == 1 + 3 * 4 + 2 * 4


def test_layers_that_predict_further_tokens() -> None:
    config = model_of("deepseek_v3").config
    names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "mlp.gate")
    hub = {f"model.layers.3.{name}.weight": torch.ones(2) for name in names}
    made = megatron(config).resolve(hub)
    own = ("enorm", "hnorm", "eh_proj", "final_layernorm", "mtp_model_layer.input_layernorm")
    assert list(made) == [f"mtp.layers.0.{name}.weight" for name in (*own, "mtp_model_layer.mlp.router")]
    assert list(megatron(config).inverse().resolve(made)) == list(hub)


@pytest.mark.parametrize("make", [megatron, torchtitan])
def test_what_no_table_describes(make: Any, tmp_path: Path) -> None:
    config = model_of("llama").config.to_dict()
    with pytest.raises(Unsupported, match="model_type='bert', only for llama, mistral"):
        make({"model_type": "bert"})
    with pytest.raises(Unsupported, match="are quantized"):
        make(config | {"quantization_config": {"bits": 4}})
    with pytest.raises(Unsupported, match="rope_interleave=false"):
        make(model_of("deepseek_v3").config.to_dict() | {"rope_interleave": False})
    with pytest.raises(holdfast.errors.Mismatch, match="'vocab_size' is missing"):
        make({name: value for name, value in config.items() if name != "vocab_size"})
    with pytest.raises(NotACheckpoint, match=r"there is no .*config\.json"):
        make(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(NotACheckpoint, match="it holds a list"):
        make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert make(tmp_path) == make(tmp_path / "config.json") == make(config)


def test_tensors_that_only_the_target_has() -> None:
    remap = Remap([Drop("{*x}._extra_state", only="back"), Constant("{i}.bias", (2,), value=1.0, beside="{i}.weight")])
    made = remap.resolve({"0.weight": torch.ones(2), "1.weight": torch.ones(2), "a._extra_state": torch.ones(1)})
    assert list(made) == ["0.weight", "1.weight", "a._extra_state", "0.bias", "1.bias"]
    assert list(remap.inverse().resolve(made)) == ["0.weight", "1.weight"]
    assert remap.inverse().inverse() == remap
    assert list(remap.resolve({"0.weight": torch.ones(2)}, moments=True)) == ["0.weight"]
