"""Parameter groups of optimizers: what is saved of their settings, and which saved group belongs to which live one.

The collectors of optimizers call `settings`, `match` and `put`. Never goes by the position of a group if the
checkpoint names its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import names, values
from holdfast.state.kinds import is_zero
from holdfast.state.leaves import Saved

_NOT_SETTINGS = ("params", "param_names")
"""Derivable from the live optimizer, and different on every pipeline stage."""

_OF_SCHEDULERS = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")
"""What torch's schedulers put into groups: one that is attached to the live optimizer needs it, saved or not."""


Live = list[tuple[Any, dict[str, Any], list[str]]]
"""The groups of live optimizers: the optimizer, the group, and the names of its parameters."""

Settings = dict[str, Any]


def settings(path: str, index: int, group: Mapping[str, Any]) -> Settings:
    """The settings of a group as JSON by key. Raises Unsupported, naming what a checkpoint does not keep."""
    encoded = {}
    for key, value in group.items():
        if key in _NOT_SETTINGS:
            continue
        at = f"{path}/param_groups/{index}/{key}"
        try:
            encoded[str(key)] = values.encode_tree(value, None)
        except values.Refused as error:
            raise Unsupported(f"{at}{error.path}: {error.reason}") from None
    return encoded


def saved_parameters(path: str, saved: Saved) -> set[str]:
    """The names of all parameters in the saved groups of the optimizer at ``path``."""
    at = names.child(path, "param_groups")
    listed = set()
    for name in saved.below(at):
        keys = name[len(at) + 1 :].split("/")
        if len(keys) >= 2 and keys[1] == "params" and name in saved.values:
            value = saved.values[name]
            listed.update(value if isinstance(value, list) else [value])
    return {fqn for fqn in listed if isinstance(fqn, str)}


def match(path: str, live: Sequence[Sequence[str]], tree: Sequence[Mapping[str, Any]]) -> list[Settings]:
    """For each live group the settings of the saved one, by the names of its parameters. Raises Mismatch if unclear."""
    if not any("params" in group for group in tree):
        # A format that does not keep the parameters of a group (Megatron's): only their order is known.
        if len(tree) != len(live):
            raise Mismatch(
                f"{path}: {len(tree)} groups were saved without the names of their parameters, here there are "
                f"{len(live)}; build the optimizer with as many groups, or leave param_groups out by only="
            )
        return [_settings_of(group) for group in tree]
    saved_of = {fqn: group for group in tree for fqn in group.get("params", ())}
    matched = []
    for index, fqns in enumerate(live):
        sources = {id(saved_of[f]): saved_of[f] for f in fqns if f in saved_of}
        if not fqns and index < len(tree):
            sources = {0: tree[index]}
        candidates = [_settings_of(group) for group in sources.values()]
        for other in candidates[1:]:
            odd = sorted(k for k in {*candidates[0], *other} if not _same(candidates[0].get(k), other.get(k)))
            if odd:
                shown = ", ".join(f"{k} {candidates[0].get(k)} and {other.get(k)}" for k in odd)
                raise Mismatch(
                    f"{path}: the parameters of group {index} were saved in groups that differ ({shown}); build the "
                    "optimizer with the same grouping, or leave param_groups out by only="
                )
        matched.append(candidates[0] if candidates else {})
    return matched


def put(path: str, live: Live, tree: Sequence[Mapping[str, Any]]) -> None:
    """Set the live groups to the saved settings, in place, and let each optimizer see it as torch does after a load."""
    for (optimizer, group, _), new in zip(live, match(path, [fqns for _, _, fqns in live], tree), strict=True):
        _set(group, new, optimizer)
    for optimizer in {id(optimizer): optimizer for optimizer, _, _ in live}.values():
        if is_zero(optimizer):
            optimizer._sync_param_groups(optimizer.param_groups, optimizer.optim.param_groups)
        inner = optimizer.optim if is_zero(optimizer) else optimizer
        inner.__setstate__({"state": inner.state, "param_groups": inner.param_groups})
        for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
            hook(optimizer)


def _set(group: dict[str, Any], new: Settings, optimizer: Any) -> None:
    if new:
        kept = {*_NOT_SETTINGS, *_OF_SCHEDULERS, *optimizer.defaults}
        for key in [key for key in group if key not in new and key not in kept]:
            del group[key]
    for key, value in new.items():
        present = group.get(key)
        if isinstance(present, torch.Tensor) and not isinstance(value, torch.Tensor):
            present.fill_(value)  # saved as a number, by an older version or of a number
        elif isinstance(present, torch.Tensor) and present.shape == value.shape and present.dtype == value.dtype:
            present.copy_(value)
        else:
            group[key] = value


def _settings_of(group: Mapping[str, Any]) -> Settings:
    return {key: value for key, value in group.items() if key not in _NOT_SETTINGS}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)
    return bool(one == other)
