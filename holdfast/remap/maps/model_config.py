"""What the maps have to know of a model: its family, and the facts of its config that choose rules.

The maps beside this file ask for it. Never reads more than a config.json.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.errors import Mismatch, NotACheckpoint, Unsupported
from holdfast.remap.naming import Rename
from holdfast.remap.remap import AnyRule
from holdfast.storage.place import Place
from holdfast.storage.urls import location

Config = Mapping[str, Any] | str | os.PathLike[str] | Place | Any
"""A config of transformers, its values, or the path or URL of a config.json or of the folder that has it."""

DENSE = ("llama", "mistral", "qwen2", "qwen3")
WITH_EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")
LATENT = ("deepseek_v2", "deepseek_v3")
"""Families with multi-head latent attention, and with experts."""


@dataclass(frozen=True)
class ModelConfig:
    """A model, as the maps see it.

    Attributes:
        family: The ``model_type`` of its config.
        is_latent: Whether it has multi-head latent attention.
        has_experts: Whether some of its layers have experts.
        dense_layers: The numbers of the layers that have none, in a model with experts.
        is_tied: Whether the head is the embedding, so that the hub folder has it once.
        parameters: ``("weight",)``, or ``("weight", "bias")`` if linear layers may have a bias.
        prediction_layers: The numbers of the layers behind the last one that predict further tokens.
        values: What the sizes of rules may name.
    """

    family: str
    is_latent: bool
    has_experts: bool
    dense_layers: tuple[int, ...]
    is_tied: bool
    parameters: tuple[str, ...]
    prediction_layers: tuple[int, ...]
    values: dict[str, int]


def read_config(config: Config) -> ModelConfig:
    """Read a config. Raises NotACheckpoint if there is none, Unsupported for a model that no table describes."""
    values = _values_of(config)
    family = str(values.get("model_type"))
    if family not in (*DENSE, *WITH_EXPERTS, *LATENT):
        known = ", ".join((*DENSE, *WITH_EXPERTS, *LATENT))
        raise Unsupported(
            f"there is no table of rules for model_type={family!r}, only for {known}. If the tensors of your model "
            "have the names of one of these, pass its config as a dict with that model_type; else write a Remap"
        )
    if values.get("quantization_config"):
        raise Unsupported(
            f"the tensors of this {family} are quantized, and a map moves elements without computing them: convert "
            "the folder to a floating dtype first, and remove quantization_config from its config"
        )
    if values.get("rope_interleave") is False:
        raise Unsupported(f"this {family} has rope_interleave=false, which the frameworks' attention does not know")
    try:
        return _model_config(family, values)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise Mismatch(f"the config of this {family} is not complete: {error} is missing, or is no number") from None


def _model_config(family: str, values: Mapping[str, Any]) -> ModelConfig:
    layers, heads = int(values["num_hidden_layers"]), int(values["num_attention_heads"])
    experts = _first(values, "num_local_experts", "num_experts", "n_routed_experts") or 0
    has_experts = family in (*WITH_EXPERTS, *LATENT) and experts > 0
    step = _first(values, "decoder_sparse_step", "moe_layer_freq") or 1
    without = set(_first(values, "mlp_only_layers") or ()) | set(range(_first(values, "first_k_dense_replace") or 0))
    shift = 0 if family in LATENT else 1
    dense = tuple(i for i in range(layers) if i in without or (i + shift) % step)
    has_bias = family in ("qwen2", "qwen2_moe") or any(values.get(key) for key in ("attention_bias", "mlp_bias"))
    more = _first(values, "num_nextn_predict_layers") or 0
    return ModelConfig(
        family, family in LATENT, has_experts, dense if has_experts else (), bool(values.get("tie_word_embeddings")),
        ("weight", "bias") if has_bias else ("weight",), tuple(range(layers, layers + more)),
        {
            "num_attention_heads": heads, "num_key_value_heads": _first(values, "num_key_value_heads") or heads,
            "head_dim": _first(values, "head_dim") or int(values["hidden_size"]) // heads,
            "vocab_size": int(values["vocab_size"]), "num_experts": experts,
        },
    )  # fmt: skip


def _first(values: Mapping[str, Any], *keys: str) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _values_of(config: Config) -> Mapping[str, Any]:
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    path = location(config)
    path = path if path.name.endswith(".json") else path / "config.json"
    if not path.is_file():
        raise NotACheckpoint(f"there is no {path}: pass the folder of a model of the hub, its config.json, or a config")
    from holdfast.formats.machine.untrusted import read_json  # programs that need no map import no reader of formats

    values = read_json(path)
    if not isinstance(values, dict):
        raise NotACheckpoint(f"{path} is no config of a model: it holds a {type(values).__name__}")
    return values


_MIXTRAL = "model.layers.{i}.block_sparse_moe"
_MLP = "model.layers.{i}.mlp"
HUB_NAMES: dict[str, tuple[AnyRule, ...]] = {
    "mixtral": (
        Rename(f"{_MIXTRAL}.gate.weight", f"{_MLP}.gate.weight"),
        Rename(f"{_MIXTRAL}.experts.{{e}}.w1.weight", f"{_MLP}.experts.{{e}}.gate_proj.weight"),
        Rename(f"{_MIXTRAL}.experts.{{e}}.w3.weight", f"{_MLP}.experts.{{e}}.up_proj.weight"),
        Rename(f"{_MIXTRAL}.experts.{{e}}.w2.weight", f"{_MLP}.experts.{{e}}.down_proj.weight"),
    ),
    "qwen2_moe": (Rename(f"{_MLP}.shared_expert.{{*rest}}", f"{_MLP}.shared_experts.{{*rest}}"),),
}
"""From the names that some families have in a hub folder to those of the other families, which the tables use."""
