"""Pickled DTensors and ShardedTensors as shares of a whole, and the state trees of all ranks joined into one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.alike import alike, same_tensors
from holdfast.formats.machine.pickles import Record
from holdfast.formats.shares import Mesh, Share, placed_share, sizes_of
from holdfast.formats.simplified import MAX_DEPTH, MAX_LEAVES, PerRank
from holdfast.formats.stored import Stored, joined
from holdfast.ondisk.box import Box, inside
from holdfast.plan.spread import Split
from holdfast.storage.place import Place

# One leaf of one rank


def is_sharded(leaf: object) -> bool:
    """Whether `share_of` knows what to make of a leaf."""
    return isinstance(leaf, Share) or (
        isinstance(leaf, Record)
        and leaf.name.startswith("torch.")
        and leaf.name.endswith((".DTensor", ".ShardedTensor"))
    )


def has_shards(node: Any, depth: int = 0) -> bool:
    """Whether a tree holds a sharded tensor."""
    if depth < 20 and isinstance(node, (dict, list, tuple)):
        return any(has_shards(v, depth + 1) for v in (node.values() if isinstance(node, dict) else node))
    return is_sharded(node)


def share_of(leaf: Record | Share, rank: int, where: str) -> Share:
    """What ``rank`` saved of a DTensor or ShardedTensor; ``where`` names it in errors.

    Raises Unsupported for placements that leave no rank with the value (Partial), Damaged for what contradicts itself.
    """
    if isinstance(leaf, Share):
        return leaf
    try:
        if leaf.name.endswith(".ShardedTensor"):
            return _sharded_tensor(leaf)
        return _dtensor(leaf, rank)
    except Unsupported as error:
        raise Unsupported(f"{where} {error}") from None
    except Damaged as error:
        raise Damaged(f"{where}: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = leaf.name.rpartition(".")[2]
        raise Damaged(f"{where} is a {kind} that cannot be made out: {type(error).__name__}: {error}") from None


def _attributes(record: Record) -> dict[str, Any]:
    """What an object had: its attributes, and its slots, which pickles keep apart."""
    state = record.state
    if isinstance(state, tuple) and len(state) == 2:
        return {**(state[0] or {}), **(state[1] or {})}
    return state if isinstance(state, dict) else {}


def _dtensor(leaf: Record, rank: int) -> Share:
    attributes = _attributes(leaf)
    local, spec = attributes["_local_tensor"], _attributes(attributes["_spec"])
    shape = sizes_of(leaf.args[1])
    if not isinstance(local, Stored):
        raise Unsupported(f"is a DTensor of {getattr(local, 'name', type(local).__name__)}; save plain local tensors")
    mesh = mesh_of(spec["mesh"], rank)
    order = _strides_of(spec.get("shard_order") or (), mesh.sizes)
    splits = [_split(p, max(len(shape), 1), order.get(axis, 1)) for axis, p in enumerate(spec["placements"])]
    return placed_share(shape, mesh, splits, local, "it")


def _split(placement: Record, ndim: int, strides: int) -> Split | None:
    kind = placement.name.rpartition(".")[2]
    if kind == "Replicate":
        return None
    if kind == "Shard":
        return Split(placement.get("dim") % ndim, strides)
    if kind == "_StridedShard":
        return Split(placement.get("dim") % ndim, int(placement.get("split_factor")))
    raise Unsupported(
        f"was saved with placement {kind}: its value is whole on no rank; redistribute() it to Shard or Replicate "
        "before saving"
    )


def _strides_of(order: Any, sizes: tuple[int, ...]) -> dict[int, int]:
    """An order of cutting that torch tells apart from the placements, as strides (see `spread`)."""
    strides: dict[int, int] = {}
    for entry in order:
        _, axes = entry.args if isinstance(entry, Record) else entry
        for place, axis in enumerate(axes):
            strides[axis] = prod(sizes[before] for before in axes[:place] if before > axis)
    return strides


def mesh_of(record: Record, rank: int) -> Mesh:
    """The mesh that a pickled DeviceMesh of any torch since 2.0 stands for, as ``rank`` saw it."""
    attributes = _attributes(record)
    ranks, layout = attributes.get("mesh", attributes.get("_mesh")), attributes.get("_layout")
    is_saved, saved = "_coordinate_on_dim" in attributes, attributes.get("_coordinate_on_dim")
    coordinate = None if saved is None else tuple(saved)
    if isinstance(ranks, Stored):  # until 2.8
        if not is_saved:
            where = (ranks.read() == rank).nonzero().tolist()
            coordinate = tuple(where[0]) if where else None
        return Mesh(ranks.shape, coordinate)
    axes = _axes(layout)
    if not is_saved:
        at = next((i for i, who in enumerate(attributes["_rank_map"].read().tolist()) if who == rank), None)
        coordinate = None if at is None else tuple(_index(at, axis) for axis in axes)
    return Mesh(tuple(prod(size for size, _ in axis) for axis in axes), coordinate)


def _axes(layout: Any) -> list[list[tuple[int, int]]]:
    """For each axis of a mesh (size, stride) pairs over the list of all its ranks: one, or more if it was flattened."""
    attributes = _attributes(layout)
    if "axes" in attributes:  # since 2.12
        axes = [(axis.get("shape"), axis.get("stride")) for axis in attributes["axes"]]
        return [list(zip(_flat(sizes), _flat(strides), strict=True)) for sizes, strides in axes]
    sizes, strides = attributes["shape"], attributes["stride"]
    if isinstance(sizes, int):
        sizes, strides = (sizes,), (strides,)
    return [list(zip(_flat(n), _flat(s), strict=True)) for n, s in zip(sizes, strides, strict=True)]


def _flat(numbers: Any) -> list[int]:
    return [numbers] if isinstance(numbers, int) else [n for inner in numbers for n in _flat(inner)]


def _index(at: int, axis: list[tuple[int, int]]) -> int:
    index = 0
    for size, stride in axis:
        index = index * size + (at // stride) % size
    return index


def _sharded_tensor(leaf: Record) -> Share:
    shards, metadata = leaf.state[0], leaf.state[1]
    shape = sizes_of(_attributes(metadata)["size"])
    parts, dtype = [], leaf.args[0] if leaf.args else ""
    for shard in shards:
        held = _attributes(shard)
        place, tensor = _attributes(held["metadata"]), held["tensor"]
        box = Box(sizes_of(place["shard_offsets"]), sizes_of(place["shard_sizes"]))
        if not isinstance(tensor, Stored) or tensor.shape != box.lengths or not inside(box, shape):
            raise Damaged(f"its shard {box} is no part of a tensor of shape {list(shape)}")
        dtype = tensor.dtype
        parts.append((box.offsets, tensor))
    return Share(dtype, shape, tuple((offsets, part) for offsets, part in parts if 0 not in part.shape))


def join_ranks(trees: Sequence[Any], where: str = "") -> Any:
    """The state trees of ranks 0, 1, … as one: sharded leaves joined and proved, what is alike once, else `PerRank`.

    What only some ranks have is taken from them. ``where`` stands before names in errors. Raises Damaged for a sharded
    leaf that the ranks do not hold all of, or see differently.
    """
    return join_nodes({"": list(enumerate(trees))}, len(trees), where)[""]


def join_nodes(nodes: Mapping[str, Sequence[tuple[int, Any]]], world_size: int, where: str = "") -> dict[str, Any]:
    """`join_ranks` for several trees at once, each by its name, with the ranks that have it and what they hold."""
    leaves: list[tuple[str, Sequence[tuple[int, Any]]]] = []
    count = 0

    def shape_of(held: Sequence[tuple[int, Any]], at: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_LEAVES:
            raise Damaged(f"{where}{at[:200]} is nested without end: it contains itself")
        first = held[0][1]
        if all(isinstance(node, dict) for _, node in held):
            below: dict[Any, list[tuple[int, Any]]] = {}
            for rank, node in held:
                for key, value in node.items():
                    below.setdefault(key, []).append((rank, value))
            return {k: shape_of(values, f"{at}/{k}" if at else str(k), depth + 1) for k, values in below.items()}
        if _walked(first) and all(type(node) is type(first) and len(node) == len(first) for _, node in held):
            inner = [
                shape_of([(rank, node[i]) for rank, node in held], f"{at}/{i}", depth + 1) for i in range(len(first))
            ]
            return type(first)(inner)
        leaves.append((at, held))
        return _Leaf(len(leaves) - 1)

    trees = {name: shape_of(held, name, 0) for name, held in nodes.items()}
    answers = join_leaves(leaves, world_size, where)
    return {name: _filled(tree, answers) for name, tree in trees.items()}


class _Leaf(NamedTuple):
    """The place of a leaf in the tree."""

    number: int


def _walked(node: Any) -> bool:
    """Whether a list or tuple has leaves of its own; one of plain values (betas, parameter names) is one value."""
    return (
        isinstance(node, (list, tuple))
        and not isinstance(node, torch.Size)
        and any(isinstance(value, (dict, list, tuple, Stored)) or is_sharded(value) for value in node)
    )


def _filled(node: Any, answers: list[Any]) -> Any:
    if isinstance(node, _Leaf):
        return answers[node.number]
    if isinstance(node, dict):
        return {key: _filled(value, answers) for key, value in node.items()}
    return type(node)(_filled(value, answers) for value in node)


def join_leaves(leaves: Sequence[tuple[str, Sequence[tuple[int, Any]]]], world_size: int, where: str = "") -> list[Any]:
    """Each leaf's name and what the ranks that have it hold there, as one."""
    plain = [[leaf for _, leaf in held] for _, held in leaves]
    tensors = [group if len(group) > 1 and all(isinstance(v, Stored) for v in group) else [] for group in plain]
    equal = same_tensors(tensors)
    answers: list[Any] = []
    for (at, held), group, compared, same in zip(leaves, plain, tensors, equal, strict=True):
        if any(map(is_sharded, group)):
            answers.append(_joined(f"{where}{at}", held))
        elif same if compared else all(alike(group[0], other) for other in group[1:]):
            answers.append(group[0])
        else:
            by_rank = dict(held)
            answers.append(PerRank(tuple(by_rank.get(rank) for rank in range(world_size))))
    return answers


def _joined(name: str, held: Sequence[tuple[int, Any]]) -> Stored:
    if not all(is_sharded(leaf) for _, leaf in held):
        raise Damaged(f"{name} is sharded on some ranks and not on others: the files are of different saves")
    shares = [share_of(leaf, rank, name) for rank, leaf in held]
    kinds = {(share.dtype, share.shape) for share in shares if share.parts} or {(shares[0].dtype, shares[0].shape)}
    if len(kinds) > 1 or len({share.shape for share in shares}) > 1:
        raise Damaged(f"{name} is seen differently by the ranks ({sorted(map(str, kinds))}): files of several saves")
    ((dtype, shape),) = kinds
    whole = joined(dtype, shape, (part for share in shares for part in share.parts))
    fault = whole.fault()
    if fault:
        ranks = [rank for rank, _ in held]
        raise Damaged(
            f"{name} ({dtype} of shape {list(shape)}) is not whole with what ranks {_short(ranks)} hold: {fault}. Is "
            "the file of another rank missing?"
        )
    return whole


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


def _short(ranks: list[int]) -> str:
    return str(ranks) if len(ranks) < 9 else f"{ranks[0]} to {ranks[-1]} ({len(ranks)} of them)"
