"""The items of a torch plan in holdfast's words: pieces of tensors, and values as values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from holdfast.dcp.flattened import name_of
from holdfast.dcp.states import without_files
from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk.box import Box, tiling_fault, whole
from holdfast.ondisk.containers import Note
from holdfast.ondisk.manifest import FileRecord
from holdfast.ondisk.values import JSON
from holdfast.plan.plan import PiecedTensor
from holdfast.plan.spread import WHOLE
from holdfast.ranks.ranks import Ranks
from holdfast.state import Collected, Entry, collect
from holdfast.state.leaves import View
from holdfast.state.per_rank import RNG, PerRank, is_stateful
from holdfast.state.tensors import dtype_name


@dataclass
class RankItems:
    """What one rank wrote, as its results tell the first: pieces of tensors, and values as the manifest has them."""

    rank: int
    tensors: dict[str, PiecedTensor] = field(default_factory=dict)
    values: dict[str, JSON] = field(default_factory=dict)
    containers: dict[str, Note] = field(default_factory=dict)
    files: list[FileRecord] = field(default_factory=list)


def gather(plan: SavePlan, planner: SavePlanner, rank: int) -> tuple[Collected, RankItems]:
    """The tensors and values of a plan's items, in holdfast's words."""
    paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    collected = Collected()
    tensors: list[tuple[str, WriteItem]] = []
    for item in plan.items:
        path = paths.get(item.index.fqn, (item.index.fqn,))
        name = name_of(path)
        if item.type is WriteItemType.BYTE_IO:
            # Each by itself: other ranks may write other values of the same dict, and so it must not become one value.
            _add(collect(_nested(path, _object_of(planner, item, name)), Ranks(rank, rank + 1)), collected)
        else:
            tensors.append((name, item))
    written = RankItems(rank, values=collected.values, containers=collected.containers)
    for entry in collected.entries.values():  # tensors inside of tuples, which torch takes for values
        written.tensors[entry.name] = PiecedTensor(entry.dtype, entry.shape, [(v.box, rank) for v in entry.views])
    for name, item in tensors:
        _add_tensor(name, item, planner, collected, written)
    return collected, written


def _add_tensor(name: str, item: WriteItem, planner: SavePlanner, collected: Collected, written: RankItems) -> None:
    data = item.tensor_data
    tensor = planner.resolve_data(item)
    if data is None or not isinstance(tensor, torch.Tensor):
        raise Unsupported(f"{name}: the planner gives a {type(tensor).__qualname__} for a tensor")
    box, shape = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)), tuple(data.size)
    if tuple(tensor.shape) != box.lengths:
        raise Mismatch(f"{name}: the planner gives a tensor of shape {list(tensor.shape)} for {box}")
    dtype = dtype_name(name, tensor)
    planned = written.tensors.setdefault(name, PiecedTensor(dtype, shape, []))
    if (planned.dtype, planned.shape) != (dtype, shape):
        raise Mismatch(f"{name} is {planned.dtype} {list(planned.shape)} and {dtype} {list(shape)} at once")
    entry = collected.entries.setdefault(name, Entry(name, dtype, shape, WHOLE, []))
    if box.size or 0 in shape:
        planned.pieces.append((whole(shape) if 0 in shape else box, written.rank))
        entry.views.append(View(box, tensor.detach()))


def _object_of(planner: SavePlanner, item: WriteItem, name: str) -> Any:
    """The value itself: `resolve_data` would pickle it, so `transform_object` of a planner is not asked for values."""
    lookup = getattr(planner, "lookup_object", None)
    if lookup is None:
        raise Unsupported(
            f"{name} is a value, which {type(planner).__qualname__} hands out as a pickle only: derive the planner "
            "from DefaultSavePlanner, whose lookup_object gives the value itself"
        )
    value = lookup(item.index)
    if isinstance(value, (PerRank, RNG)):
        raise Unsupported(f"{name} differs by rank, and torch's engine keeps one value: save it with holdfast.dcp.save")
    if is_stateful(value):
        raise Unsupported(f"{name} is a {type(value).__qualname__} inside of a dict: give its state_dict()")
    return without_files(value)


def _nested(path: Sequence[str | int], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {str(key): value}
    return dict(value)


def _add(collected: Collected, into: Collected) -> None:
    into.entries.update(collected.entries)
    into.values.update(collected.values)
    into.containers.update(collected.containers)


def joined(written: list[RankItems]) -> dict[str, PiecedTensor]:
    """The tensors of all ranks. Raises Mismatch, by name, where ranks disagree or a tensor has a hole or an overlap."""
    tensors: dict[str, PiecedTensor] = {}
    for one in written:
        for name, tensor in one.tensors.items():
            known = tensors.setdefault(name, PiecedTensor(tensor.dtype, tensor.shape, []))
            if (known.dtype, known.shape) != (tensor.dtype, tensor.shape):
                raise Mismatch(
                    f"{name} is {known.dtype} {list(known.shape)} on one rank and {tensor.dtype} {list(tensor.shape)} "
                    f"on rank {one.rank}: one name, one tensor"
                )
            known.pieces.extend(tensor.pieces)
    for name, tensor in tensors.items():
        fault = None if 0 in tensor.shape else tiling_fault(tensor.shape, [box for box, _ in tensor.pieces])
        if fault:
            raise Mismatch(f"{name} of shape {list(tensor.shape)} is not whole: {fault}")
    return tensors


def containers(metadata: Metadata, written: list[RankItems]) -> dict[str, Note]:
    """Lists and tuples inside of values, and the lists that torch has taken apart: their positions are integers."""
    notes = {path: kind for one in written for path, kind in one.containers.items()}
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    for key in metadata.state_dict_metadata:
        path = paths.get(key, (key,))
        for depth, position in enumerate(path):
            if isinstance(position, int):
                notes[name_of(path[:depth])] = "list"
    return notes
