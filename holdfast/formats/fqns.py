"""Foreign names as ours: prefixes of wrappers removed, and optimizer state by FQN where the file has the names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from holdfast.errors import Damaged
from holdfast.formats.stored import float_scalar
from holdfast.storage.place import Place

_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.", "_forward_module.")


def plain_fqn(name: str) -> str:
    """An FQN without what FSDP1, torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        if wrapper in name:
            name = name.replace(wrapper, "")
    return name


def unwrapped(keys: Iterable[Any]) -> dict[Any, Any]:
    """Each key of a state dict with its FQN: wrappers off, and ``module.`` of DDP if all have it.

    Keys that are no text stay as they are, and all do if two would become one.
    """
    keys = list(keys)
    fqns = {key: plain_fqn(key) if isinstance(key, str) else key for key in keys}
    texts = [fqn for fqn in fqns.values() if isinstance(fqn, str)]
    if texts and all(fqn.startswith("module.") for fqn in texts):
        fqns = {k: v.removeprefix("module.") if isinstance(v, str) else v for k, v in fqns.items()}
    return fqns if len(set(fqns.values())) == len(fqns) else {key: key for key in keys}


def model_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A module's state dict under plain FQNs."""
    called = unwrapped(state)
    return {called[key]: value for key, value in state.items()}


def optimizer_state(saved: Mapping[Any, Any], where: Place, ids: Mapping[int, str] | None = None) -> dict[str, Any]:
    """An optimizer's state dict as ours: ``state`` by FQN, ``param_groups`` with the FQNs as ``params``.

    Integer ids become names if ``ids`` or the groups' ``param_names`` say which, else stay integers (a live optimizer
    knows its own). A step that is a number becomes the float32 scalar that torch's optimizers keep. Raises Damaged if
    a group's parameters are neither.
    """
    groups = [dict(group) for group in saved.get("param_groups", ())]
    known: dict[Any, str] = dict(ids or {})
    members: list[Any] = []
    for group in groups:
        params, names = _params(group, where), group.pop("param_names", None)
        if isinstance(names, (list, tuple)) and len(names) == len(params) and all(isinstance(n, str) for n in names):
            known.update(zip(params, names, strict=True))
        members += params
    state = saved.get("state", {})
    called = unwrapped([known.get(key, key) for key in [*state, *members]])

    def name(key: Any) -> Any:
        return called[known.get(key, key)]

    for group in groups:
        if "params" in group:
            group["params"] = [name(key) for key in group["params"]]
    return {
        "state": {name(key): _own_step(value, where) for key, value in state.items()},
        "param_groups": groups,
        **{key: value for key, value in saved.items() if key not in ("state", "param_groups")},
    }


def _params(group: Mapping[str, Any], where: Place) -> Sequence[Any]:
    params = group.get("params", ())
    if isinstance(params, (list, tuple)) and all(isinstance(param, (int, str)) for param in params):
        return params
    raise Damaged(f"{where}: `params` of a parameter group are no list of names or numbers: the file was altered")


def _own_step(state: Any, where: Place) -> Any:
    if not isinstance(state, Mapping) or type(state.get("step")) not in (int, float):
        return state
    return {**state, "step": float_scalar(float(state["step"]), where)}
