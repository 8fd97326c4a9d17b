"""Megatron-core's side of its map: what its converters make of a hub folder, and a dense model with its layout.

From Megatron-Bridge at 067f987d: src/megatron/bridge/models/conversion/param_mapping.py (``merge_qkv_weights``,
``GatedMLPMapping``), models/{llama,qwen,deepseek}; from Megatron-LM at d98e8a64: tools/checkpoint/loader_mixtral_hf.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.remap.reference_titan import Tensors, attended, common_names, rotated_halves

_NAMES = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    "self_attn.o_proj.weight": "self_attention.linear_proj.weight",
    "self_attn.o_proj.bias": "self_attention.linear_proj.bias",
    "self_attn.q_norm.weight": "self_attention.q_layernorm.weight",
    "self_attn.k_norm.weight": "self_attention.k_layernorm.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "mlp.down_proj.weight": "mlp.linear_fc2.weight",
    "mlp.gate.weight": "mlp.router.weight",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_experts.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
}


def merged(config: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``merge_qkv_weights``: for each group its queries, its key, its value."""
    groups, heads = config.num_key_value_heads, config.num_attention_heads
    size, parts = q.shape[0] // heads, []
    for i in range(groups):
        each = heads // groups * size
        parts += [q[i * each : (i + 1) * each], k[i * size : (i + 1) * size], v[i * size : (i + 1) * size]]
    return torch.cat(parts)


def from_hf(hub: Tensors, config: Any) -> Tensors:
    """The tensors of a torch_dist checkpoint, whose vocabulary is not padded."""
    latent = "kv_lora_rank" in config.to_dict()
    hub, made = common_names(hub), {}
    mixed = any(".mlp.gate.weight" in name for name in hub)
    for name, tensor in hub.items():
        layer, at, rest = "", "", name
        if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name):
            layer, rest = match.groups()
            at = f"decoder.layers.{layer}."
        expert = re.fullmatch(r"mlp\.experts\.(\d+)\.(\w+)\.weight", rest)
        if rest == "input_layernorm.weight":
            made[at + (rest if latent else "self_attention.linear_qkv.layer_norm_weight")] = tensor
        elif rest == "post_attention_layernorm.weight":
            dense = not mixed or f"model.layers.{layer}.mlp.gate.weight" not in hub
            made[at + ("mlp.linear_fc1.layer_norm_weight" if dense else "pre_mlp_layernorm.weight")] = tensor
        elif not latent and (match := re.fullmatch(r"self_attn\.q_proj\.(\w+)", rest)):
            q, k, v = (hub[name.replace("q_proj", f"{x}_proj")] for x in "qkv")
            made[f"{at}self_attention.linear_qkv.{match[1]}"] = merged(config, q, k, v)
        elif latent and rest == "self_attn.q_proj.weight":
            made[f"{at}self_attention.linear_q_proj.weight"] = tensor
        elif expert and expert[2] == "down_proj":
            made[f"{at}mlp.experts.experts.{expert[1]}.linear_fc2.weight"] = tensor
        elif rest.endswith("gate_proj.weight"):
            whole = torch.cat([tensor, hub[name.replace("gate_proj", "up_proj")]])
            where = f"mlp.experts.experts.{expert[1]}." if expert else rest.removesuffix("gate_proj.weight")
            made[f"{at}{where}linear_fc1.weight"] = whole
        elif not re.search(r"(k_proj|v_proj|up_proj)\.\w+$", rest):
            made[at + _NAMES[rest]] = tensor
    return made


class _NormLinear(nn.Linear):
    """Transformer Engine's LayerNormLinear."""

    def __init__(self, size: int, out: int, bias: bool, eps: float) -> None:
        super().__init__(size, out, bias=bias)
        self.layer_norm_weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.eps))


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        heads, dim, eps = config.num_attention_heads, config.hidden_size, config.rms_norm_eps
        self.size, self.groups = getattr(config, "head_dim", None) or dim // heads, config.num_key_value_heads
        self.base, bias = config.rope_parameters["rope_theta"], getattr(config, "attention_bias", False)
        attention = self.self_attention = nn.Module()
        out = (heads + 2 * self.groups) * self.size
        attention.linear_qkv = _NormLinear(dim, out, bias or config.model_type == "qwen2", eps)
        attention.linear_proj = nn.Linear(heads * self.size, dim, bias=bias)
        if config.model_type == "qwen3":
            attention.q_layernorm, attention.k_layernorm = (nn.RMSNorm(self.size, eps) for _ in "qk")
        self.mlp = nn.Module()
        self.mlp.linear_fc1 = _NormLinear(dim, 2 * config.intermediate_size, False, eps)
        self.mlp.linear_fc2 = nn.Linear(config.intermediate_size, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.self_attention
        mixed = a.linear_qkv(x).unflatten(-1, (self.groups, -1, self.size))
        q, k, v = mixed.split([mixed.shape[-2] - 2, 1, 1], -2)
        q, k, v = (part.flatten(2, 3) for part in (q, k, v))
        if hasattr(a, "q_layernorm"):
            q, k = a.q_layernorm(q), a.k_layernorm(k)
        x = x + a.linear_proj(attended(rotated_halves(q, self.base), rotated_halves(k, self.base), v))
        gate, up = self.mlp.linear_fc1(x).chunk(2, -1)
        return x + self.mlp.linear_fc2(F.silu(gate) * up)


class Megatron(nn.Module):
    """A dense GPT model with the names of Transformer Engine's layers, its vocabulary padded to ``rows``."""

    def __init__(self, config: Any, rows: int) -> None:
        super().__init__()
        self.embedding, self.decoder = nn.Module(), nn.Module()
        self.embedding.word_embeddings = nn.Embedding(rows, config.hidden_size)
        self.decoder.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.decoder.final_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_layer = None
        if not config.tie_word_embeddings:
            self.output_layer = nn.Linear(config.hidden_size, rows, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding.word_embeddings(tokens)
        for layer in self.decoder.layers:
            x = layer(x)
        head = self.embedding.word_embeddings if self.output_layer is None else self.output_layer
        return F.linear(self.decoder.final_layernorm(x), head.weight)
