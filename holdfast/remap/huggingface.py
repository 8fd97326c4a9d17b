"""The maps that transformers has between the names of a hub folder and those of its models, for each of its models.

`transformers` makes a rule of a model or config, `pretrained` does what it says. Never knows an architecture by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk.dtypes import known, torch_dtype
from holdfast.remap import pretrained
from holdfast.remap.nodes import Node
from holdfast.remap.pretrained import Conversion, Resolved

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Transformers(msgspec.Struct, frozen=True, tag="transformers"):
    """From a hub folder to the model that ``from_pretrained`` makes of it, or back to what ``save_pretrained`` writes.

    ``architecture``: the class of the model. ``config``: its config.json without what changes no tensor. ``dtype``:
    what tensors of the model's dtype become, as in ``from_pretrained``; None leaves all as they are. ``used``: the
    conversions that ``from_pretrained`` used for this model and ``save_pretrained`` undoes; None if it was made in
    another way.
    """

    architecture: str
    config: dict[str, Any]
    back: bool = False
    dtype: str | None = None
    used: tuple[Conversion, ...] | None = None

    def resolve(self, source: Mapping[str, Node]) -> dict[str, Node]:
        """The tensors of the target, each as an arrangement of those of the source. Reads and computes nothing.

        Going back, tensors that the config ties are written once if they are one tensor in the source, too.
        """
        return self.resolved(source).nodes

    def resolved(self, source: Mapping[str, Node]) -> Resolved:
        """As ``resolve``, with the names that the target lacks, and those of the source that it has no place for."""
        empty = pretrained.Empty(self.architecture, self.config, self.dtype, self.used)
        return (pretrained.saved if self.back else pretrained.loaded)(empty, source)

    def inverse(self) -> Transformers:
        """The other way."""
        return msgspec.structs.replace(self, back=not self.back)


def transformers(
    model_or_config: PreTrainedModel | PreTrainedConfig | str | os.PathLike[str], *, dtype: str | None = None
) -> Transformers:
    """The map from a hub folder's tensors to those of a live model of transformers; ``.inverse()`` is the other way.

    Takes a model, sharded or not, whose tensors are not touched; or its config; or the folder or hub id that has the
    config. ``dtype`` casts as ``from_pretrained(dtype=…)`` does, ``"auto"`` to the config's dtype; without it tensors
    stay as they are. Raises Unsupported for a quantized model, and for what is not a model of transformers.
    """
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


def _rule(config: Any, architecture: str, dtype: str | None, used: tuple[Conversion, ...] | None) -> Transformers:
    if getattr(config, "quantization_config", None) is not None:
        raise Unsupported(
            f"{architecture} is quantized, and its tensors are computed from those of the folder, not arranged: "
            "load it with transformers, dequantize it, and save it without quantization"
        )
    if dtype == "auto":
        dtype = None if config.dtype is None else str(config.dtype).removeprefix("torch.")
    if dtype is not None and not (known(dtype) and torch_dtype(dtype).is_floating_point):
        raise Mismatch(f'dtype={dtype!r} is not a floating dtype of torch: use "bfloat16", "float32" or "auto"')
    return Transformers(architecture, _plain(json.loads(config.to_json_string())), dtype=dtype, used=used)


_OF_A_FOLDER = {"architectures", "transformers_version", "_name_or_path", "dtype", "torch_dtype"}


def _plain(value: Any) -> Any:
    """A config without what differs between two folders of one model."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if key not in _OF_A_FOLDER}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
