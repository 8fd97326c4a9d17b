"""A tiny random model of each family that the maps of frameworks know."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch

_SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attn_implementation": "eager",
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 10,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


class Family(NamedTuple):
    """A model's class in transformers, the options of its config, and how many experts each layer has.

    ``pairs``: whether the model of torchtitan turns pairs.
    """

    name: str
    options: dict[str, Any]
    experts: tuple[int, ...] = (0, 0, 0)
    pairs: bool = False


FAMILIES = {
    "llama": Family("Llama", {}, pairs=True),
    "llama_bias_head_dim": Family("Llama", {"attention_bias": True, "head_dim": 12}, pairs=True),
    "mistral": Family("Mistral", {"head_dim": 12}, pairs=True),
    "qwen2": Family("Qwen2", {}),
    "qwen3_tied": Family("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "mixtral": Family("Mixtral", {"num_local_experts": 4}, (4, 4, 4)),
    "qwen2_moe": Family(
        "Qwen2Moe", _EXPERTS | {"shared_expert_intermediate_size": 12, "decoder_sparse_step": 2}, (0, 4, 0)
    ),
    "qwen3_moe": Family("Qwen3Moe", _EXPERTS | {"head_dim": 12, "mlp_only_layers": [2]}, (4, 4, 0)),
    "deepseek_v2": Family("DeepseekV2", _LATENT | {"q_lora_rank": None, "n_shared_experts": 1}, (0, 4, 4)),
    "deepseek_v3": Family("DeepseekV3", _LATENT | {"q_lora_rank": 8, "n_shared_experts": 2}, (0, 4, 4)),
}


def model_of(family: str) -> Any:
    """A random model: each tensor has elements of its own, also those that are initialized with one number."""
    import transformers

    config = getattr(transformers, f"{FAMILIES[family].name}Config")(**_SIZES | FAMILIES[family].options)
    torch.manual_seed(0)
    model = getattr(transformers, f"{FAMILIES[family].name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape) * 0.2 + (tensor.ndim == 1))
    return model


def hub_folder(family: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a model as a hub folder, and return what it holds."""
    from safetensors.torch import load_file

    model_of(family).save_pretrained(folder)
    return load_file(folder / "model.safetensors")
