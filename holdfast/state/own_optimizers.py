"""Optimizers with a ``state_dict`` of their own, and wrappers around optimizers: their own methods are called.

The table names `gather` and `hand_back`. Their state dicts call parameters by number, as torch's do. Here they go by
name, so that what was saved of a parameter finds it whatever its number is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import names
from holdfast.ondisk.values import JSON
from holdfast.ranks.ranks import Ranks
from holdfast.state import groups, objects, optimizers, trees
from holdfast.state.leaves import Target
from holdfast.state.optimizers import parameters_of
from holdfast.state.parameters import Known, call_parameters, entries_beside
from holdfast.state.trees import bare_tensors
from holdfast.state.walk import Loading, Put, Walk


def is_optimizer_like(node: object) -> bool:
    """Whether an object has parameter groups, as torch's optimizers do."""
    param_groups = getattr(node, "param_groups", None)
    return (
        isinstance(param_groups, list)
        and bool(param_groups)
        and all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in param_groups)
    )


def gather(walk: Walk, path: str, optimizer: Any, put: Put) -> None:
    """Add what the optimizer's state dict holds, with names in the place of numbers."""
    fqns = called_of(path, optimizer, walk.known)
    if fqns is None:
        objects.gather(walk, path, optimizer, put)
        return
    parameter = parameter_of(optimizer, fqns)

    def add(name: str, tensor: Any) -> None:
        for entry in entries_beside(name, tensor, parameter(name), None, walk.ranks):
            walk.into.add(entry)
        trees.note_tensor(name, tensor, parameter(name), walk.into)

    trees.add_tree(path, named(optimizer.state_dict(), fqns), walk.into, add, owned=True)


def hand_back(walk: Loading, path: str, optimizer: Any, put: Put) -> None:
    """Hand the optimizer its state dict, with its own numbers in the place of names."""
    fqns = called_of(path, optimizer, walk.known)
    if fqns is None:
        objects.hand_back(walk, path, optimizer, put)
        return
    rest = iter(fqns)
    live = [[next(rest) for _ in group["params"]] for group in optimizer.param_groups]

    def load(tree: Any) -> None:
        optimizer.load_state_dict(numbered(path, tree, live))

    def present() -> dict[str, Any]:
        try:
            return dict(bare_tensors(path, named(optimizer.state_dict(), fqns)))
        except Exception:  # noqa: BLE001 - it took its state, and this is asked for the report alone
            return {}

    maker = walk.maker(parameter_of=parameter_of(optimizer, fqns))
    undo = partial(objects.undoing, optimizer)
    walk.into.handback.targets.append(Target(path, load, maker, undoing=undo, present=present))


def called_of(path: str, optimizer: Any, known: Known) -> list[str] | None:
    """The name of each parameter, in torch's order; None if the state does not hold them.

    Raises Unsupported for parameters of FSDP1, which are flattened: only torch knows how to name their state.
    """
    parameters = parameters_of(optimizer)
    if not any(id(p) in known for p in parameters):
        return None
    called = [call_parameters(path, parameters, known)[id(p)] for p in parameters]
    if any(named.flat is not None for named in called):
        raise Unsupported(
            f"{path}: {type(optimizer).__qualname__} has a state_dict() of its own, over flat parameters of FSDP1: "
            "how its state is sharded cannot be told; use FSDP2 (fully_shard)"
        )
    return [named.fqn for named in called]


def named(tree: Any, fqns: Sequence[str]) -> Any:
    """A state dict with the parameters' names in the place of their numbers, wherever it is nested."""
    if not isinstance(tree, dict):
        return tree
    numbers = _numbers(tree, len(fqns))
    if numbers is None:
        return {key: named(value, fqns) for key, value in tree.items()} if type(tree) is dict else tree
    called = dict(zip(numbers, fqns, strict=True))
    state = {called.get(key, key): value for key, value in tree["state"].items()}
    return {
        **tree,
        "state": state,
        "param_groups": [{**g, "params": [called[n] for n in g["params"]]} for g in tree["param_groups"]],
    }


def numbered(path: str, tree: Any, live: Sequence[Sequence[str]]) -> Any:
    """The inverse of `named`, for the parameters that the groups of the live optimizer have, by name."""
    if not isinstance(tree, dict):
        return tree
    saved_groups = tree.get("param_groups")
    if not isinstance(saved_groups, list) or not isinstance(tree.get("state"), dict):
        return {key: numbered(path, value, live) for key, value in tree.items()} if type(tree) is dict else tree
    if not all(isinstance(g, dict) and all(isinstance(p, str) for p in g.get("params", ())) for g in saved_groups):
        return tree
    number = {fqn: i for i, fqn in enumerate(fqn for group in live for fqn in group)}
    matched = groups.match(path, live, saved_groups)
    kept = [{**settings, "params": [number[fqn] for fqn in fqns]} for settings, fqns in zip(matched, live, strict=True)]
    state = {number.get(key, key): value for key, value in tree["state"].items()}
    listed = {fqn for group in saved_groups for fqn in group.get("params", ())}
    return {
        **tree,
        # What belongs to parameters that are not here (of another pipeline stage) has no number.
        "state": {key: value for key, value in state.items() if not (isinstance(key, str) and key in listed)},
        "param_groups": kept,
    }


def parameter_of(optimizer: Any, fqns: Sequence[str]) -> Callable[[str], torch.Tensor | None]:
    """A function from the name of a leaf to the parameter whose state it is: the key after ``state`` names it."""
    by_name = dict(zip(fqns, parameters_of(optimizer), strict=True))

    def find(name: str) -> torch.Tensor | None:
        keys = names.split(name)
        return next((by_name[b] for a, b in pairwise(keys) if a == "state" and b in by_name), None)

    return find


def _numbers(tree: Mapping[str, Any], count: int) -> list[int] | None:
    """The numbers of all parameters in their order, if ``tree`` is a state dict as torch's optimizers give it."""
    param_groups = tree.get("param_groups")
    if not isinstance(tree.get("state"), dict) or not isinstance(param_groups, list):
        return None
    if not all(isinstance(group, dict) and isinstance(group.get("params"), (list, tuple)) for group in param_groups):
        return None
    numbers = [number for group in param_groups for number in group["params"]]
    ok = len(numbers) == count and all(type(number) is int for number in numbers) and len(set(numbers)) == count
    return numbers if ok else None


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
