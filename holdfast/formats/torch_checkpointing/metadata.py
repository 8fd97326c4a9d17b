"""``metadata.pkl`` of torch_checkpointing: which files the items of each rank are in, and where each tensor belongs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any

from holdfast.errors import Damaged, Unsupported
from holdfast.formats.machine.torch_files import load_pickle
from holdfast.formats.machine.untrusted import damaged_as, read_whole
from holdfast.formats.shares import MAX_RANKS, Mesh, Share, part_of, placed_share, sizes_of
from holdfast.formats.stored import Stored
from holdfast.ondisk.box import Box, inside
from holdfast.plan.spread import Split
from holdfast.storage.place import Place

METADATA = "metadata.pkl"
MAX_METADATA = 4 << 30

_VERSIONS = ("1.0", "2.0")

Keys = tuple[str | int, ...]
"""The way to a leaf of an item."""


@dataclass(frozen=True)
class OnMesh:
    """A DTensor, or a tensor that the library took for a replica: how a mesh cuts it and where the rank stands."""

    shape: tuple[int, ...]
    mesh: Mesh
    splits: tuple[Split | None, ...]

    @property
    def is_whole(self) -> bool:
        return not any(self.splits)

    def share(self, local: Stored, where: str) -> Share:
        """What ``local`` is a part of, and which."""
        return placed_share(self.shape, self.mesh, self.splits, local, where)


@dataclass(frozen=True)
class InBoxes:
    """A tensor that listed its boxes: for each its place in the whole, in the local tensor, and its lengths."""

    shape: tuple[int, ...]
    boxes: tuple[tuple[tuple[int, ...], Box], ...]
    is_whole = False

    def share(self, local: Stored, where: str) -> Share:
        parts = []
        for offsets, within in self.boxes:
            if not inside(within, local.shape) or not inside(Box(offsets, within.lengths), self.shape):
                raise Damaged(f"{where} has a part {within} of {local.shape} that does not lie in {self.shape}")
            if within.size:
                parts.append((offsets, part_of(local, within)))
        return Share(local.dtype, self.shape, tuple(parts))


SavedPart = OnMesh | InBoxes


@dataclass
class Metadata:
    """``files``: by item and rank, None for the usual name. ``places``: by item, rank and way."""

    version: str
    world_size: int
    files: dict[str, dict[int, str | None]] = field(default_factory=dict)
    places: dict[str, dict[int, dict[Keys, SavedPart]]] = field(default_factory=dict)


def read_metadata(folder: Place) -> Metadata | None:
    """The metadata in a folder; None if there is none, or a ``metadata.pkl`` of something else.

    Raises Damaged if it contradicts itself, Unsupported for a version that is not known.
    """
    path = folder / METADATA
    if not path.is_file():
        return None
    try:
        content = load_pickle(read_whole(path, MAX_METADATA), path)
    except Unsupported:  # it names classes: this one names none
        return None
    if not isinstance(content, dict) or not {"metadata", "world_size"} <= content.keys():
        return None
    version = content.get("version", "1.0")
    if version not in _VERSIONS:
        raise Unsupported(f"{path} is of version {str(version)[:40]!r}, which is not known; update holdfast")
    with damaged_as(f"{path} is not whole: it was altered, or is of a version that is not known"):
        return _parsed(content, version)


def _parsed(content: Mapping[str, Any], version: str) -> Metadata:
    world_size = content["world_size"]
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
        raise ValueError(f"a world size of {world_size}")
    metadata = Metadata(version, world_size)
    paths: Iterable[tuple[str, Keys, Any]]
    if version == "1.0":
        paths = _paths_of_1(content["metadata"])
        layouts = {int(rank): layout for rank, layout in content["rank_to_layout_info_mappings"].items()}
        items = {item for layout in layouts.values() for item in layout}
        files = {item: {rank: layout.get(item) for rank, layout in layouts.items()} for item in items}
    else:
        paths = _paths_of_2(content["metadata"])
        files = {item: kept["rank_to_layout_info"] for item, kept in content["metadata"].items()}
    for item, by_rank in files.items():
        metadata.files[_text(item)] = {
            int(rank): None if layout is None else _text(layout["file_path"]) for rank, layout in by_rank.items()
        }
    for item, keys, groups in paths:
        places = metadata.places.setdefault(item, {})
        for group in groups:
            for rank, place in _places(group):
                places.setdefault(rank, {})[keys] = place
    return metadata


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} where a name belongs")
    return value


def _paths_of_1(paths: Mapping[str, Any]) -> Iterator[tuple[str, Keys, Any]]:
    for text, groups in paths.items():
        item, *keys = json.loads(text)
        yield _text(item), tuple(keys), groups


def _paths_of_2(items: Mapping[str, Any]) -> Iterator[tuple[str, Keys, Any]]:
    for item, kept in items.items():
        for text, groups in kept["nested_path_to_metadata"].items():
            yield _text(item), tuple(json.loads(text)), groups


def _places(group: Mapping[str, Any]) -> Iterator[tuple[int, SavedPart]]:
    """Where each rank of a group has its part of a tensor."""
    kind, sharding = group["sharding_metadata"]["type"], group["sharding_metadata"]["data"]
    shape = sizes_of(sharding["global_shape"])
    if kind == "DTensorShardingMetadata":
        sizes, ranks = sizes_of(sharding["mesh_spec"]["mesh_shape"]), sizes_of(sharding["mesh_spec"]["mesh_data"])
        if prod(sizes) != len(ranks):
            raise ValueError(f"a mesh of sizes {sizes} with {len(ranks)} ranks")
        splits = tuple(_split(placement) for placement in sharding["placements"])
        coordinates = dict(zip(ranks, product(*map(range, sizes)), strict=True))
        for rank in group["ranks"]:
            yield rank, OnMesh(shape, Mesh(sizes, coordinates.get(rank)), splits)
    elif kind == "default_tensor_v1":
        boxes = zip(sharding["global_offsets"], sharding["local_offsets"], sharding["local_sizes"], strict=True)
        place = InBoxes(shape, tuple((sizes_of(at), Box(sizes_of(local), sizes_of(n))) for at, local, n in boxes))
        for rank in group["ranks"]:
            yield rank, place
    else:
        raise ValueError(f"sharding metadata of type {str(kind)[:60]!r}, which is not known")


def _split(placement: Mapping[str, Any]) -> Split | None:
    kind = placement["type"]
    if kind == "Replicate":
        return None
    if kind not in ("Shard", "StridedShard"):
        raise ValueError(f"a placement {str(kind)[:40]!r}, which is not known")
    return Split(*sizes_of((placement["dim"], placement["split_factor"] if kind == "StridedShard" else 1)))
