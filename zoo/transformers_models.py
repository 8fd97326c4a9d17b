"""Tiny models of transformers, random and of many architectures, and adapters of peft around one of them.

`zoo.__main__` collects `cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.case import Case, Lay, Run
from zoo.modules import seen

VOCABULARY = 32
# An option that is ... is left out.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_TWO_SIDED = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
_OLD = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "n_ctx": 64}
_PICTURE = {
    "image_size": 16,
    "patch_size": 8,
    "num_channels": 3,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_CONV = {"num_channels": 3, "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "embedding_size": 8}
_SOUND = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (3, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2, "vocab_size": VOCABULARY,
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"layer_types": None}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "phi": {"num_key_value_heads": 2}, "phi3": {}, "olmo2": {}, "granite": {}, "cohere": {},
    "stablelm": {"num_key_value_heads": 2}, "starcoder2": {}, "smollm3": {}, "glm4": {}, "nemotron": {},
    "opt": {"word_embed_proj_dim": 16, "ffn_dim": 24}, "bloom": {"n_head": 2}, "falcon": {"num_kv_heads": 1, "head_dim": ...},
    "gpt2": _OLD, "gptj": {**_OLD, "rotary_dim": 4}, "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 2, "window_size": 4},
    "gpt_neox": {"rotary_pct": 0.5}, "gpt_bigcode": _OLD, "openai-gpt": _OLD,
    "mixtral": _EXPERTS, "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 8}, "qwen3_moe": _EXPERTS,
    "olmoe": _EXPERTS, "gpt_oss": _EXPERTS, "granitemoe": _EXPERTS, "phimoe": _EXPERTS, "jetmoe": {**_EXPERTS, "kv_channels": 8},
    "deepseek_v3": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "n_shared_experts": 1, "num_key_value_heads": 2, "head_dim": 4,
    },
    "mamba": {"state_size": 4, "conv_kernel": 2}, "falcon_mamba": {"state_size": 4, "conv_kernel": 2},
    "mamba2": {"state_size": 4, "conv_kernel": 2, "head_dim": 8, "num_heads": 4, "n_groups": 1, "chunk_size": 8},
    "rwkv": {"attention_hidden_size": 16, "context_length": 64},
    "jamba": {**_EXPERTS, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"conv_L_cache": 3, "block_ff_dim": 24}, "ctrl": {**_OLD, "dff": 24}, "xlnet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 24, "d_head": 8, "max_position_embeddings": ...},
}  # fmt: skip
MASKED: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {}, "distilbert": {"dim": 16, "hidden_dim": 24, "n_heads": 2, "n_layers": 2},
    "albert": {"embedding_size": 8, "num_hidden_groups": 1}, "electra": {"embedding_size": 8}, "deberta-v2": {},
    "modernbert": {}, "esm": {"mask_token_id": 3}, "fnet": {}, "big_bird": {"attention_type": "original_full"},
    "mobilebert": {"embedding_size": 8, "intra_bottleneck_size": 8, "num_feedforward_networks": 1},
    "nystromformer": {"num_landmarks": 3, "segment_means_seq_len": 6, "conv_kernel_size": 3},
    "funnel": {"block_sizes": [1], "d_model": 16, "n_head": 2, "d_head": 8, "d_inner": 24, "num_decoder_layers": 1,
               "num_hidden_layers": ...},
}  # fmt: skip
TWO_SIDED: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
    "switch_transformers": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2, "num_experts": 2,
                            "decoder_start_token_id": 0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "bart": _TWO_SIDED, "pegasus": _TWO_SIDED, "m2m_100": _TWO_SIDED, "blenderbot": _TWO_SIDED, "led": {**_TWO_SIDED, "attention_window": 4},
    "prophetnet": {"hidden_size": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "num_encoder_layers": 1,
                   "num_decoder_layers": 1, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2, "num_hidden_layers": ...},
}  # fmt: skip
VISION: dict[str, dict[str, Any]] = {
    "vit": _PICTURE, "deit": _PICTURE, "beit": _PICTURE, "dinov2": _PICTURE, "vit_msn": _PICTURE, "siglip_vision_model": _PICTURE,
    "clip_vision_model": _PICTURE, "dinov3_vit": _PICTURE, "ijepa": _PICTURE,
    "swin": {**_PICTURE, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "num_attention_heads": ..., "window_size": 2, "patch_size": 4},
    "convnext": {**_CONV, "patch_size": 2}, "convnextv2": {**_CONV, "patch_size": 2},
    "resnet": _CONV, "mobilenet_v2": {"depth_multiplier": 0.25, "min_depth": 8},
    "segformer": {"num_channels": 3, "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16],
                  "patch_sizes": [3, 3], "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [1, 1]},
    "poolformer": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2], "padding": [1, 1]},
}  # fmt: skip
SOUND: dict[str, dict[str, Any]] = {
    "wav2vec2": _SOUND, "hubert": _SOUND, "wavlm": _SOUND, "sew": {**_SOUND, "squeeze_factor": 1},
    "unispeech": _SOUND, "data2vec-audio": {**_SOUND, "conv_pos_kernel_size": 3},
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Every architecture, and every adapter."""
    try:
        import transformers
    except ImportError:
        return
    transformers.logging.set_verbosity_error()
    for kinds, made in (
        (CAUSAL, transformers.AutoModelForCausalLM), (MASKED, transformers.AutoModelForMaskedLM),
        (TWO_SIDED, transformers.AutoModelForSeq2SeqLM), (VISION, transformers.AutoModel), (SOUND, transformers.AutoModel),
    ):  # fmt: skip
        given = {id(VISION): _pictures, id(SOUND): _sounds}.get(id(kinds), _words)
        for name, options in kinds.items():
            yield Case(f"transformers: {name}", "transformers", _build(made, name, options, given))
    yield Case("transformers: llama with tied weights", "transformers", _build(
        transformers.AutoModelForCausalLM, "llama", {"tie_word_embeddings": True}, _words))  # fmt: skip
    yield Case("transformers: llama in bfloat16", "transformers", _build(
        transformers.AutoModelForCausalLM, "llama", {}, _words, dtype=torch.bfloat16))  # fmt: skip
    yield Case("transformers: clip", "transformers", _build(transformers.AutoModel, "clip", {}, _both))
    yield Case(
        "transformers: whisper",
        "transformers",
        _build(transformers.AutoModelForSpeechSeq2Seq, "whisper", _WHISPER, _spectra),
    )
    yield from _adapters()


_WHISPER = {**_TWO_SIDED, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16}


def _words(model: nn.Module, generator: torch.Generator) -> Any:
    ids = torch.randint(3, VOCABULARY, (2, 6), generator=generator)
    return model(input_ids=ids, labels=ids)


def _pictures(model: nn.Module, generator: torch.Generator) -> Any:
    size = getattr(model.config, "image_size", 16)
    size = size if isinstance(size, int) and size <= 32 else 32
    return model(pixel_values=torch.randn(2, 3, size, size, generator=generator))


def _sounds(model: nn.Module, generator: torch.Generator) -> Any:
    return model(torch.randn(2, 80, generator=generator))


def _spectra(model: nn.Module, generator: torch.Generator) -> Any:
    return model(
        torch.randn(2, 8, 16, generator=generator), labels=torch.randint(3, VOCABULARY, (2, 4), generator=generator)
    )


def _both(model: nn.Module, generator: torch.Generator) -> Any:
    return model(
        input_ids=torch.randint(3, VOCABULARY, (2, 6), generator=generator),
        pixel_values=torch.randn(2, 3, 16, 16, generator=generator), return_loss=True,
    )  # fmt: skip


def _model(auto: Any, name: str, options: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig

    if name == "clip":
        config = AutoConfig.for_model("clip", text_config=_SMALL, vision_config=_PICTURE, projection_dim=8)
    else:
        wanted = {key: value for key, value in {**_SMALL, **options}.items() if value is not ...}
        config = AutoConfig.for_model(name, **wanted)
    return auto.from_config(config)


def _build(
    auto: Any, name: str, options: dict[str, Any], call: Callable[[nn.Module, torch.Generator], Any], *,
    dtype: torch.dtype = torch.float32, around: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Callable[[Lay], Run]:  # fmt: skip
    def build(lay: Lay) -> Run:
        model = lay(around(_model(auto, name, options).to(dtype))).train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

        def step(number: int) -> Any:
            out = call(model, torch.Generator().manual_seed(number))
            loss = out.loss if getattr(out, "loss", None) is not None else out[0].float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return [loss.detach(), seen(model)]

        return Run({"model": model, "optimizer": optimizer}, step)

    return build


def _adapters() -> Iterator[Case]:
    try:
        import peft
        import transformers
    except ImportError:
        return
    target = {"target_modules": ["q_proj", "v_proj"]}
    words = {"task_type": "CAUSAL_LM"}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "LoRA": ("LoraConfig", {"r": 2, **target}), "LoRA with dropout": ("LoraConfig", {"r": 2, "lora_dropout": 0.5, **target}),
        "DoRA": ("LoraConfig", {"r": 2, "use_dora": True, **target}), "rsLoRA": ("LoraConfig", {"r": 2, "use_rslora": True, **target}),
        "PiSSA": ("LoraConfig", {"r": 2, "init_lora_weights": "pissa", **target}),
        "LoRA and trained embeddings": ("LoraConfig", {"r": 2, "modules_to_save": ["embed_tokens", "lm_head"], **target}),
        "LoRA of embeddings": ("LoraConfig", {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}),
        "LoRA and trained tokens": ("LoraConfig", {"r": 2, "trainable_token_indices": [1, 2], **target}),
        "AdaLoRA": ("AdaLoraConfig", {"r": 2, "total_step": 20, **target, **words}), "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
        "LoHa": ("LoHaConfig", {"r": 2, **target}), "LoKr": ("LoKrConfig", {"r": 2, **target}),
        "OFT": ("OFTConfig", {"oft_block_size": 4, **target}), "BOFT": ("BOFTConfig", {"boft_block_size": 4, **target}),
        "VeRA": ("VeraConfig", {"r": 2, "target_modules": ["q_proj", "o_proj"]}), "FourierFT": ("FourierFTConfig", {"n_frequency": 5, **target}),
        "HRA": ("HRAConfig", {"r": 2, **target}), "VB-LoRA": ("VBLoRAConfig", {"r": 2, "num_vectors": 8, "vector_length": 4, "topk": 2, **target}),
        "MiSS": ("MissConfig", {"r": 2, **target}), "RandLoRA": ("RandLoraConfig", {"r": 2, "target_modules": ["q_proj", "o_proj"]}),
        "SHiRA": ("ShiraConfig", {"r": 1, **target}), "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm"], **words}),
        "trained tokens": ("TrainableTokensConfig", {"token_indices": [1, 2], "target_modules": ["embed_tokens"]}),
        "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3, **words}), "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3, **words}),
        "P-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8, **words}), "C3A": ("C3AConfig", {"block_size": 8, **target}),
        "RoAd": ("RoadConfig", {"group_size": 8, **target}),
    }  # fmt: skip
    for title, (name, options) in kinds.items():
        if hasattr(peft, name):
            around = partial(_adapted, getattr(peft, name), options)
            build = _build(transformers.AutoModelForCausalLM, "llama", {}, _words, around=around)
            yield Case(f"peft: {title}", "peft", build)
    yield Case(f"peft: {title}", "peft", _build(transformers.AutoModelForCausalLM, "llama", {}, _words, around=around))
    yield Case(
        "peft: two adapters", "peft", _build(transformers.AutoModelForCausalLM, "llama", {}, _words, around=_two)
    )


def _adapted(config: Any, options: dict[str, Any], model: nn.Module) -> nn.Module:
    from peft import get_peft_model

    return get_peft_model(model, config(**options))


def _two(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    adapted.add_adapter("other", LoraConfig(r=3, target_modules=["v_proj"]))
    adapted.set_adapter("other")
    return adapted
