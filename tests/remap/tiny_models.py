"""Tiny random models of any class of transformers: each config's own defaults, but for what makes it large."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

SMALL = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 32),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "out_hidden_size", "embedding_size",
         "word_embed_proj_dim", "encoder_hidden_dim", "image_size"), 16),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "hidden_dim", "n_inner"), 24),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "d_kv", "head_dim", "d_head", "q_lora_rank",
         "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "patch_size", "projection_dim",
         "num_mel_bins", "feature_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(
        ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers",
         "num_decoder_layers", "num_encoder_layers", "depth", "num_attention_heads", "num_heads", "n_head", "n_heads",
         "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads", "num_kv_heads",
         "num_experts_per_tok", "moe_k", "conv_kernel"), 2),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_queries", "state_size",
         "mamba_d_state", "mamba_dt_rank", "rotary_dim"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1},
    "dbrx": {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16},
             "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}},
    "detr": {"use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
             "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16],
                                 "depths": [1, 1], "out_features": ["stage2"]}},
    "ernie4_5_vl_moe_text": {"hidden_size": 256, "moe_intermediate_size": [8, 8]},
    "esm": {"vocab_size": 32},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_moe": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "n_groups": 1, "chunk_size": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "swin": {"num_heads": [2, 2], "depths": [1, 1], "window_size": 2, "patch_size": 4},
}  # fmt: skip


def config_of(kind: type) -> Any:
    """A small config of a class. Raises what the class raises if the sizes do not fit to each other."""
    from transformers import PreTrainedConfig

    default: Any = kind()
    options = {}
    for name, value in {**SMALL, **TOKENS}.items():
        now = getattr(default, name, None)
        if isinstance(now, int) and not isinstance(now, bool) and (now > value or name in TOKENS):
            options[name] = value
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            options[name] = config_of(type(value))
    for name in ("layer_types", "mlp_layer_types"):
        if kinds := list(dict.fromkeys(getattr(default, name, None) or ())):
            count = options.get("num_hidden_layers", 2)
            options[name] = (kinds * count)[:count]
    options.update(OPTIONS.get(default.model_type, {}))
    for without in ((), ("layer_types",), ("layer_types", "head_dim"), ("layer_types", "head_dim", "patch_size")):
        try:
            return kind(**{name: value for name, value in options.items() if name not in without})
        except Exception as error:
            last = error
    raise last


def model_of(name: str) -> Any:
    """A random model of the class of transformers. Raises what building it raises, and MemoryError for a large one."""
    import transformers

    one = getattr(transformers, name)
    config = config_of(one.config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in one(deepcopy(config)).parameters())
    if size > 20_000_000:
        raise MemoryError(f"{name} has {size} elements")
    torch.manual_seed(0)
    return one(config).eval()


def every_name() -> Iterator[str]:
    """For each kind of config: its class with the most usual head, and its class without one."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    tables = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, auto.MODEL_FOR_CTC_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES,
    ]  # fmt: skip
    for kind in sorted(CONFIG_MAPPING):
        classes = [table[kind] for table in tables if kind in table]
        names = [one if isinstance(one, str) else one[0] for one in classes]
        yield from dict.fromkeys([*names[:1], *names[-1:]])
