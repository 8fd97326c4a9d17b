"""The map from a hub folder to the GPT model of Megatron-core.

`holdfast.remap.megatron` is this one. Never imports Megatron.
"""

from __future__ import annotations

from typing import Literal

from holdfast.remap.joining import Concatenate
from holdfast.remap.layouts import Flatten, Pad, Unflatten
from holdfast.remap.maps.model_config import HUB_NAMES, Config, ModelConfig, read_config
from holdfast.remap.naming import Drop, Rename
from holdfast.remap.remap import AnyRule, Remap

_HUB, _MEGATRON = "model.layers.{i}", "decoder.layers.{i}"
_EMBEDDING, _OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
_EXPERTS_AT = {
    "saved": "experts.experts.{e}.LINEAR.weight",
    "sequential": "experts.local_experts.{e}.LINEAR.weight",
    "grouped": "experts.LINEAR.weight{e}",
}

_MODEL = (
    Rename("model.embed_tokens.weight", _EMBEDDING),
    Rename("model.norm.weight", "decoder.final_layernorm.weight"),
    Rename("lm_head.weight", _OUTPUT),
    Drop("{*x}._extra_state", only="back"),
)
_LATENT = (
    Rename(f"{_HUB}.self_attn.q_proj.weight", f"{_MEGATRON}.self_attention.linear_q_proj.weight"),
    Rename(f"{_HUB}.self_attn.q_a_proj.weight", f"{_MEGATRON}.self_attention.linear_q_down_proj.weight"),
    Rename(f"{_HUB}.self_attn.q_b_proj.weight", f"{_MEGATRON}.self_attention.linear_q_up_proj.weight"),
    Rename(f"{_HUB}.self_attn.kv_a_proj_with_mqa.weight", f"{_MEGATRON}.self_attention.linear_kv_down_proj.weight"),
    Rename(f"{_HUB}.self_attn.kv_b_proj.weight", f"{_MEGATRON}.self_attention.linear_kv_up_proj.weight"),
)
_LATENT_NORMS = (
    Rename(f"{_HUB}.self_attn.q_a_layernorm.weight", f"{_MEGATRON}.self_attention.q_layernorm.weight"),
    Rename(f"{_HUB}.self_attn.kv_a_layernorm.weight", f"{_MEGATRON}.self_attention.kv_layernorm.weight"),
)
_FUSED_LATENT_NORMS = (
    Rename(f"{_HUB}.self_attn.q_a_layernorm.weight", f"{_MEGATRON}.self_attention.linear_q_up_proj.layer_norm_weight"),
    Rename(
        f"{_HUB}.self_attn.kv_a_layernorm.weight", f"{_MEGATRON}.self_attention.linear_kv_up_proj.layer_norm_weight"
    ),
)
_ROUTED = (
    Rename(f"{_HUB}.mlp.gate.weight", f"{_MEGATRON}.mlp.router.weight"),
    Rename(f"{_HUB}.mlp.gate.e_score_correction_bias", f"{_MEGATRON}.mlp.router.expert_bias"),
    Concatenate(
        (f"{_HUB}.mlp.shared_experts.gate_proj.weight", f"{_HUB}.mlp.shared_experts.up_proj.weight"),
        f"{_MEGATRON}.mlp.shared_experts.linear_fc1.weight",
    ),
    Rename(f"{_HUB}.mlp.shared_experts.down_proj.weight", f"{_MEGATRON}.mlp.shared_experts.linear_fc2.weight"),
    Rename(f"{_HUB}.mlp.shared_expert_gate.weight", f"{_MEGATRON}.mlp.shared_experts.gate_weight"),
)


def megatron(
    config: Config,
    *,
    fused_norms: bool = True,
    experts: Literal["saved", "sequential", "grouped"] = "saved",
    make_vocab_size_divisible_by: int = 128,
    tensor_model_parallel_size: int = 1,
) -> Remap:
    """The map from a hub folder's tensors to those of Megatron-core's GPT model; ``.inverse()`` is the other way.

    It knows the families llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, deepseek_v2 and deepseek_v3, and
    follows Megatron-Bridge (commit 067f987d, ``models/*_bridge.py`` and ``merge_qkv_weights``) and, for mixtral,
    Megatron-LM's ``tools/checkpoint/loader_mixtral_hf.py`` (commit d98e8a64). The defaults are the names of a
    ``torch_dist`` checkpoint, as `holdfast.open` shows them.

    Args:
        config: A config of transformers, its values as a dict, or the path or URL of a config.json or of its folder.
        fused_norms: Whether norms are parts of the linear layers behind them, as in Transformer Engine's layers and in
            checkpoints of both kinds of layers. False: ``input_layernorm`` and ``pre_mlp_layernorm``, as in a model of
            Megatron's local layers.
        experts: What experts are called: as in a checkpoint (``"saved"``, ``experts.experts.{e}``), in a live
            SequentialMLP (``"sequential"``, ``experts.local_experts.{e}``) or a live TEGroupedMLP (``"grouped"``,
            ``experts.linear_fc1.weight{e}``). In a live model of several expert-parallel ranks each rank counts its
            own experts from 0, so that only a checkpoint can be mapped.
        make_vocab_size_divisible_by: As the argument of Megatron. The embedding and the output layer have rows of
            zeros up to a multiple of it times ``tensor_model_parallel_size``; the way back leaves those rows out.
        tensor_model_parallel_size: As the argument of Megatron.

    Raises:
        Unsupported: There is no table for this family, or the tensors are quantized.
        NotACheckpoint: There is no config at the path.

    Example:
        >>> import torch
        >>> from holdfast.remap import megatron
        >>> config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4,
        ...           "num_key_value_heads": 2, "hidden_size": 32, "vocab_size": 100}
        >>> made = megatron(config).resolve({"model.embed_tokens.weight": torch.ones(100, 32)})
        >>> made["embedding.word_embeddings.weight"].shape
        (128, 32)
    """
    model = read_config(config)
    rules: list[AnyRule] = [*HUB_NAMES.get(model.family, ()), *_MODEL]
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    if model.values["vocab_size"] % multiple:
        padded = (_EMBEDDING,) if model.is_tied else (_EMBEDDING, _OUTPUT)
        rules += [Pad(name, 0, after="-vocab_size % vocab_multiple") for name in padded]
    rules += _attention(model)
    rules += _experts(_EXPERTS_AT[experts]) if model.has_experts else []
    rules += _gated(model)
    rules += _norms(model, fused_norms)
    rules += _prediction(model)
    return Remap(tuple(rules), {**model.values, "vocab_multiple": multiple})


def _attention(model: ModelConfig) -> list[AnyRule]:
    """One matrix for each group of heads: its queries, then its key and its value."""
    rules: list[AnyRule] = list(_LATENT) if model.is_latent else []
    for p in model.parameters:
        parts = tuple(f"{_HUB}.self_attn.{part}_proj.{p}" for part in "qkv")
        fused = f"{_MEGATRON}.self_attention.linear_qkv.{p}"
        sizes = ("num_attention_heads // num_key_value_heads * head_dim", "head_dim", "head_dim")
        if not model.is_latent:
            rules += [Unflatten(part, 0, ("num_key_value_heads", -1)) for part in parts]
            rules += [Concatenate(parts, fused, 1, sizes), Flatten(fused, 0, ("num_key_value_heads", -1))]
        rules.append(Rename(f"{_HUB}.self_attn.o_proj.{p}", f"{_MEGATRON}.self_attention.linear_proj.{p}"))
    return rules


def _experts(names: str) -> list[AnyRule]:
    gate, up, down = (f"{_HUB}.mlp.experts.{{e}}.{part}_proj.weight" for part in ("gate", "up", "down"))
    first, second = (f"{_MEGATRON}.mlp.{names.replace('LINEAR', linear)}" for linear in ("linear_fc1", "linear_fc2"))
    return [Concatenate((gate, up), first), Rename(down, second), *_ROUTED]


def _gated(model: ModelConfig) -> list[AnyRule]:
    rules: list[AnyRule] = []
    for p in model.parameters:
        gate, up, down = (f"{_HUB}.mlp.{part}_proj.{p}" for part in ("gate", "up", "down"))
        rules.append(Concatenate((gate, up), f"{_MEGATRON}.mlp.linear_fc1.{p}"))
        rules.append(Rename(down, f"{_MEGATRON}.mlp.linear_fc2.{p}"))
    return rules


def _norms(model: ModelConfig, fused: bool) -> list[AnyRule]:
    before, after = f"{_HUB}.input_layernorm.weight", f"{_HUB}.post_attention_layernorm.weight"
    rules: list[AnyRule] = []
    if fused and model.has_experts:
        names = [
            (after.replace("{i}", str(i)), f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight")
            for i in model.dense_layers
        ]
        rules += [Rename(*pair) for pair in names]
    fused_mlp, fused_attention = fused and not model.has_experts, fused and not model.is_latent
    mlp = "mlp.linear_fc1.layer_norm_weight" if fused_mlp else "pre_mlp_layernorm.weight"
    attention = "self_attention.linear_qkv.layer_norm_weight" if fused_attention else "input_layernorm.weight"
    rules += [Rename(after, f"{_MEGATRON}.{mlp}"), Rename(before, f"{_MEGATRON}.{attention}")]
    if model.is_latent:
        return [*rules, *(_FUSED_LATENT_NORMS if fused else _LATENT_NORMS)]
    names = [(f"{_HUB}.self_attn.{x}_norm.weight", f"{_MEGATRON}.self_attention.{x}_layernorm.weight") for x in "qk"]
    return [*rules, *(Rename(*pair) for pair in names)]


def _prediction(model: ModelConfig) -> list[AnyRule]:
    rules: list[AnyRule] = []
    for k, layer in enumerate(model.prediction_layers):
        hub, own = f"model.layers.{layer}", f"mtp.layers.{k}"
        rules += [Rename(f"{hub}.{name}.weight", f"{own}.{name}.weight") for name in ("enorm", "hnorm", "eh_proj")]
        rules.append(Rename(f"{hub}.shared_head.norm.weight", f"{own}.final_layernorm.weight"))
        rules.append(Rename(f"decoder.layers.{layer}.{{*rest}}", f"{own}.mtp_model_layer.{{*rest}}"))
    return rules
