"""Every kind of tensor becomes boxes: plain, DTensor, ShardedTensor, `holdfast.Shard`, flattening subclasses.

The walk calls `entries_of` for each tensor. Never copies a byte; a layout that is not known exactly is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from holdfast.errors import Mismatch, Unsupported
from holdfast.ondisk import dtypes, names
from holdfast.ondisk.box import Box, flat_boxes, inside, whole
from holdfast.plan.spread import WHOLE, Boxes, Placed, Split, placed_runs
from holdfast.ranks.ranks import Ranks
from holdfast.state.kinds import is_dtensor, is_sharded_tensor
from holdfast.state.leaves import Entry, View

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

LOWEST = 1 << 40
"""Only the heap of a program that is not position-independent lies below this address, as that of Debian's Python."""

PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a tensor that torch itself does not know to be sharded.

    Args:
        tensor: The elements of this rank's box, on any device.
        shape: The shape of the whole tensor.
        offsets: Where the box begins, one number an axis. The boxes of all ranks together have to cover the tensor;
            equal boxes on several ranks are replicas.

    Raises:
        ValueError: The box leaves the tensor.

    Example:
        >>> import torch
        >>> state = {"table": holdfast.Shard(torch.zeros(4, 8), shape=(16, 8), offsets=(4, 0))}
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    offsets: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.shape) != self.tensor.dim() or not inside(
            Box(tuple(self.offsets), tuple(self.tensor.shape)), tuple(self.shape)
        ):
            raise ValueError(
                f"a shard of shape {list(self.tensor.shape)} at {list(self.offsets)} does not lie in a tensor of "
                f"shape {list(self.shape)}"
            )


@dataclass(frozen=True)
class FlatShard:
    """This rank's stretch of a tensor of ``shape`` that was flattened and cut: ``tensor`` holds the elements from
    ``start`` on, in one dimension; it may be empty. The stretches of all ranks must tile it.

    Raises ValueError if the stretch leaves the tensor.
    """

    tensor: torch.Tensor
    shape: Sequence[int]
    start: int

    def __post_init__(self) -> None:
        if self.tensor.dim() != 1 or not 0 <= self.start <= prod(self.shape) - self.tensor.numel():
            raise ValueError(
                f"a stretch of shape {list(self.tensor.shape)} from {self.start} on does not lie in a flattened tensor "
                f"of shape {list(self.shape)}"
            )


def is_tensor_leaf(value: object) -> bool:
    """Whether ``value`` is something that `entries_of` takes."""
    return isinstance(value, (torch.Tensor, Shard, FlatShard)) or is_sharded_tensor(value)


def entries_of(name: str, value: object, ranks: Ranks) -> list[Entry]:
    """The entry of a tensor leaf, or one for each part of a subclass that flattens. Raises Unsupported by name."""
    if type(value) in PLAIN:
        return [plain_entry(name, value)]  # type: ignore[arg-type]
    if is_dtensor(value):
        return _dtensor(name, value, ranks)
    if isinstance(value, Shard):
        return [_explicit(name, value, ranks)]
    if isinstance(value, FlatShard):
        return [flat_entry(name, value.tensor, tuple(value.shape), value.start, ranks)]
    if is_sharded_tensor(value):
        return [_sharded_tensor(name, value, ranks)]
    if isinstance(value, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)):
        raise Unsupported(f"{name} is an uninitialized parameter; run one forward pass before saving")
    if hasattr(value, "__tensor_flatten__"):
        parts, _ = value.__tensor_flatten__()
        inner = (entries_of(names.child(name, part), getattr(value, part), ranks) for part in parts)
        return [entry for entries in inner for entry in entries]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Unsupported(
        f"{name} is a {kind}: a tensor subclass without __tensor_flatten__ is not known; "
        "save its parts as plain tensors, or wrap this rank's box as holdfast.Shard"
    )


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """torch's name of the element type. Raises Unsupported for what has no plain bytes."""
    if tensor.layout is not torch.strided or tensor.is_quantized or lacks_memory(tensor):
        _check_bytes(name, tensor)
    return dtypes.name_of(tensor.dtype)


def _check_bytes(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise Unsupported(f"{name} is on the meta device and has no bytes; materialize it first (to_empty, then init)")
    if tensor.is_quantized:
        raise Unsupported(f"{name} is quantized ({tensor.dtype}); save int_repr(), scale and zero point as tensors")
    if tensor.layout is not torch.strided:
        raise Unsupported(f"{name} has layout {tensor.layout}; save its indices and values as tensors, or to_dense()")
    if is_freed(tensor):
        raise Unsupported(
            f"{name} has no memory: its storage was freed (untyped_storage().resize_(0)), as FSDP frees unsharded "
            "parameters; save the sharded parameter, or before it is freed"
        )


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is empty, meta or freed: its address is its offset into nothing."""
    # Asked of every tensor of a save: to ask the storage itself takes 1.4 times as long (measured).
    address = tensor.data_ptr()
    return address < LOWEST and address == tensor.storage_offset() * tensor.itemsize


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage of a tensor was freed. Reading it would end the process."""
    return lacks_memory(tensor) and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def plain_entry(name: str, tensor: torch.Tensor) -> Entry:
    """The entry of a tensor that every rank has whole."""
    box = whole(tensor.shape)
    memory = tensor.detach() if tensor.requires_grad else tensor
    return Entry(name, dtype_name(name, tensor), box.lengths, WHOLE, [View(box, memory)])


def placed(name: str, tensor: DTensor, ranks: Ranks) -> tuple[Placed, int | None]:
    """How a DTensor lies over the group's ranks, and this rank's position in the mesh (None: not part of it)."""
    spec = tensor._spec
    try:
        order = getattr(spec, "shard_order", None) or ()
        return _placed(spec.mesh, spec.placements, order, max(tensor.dim(), 1), ranks.global_ranks, ranks.rank)
    except (Unsupported, Mismatch) as error:
        raise type(error)(f"{name} {error}") from None


@lru_cache(maxsize=256)
def _placed(
    mesh: DeviceMesh, placements: tuple[Any, ...], order: tuple[Any, ...], ndim: int, global_ranks: tuple[int, ...],
    rank: int,
) -> tuple[Placed, int | None]:  # fmt: skip
    # Thousands of tensors share a mesh and placements, and asking a mesh for its ranks makes a tensor each time.
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardPlacement
    from torch.distributed.tensor.placement_types import _StridedShard

    strides = _strides_of(order, tuple(mesh.mesh.shape))
    splits: list[Split | None] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            splits.append(Split(placement.dim % ndim, int(placement.split_factor)))
        elif isinstance(placement, ShardPlacement):
            splits.append(Split(placement.dim % ndim, strides.get(axis, 1)))
        elif isinstance(placement, Replicate):
            splits.append(None)
        else:
            raise Unsupported(
                f"has placement {placement!r} on mesh {mesh}: its value is not whole on any rank; "
                "redistribute() it to Shard or Replicate first"
            )
    members = tuple(mesh.mesh.flatten().tolist())
    place = {g: r for r, g in enumerate(global_ranks)}
    outside = [g for g in members if g not in place]
    if outside:
        raise Mismatch(f"lies on a mesh with global ranks {outside}, which are not in the group of this call")
    spread = Placed(tuple(place[g] for g in members), tuple(mesh.mesh.shape), tuple(splits))
    return spread, spread.ranks.index(rank) if rank in spread.ranks else None


def _strides_of(order: tuple[Any, ...], mesh_shape: tuple[int, ...]) -> dict[int, int]:
    """An order of cutting that torch states apart from the placements, as strides (see `spread.cutting_axes`)."""
    return {
        axis: prod(mesh_shape[before] for before in entry.mesh_dims[:place] if before > axis)
        for entry in order
        for place, axis in enumerate(entry.mesh_dims)
    }


def local_views(name: str, shape: tuple[int, ...], spread: Placed, position: int, local: torch.Tensor) -> list[View]:
    """``local``, this rank's memory of a DTensor, as one view for each box (several if it is strided)."""
    expected, boxes = _boxes_of(shape, spread, position)
    if local.shape != expected:
        if local.numel() == 0 and 0 in expected:
            return []
        raise Unsupported(
            f"{name} holds a local tensor of shape {list(local.shape)} where {spread} of shape {list(shape)} "
            f"says {list(expected)}; this kind of placement is not known"
        )
    views = []
    for box, cuts in boxes:
        view = local
        for dim, start, length in cuts:
            view = view.narrow(dim, start, length)
        views.append(View(box, view))
    return views


_Cuts = tuple[tuple[int, int, int], ...]
"""For dimensions of a local tensor that are cut: the dimension, where the box begins, and its length."""


@lru_cache(maxsize=4096)
def _boxes_of(
    shape: tuple[int, ...], spread: Placed, position: int
) -> tuple[tuple[int, ...], tuple[tuple[Box, _Cuts], ...]]:
    """The shape of a local tensor and its boxes, each with what cuts it out. Many tensors share a shape and a mesh."""
    axes = placed_runs(shape, spread, position)
    expected = tuple(sum(run.length for run in axis) for axis in axes)
    boxes = []
    for runs in product(*axes) if 0 not in expected else ():
        box = Box(tuple(run.start for run in runs), tuple(run.length for run in runs))
        cuts = ((dim, run.local, run.length) for dim, run in enumerate(runs) if run.length != expected[dim])
        boxes.append((box, tuple(cuts)))
    return expected, tuple(boxes)


def _dtensor(name: str, tensor: DTensor, ranks: Ranks) -> list[Entry]:
    spread, position = placed(name, tensor, ranks)
    local = tensor._local_tensor
    if type(local) not in PLAIN:
        local = local.detach()
        if hasattr(local, "wait"):
            local = local.wait()  # an AsyncCollectiveTensor: the result of a collective still under way
        if hasattr(local, "__tensor_flatten__"):
            parts, _ = local.__tensor_flatten__()
            return [stacked_part(names.child(name, part), getattr(local, part), spread, position) for part in parts]
        if type(local) not in PLAIN:
            raise Unsupported(f"{name} is a DTensor of {type(local).__qualname__}; only plain local tensors are known")
    if local.requires_grad:
        local = local.detach()
    shape = tuple(tensor.shape)
    dtype = dtype_name(name, local)
    views = local_views(name, shape, spread, position, local) if position is not None else []
    return [Entry(name, dtype, shape, spread, views)]


def stacked_part(name: str, part: torch.Tensor, spread: Placed, position: int | None) -> Entry:
    """A part of the local tensors of a DTensor: those of all shards as one tensor, with an axis before the others.

    How a subclass lays its numbers out in its parts is its own affair, so they come back only as they were cut.
    """
    if type(part) not in PLAIN:
        raise Unsupported(f"{name} is a {type(part).__qualname__} inside of a DTensor; only plain parts are known")
    splits = tuple(None if split is None else Split(0) for split in spread.splits)
    shards = prod(size for size, split in zip(spread.shape, splits, strict=True) if split is not None)
    shape, stack = (shards, *part.shape), Placed(spread.ranks, spread.shape, splits)
    views = local_views(name, shape, stack, position, part.detach().unsqueeze(0)) if position is not None else []
    return Entry(name, dtype_name(name, part), shape, stack, views)


def _explicit(name: str, shard: Shard, ranks: Ranks) -> Entry:
    if type(shard.tensor) not in PLAIN:
        raise Unsupported(f"{name} is a Shard of {type(shard.tensor).__qualname__}; give it a plain tensor")
    box = Box(tuple(shard.offsets), tuple(shard.tensor.shape))
    views = [View(box, shard.tensor.detach())]
    return boxed(name, dtype_name(name, shard.tensor), tuple(shard.shape), views, ranks)


def flat_entry(name: str, memory: torch.Tensor, shape: tuple[int, ...], start: int, ranks: Ranks) -> Entry:
    """What this rank holds of a flattened tensor of ``shape``: the elements from ``start`` on, as boxes."""
    views, at = [], 0
    for box in flat_boxes(shape, start, start + memory.numel()):
        views.append(View(box, memory.detach()[at : at + box.size].view(box.lengths)))
        at += box.size
    return boxed(name, dtype_name(name, memory), shape, views, ranks)


def boxed(name: str, dtype: str, shape: tuple[int, ...], views: list[View], ranks: Ranks) -> Entry:
    """An entry of which this rank knows only its own boxes."""
    views = [v for v in views if v.box.size]
    own = (ranks.rank, tuple((v.box.offsets, v.box.lengths) for v in views))
    return Entry(name, dtype, shape, Boxes((own,)), views)


def _sharded_tensor(name: str, tensor: ShardedTensor, ranks: Ranks) -> Entry:
    views = []
    shape = tuple(tensor.metadata().size)
    for shard in tensor.local_shards():
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        views.append(View(box, shard.tensor.detach().view(box.lengths)))
    dtype = dtypes.name_of(tensor.dtype) if not views else dtype_name(name, views[0].tensor)
    return boxed(name, dtype, shape, views, ranks)
