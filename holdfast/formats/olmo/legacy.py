"""OLMo's `torch_legacy` layout: ``rank<N>.pt``, each one rank's whole state with ShardedTensors; all ranks joined.

`olmo` calls `read_legacy`. Holds one rank's pickle at a time beside the places of the shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.formats.alike import alike, same_tensors
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.olmo.ranks import joint, plausible, proved, rank_files
from holdfast.formats.sharded import is_sharded, share_of
from holdfast.formats.simplified import MAX_DEPTH
from holdfast.formats.stored import Stored, joined
from holdfast.storage.place import Place

_NOTHING: Any = object()


class RankStates(NamedTuple):
    """What the files of all ranks hold: the state that is cut over them, their trainers' state, how many there are."""

    cut: dict[str, Any]
    trainer: dict[str, Any]
    world: int


class _Place(NamedTuple):
    """Where a leaf was found."""

    path: Place
    rank: int


@dataclass(eq=False)
class _Sharded:
    """A ShardedTensor, or a DTensor, of which the shards of some ranks have come."""

    dtype: str
    shape: tuple[int, ...]
    parts: list[tuple[tuple[int, ...], Stored]] = field(default_factory=list)


def read_legacy(folder: Place) -> RankStates | None:
    """The checkpoint of the rank files in a folder, or None if they are no such states. Raises Damaged."""
    files = rank_files(folder)
    cut: dict[str, Any] = {}
    trainers: list[Any] = []
    world: int | None = None
    for rank, path in files.items():
        held = load_path(path)
        if not is_legacy(held):
            if not trainers:
                return None
            raise Damaged(f"{path} holds no model and optimizer as {files[0]} does: it is of another save")
        if world is None:
            world = proved(files, plausible(held.get("world_size")), folder)
        for key in ("model", "optim"):
            if key in held:
                cut[key] = _merged(cut.get(key, _NOTHING), held.pop(key), _Place(path, rank), key, 0)
        trainers.append(held)
    if world is None:
        return None
    return RankStates({key: _finished(value) for key, value in cut.items()}, joint(trainers), world)


def is_legacy(held: Any) -> bool:
    """Whether a loaded file is one rank's state in this layout."""
    return isinstance(held, dict) and isinstance(held.get("model"), dict) and bool({"optim", "global_step"} & {*held})


def _merged(known: Any, node: Any, place: _Place, at: str, depth: int) -> Any:
    """A node as the ranks before have it, with what this one adds."""
    if depth > MAX_DEPTH:
        raise Damaged(f"{place.path}: {at[:200]} is nested {MAX_DEPTH} deep, or contains itself")
    first = known is _NOTHING
    if isinstance(node, dict) and (first or isinstance(known, dict)):
        into = {} if first else known
        for key, value in node.items():
            into[key] = _merged(into.get(key, _NOTHING), value, place, f"{at}.{key}", depth + 1)
        return into
    if is_sharded(node):
        share = share_of(node, place.rank, f"{place.path}: {at}")
        known = _Sharded(share.dtype, share.shape) if first else known
        if not isinstance(known, _Sharded) or (known.dtype, known.shape) != (share.dtype, share.shape):
            raise _differs(place, at)
        known.parts += share.parts
        return known
    if first:
        return node
    if isinstance(known, Stored) and isinstance(node, Stored):
        if (known.dtype, known.shape) != (node.dtype, node.shape):
            raise _differs(place, at)
        if not same_tensors([[known, node]])[0]:
            log.warning("%s: %s is another than on ranks before, whose is taken", place.path, at)
        return known
    if type(known) is not type(node) or not alike(known, node):
        raise _differs(place, at)
    return known


def _differs(place: _Place, at: str) -> Damaged:
    return Damaged(
        f"{place.path}: {at} is not what the ranks before have there: the files are of different saves, or one was "
        "altered"
    )


def _finished(node: Any) -> Any:
    """The tree with every tensor joined. What one lacks is found later, when all are proved."""
    if isinstance(node, _Sharded):
        return joined(node.dtype, node.shape, node.parts)
    if isinstance(node, dict):
        return {key: _finished(value) for key, value in node.items()}
    return node
