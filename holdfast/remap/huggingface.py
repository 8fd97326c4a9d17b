"""The maps that transformers has between the names of a hub folder and those of its models, for each of its models.

Users call `transformers` with a model, its config or its folder. It never touches a tensor of the model.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk.dtypes import known, torch_dtype
from holdfast.remap.architecture import Transformers
from holdfast.remap.conversion import Conversion
from holdfast.remap.remap import Remap

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def transformers(
    model_or_config: PreTrainedModel | PreTrainedConfig | str | os.PathLike[str], *, dtype: str | None = None
) -> Remap:
    """Return the map from a hub folder to a model of transformers, as ``from_pretrained`` loads it.

    Its `Remap.inverse` is the map from the model to the folder that ``save_pretrained`` writes.

    Args:
        model_or_config: A model, sharded or not, whose tensors are not touched. Or its config, or the folder or the
            id on the hub that has its config.json.
        dtype: What floating tensors become, as in ``from_pretrained(dtype=…)``; ``"auto"`` is the config's dtype.
            Without it tensors stay as they are.

    Raises:
        Unsupported: It is quantized, so that tensors are computed, or it is no model of transformers.
        Mismatch: The config does not say which class the model is of.

    Example:
        >>> remap = transformers(model)
        >>> load("llama", {"model": model}, remap=remap)
        >>> convert("checkpoint", "export", to="huggingface", only="model", remap=remap.inverse(), extras="llama")
    """
    from holdfast.remap import pretrained

    pretrained.required()
    from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

    thing: Any = model_or_config
    if isinstance(thing, (str, os.PathLike)):
        thing = AutoConfig.from_pretrained(os.fspath(thing))
    if isinstance(thing, PreTrainedConfig):
        names = thing.architectures or []
        if len(names) != 1:
            raise Mismatch(
                f"the config of {thing.model_type} names {len(names)} architectures, and the map needs one: pass the "
                'model, or set config.architectures = ["…ForCausalLM"]'
            )
        return _rule(thing, names[0], dtype, None)
    model = _unwrapped(thing, PreTrainedModel)
    used = getattr(model, "_weight_conversions", None)
    described = None if used is None else pretrained.described(used)
    return _rule(model.config, pretrained.name_of_class(pretrained.written_class(model)), dtype, described)


def _unwrapped(model: Any, kind: type) -> Any:
    """The model inside of torch.compile, DistributedDataParallel and FSDP1."""
    thing = model
    while not isinstance(thing, kind):
        parts = getattr(thing, "_modules", {})
        inner = [parts[name] for name in ("module", "_orig_mod", "_fsdp_wrapped_module") if name in parts]
        if not inner:
            raise Unsupported(
                f"{type(model).__name__} is not a model of transformers, nor a config, nor a folder with a "
                "config.json: pass one of these, or write the map as rules"
            )
        thing = inner[0]
    return thing


def _rule(config: Any, architecture: str, dtype: str | None, used: tuple[Conversion, ...] | None) -> Remap:
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported(
            f"{architecture} is quantized, and its tensors are computed from those of the folder, not arranged: "
            "load it with transformers, dequantize it, and save it without quantization"
        )
    if dtype == "auto":
        dtype = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if dtype is not None and not (known(dtype) and torch_dtype(dtype).is_floating_point):
        raise Mismatch(f'dtype={dtype!r} is not a floating dtype of torch: use "bfloat16", "float32" or "auto"')
    plain = _plain(json.loads(config.to_json_string()))
    return Remap((Transformers(architecture, plain, dtype=dtype, used=used),))


_OF_A_FOLDER = {"architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"}


def _plain(value: Any) -> Any:
    """A config without what differs between two folders of one model."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if key not in _OF_A_FOLDER}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
