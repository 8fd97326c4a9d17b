"""Which part of a state is the model, which the optimizer, and what its groups are, judged by keys and content."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from holdfast.errors import Damaged
from holdfast.formats import fqns
from holdfast.formats.machine.untrusted import damaged_as
from holdfast.formats.simplified import PerRank
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

_MODELS = ("model", "model_state_dict", "module", "state_dict")
_BY_NAME = "param_to_group_meta"
"""Where Megatron-FSDP keeps the settings of each parameter."""

_STEPS = ("step", "global_step", "iteration")
_TRAINERS = ("train_state", "trainer_state", "trainer", "train")
# Tensors that stand beside a model whose own names are at the top.
_NO_PARAMETERS = frozenset(["rng", "rng_state", "torch_rng_state", "cuda_rng_state", *_STEPS])


def own_names(tree: Mapping[str, Any], where: Place) -> tuple[dict[str, Any], list[str]]:
    """The state under our names, and a note on each part that was recognised by more than its key.

    ``model`` and ``optimizer`` are the only ones of their kind; several keep their own keys.
    """
    state, how = dict(tree), []
    if not any(_is_model(state.get(key)) for key in _MODELS):
        within = [key for key, value in state.items() if _is_application(value)]
        if len(within) == 1:
            state = _lifted(state, within[0])
            how.append(f"model and optimizer are those within {within[0]!r}")
    optimizers = [key for key, value in state.items() if _is_optimizer(value)]
    state = _with_model(state, optimizers, how)
    for key in optimizers:
        state[key] = _optimizer(state[key], state.get("model"), where)
    if len(optimizers) == 1 and "optimizer" not in state:
        state = {"optimizer" if key == optimizers[0] else key: value for key, value in state.items()}
        how += [] if optimizers == ["optim"] else [f"{optimizers[0]!r} is the optimizer"]
    return state, how


def step_of(state: Mapping[str, Any]) -> int | None:
    """The training step, if a value of the state is named so."""
    for holder in (state, *(state.get(key) for key in _TRAINERS)):
        for key in _STEPS:
            value = holder.get(key) if isinstance(holder, dict) else None
            if isinstance(value, Stored) and prod(value.shape) == 1 and value.dtype in ("int32", "int64"):
                value = value.read().item()
            if type(value) is int:
                return value
    return None


def _lifted(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The contents of a key moved one level up; what has a namesake there stays below."""
    within = state[key]
    stays = {k: v for k, v in within.items() if k in state}
    rest = {k: v for k, v in state.items() if k != key}
    return {**{k: v for k, v in within.items() if k not in stays}, **rest, **({key: stays} if stays else {})}


def _with_model(state: dict[str, Any], optimizers: list[str], how: list[str]) -> dict[str, Any]:
    model = next((key for key in _MODELS if _is_model(state.get(key))), None)
    if model is None:
        at_top = [key for key, value in state.items() if _is_of_model(key, value)]
        named = [key for key, value in state.items() if _has_fqns(value) and key not in optimizers]
        if at_top:
            state = {"model": {key: state[key] for key in at_top}, **_without(state, at_top)}
            how.append("the model's names stand at the top")
        elif len(named) == 1:
            model = named[0]
    if model is not None and model != "model" and "model" not in state:
        state = {"model": state[model], **_without(state, [model])}
        how.append(f"{model!r} is the model")
    return {**state, "model": fqns.model_state(state["model"])} if _is_model(state.get("model")) else state


def _without(state: Mapping[str, Any], keys: list[str]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    return isinstance(value, Stored)


def _is_model(value: Any) -> bool:
    return isinstance(value, dict) and not _is_optimizer(value) and _holds_tensors(value)


def _has_fqns(value: Any) -> bool:
    return _is_model(value) and all(isinstance(v, Stored) for v in value.values()) and any("." in k for k in value)


def _is_of_model(key: str, value: Any) -> bool:
    return key not in _NO_PARAMETERS if isinstance(value, Stored) else key.endswith("_extra_state")


def _is_application(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and any(_is_model(value.get(key)) for key in _MODELS)
        and any(map(_is_optimizer, value.values()))
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return "param_groups" in value or isinstance(value.get(_BY_NAME), dict) or _is_flattened(value)


def _is_flattened(value: Mapping[Any, Any]) -> bool:
    return bool(value) and all(isinstance(key, str) and key.startswith(("param_groups.", "state.")) for key in value)


def _optimizer(saved: Mapping[str, Any], model: Any, where: Place) -> dict[str, Any]:
    if _is_flattened(saved):
        saved = _unflattened(saved, model if isinstance(model, dict) else {})
    elif "param_groups" not in saved:
        rest = {key: value for key, value in saved.items() if key != _BY_NAME}
        saved = {**rest, "param_groups": _groups(saved[_BY_NAME])}
    state, groups = saved.get("state", {}), saved["param_groups"]
    if not isinstance(state, dict) or not isinstance(groups, list) or not all(map(_is_group, groups)):
        return dict(saved)  # no optimizer of torch: kept as it is
    params = [p for group in groups for p in group.get("params", ())]
    if all(type(p) is int for p in params) and all(str(key).isdecimal() for key in state):
        # torch.optim's numbers: DCP made texts of them, as of all keys.
        saved = {**saved, "state": {int(key): value for key, value in state.items()}}
    return fqns.optimizer_state(saved, where)


def _is_group(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("params", []), (list, tuple))


def _unflattened(flat: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """``state.<fqn>.<key>`` and ``param_groups.<fqn>.<setting>`` nested again. The format does not keep the groups."""
    settings: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith("param_groups."):
            name, _, setting = key.removeprefix("param_groups.").rpartition(".")
            settings.setdefault(name, {})[setting] = value
    state: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        if key.startswith("state."):
            name, *steps, last = _split(key.removeprefix("state."), settings, model)
            at = state.setdefault(name, {})
            for step in steps:
                at = at.setdefault(step, {})
            at[last] = value
    return {"state": state, "param_groups": _groups(settings)}


def _groups(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of the parameters that have equal settings, in the order of their first."""
    groups: dict[Any, dict[str, Any]] = {}
    for name, chosen in settings.items():
        chosen = chosen if isinstance(chosen, dict) else {}
        alike = tuple(sorted((str(setting), _comparable(value)) for setting, value in chosen.items()))
        groups.setdefault(alike, {**chosen, "params": []})["params"].append(name)
    return list(groups.values())


def _split(key: str, *known: Mapping[str, Any]) -> list[str]:
    """A parameter's name and the keys behind it: one, or more where its state is nested."""
    name = key
    while "." in name:
        name = name.rpartition(".")[0]
        if any(name in names for names in known):
            return [name, *key[len(name) + 1 :].split(".")]
    name, _, last = key.rpartition(".")
    return [name, last]


def _comparable(value: Any) -> str:
    if isinstance(value, Stored) and value.nbytes <= 64:  # a learning rate may be a tensor
        return f"{value.dtype} {value.read().tolist()}"
    return repr(value)


def own_items(items: Mapping[str, Any], where: Place) -> tuple[dict[str, Any], list[str]]:
    """The items with the only model as ``model`` and the only optimizer as ``optimizer``, and what was taken for which.

    Several models or optimizers keep the names that they have. Items that are neither stay as they are.
    """
    clear = {key: value for key, value in items.items() if isinstance(value, dict) and _is_regular(value)}
    with damaged_as(f"{where}: a model or an optimizer in it is not one"):
        named, how = own_names(clear, where)
    state: dict[str, Any] = {}
    for key, value in named.items():
        state[key] = fqns.model_state(value) if key != "model" and _is_bare_model(value) else value
    for key, value in items.items():
        if key not in clear:
            if key in state:
                raise Damaged(f"{where}: both an item and a part of another are named {key!r}")
            state[key] = value
    return state, how


def step_in(state: Mapping[str, Any]) -> int | None:
    """The training step, if an item is named so or holds a number named so."""
    steps = [item[key] for item in state.values() if isinstance(item, dict) for key in _STEPS if key in item]
    return next((step for step in [step_of(state), *steps] if type(step) is int), None)


def _is_regular(item: Mapping[Any, Any]) -> bool:
    """Whether an item is none, or a whole optimizer: not one of which each rank names other parameters."""
    if "param_groups" not in item:
        return True
    groups = item["param_groups"]
    return isinstance(groups, list) and all(
        isinstance(group, dict) and not isinstance(group.get("params"), PerRank) for group in groups
    )


def _is_bare_model(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and all(isinstance(key, str) and isinstance(value, Stored) for key, value in item.items())
        and any("float" in value.dtype for value in item.values())
    )
