"""Optimizer state that was saved under torch's integer ids, called by the names of a live optimizer's parameters.

`load` asks `names_for_ids` before it matches. Never guesses: only the live optimizer knows which parameter is which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import Mismatch
from holdfast.ondisk import names
from holdfast.ondisk.values import JSON
from holdfast.ranks.ranks import Ranks
from holdfast.state import optimizers
from holdfast.state.own_optimizers import is_optimizer_like
from holdfast.state.walk import Walk


def names_for_ids(
    path: str, saved: Mapping[str, JSON], into: Mapping[str, Any]
) -> tuple[dict[str, str], dict[str, JSON]]:
    """For the optimizer saved at ``path``: names of its state by integer to those by FQN, and the groups' ``params``.

    Both empty if it was saved under names, or if ``into`` has no optimizer there. As in torch, the n-th parameter of
    the saved groups is the n-th of the live ones; raises Mismatch if their lengths differ.
    """
    groups = _groups(path, saved)
    live = _at(into, names.split(path))
    if not groups or not live or not all(type(id_) is int for ids in groups for _, id_ in ids):
        return {}, {}
    known = Walk(Ranks(0, 1), into).known
    called = [optimizers.parameter_fqns(path, optimizer, known) for optimizer in live]
    fqns = [group for of_one in called for group in of_one]
    if [len(ids) for ids in groups] != [len(group) for group in fqns]:
        raise Mismatch(
            f"{path} was saved under integer ids in groups of {[len(ids) for ids in groups]} parameters, here are "
            f"groups of {[len(group) for group in fqns]}: build the optimizer with the same groups"
        )
    states: dict[str, str] = {}
    params: dict[str, JSON] = {}
    for ids, group in zip(groups, fqns, strict=True):
        for (at, id_), fqn in zip(ids, group, strict=True):
            states[f"{path}/state/{id_}"] = names.join([*names.split(path), "state", fqn])
            params[at] = fqn
    return states, params


def optimizers_of(saved: Mapping[str, JSON]) -> list[str]:
    """Paths of the optimizers that a checkpoint holds."""
    end = "/param_groups/0/params/0"
    return [name.removesuffix(end) for name in saved if name.endswith(end)]


def _groups(path: str, saved: Mapping[str, JSON]) -> list[list[tuple[str, JSON]]]:
    """For each saved group the names and values of its ``params``; a group may have none."""
    groups: list[list[tuple[str, JSON]]] = []
    while True:
        at = f"{path}/param_groups/{len(groups)}"
        ids: list[tuple[str, JSON]] = []
        while (name := f"{at}/params/{len(ids)}") in saved:
            ids.append((name, saved[name]))
        if not ids and f"{at}/lr" not in saved:
            return groups
        groups.append(ids)


def _at(into: Any, keys: tuple[str, ...]) -> list[Any]:
    for key in keys:
        if isinstance(into, (list, tuple)) and key.isdecimal() and int(key) < len(into):
            into = into[int(key)]
        else:
            into = into.get(key) if isinstance(into, Mapping) else None
    nodes = into if isinstance(into, (list, tuple)) else [into]
    return list(nodes) if nodes and all(map(is_optimizer_like, nodes)) else []
