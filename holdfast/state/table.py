"""The one table of what becomes of each kind of object in a state: how it is recognised, gathered, and handed back.

`collect` walks a state with it, for saves and loads alike, and docs/values.md shows it. The rows name the functions
that do the work; those of containers and lists, which come back here for what they hold, stand in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from holdfast.errors import Unsupported
from holdfast.ondisk import names
from holdfast.ranks.ranks import Ranks
from holdfast.state import module_leaves, modules, objects, optimizers, own_optimizers, per_rank, trees
from holdfast.state.kinds import without_fabric
from holdfast.state.leaves import Collected, Entry, Saved, Target
from holdfast.state.per_rank import RNG, PerRank, is_stateful
from holdfast.state.recall import Recall
from holdfast.state.tensors import is_tensor_leaf
from holdfast.state.trees import is_container, only_values
from holdfast.state.walk import Loading, Put, Walk


class Rule(NamedTuple):
    """One kind of object. ``is_one`` recognises it, and the first rule that fits counts.

    A save calls ``gather(walk, path, node, put)``, which adds what there is to ``walk.into``. A load calls
    ``hand_back``, which also adds how the object takes back what was saved; ``put`` stores a new value in its place.
    The rest says for people what becomes of the object.
    """

    is_one: Callable[[Any], bool]
    gather: Callable[[Walk, str, Any, Put], None]
    hand_back: Callable[[Loading, str, Any, Put], None]
    what: str
    saved: str
    comes_back: str


def visit(walk: Walk, path: str, node: Any, put: Put) -> None:
    """Do what the table says of the object at ``path``."""
    node = without_fabric(node)
    rule = rule_of(node)
    if isinstance(walk, Loading):
        rule.hand_back(walk, path, node, put)
    else:
        rule.gather(walk, path, node, put)


def rule_of(node: Any) -> Rule:
    return next(rule for rule in (_OF_DICTS if type(node) is dict else RULES) if rule.is_one(node))


def keep(value: Any) -> None:
    """The ``put`` of an object that nothing can replace."""


def _is_list_of(kind: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda node: type(node) in (list, tuple) and bool(node) and all(map(kind, node))


def _is_module(node: Any) -> bool:
    return isinstance(node, nn.Module)


def _is_own_optimizer(node: Any) -> bool:
    return is_stateful(node) and own_optimizers.is_optimizer_like(node)


def _is_optimizer(node: Any) -> bool:
    return optimizers.is_plain(node) or _is_own_optimizer(node)


def _tensor(walk: Walk, path: str, node: Any, put: Put) -> None:
    walk.plain(path, node)


def _per_rank(walk: Walk, path: str, node: PerRank, put: Put) -> None:
    walk.into.per_rank[path] = per_rank.leaf(path, node.state(), node.put, node.elsewhere)


def _rng(walk: Walk, path: str, node: RNG, put: Put) -> None:
    walk.into.per_rank[path] = per_rank.leaf(path, node.state_dict(), node.load_state_dict, node.rule())


def _modules(walk: Walk, path: str, node: Any, put: Put) -> None:
    for at, module in modules.merged(path, node, walk.has):
        visit(walk, at, module, keep)


def _optimizer(walk: Walk, path: str, node: Any, put: Put) -> None:
    _at_one_path(walk, path, [node])


def _optimizers(walk: Walk, path: str, node: Any, put: Put) -> None:
    """Optimizers of a list share its path if their parameters tell them apart, else each has its position."""
    optimizers_here = [without_fabric(optimizer) for optimizer in node]
    if optimizers.share_a_path(optimizers_here, walk.known, walk.has, path):
        _at_one_path(walk, path, optimizers_here)
        return
    for i, optimizer in enumerate(optimizers_here):
        visit(walk, names.child(path, str(i)), optimizer, keep)


def _at_one_path(walk: Walk, path: str, here: list[Any]) -> None:
    if walk.recall is None:
        optimizers.collect_optimizers(path, here, walk.known, walk.ranks, walk.into, walk.saved)
        return
    params = walk.recall.optimizers(path, here, walk.owners, walk.into)
    if params is not None:
        optimizers.collect_settings(path, here, params, walk.into)
        return
    added = Collected()
    optimizers.collect_optimizers(path, here, walk.known, walk.ranks, added, None)
    walk.into.merge(added)
    walk.recall.note_optimizers(path, here, walk.owners, added)


def _gather_values(walk: Walk, path: str, node: Any, put: Put) -> None:
    trees.add_values(path, node, walk.into, owned=False)


def _hand_values_back(walk: Loading, path: str, node: Any, put: Put) -> None:
    """A container of values is filled where it is, so that other references to it see them."""
    _gather_values(walk, path, node, put)
    fill, fill_some = partial(walk.filling.put, node, put), partial(walk.filling_some.put, node, put)
    walk.into.handback.targets.append(Target(path, fill, put_some=fill_some))


def container(walk: Walk, path: str, node: Any, put: Put) -> None:
    """Visit what a container holds. It is filled in place and keeps its class; a tuple is replaced if it has to be."""
    new_items = list(node) if isinstance(node, tuple) else node
    for at, (key, value) in trees.note_container(path, node, walk.into, in_place=True):
        if is_tensor_leaf(value):  # most are: the table would say the same
            walk.plain(at, value)
        else:
            visit(walk, at, value, partial(new_items.__setitem__, key))
    if isinstance(node, tuple) and isinstance(walk, Loading):
        walk.into.handback.after.append(partial(_put_tuple, node, new_items, put))


def _put_tuple(present: tuple[Any, ...], items: list[Any], put: Put) -> None:
    """Put a new tuple around the same tensors and objects, if a value in it is another now."""
    if any(new is not old for new, old in zip(items, present, strict=True)):
        put(tuple(items))


VALUES = Rule(
    lambda node: is_container(node) and only_values(node),
    _gather_values,
    _hand_values_back,
    "dict, list, tuple of plain values",
    "values, types and order",
    "dicts and lists are filled in place, a tuple is replaced",
)

CONTAINER = Rule(
    is_container,
    container,
    container,
    "dict, list, tuple of other things",
    "each item, by key or position",
    "item by item",
)

_OF_DICTS = (VALUES, CONTAINER)
"""All that a dict can be; a state of bare tensors has one for each parameter."""

RULES = (
    Rule(
        is_tensor_leaf,
        _tensor,
        _tensor,
        "tensor",
        "its numbers, of each rank the boxes that it holds",
        "filled in place",
    ),
    Rule(
        lambda node: isinstance(node, PerRank),
        _per_rank,
        _per_rank,
        "`PerRank`",
        "each rank's value",
        "`value` is replaced; on another number of ranks `elsewhere` decides",
    ),
    Rule(
        lambda node: isinstance(node, RNG),
        _rng,
        _rng,
        "`RNG`",
        "each rank's generators",
        "the generators are set",
    ),
    Rule(
        _is_module,
        module_leaves.gather,
        module_leaves.hand_back,
        "module",
        "its `state_dict()`, without prefixes of DDP, FSDP, `torch.compile` and Fabric",
        "filled in place, or by its own methods",
    ),
    Rule(
        _is_list_of(_is_module),
        _modules,
        _modules,
        "list of modules",
        "each module: at one path if no name occurs twice, otherwise by position",
        "as a module",
    ),
    Rule(
        optimizers.is_plain,
        _optimizer,
        _optimizer,
        "optimizer with torch's `state_dict`",
        "state by parameter name, and the settings of the groups",
        "filled in place; state that was not saved is removed",
    ),
    Rule(
        _is_own_optimizer,
        own_optimizers.gather,
        own_optimizers.hand_back,
        "other optimizer",
        "its `state_dict()`, by parameter name",
        "by its `load_state_dict`",
    ),
    Rule(
        _is_list_of(_is_optimizer),
        _optimizers,
        _optimizers,
        "list of optimizers",
        "each optimizer: at one path if each parameter is in one of them, otherwise by position",
        "as an optimizer",
    ),
    VALUES,
    CONTAINER,
    Rule(
        is_stateful,
        objects.gather,
        objects.hand_back,
        "object with `state_dict()` and `load_state_dict()`",
        "its `state_dict()`",
        "by its `load_state_dict`",
    ),
    Rule(
        lambda node: True,
        _gather_values,
        _hand_values_back,
        "anything else",
        "the value",
        "replaced",
    ),
)
"""In the order in which they are tried."""


def collect(
    state: Mapping[str, Any], ranks: Ranks, saved: Saved | None = None, *, recall: Recall | None = None
) -> Collected:
    """All leaves of ``state`` as this rank holds them, tensors as views of their own memory.

    A load passes what the checkpoint holds as ``saved``; the result then says how to hand it back. A save may pass a
    ``recall``: what has not changed since the last time is not walked again. Raises Unsupported, naming the path of the
    first leaf that cannot be saved.
    """
    if not isinstance(state, dict):
        raise Unsupported(f"a state is a dict of names, not a {type(state).__qualname__}: wrap it as {{'model': …}}")
    if recall is not None:
        recall.begin()
    walk = Walk(ranks, state, recall) if saved is None else Loading(ranks, state, saved)
    try:
        container(walk, "", state, keep)
    except RecursionError:
        raise Unsupported("a container of the state contains itself, or is nested hundreds of times") from None
    _find_aliases(walk.into)
    return walk.into


def _find_aliases(into: Collected) -> None:
    """Names whose every byte is the memory of an earlier name: tied weights. The first name keeps the tensor."""
    first: dict[int, Entry] = {}
    later: dict[int, list[Entry]] = {}  # of memory that starts where the first does, but is not the same
    for name, entry in into.entries.items():
        if not entry.views or 0 in entry.shape:
            continue
        address = entry.views[0].tensor.data_ptr()
        one = first.setdefault(address, entry)
        if one is entry:
            continue
        others = later.setdefault(address, [])
        other = next((e for e in (one, *others) if _same_memory(e, entry)), None)
        if other is None:
            others.append(entry)
        else:
            into.aliases[name] = other.name


def _same_memory(a: Entry, b: Entry) -> bool:
    return (a.dtype, a.shape, a.spread, len(a.views)) == (b.dtype, b.shape, b.spread, len(b.views)) and all(
        (v.box, v.tensor.data_ptr(), v.tensor.stride(), v.tensor.device)
        == (w.box, w.tensor.data_ptr(), w.tensor.stride(), w.tensor.device)
        for v, w in zip(a.views, b.views, strict=True)
    )
