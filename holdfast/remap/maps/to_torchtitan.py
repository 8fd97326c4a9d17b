"""The map from a hub folder to the models of torchtitan.

`holdfast.remap.torchtitan` is this one. Never imports torchtitan.
"""

from __future__ import annotations

from typing import Literal

from holdfast.remap.joining import Stack
from holdfast.remap.layouts import PermuteBlocks
from holdfast.remap.maps.model_config import HUB_NAMES, Config, ModelConfig, read_config
from holdfast.remap.naming import Constant, Rename, Tie
from holdfast.remap.remap import AnyRule, Remap

_HUB, _TITAN = "model.layers.{i}", "layers.{i}"
_PROJECTIONS = f"{_TITAN}.attention.qkv_linear"
_STACKED = f"{_TITAN}.moe.routed_experts.inner_experts"

_MODEL = (
    Rename("model.embed_tokens.weight", "tok_embeddings.weight"),
    Rename("model.norm.weight", "norm.weight"),
    Rename(f"{_HUB}.input_layernorm.weight", f"{_TITAN}.attention_norm.weight"),
    Rename(f"{_HUB}.post_attention_layernorm.weight", f"{_TITAN}.ffn_norm.weight"),
    Rename(f"{_HUB}.mlp.gate_proj.{{p}}", f"{_TITAN}.feed_forward.w1.{{p}}"),
    Rename(f"{_HUB}.mlp.down_proj.{{p}}", f"{_TITAN}.feed_forward.w2.{{p}}"),
    Rename(f"{_HUB}.mlp.up_proj.{{p}}", f"{_TITAN}.feed_forward.w3.{{p}}"),
)
_GROUPED_QUERIES = (
    Rename(f"{_HUB}.self_attn.q_proj.{{p}}", f"{_PROJECTIONS}.wq.{{p}}"),
    Rename(f"{_HUB}.self_attn.k_proj.{{p}}", f"{_PROJECTIONS}.wk.{{p}}"),
    Rename(f"{_HUB}.self_attn.v_proj.{{p}}", f"{_PROJECTIONS}.wv.{{p}}"),
    Rename(f"{_HUB}.self_attn.o_proj.{{p}}", f"{_TITAN}.attention.wo.{{p}}"),
    Rename(f"{_HUB}.self_attn.q_norm.weight", f"{_TITAN}.attention.q_norm.weight"),
    Rename(f"{_HUB}.self_attn.k_norm.weight", f"{_TITAN}.attention.k_norm.weight"),
)
_PAIRS = (
    PermuteBlocks(f"{_PROJECTIONS}.wq.{{p}}", 0, ("num_attention_heads", 2, -1), (0, 2, 1)),
    PermuteBlocks(f"{_PROJECTIONS}.wk.{{p}}", 0, ("num_key_value_heads", 2, -1), (0, 2, 1)),
    PermuteBlocks(f"{_TITAN}.attention.q_norm.weight", 0, (2, -1), (1, 0)),
    PermuteBlocks(f"{_TITAN}.attention.k_norm.weight", 0, (2, -1), (1, 0)),
)
"""Halves of each head become pairs, which are turned together."""
_LATENT = (
    Rename(f"{_HUB}.self_attn.q_proj.weight", f"{_TITAN}.attention.wq.weight"),
    Rename(f"{_HUB}.self_attn.q_a_proj.{{p}}", f"{_TITAN}.attention.wq_a.{{p}}"),
    Rename(f"{_HUB}.self_attn.q_a_layernorm.weight", f"{_TITAN}.attention.q_norm.weight"),
    Rename(f"{_HUB}.self_attn.q_b_proj.weight", f"{_TITAN}.attention.wq_b.weight"),
    Rename(f"{_HUB}.self_attn.kv_a_proj_with_mqa.{{p}}", f"{_TITAN}.attention.wkv_a.{{p}}"),
    Rename(f"{_HUB}.self_attn.kv_a_layernorm.weight", f"{_TITAN}.attention.kv_norm.weight"),
    Rename(f"{_HUB}.self_attn.kv_b_proj.weight", f"{_TITAN}.attention.wkv_b.weight"),
    Rename(f"{_HUB}.self_attn.o_proj.{{p}}", f"{_TITAN}.attention.wo.{{p}}"),
)
_EXPERTS = (
    Stack(f"{_HUB}.mlp.experts.{{e}}.gate_proj.weight", f"{_STACKED}.w1_EFD"),
    Stack(f"{_HUB}.mlp.experts.{{e}}.down_proj.weight", f"{_STACKED}.w2_EDF"),
    Stack(f"{_HUB}.mlp.experts.{{e}}.up_proj.weight", f"{_STACKED}.w3_EFD"),
    Rename(f"{_HUB}.mlp.gate.weight", f"{_TITAN}.moe.router.gate.weight"),
    Rename(f"{_HUB}.mlp.shared_experts.gate_proj.weight", f"{_TITAN}.moe.shared_experts.w1.weight"),
    Rename(f"{_HUB}.mlp.shared_experts.down_proj.weight", f"{_TITAN}.moe.shared_experts.w2.weight"),
    Rename(f"{_HUB}.mlp.shared_experts.up_proj.weight", f"{_TITAN}.moe.shared_experts.w3.weight"),
    Rename(f"{_HUB}.mlp.shared_expert_gate.weight", f"{_TITAN}.moe.shared_experts.gate.weight"),
)
_SAVED_BIAS = Rename(f"{_HUB}.mlp.gate.e_score_correction_bias", f"{_TITAN}.moe.expert_bias_E")
_NEW_BIAS = Constant(f"{_TITAN}.moe.expert_bias_E", ("num_experts",), beside=f"{_TITAN}.moe.router.gate.weight")
_PREDICTION = (
    Rename(f"{_HUB}.enorm.weight", f"{_TITAN}.enorm.weight"),
    Rename(f"{_HUB}.hnorm.weight", f"{_TITAN}.hnorm.weight"),
    Rename(f"{_HUB}.eh_proj.weight", f"{_TITAN}.eh_proj.weight"),
    Rename(f"{_HUB}.shared_head.norm.weight", f"{_TITAN}.mtp_norm.weight"),
)
_OLDER_NAMES = (
    Rename(f"{_PROJECTIONS}.{{*rest}}", f"{_TITAN}.attention.{{*rest}}"),
    Rename(f"{_STACKED}.w1_EFD", f"{_TITAN}.moe.experts.w1"),
    Rename(f"{_STACKED}.w2_EDF", f"{_TITAN}.moe.experts.w2"),
    Rename(f"{_STACKED}.w3_EFD", f"{_TITAN}.moe.experts.w3"),
    Rename(f"{_TITAN}.moe.expert_bias_E", f"{_TITAN}.moe.expert_bias"),
    Rename("lm_head.weight", "output.weight"),
)


def torchtitan(
    config: Config,
    *,
    version: Literal["main", "0.2"] = "main",
    rotary: Literal["pairs", "halves"] | None = None,
    expert_bias: bool = True,
) -> Remap:
    """The map from a hub folder's tensors to those of a model of torchtitan; ``.inverse()`` is the other way.

    It knows the families llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, deepseek_v2 and deepseek_v3. For
    llama, qwen3, qwen3_moe and deepseek_v3 it does what the ``state_dict_adapter.py`` of the model in torchtitan does
    (commit b5bcd76c, August 2026). torchtitan has no models of the other families: their names follow from these.

    Args:
        config: A config of transformers, its values as a dict, or the path or URL of a config.json or of its folder.
        version: ``"main"`` for the names of torchtitan since July 2026, ``"0.2"`` for those of the releases 0.2.0 to
            0.2.2.
        rotary: How the model's rotary embedding takes the queries and keys of a head: as ``"pairs"`` (torchtitan's
            ComplexRoPE) or as ``"halves"`` (CosSinRoPE, and transformers). Without it pairs for llama and mistral, and
            halves for the others. DeepSeek's attention has pairs in both layouts.
        expert_bias: Add zeros for the buffer ``expert_bias_E`` of each layer with experts if the hub folder has none:
            a model of torchtitan has it unless its ``load_balance_coeff`` is None.

    Raises:
        Unsupported: There is no table for this family, or the tensors are quantized.
        NotACheckpoint: There is no config at the path.

    Example:
        >>> import torch
        >>> from holdfast.remap import torchtitan
        >>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
        ...           "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 100}
        >>> hub = {"model.layers.0.self_attn.k_proj.weight": torch.arange(16.0).reshape(16, 1)}
        >>> made = torchtitan(config).resolve(hub)
        >>> list(made)
        ['layers.0.attention.qkv_linear.wk.weight']
    """
    model = read_config(config)
    rules: list[AnyRule] = [*HUB_NAMES.get(model.family, ()), *_MODEL]
    if model.is_latent:
        rules += _LATENT
    else:
        pairs = rotary == "pairs" or (rotary is None and model.family in ("llama", "mistral"))
        rules += (*_GROUPED_QUERIES, *(_PAIRS if pairs else ()))
    if model.has_experts:
        rules += _EXPERTS
        rules += [_SAVED_BIAS] if model.family == "deepseek_v3" else [_NEW_BIAS] if expert_bias else []
    rules += _prediction(model)
    rules += [Tie("tok_embeddings.weight", "lm_head.weight")] if model.is_tied else []
    return Remap((*rules, *(_OLDER_NAMES if version == "0.2" else ())), model.values)


def _prediction(model: ModelConfig) -> list[AnyRule]:
    if not model.prediction_layers:
        return []
    moved = [
        Rename(f"layers.{layer}.{{*rest}}", f"mtp_layers.{k}.{{*rest}}")
        for k, layer in enumerate(model.prediction_layers)
    ]
    return [*_PREDICTION, *moved]
