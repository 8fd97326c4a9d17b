"""Checkpoints of named items (a model, an optimizer, a trainer's progress) under our names.

Readers of formats whose users name what they save call `own_items`. Never renames what it is not sure of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats import fqns
from holdfast.formats.dcp.names import own_names, step_of
from holdfast.formats.simplified import PerRank
from holdfast.formats.stored import Stored
from holdfast.storage.place import Place

_STEPS = ("step", "global_step", "iteration")


def own_items(items: Mapping[str, Any], where: Place) -> tuple[dict[str, Any], list[str]]:
    """The items with the only model as ``model`` and the only optimizer as ``optimizer``, and what was taken for which.

    Several models or optimizers keep the names that they have. Items that are neither stay as they are.
    """
    clear = {key: value for key, value in items.items() if isinstance(value, dict) and _is_regular(value)}
    try:
        found, how = own_names(clear, where)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, Damaged):
            raise
        raise Damaged(f"{where}: a model or an optimizer in it is not one: {type(error).__name__}: {error}") from None
    state: dict[str, Any] = {}
    for key, value in found.items():
        state[key] = fqns.model_state(value) if key != "model" and _is_model(value) else value
    for key, value in items.items():
        if key not in clear:
            if key in state:
                raise Damaged(f"{where}: both an item and a part of another are named {key!r}")
            state[key] = value
    return state, how


def step_in(state: Mapping[str, Any]) -> int | None:
    """The training step, if an item is named so or holds a number named so."""
    found = step_of(state)
    for item in state.values() if found is None else ():
        for key in _STEPS:
            if isinstance(item, dict) and type(item.get(key)) is int:
                return int(item[key])
    return found


def prove_joined(state: Mapping[str, Any], where: Place, instead: str) -> None:
    """Raise Unsupported if most tensors of a joined state are others for each rank, and none says where it belongs.

    ``instead``: how to save so that they do. What counts are floating point tensors: generators differ rightly.
    """
    whole, apart = 0, []
    todo: list[tuple[str, Any]] = [("", state)]
    while todo:
        at, node = todo.pop()
        if isinstance(node, dict):
            todo += [(f"{at}/{key}" if at else str(key), value) for key, value in node.items()]
        elif isinstance(node, PerRank):
            apart += [at] * any(isinstance(v, Stored) and "float" in v.dtype for v in node.values)
        else:
            whole += isinstance(node, Stored) and "float" in node.dtype
    if len(apart) > whole:
        raise Unsupported(
            f"{where}: {len(apart)} tensors, such as {min(apart)}, differ between its files. If these are the parts "
            f"that ranks held, nothing says where they belong: {instead}. If the numbers in the names are steps, open "
            "one of the files"
        )


def _is_regular(item: Mapping[Any, Any]) -> bool:
    """Whether an item is none, or a whole optimizer: not one of which each rank names other parameters."""
    if "param_groups" not in item:
        return True
    groups = item["param_groups"]
    return isinstance(groups, list) and all(
        isinstance(group, dict) and not isinstance(group.get("params"), PerRank) for group in groups
    )


def _is_model(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and all(isinstance(key, str) and isinstance(value, Stored) for key, value in item.items())
        and any("float" in value.dtype for value in item.values())
    )
