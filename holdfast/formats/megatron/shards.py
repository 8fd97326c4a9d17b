"""Megatron-core's tensors and objects as a module has them: layers out of their stack, flattened ranges in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from holdfast.errors import Damaged
from holdfast.formats.sources import Stretch
from holdfast.formats.stored import Stored, concatenated
from holdfast.ondisk import dtypes
from holdfast.ondisk.box import Box, flat_boxes, inside
from holdfast.storage.place import Place

_LAYERS = frozenset(["layers", "blocks", "h"])
"""What models call a list of layers. In an FQN a number follows, but not in the key of a stack of them."""

ShardPlace = tuple[tuple[int, ...], tuple[int, ...]]
"""Where an object stands in a grid of such, and the grid's shape."""

Grid = dict[ShardPlace, Any]


def unflattened(key: str, tensor: Stored, shape: Any, folder: Place) -> Stored:
    """A tensor of ``shape``, of whose local shards flat ranges were saved.

    On disk it is a grid of shards with one axis more: the elements of each, flattened and cut among ranks.
    """
    if not isinstance(shape, (tuple, list)) or not all(type(n) is int and n >= 0 for n in shape):
        raise Damaged(f"{folder}: {key} is said to have the shape {str(shape)[:100]}")
    if not dtypes.known(tensor.dtype):  # it is left out, whatever its shape
        return tensor
    shape, counts = tuple(shape), tensor.shape[:-1]
    local = tuple(n // count for n, count in zip(shape, counts, strict=False) if count)
    if len(counts) != len(shape) or len(local) != len(shape) or prod(local) != tensor.shape[-1]:
        raise Damaged(f"{folder}: {key} is saved in shape {tensor.shape}, which are no shards of {shape}")
    size = dtypes.itemsize(tensor.dtype)
    pieces: list[tuple[Box, Stretch]] = []
    for box, stretch in tensor.pieces:
        if any(n != 1 for n in box.lengths[:-1]) or not inside(box, tensor.shape):
            raise Damaged(f"{folder}: part {box} of {key} lies in no shard of it")
        corner = [number * length for number, length in zip(box.offsets, local, strict=False)]
        at = 0
        for part in flat_boxes(local, box.offsets[-1], box.offsets[-1] + box.lengths[-1]):
            moved = Box(tuple(a + b for a, b in zip(corner, part.offsets, strict=True)), part.lengths)
            pieces.append((moved, stretch.part(at, part.size * size)))
            at += part.size * size
    return Stored(tensor.dtype, shape, tuple(pieces))


def stack_of(key: str, tensor: Stored) -> str:
    """The list of layers that a tensor is the stack of, or nothing.

    The key names such a list without a number, and each chunk has one layer, for each rank saved its own.
    """
    names = key.split(".")
    at = _list_in(names)
    stacked = bool(tensor.shape and tensor.pieces) and all(box.lengths[0] == 1 for box, _ in tensor.pieces)
    return ".".join(names[: at + 1]) if at is not None and stacked else ""


def _list_in(names: Sequence[str]) -> int | None:
    """Where a list of layers is named that no number follows."""
    for at, name in enumerate(names[:-1]):
        if name in _LAYERS and not names[at + 1].isdecimal():
            return at
    return None


def _experts_in(names: Sequence[str]) -> int | None:
    """Where the experts of a layer are named that are stacked too."""
    for at in range(1, len(names) - 1):
        if names[at - 1] == names[at] == "experts" and not names[at + 1].isdecimal():
            return at
    return None


def apart(key: str, tensor: Stored, folder: Place) -> dict[str, Stored]:
    """The layers of a stack by FQN, and the experts of each; the tensor itself if it is none."""
    stack = stack_of(key, tensor)
    layers = {key: tensor}
    if stack:
        layers = {f"{stack}.{n}{key[len(stack) :]}": layer for n, layer in enumerate(_rows(key, tensor, folder))}
    experts: dict[str, Stored] = {}
    for name, layer in layers.items():
        names = name.split(".")
        at = _experts_in(names)
        if at is None or len(layer.shape) < 2:
            experts[name] = layer
        else:
            experts.update((_numbered(names, at, n), row) for n, row in enumerate(_rows(key, layer, folder)))
    return experts


def _numbered(names: Sequence[str], at: int, number: int) -> str:
    return ".".join([*names[: at + 1], str(number), *names[at + 1 :]])


def _rows(key: str, tensor: Stored, folder: Place) -> list[Stored]:
    """Every row of a tensor, each without the first axis."""
    if tensor.shape[0] > sum(box.lengths[0] for box, _ in tensor.pieces):
        raise Damaged(f"{folder}: {key} of shape {list(tensor.shape)} is not whole: layers of it are missing")
    size = dtypes.itemsize(tensor.dtype)
    pieces: list[list[tuple[Box, Stretch]]] = [[] for _ in range(tensor.shape[0])]
    for box, stretch in tensor.pieces:
        if not inside(box, tensor.shape):
            raise Damaged(f"{folder}: part {box} lies outside of {key}, whose shape is {list(tensor.shape)}")
        inner = Box(box.offsets[1:], box.lengths[1:])
        for n in range(box.lengths[0]):
            pieces[box.offsets[0] + n].append((inner, stretch.part(n * inner.size * size, inner.size * size)))
    return [Stored(tensor.dtype, tensor.shape[1:], tuple(row_pieces)) for row_pieces in pieces]


def glued(module: Mapping[str, Any]) -> dict[str, Any]:
    """Gated weights, of which some versions save the halves as ``weight_w`` and ``weight_v``, as one ``weight``."""
    whole_weights: dict[str, Any] = {}
    for key, value in module.items():
        whole = _whole_of(key, module)
        if whole is None:
            whole_weights[key] = value
        elif whole not in whole_weights:
            whole_weights[whole] = concatenated([module[f"{whole}_w"], module[f"{whole}_v"]])
    return whole_weights


def glued_state(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same for what an optimizer keeps of each parameter."""
    kinds = dict.fromkeys(kind for held in state.values() for kind in held)
    parameters: dict[str, dict[str, Any]] = {}
    for kind in kinds:
        for key, value in glued({key: held[kind] for key, held in state.items() if kind in held}).items():
            parameters.setdefault(key, {})[kind] = value
    return parameters


def _whole_of(key: str, module: Mapping[str, Any]) -> str | None:
    for name in ("weight", "bias"):
        if key.endswith((f".{name}_w", f".{name}_v")):
            whole = key[:-2]
            halves = [module.get(f"{whole}_w"), module.get(f"{whole}_v")]
            if whole not in module and all(isinstance(half, Stored) and half.shape for half in halves):
                return whole
    return None


def place_of(key: str) -> tuple[str, ShardPlace]:
    """The name of an object and its place, of a key ``<name>/shard_<offsets>_<shape>``."""
    name, _, shard = key.partition("/shard_")
    offsets, _, shape = shard.partition("_")
    try:
        return name, (_numbers(offsets), _numbers(shape))
    except ValueError:
        return key, ((), ())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")) if text else ()


def objects_apart(name: str, grid: Grid, folder: Place) -> dict[str, Any]:
    """The objects of a grid: of stacked layers and experts by FQN; else the only one, or lists of them."""
    cells: dict[str, dict[tuple[int, ...], Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for (offsets, shape), value in grid.items():
        names: Sequence[str] = name.split(".")
        for find in (_list_in, _experts_in):
            at = find(names)
            if at is not None and offsets and shape:
                names = _numbered(names, at, offsets[0]).split(".")
                offsets, shape = offsets[1:], shape[1:]
        called = ".".join(names)
        if shapes.setdefault(called, shape) != shape:
            raise Damaged(f"{folder}: the shards of {name} belong to grids of {shapes[called]} and {shape}")
        cells.setdefault(called, {})[offsets] = value
    return {called: _listed(called, cells[called], shapes[called], folder) for called in cells}


def _listed(name: str, cells: Mapping[tuple[int, ...], Any], shape: tuple[int, ...], folder: Place) -> Any:
    if any(len(offsets) == len(shape) + 1 for offsets in cells):  # some versions left the last length out
        shape = (*shape, 1 + max(offsets[-1] for offsets in cells))
    order = sorted(cells)
    if prod(shape) != len(order) or not all(
        len(offsets) == len(shape) and all(o < n for o, n in zip(offsets, shape, strict=True)) for offsets in order
    ):
        raise Damaged(
            f"{folder}: {name} is cut into a grid of {list(shape)}, but {len(order)} of its parts are there; "
            "a rank's file is missing or its save never finished"
        )
    values = [cells[offsets] for offsets in order]
    if len(values) == 1:
        return values[0]
    for length in reversed(shape[1:]):
        values = [values[at : at + length] for at in range(0, len(values), length)]
    return values
