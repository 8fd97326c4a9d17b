"""The one table of what becomes of each kind of object in a state: what is saved, under which names, how it comes back.

The walk asks `rule_of` for each node, and docs/states.md shows the table. Never saves or loads anything itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import nn

from holdfast.state import optimizers
from holdfast.state.own_optimizers import is_optimizer_like
from holdfast.state.per_rank import RNG, PerRank, is_stateful
from holdfast.state.tensors import is_tensor_leaf
from holdfast.state.trees import is_container, only_values

Kind = Literal[
    "tensor", "per rank", "rng", "module", "modules", "optimizer", "own optimizer", "optimizers", "values", "container",
    "object", "value",
]  # fmt: skip


class Rule(NamedTuple):
    """One kind of object. ``is_one`` tells it; the first rule that fits counts. The rest says what becomes of it."""

    kind: Kind
    is_one: Callable[[Any], bool]
    what: str
    saved: str
    named: str
    comes_back: str
    refused: str


def _is_list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda node: type(node) in (list, tuple) and bool(node) and all(map(kind, node))


def _is_module(node: Any) -> bool:
    return isinstance(node, nn.Module)


def _is_own_optimizer(node: Any) -> bool:
    return is_stateful(node) and is_optimizer_like(node)


RULES = (
    Rule(
        "tensor",
        is_tensor_leaf,
        "tensor",
        "its numbers: of a sharded tensor this rank's boxes, of a subclass with `__tensor_flatten__` each inner tensor",
        "the path of keys; an inner tensor has its attribute's name below that",
        "filled in place, where it lies",
        "meta, sparse and torch-quantized tensors, `Partial` placements, subclasses without `__tensor_flatten__`",
    ),
    Rule(
        "per rank",
        lambda node: isinstance(node, PerRank),
        "value of each rank (`PerRank`)",
        "every rank's own value",
        "the path, once for all ranks",
        "`value` is replaced, or the object's `load_state_dict` called; on another world size `elsewhere` decides",
        "tensors inside that have no plain bytes",
    ),
    Rule(
        "rng",
        lambda node: isinstance(node, RNG),
        "random generators (`RNG`)",
        "every rank's own generators",
        "the path, once for all ranks",
        "the generators are set; a rank that did not exist gets a stream of its own",
        "",
    ),
    Rule(
        "module",
        _is_module,
        "module",
        "what its `state_dict()` holds, wrappers (DDP, FSDP, `torch.compile`, Fabric) taken off",
        "the FQN is one key below the path",
        "parameters and buffers are filled in place, then load post-hooks run. A submodule that overrides "
        "`state_dict`, `_save_to_state_dict`, `_load_from_state_dict` or `load_state_dict`, or has hooks on them, is "
        "loaded by these from new memory, laid out as it is here; extra state goes to `set_extra_state`",
        "an entry that nothing takes back, unless it equals the present one; lazy parameters before the first pass",
    ),
    Rule(
        "modules",
        _is_list_of(_is_module),
        "list of modules",
        "as for each of them",
        "all at the path of the list if no name stands twice (pipeline chunks), else each at its position",
        "as for each of them",
        "",
    ),
    Rule(
        "optimizer",
        optimizers.is_plain,
        "optimizer with torch's `state_dict`, `ZeroRedundancyOptimizer`",
        "the state of each parameter however nested, state under other keys, the groups' settings",
        "`state/<FQN>/<key>` and `param_groups/<i>/<setting>`; integers in the place of FQNs if the state does not "
        "hold the parameters",
        "state that is there is filled in place, other state is made; state that was not saved goes, and stands in "
        "`Loaded.cleared`. Settings are set in place, group by group, by the names of the parameters. Then "
        "`__setstate__` and load post-hooks run, as in torch",
        "plain tensors of another shape beside a sharded parameter; group tensors over 1 MiB",
    ),
    Rule(
        "own optimizer",
        _is_own_optimizer,
        "optimizer with methods of its own, wrapper of optimizers",
        "what its `state_dict()` holds",
        "as its keys, with FQNs in the place of parameter numbers",
        "its `load_state_dict` is called, with tensors laid out as the parameters are",
        "over flattened parameters of FSDP1",
    ),
    Rule(
        "optimizers",
        _is_list_of(lambda node: optimizers.is_plain(node) or _is_own_optimizer(node)),
        "list of optimizers",
        "as for each of them",
        "all at the path of the list if each parameter is named and in one of them alone, else each at its position",
        "as for each of them",
        "",
    ),
    Rule(
        "values",
        lambda node: is_container(node) and only_values(node),
        "dict, list, tuple of plain values",
        "the values, their types and their order",
        "the path",
        "dicts and lists are filled in place, a tuple is replaced",
        "what no checkpoint holds: code, and objects without a state dict",
    ),
    Rule(
        "container",
        is_container,
        "dict, list, tuple of other things",
        "each item",
        "keys and positions, joined by `/`",
        "item by item; the container stays the one it is",
        "keys that are no text at the top; a plain value inside of a tuple that also holds tensors",
    ),
    Rule(
        "object",
        is_stateful,
        "object with `state_dict()` and `load_state_dict()`",
        "what its `state_dict()` holds",
        "as its keys, below the path",
        "its `load_state_dict` is called with what was saved, in new tensors",
        "what no checkpoint holds inside of it",
    ),
    Rule("value", lambda node: True, "anything else", "the value", "the path", "replaced", "what no checkpoint holds"),
)
"""In the order in which they are tried."""


_OF_DICTS = tuple(rule for rule in RULES if rule.kind in ("values", "container"))
"""All that a dict can be, of which a state of bare tensors has as many as parameters."""


def rule_of(node: Any) -> Rule:
    """The rule for a node of a state."""
    return next(rule for rule in (_OF_DICTS if type(node) is dict else RULES) if rule.is_one(node))
