"""What a tree from a torch file is: a module's state dict, an optimizer's, or a trainer's dict of such and more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import Unsupported
from holdfast.events import log
from holdfast.formats import fqns
from holdfast.formats.machine import arrays
from holdfast.formats.machine.pickles import Record
from holdfast.formats.sharded import is_sharded, share_of
from holdfast.formats.simplified import simplified
from holdfast.formats.stored import Opaque, Stored, joined
from holdfast.storage.place import Place

# What trainers call the weights. The second row counts only where there is nothing of the first.
_MODEL_KEYS = (
    ("model", "state_dict", "model_state_dict", "module", "model_state", "model_states", "modelstate"),
    ("net", "network", "net_state_dict", "network_state_dict", "model_dict", "model_weights", "weights", "params"),
)  # fmt: skip
_STEP_KEYS = (
    "step", "global_step", "iteration", "iter", "iter_num", "steps", "global_steps", "num_steps", "num_updates",
    "train_step", "current_step",
)  # fmt: skip
_DEEP = 4
"""How far below a key tensors are looked for."""


class Arranged(NamedTuple):
    """A state under our names, and the training step if it is known."""

    state: dict[str, Any]
    step: int | None


def is_tensor(value: object) -> bool:
    """Whether a leaf is a tensor or stands for one: a sharded one, an array of NumPy, one that cannot be read."""
    return isinstance(value, (Stored, Opaque)) or is_sharded(value) or arrays.is_array(value)


def is_model_state(value: object) -> bool:
    """Whether this is a module's bare state dict: tensors by name, and at most extra state of modules besides."""
    return (
        isinstance(value, dict)
        and any(is_tensor(v) for v in value.values())
        and all(isinstance(k, str) and (is_tensor(v) or k.endswith("_extra_state")) for k, v in value.items())
    )


def is_optimizer_state(value: object) -> bool:
    """Whether this is an optimizer's state dict."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and isinstance(value.get("param_groups"), (list, tuple))
        and all(isinstance(group, dict) for group in value["param_groups"])
    )


def arranged(tree: Any, where: Place) -> Arranged:
    """What a torch file holds, as a state under our names. Raises Unsupported for a whole module or one rank's part.

    The only model becomes ``model`` and the only optimizer ``optimizer``; several keep their own keys one level below.
    """
    _refuse_module(tree, "", where)
    tree = simplified(tree, where)
    if is_optimizer_state(tree):
        return Arranged({"optimizer": optimizer(tree, where)}, None)
    if is_model_state(tree):
        return Arranged({"model": model(tree, where)}, None)
    if not isinstance(tree, dict):
        return Arranged({"state": tree}, None)
    models = _models(tree, where)
    optimizers = _optimizers(tree, where)
    taken = {*(["model"] if models else ()), *(["optimizer"] if optimizers else ())}
    state: dict[str, Any] = {}
    for key, value in tree.items():
        if key in models:
            state["model"] = models[key] if len(models) == 1 else models
        elif key in optimizers:
            state["optimizer"] = optimizers[key] if len(optimizers) == 1 else optimizers
        else:
            name = key
            while name in taken:
                name = f"{name}_"
                log.warning("%s: what lies under %r is no state of one, and is called %r here", where, key, name)
            state[name] = fqns.model_state(value) if is_model_state(value) else value
    return Arranged(state, step_of(tree))


def model(state: Mapping[Any, Any], where: Place) -> dict[Any, Any]:
    """A module's state dict under plain names. Raises Unsupported where it holds only one rank's part of a tensor."""
    return fqns.model_state(whole_tensors(state, where))


def whole_tensors(state: Mapping[Any, Any], where: Place) -> dict[Any, Any]:
    """A module's state dict under its own names. Raises Unsupported where it holds one rank's part of a tensor."""
    return {key: _whole(value, f"{where}: {key}") for key, value in state.items()}


def optimizer(state: Mapping[Any, Any], where: Place) -> dict[str, Any]:
    """An optimizer's state dict as ours. Raises Unsupported where it holds only one rank's part of a tensor."""
    leaves = {
        key: {k: _whole(v, f"{where}: {key}/{k}") for k, v in leaf.items()} if isinstance(leaf, dict) else leaf
        for key, leaf in state["state"].items()
    }
    return fqns.optimizer_state({**state, "state": leaves}, where)


def step_of(tree: Mapping[Any, Any]) -> int | None:
    """The training step at the top of a trainer's dict."""
    for key in _STEP_KEYS:
        value = tree.get(key)
        if isinstance(value, Stored) and value.shape == () and value.dtype in ("int64", "int32"):
            value = int(value.read())
        if type(value) is int and value >= 0:
            return value
    return None


def _models(tree: Mapping[Any, Any], where: Place) -> dict[str, Any]:
    """Top keys under which a model's weights lie, with those."""
    for keys in _MODEL_KEYS:
        for key in keys:
            _refuse_module(tree.get(key), key, where)
        models = {
            key: tree[key]
            for key in keys
            if key in tree and _holds_tensors(tree[key], _DEEP) and not is_optimizer_state(tree[key])
        }
        if models:
            return {key: _each_model(value, where) for key, value in models.items()}
    return {}


def _each_model(value: Any, where: Place) -> Any:
    if isinstance(value, (list, tuple)):
        return [_each_model(one, where) for one in value]
    return model(value, where) if isinstance(value, dict) else value


def _optimizers(tree: Mapping[Any, Any], where: Place) -> dict[str, Any]:
    """Top keys under which state of optimizers lies, with that: one, a list or a dict of several."""
    optimizers: dict[str, Any] = {}
    for key, value in tree.items():
        if is_optimizer_state(value):
            optimizers[key] = optimizer(value, where)
        elif isinstance(value, (list, tuple)) and value and all(map(is_optimizer_state, value)):
            each = [optimizer(one, where) for one in value]
            optimizers[key] = each[0] if len(each) == 1 else each
        elif isinstance(value, dict) and value and all(map(is_optimizer_state, value.values())):
            by_name = {name: optimizer(one, where) for name, one in value.items()}
            optimizers[key] = next(iter(by_name.values())) if len(by_name) == 1 else by_name
    return optimizers


def _holds_tensors(value: Any, depth: int) -> bool:
    if isinstance(value, (dict, list, tuple)):
        inside = value.values() if isinstance(value, dict) else value
        return depth > 0 and any(_holds_tensors(v, depth - 1) for v in inside)
    return is_tensor(value)


def _refuse_module(value: Any, key: str, where: Place) -> None:
    held = value.state if isinstance(value, Record) else None
    if isinstance(value, Record) and isinstance(held, dict) and "_parameters" in held and "_modules" in held:
        raise Unsupported(
            f"{where}{f', under {key!r},' if key else ''} is a whole module ({value.name}), pickled with the names of "
            "its code; load it with the program that wrote it, and save module.state_dict() instead"
        )


def _whole(value: Any, what: str) -> Any:
    """A tensor as it is; of a sharded one that this rank has whole, the tensor itself."""
    if not isinstance(value, Record) or not is_sharded(value):
        return value
    share = share_of(value, 0, what)
    tensor = joined(share.dtype, share.shape, share.parts)
    if tensor.fault() is None:
        return tensor
    kind = value.name.rpartition(".")[2]
    raise Unsupported(
        f"{what} is a {kind} of which this file holds one rank's part, and nothing says where the others are; save "
        "with torch.distributed.checkpoint, or gather it (full_tensor()) before torch.save"
    )
