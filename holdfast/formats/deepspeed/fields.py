"""Loads the files of DeepSpeed's ranks, and checks the type of each field that the readers use.

`ranks` and `universal` call it. Never compares one file with another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.errors import Damaged
from holdfast.formats.machine.torch_files import load_file
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

Fits = Callable[[Any], bool]


def load_model(stretch: Stretch) -> Mapping[str, Any]:
    """What a ``*_model_states.pt`` holds. Raises Damaged if a field is not as DeepSpeed writes it."""
    content = _load(stretch, "module")
    _check(content, _MODEL, stretch.source.path)
    return content


def load_optimizer(stretch: Stretch) -> Mapping[str, Any]:
    """What a ``*_optim_states.pt`` holds. Raises Damaged if a field is not as DeepSpeed writes it."""
    content = _load(stretch, "optimizer_state_dict")
    state = content["optimizer_state_dict"]
    if not _is_fields(state) or state.get("base_optimizer_state", state.get("optimizer_state_dict")) is None:
        raise _altered(stretch.source.path, "optimizer_state_dict")
    _check(state, _OPTIMIZER, stretch.source.path)
    return content


def load_common(stretch: Stretch) -> Mapping[str, Any]:
    """What a universal checkpoint's ``optimizer_state.pt`` holds. Raises Damaged as `load_model` does."""
    content = _load(stretch, "param_groups")
    _check(content, _OPTIMIZER, stretch.source.path)
    return content


def _load(stretch: Stretch, key: str) -> Mapping[str, Any]:
    content = load_file(stretch)
    if not isinstance(content, dict) or key not in content:
        raise Damaged(f"{stretch.source.path} is no file of DeepSpeed: it holds no {key}")
    return content


def _check(content: Mapping[str, Any], fields: Mapping[str, Fits], path: Place) -> None:
    for key, fits in fields.items():
        if content.get(key) is not None and not fits(content[key]):
            raise _altered(path, key)


def _altered(path: Place, key: str) -> Damaged:
    return Damaged(f"{path}: {key} is not as DeepSpeed writes it: the file was altered; bring it back from a copy")


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_list(value: Any, fits: Fits) -> bool:
    return isinstance(value, (list, tuple)) and all(map(fits, value))


def _is_dict(value: Any, fits: Fits) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) and fits(one) for key, one in value.items())


def _is_fields(value: Any) -> bool:
    return _is_dict(value, lambda _: True)


def _is_shapes(value: Any) -> bool:
    return _is_dict(value, lambda shape: _is_list(shape, _is_count))


def _is_stage(value: Any) -> bool:
    """A number, or an enum of DeepSpeed."""
    return _is_count(value) or (bool(args := getattr(value, "args", None)) and _is_list(args, _is_count))


def _is_group(value: Any) -> bool:
    return _is_fields(value) and _is_list(value.get("params", ()), lambda id_: isinstance(id_, (int, str)))


def _is_state(value: Any) -> bool:
    """A state dict of an optimizer, or in elastic checkpoints the states of its groups."""
    if not isinstance(value, Mapping):
        return _is_list(value, _is_fields)
    states, groups = value.get("state", {}), value.get("param_groups", ())
    return isinstance(states, Mapping) and all(map(_is_fields, states.values())) and _is_list(groups, _is_group)


_MODEL: Mapping[str, Fits] = {
    "module": _is_fields,
    "buffer_names": lambda names: _is_list(names, lambda name: isinstance(name, str)),
    "optimizer": lambda state: isinstance(state, Mapping),
    "param_shapes": lambda groups: _is_list(groups, _is_shapes),
    "frozen_param_shapes": _is_shapes,
    "frozen_param_fragments": lambda tensors: _is_dict(tensors, lambda one: isinstance(one, Stored)),
    "shared_params": lambda names: _is_dict(names, lambda name: isinstance(name, str)),
    "dp_world_size": _is_count,
    "mp_world_size": _is_count,
    "checkpoint_parallel_dimensions": lambda degrees: (
        isinstance(degrees, Mapping) and _is_count(degrees.get("tp_degree") or 0)
    ),
}
_OPTIMIZER: Mapping[str, Fits] = {
    "base_optimizer_state": _is_state,
    "optimizer_state_dict": _is_state,
    "param_groups": lambda groups: _is_list(groups, _is_group),
    "group_paddings": lambda counts: _is_list(counts, _is_count),
    "param_alignment_paddings": lambda groups: _is_list(groups, lambda one: one is None or _is_list(one, _is_count)),
    "partition_count": lambda count: _is_count(count) or _is_list(count, _is_count),
    "zero_stage": _is_stage,
    "param_slice_mappings": lambda groups: _is_list(groups, _is_fields),
}
