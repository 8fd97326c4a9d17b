"""torchtitan's side of its map: what its adapters make of a hub folder, and a model with its layout and forward pass.

From torchtitan at b5bcd76c: torchtitan/models/{llama3,qwen3,deepseek_v3}/state_dict_adapter.py, models/common/rope.py
(ComplexRoPE, CosSinRoPE), models/common/attention.py, models/common/moe.py, models/deepseek_v3/model.py.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Tensors = dict[str, torch.Tensor]

_FROM_HF = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.{}.self_attn.q_proj": "layers.{}.attention.qkv_linear.wq",
    "model.layers.{}.self_attn.k_proj": "layers.{}.attention.qkv_linear.wk",
    "model.layers.{}.self_attn.v_proj": "layers.{}.attention.qkv_linear.wv",
    "model.layers.{}.self_attn.o_proj": "layers.{}.attention.wo",
    "model.layers.{}.self_attn.q_norm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.k_norm": "layers.{}.attention.k_norm",
    "model.layers.{}.self_attn.q_a_proj": "layers.{}.attention.wq_a",
    "model.layers.{}.self_attn.q_a_layernorm": "layers.{}.attention.q_norm",
    "model.layers.{}.self_attn.q_b_proj": "layers.{}.attention.wq_b",
    "model.layers.{}.self_attn.kv_a_proj_with_mqa": "layers.{}.attention.wkv_a",
    "model.layers.{}.self_attn.kv_a_layernorm": "layers.{}.attention.kv_norm",
    "model.layers.{}.self_attn.kv_b_proj": "layers.{}.attention.wkv_b",
    "model.layers.{}.mlp.gate_proj": "layers.{}.feed_forward.w1",
    "model.layers.{}.mlp.up_proj": "layers.{}.feed_forward.w3",
    "model.layers.{}.mlp.down_proj": "layers.{}.feed_forward.w2",
    "model.layers.{}.input_layernorm": "layers.{}.attention_norm",
    "model.layers.{}.post_attention_layernorm": "layers.{}.ffn_norm",
    "model.layers.{}.mlp.gate": "layers.{}.moe.router.gate",
    "model.layers.{}.mlp.gate.e_score_correction_bias": "layers.{}.moe.expert_bias_E",
    "model.layers.{}.mlp.shared_experts.gate_proj": "layers.{}.moe.shared_experts.w1",
    "model.layers.{}.mlp.shared_experts.up_proj": "layers.{}.moe.shared_experts.w3",
    "model.layers.{}.mlp.shared_experts.down_proj": "layers.{}.moe.shared_experts.w2",
    "model.layers.{}.mlp.shared_expert_gate": "layers.{}.moe.shared_experts.gate",
}
_EXPERTS = {"gate_proj": "w1_EFD", "down_proj": "w2_EDF", "up_proj": "w3_EFD"}
_MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def common_names(hub: Tensors) -> Tensors:
    """Mixtral's and Qwen2-MoE's names as those of Qwen3-MoE and DeepSeek."""
    result = {}
    for name, tensor in hub.items():
        name = name.replace("block_sparse_moe", "mlp").replace("shared_expert.", "shared_experts.")
        name = re.sub(r"(experts\.\d+\.)(w\d)", lambda match: match[1] + _MIXTRAL[match[2]], name)
        result[name] = tensor
    return result


def reverse_permute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """llama3's ``_reverse_permute``, which says ``w.view(n_heads, 2, dim1 // n_heads // 2, dim2)``; for biases too."""
    return w.view(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def from_hf(hub: Tensors, config: Any, pairs: bool) -> Tensors:
    """What the adapters' ``from_hf`` makes of a hub folder's tensors."""
    titan: Tensors = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in common_names(hub).items():
        expert = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(\w+)\.weight", name)
        if expert:
            target = f"layers.{expert[1]}.moe.routed_experts.inner_experts.{_EXPERTS[expert[3]]}"
            stacks.setdefault(target, {})[int(expert[2])] = tensor
            continue
        if pairs and ".q_proj." in name:
            tensor = reverse_permute(tensor, config.num_attention_heads)
        if pairs and ".k_proj." in name:
            tensor = reverse_permute(tensor, config.num_key_value_heads)
        layer = next(iter(re.findall(r"layers\.(\d+)\.", name)), "")
        abstract = re.sub(r"\.\d+\.", ".{}.", name)
        stem, _, kind = abstract.rpartition(".")
        target = _FROM_HF[abstract] if abstract in _FROM_HF else f"{_FROM_HF[stem]}.{kind}"
        if "kv_lora_rank" in config.to_dict():
            target = target.replace("qkv_linear.", "")
        titan[target.format(layer)] = tensor
    for target, experts in stacks.items():
        titan[target] = torch.stack([experts[e] for e in sorted(experts)])
    if config.tie_word_embeddings:
        titan["lm_head.weight"] = titan["tok_embeddings.weight"]
    return titan


def rotated_pairs(x: torch.Tensor, base: float) -> torch.Tensor:
    """ComplexRoPE: neighbours are one complex number. ``x``: batch, position, head, element."""
    size = x.shape[-1]
    frequencies = 1.0 / (base ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(x.shape[1]), frequencies).float()
    turned = (
        torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def rotated_halves(x: torch.Tensor, base: float) -> torch.Tensor:
    """CosSinRoPE: an element turns with that half a head further on."""
    size = x.shape[-1]
    frequencies = 1.0 / (base ** (torch.arange(0, size, 2).float() / size))
    angles = torch.outer(torch.arange(x.shape[1]), frequencies).repeat(1, 2)[:, None]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention; a key serves as many heads of queries as there are."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)


class _QKV(nn.Module):
    def __init__(self, dim: int, queries: int, keys: int, bias: bool) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(dim, size, bias=bias) for size in (queries, keys, keys))


class _Attention(nn.Module):
    def __init__(self, config: Any, pairs: bool) -> None:
        super().__init__()
        heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        self.size = getattr(config, "head_dim", None) or dim // heads
        self.rotated, self.base = rotated_pairs if pairs else rotated_halves, config.rope_parameters["rope_theta"]
        bias = config.model_type in ("qwen2", "qwen2_moe") or getattr(config, "attention_bias", False)
        self.qkv_linear = _QKV(dim, heads * self.size, groups * self.size, bias)
        self.wo = nn.Linear(heads * self.size, dim, bias=getattr(config, "attention_bias", False))
        self.q_norm = self.k_norm = None
        if config.model_type.startswith("qwen3"):
            self.q_norm, self.k_norm = (nn.RMSNorm(self.size, config.rms_norm_eps) for _ in "qk")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = self.qkv_linear
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (linear.wq, linear.wk, linear.wv))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.wo(attended(self.rotated(q, self.base), self.rotated(k, self.base), v))


class _Latent(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.heads, self.base = config, config.num_attention_heads, config.rope_parameters["rope_theta"]
        size, dim, eps = config.qk_nope_head_dim + config.qk_rope_head_dim, config.hidden_size, config.rms_norm_eps
        if config.q_lora_rank:
            self.wq_a = nn.Linear(dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps)
            self.wq_b = nn.Linear(config.q_lora_rank, self.heads * size, bias=False)
        else:
            self.wq = nn.Linear(dim, self.heads * size, bias=False)
        self.wkv_a = nn.Linear(dim, config.kv_lora_rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_lora_rank, eps)
        values = self.heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.wkv_b = nn.Linear(config.kv_lora_rank, values, bias=False)
        self.wo = nn.Linear(self.heads * config.v_head_dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c = self.config
        q = self.wq_b(self.q_norm(self.wq_a(x))) if c.q_lora_rank else self.wq(x)
        q_nope, q_pe = q.unflatten(-1, (self.heads, -1)).split([c.qk_nope_head_dim, c.qk_rope_head_dim], -1)
        kv, k_pe = self.wkv_a(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        q_pe, k_pe = rotated_pairs(q_pe, self.base), rotated_pairs(k_pe.unsqueeze(2), self.base)
        kv = self.wkv_b(self.kv_norm(kv)).unflatten(-1, (self.heads, -1))
        k_nope, v = kv.split([c.qk_nope_head_dim, c.v_head_dim], -1)
        k = torch.cat([k_nope, k_pe.expand(-1, -1, self.heads, -1)], -1)
        return self.wo(attended(torch.cat([q_nope, q_pe], -1), k, v))


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int, gated: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.gate = nn.Linear(dim, 1, bias=False) if gated else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out if self.gate is None else torch.sigmoid(self.gate(x)) * out


class _Routed(nn.Module):
    def __init__(self, count: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.inner_experts = nn.Module()
        for name, shape in {"w1_EFD": (hidden, dim), "w2_EDF": (dim, hidden), "w3_EFD": (hidden, dim)}.items():
            self.inner_experts.register_parameter(name, nn.Parameter(torch.randn(count, *shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What each expert makes of each token."""
        e = self.inner_experts
        hidden = F.silu(torch.einsum("efd,btd->btef", e.w1_EFD, x)) * torch.einsum("efd,btd->btef", e.w3_EFD, x)
        return torch.einsum("edf,btef->bted", e.w2_EDF, hidden)


class _MoE(nn.Module):
    def __init__(self, config: Any, count: int) -> None:
        super().__init__()
        self.config, self.sigmoid = config, config.model_type == "deepseek_v3"
        hidden = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        shared = getattr(config, "shared_expert_intermediate_size", 0) or hidden * getattr(
            config, "n_shared_experts", 0
        )
        self.router = nn.Module()
        self.router.gate = nn.Linear(config.hidden_size, count, bias=False)
        self.routed_experts = _Routed(count, config.hidden_size, hidden)
        gated = config.model_type == "qwen2_moe"
        self.shared_experts = _FeedForward(config.hidden_size, shared, gated) if shared else None
        self.register_buffer("expert_bias_E", torch.ones(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        c, logits = self.config, self.router.gate(x)
        scores = torch.sigmoid(logits) if self.sigmoid else logits.softmax(-1)
        chosen = (scores + self.expert_bias_E).topk(c.num_experts_per_tok, -1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if getattr(c, "norm_topk_prob", c.model_type == "mixtral"):
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * getattr(c, "routed_scaling_factor", 1.0)
        out = torch.einsum("bted,bte->btd", self.routed_experts(x), weights)
        return out if self.shared_experts is None else out + self.shared_experts(x)


class _Block(nn.Module):
    def __init__(self, config: Any, pairs: bool, experts: int) -> None:
        super().__init__()
        latent = "kv_lora_rank" in config.to_dict()
        self.attention: nn.Module = _Latent(config) if latent else _Attention(config, pairs)
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        if experts:
            self.moe = _MoE(config, experts)
        else:
            self.feed_forward = _FeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + getattr(self, "moe" if hasattr(self, "moe") else "feed_forward")(self.ffn_norm(x))


class Titan(nn.Module):
    """A model with torchtitan's names. ``experts``: how many each layer has; 0 for a dense layer."""

    def __init__(self, config: Any, pairs: bool, experts: list[int]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): _Block(config, pairs, count) for i, count in enumerate(experts)})
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.tok_embeddings.weight = self.lm_head.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))
