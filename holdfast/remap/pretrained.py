"""What `from_pretrained` and `save_pretrained` do with names and tensors: their own code, run on traced tensors.

The rule in `huggingface` calls it. Imports transformers when it is called, and never makes a tensor with memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from holdfast.errors import HoldfastError, Mismatch, Unsupported
from holdfast.ondisk.dtypes import name_of, torch_dtype
from holdfast.remap.conversion import Conversion
from holdfast.remap.nodes import Node, cast
from holdfast.remap.tracing import Traced, node_of, refusals

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Empty(NamedTuple):
    """A model without memory, as data."""

    architecture: str
    config: dict[str, Any]
    dtype: str | None
    used: tuple[Conversion, ...] | None

    def model(self) -> PreTrainedModel:
        """On the meta device, as ``from_pretrained`` makes it. Raises Unsupported if the class is not there."""
        from transformers import CONFIG_MAPPING

        one = class_of_name(self.architecture)
        kind, name = one.config_class, self.config.get("model_type")
        if getattr(kind, "model_type", None) != name and name in CONFIG_MAPPING:
            kind = CONFIG_MAPPING[name]
        config = kind.from_dict(kind._decode_special_floats(self.config))
        if fusions := getattr(config, "fusion_config", None):
            import_module("transformers.fusion_mapping").register_fusion_patches(one, config, fusions)
        with ExitStack() as stack:  # as if quantized, which is on the meta device even with DeepSpeed's ZeRO-3
            for context in one.get_init_context(self.torch_dtype, True, True, None):
                stack.enter_context(context)
            return one(config)

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype is None else torch_dtype(self.dtype)


class Resolved(NamedTuple):
    """Tensors of the target, names of it that are not in the source, and names of the source that it does not have."""

    nodes: dict[str, Node]
    missing: list[str]
    unexpected: list[str]


def loaded(empty: Empty, source: Mapping[str, Node]) -> Resolved:
    """As ``from_pretrained`` loads, but for the initial values of what is missing.

    Raises Mismatch for tensors that do not fit to the config, and Unsupported for those that would be computed.
    """
    with _quietly(empty.architecture):
        return _loaded(empty, source)


def saved(empty: Empty, source: Mapping[str, Node]) -> Resolved:
    """As ``save_pretrained`` saves: without what the model ignores, tied tensors once, and conversions undone.

    What is in the source and not in the model is kept, as ``save_pretrained`` keeps what was added to the model.
    """
    with _quietly(empty.architecture):
        return _saved(empty, source)


def first_names(empty: Empty, nodes: dict[str, Node]) -> dict[str, Node]:
    """Of tied tensors of the model the first alone: an optimizer knows a parameter by one name."""
    with _quietly(empty.architecture):
        model = empty.model()
        model.tie_weights()
        of: dict[int, str] = {}
        first = {name: of.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()}
    return {name: node for name, node in nodes.items() if first.get(name, name) == name}


@contextmanager
def _quietly(architecture: str) -> Iterator[None]:
    """No progress bar and no warnings of weights that are not loaded; errors that say what the first one was."""
    required()
    from transformers.utils import logging

    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with refusals() as refused, torch.no_grad():
            try:
                yield
            except HoldfastError:
                raise
            except Exception as error:  # transformers and torch turn errors of tensors into others, or into text
                text = f"the tensors of {architecture} cannot be mapped: {error}"
                raise (refused[-1] if refused else Mismatch(text)) from error
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


class _Slice:
    """What transformers takes for a tensor in a file, and asks for as one dtype on one device."""

    def __init__(self, node: Node, casts: bool) -> None:
        self.node, self.casts = node, casts

    def __getitem__(self, _: Any) -> _Slice:
        return self

    def to(self, *, device: Any = None, dtype: torch.dtype | None = None) -> Traced:
        return Traced(cast(self.node, name_of(dtype)) if self.casts and dtype is not None else self.node)


def _loaded(empty: Empty, source: Mapping[str, Node]) -> Resolved:
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model = empty.model()
    own, _, others = _conversions(model, empty.used or ())
    dtype = empty.torch_dtype
    config = LoadStateDictConfig(
        device_map={"": "meta"}, dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=[*others, *own]
    )
    slices = {name: _Slice(node, empty.dtype is not None) for name, node in source.items()}
    info, _ = convert_and_load_state_dict_in_model(model, slices, config)
    for name, text in info.conversion_errors.items():
        raise ValueError(f"{name}: {text}")
    if info.mismatched_keys:
        lines = [f"{name}: {[*has]}, the config has {[*wanted]}" for name, has, wanted in sorted(info.mismatched_keys)]
        raise Mismatch(f"the source does not fit to the config of {empty.architecture}:\n" + "\n".join(lines))
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    tensors = model.state_dict(keep_vars=True)
    nodes = {name: tensor.node for name, tensor in tensors.items() if isinstance(tensor, Traced)}
    missing = [name for name in tensors if name not in nodes and name in info.missing_keys]
    if not nodes:
        return Resolved(dict(source), missing, [])
    return Resolved(nodes, missing, sorted(info.unexpected_keys))


def _saved(empty: Empty, source: Mapping[str, Node]) -> Resolved:
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    model = empty.model()
    model.tie_weights()
    if empty.used is not None:
        _, model._weight_conversions, _ = _conversions(model, empty.used)
    nodes = _tied(model, source)
    tensors = model.state_dict()
    if not nodes:
        return Resolved(dict(source), [*tensors], [])
    missing = [name for name in tensors if name not in nodes]
    for name in model._keys_to_ignore_on_save or ():
        nodes.pop(name, None)
    own = {name: tensor for name, tensor in tensors.items() if name in nodes}
    kept = remove_tied_weights_from_state_dict(own, model)
    traced = {name: Traced(nodes[name]) for name in kept}
    traced |= {name: Traced(node) for name, node in source.items() if name not in tensors}
    reverted = revert_weight_conversion(model, traced)
    return Resolved({name: node_of(tensor) for name, tensor in reverted.items()}, missing, [])


def _tied(model: PreTrainedModel, source: Mapping[str, Node]) -> dict[str, Node]:
    """The source's node of each tensor of the model, or of one that it is tied to; unties those of different nodes."""
    tensors = model.state_dict(keep_vars=True)
    first: dict[int, Node] = {}
    for name, tensor in tensors.items():
        if name in source and source[name] != first.setdefault(id(tensor), source[name]):
            parent, _, leaf = name.rpartition(".")
            own = tensor.detach().clone()
            own = torch.nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else own
            setattr(model.get_submodule(parent), leaf, own)
    nodes = {name: source.get(name) or first.get(id(tensor)) for name, tensor in tensors.items()}
    return {name: node for name, node in nodes.items() if node is not None}


def described(conversions: Any) -> tuple[Conversion, ...]:
    """Conversions as data."""

    return tuple(
        Conversion(type(one).__name__, tuple(one.source_patterns), tuple(one.target_patterns), one.scope_prefix)
        for one in conversions
    )


def _conversions(model: PreTrainedModel, used: tuple[Conversion, ...]) -> tuple[list[Any], list[Any], list[Any]]:
    """The model's own conversions; those that were used; and of these what the user passed as ``key_mapping``."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    own = get_model_conversion_mapping(model)
    by = dict(zip(described(own), own, strict=True))
    lost = [one for one in used if one not in by and one.kind != "WeightRenaming"]
    if lost:
        raise Mismatch(f"this version of transformers has no {lost[0]}: use the version that the map was made with")
    passed = {one: WeightRenaming([*one.source], [*one.target]) for one in used if one not in by}
    return own, [by[one] if one in by else passed[one] for one in used], [*passed.values()]


def written_class(model: Any) -> type:
    """The class that somebody wrote: FSDP2 and others make one of their own from it, at run time."""
    from transformers import PreTrainedModel

    for one in type(model).__mro__:
        if not issubclass(one, PreTrainedModel):
            continue
        if vars(sys.modules.get(one.__module__, object)).get(one.__qualname__) is one or "__init__" in vars(one):
            return one
    raise AssertionError("a model is of a class that has an __init__")


def name_of_class(one: type) -> str:
    """Its name in transformers, or its module and its name there."""
    import transformers

    name: str = one.__name__
    return name if getattr(transformers, name, None) is one else f"{one.__module__}:{one.__qualname__}"


def class_of_name(name: str) -> Any:
    """A class of transformers, or one that this process has: a map in a file makes nobody import other modules."""
    import transformers

    module, _, qualified = name.rpartition(":")
    if not module and isinstance(one := getattr(transformers, name, None), type):
        return one
    if module.startswith("transformers."):
        import_module(module)
    same = [
        one
        for one in _below(transformers.PreTrainedModel)
        if (one.__qualname__ == qualified and one.__module__ == module if module else one.__name__ == name)
    ]
    if not same:
        raise Unsupported(f"this process has no model class {name}: import its module, or update transformers")
    return same[-1]


def _below(one: Any) -> Iterator[Any]:
    for inner in one.__subclasses__():
        yield inner
        yield from _below(inner)


def required() -> None:
    """Raise Unsupported if transformers is not there, or has no conversions."""
    try:
        from transformers.core_model_loading import revert_weight_conversion  # noqa: F401
    except ImportError as error:
        raise Unsupported("the maps are in transformers 5 and later: pip install -U transformers") from error
