"""Meta's torch_checkpointing: ``<item>_<rank>.pt`` (.json, .safetensors) of every item and rank, and ``metadata.pkl``.

Without ``metadata.pkl``, which the library omits where no item may be resharded, the DTensors say where they belong.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from holdfast.errors import Damaged
from holdfast.events import log
from holdfast.formats import members
from holdfast.formats.assemble import ForeignState
from holdfast.formats.dcp.names import own_items, step_in
from holdfast.formats.huggingface import safetensors_files
from holdfast.formats.machine import torch_files
from holdfast.formats.machine.untrusted import read_json
from holdfast.formats.members import newest
from holdfast.formats.sharded import join_nodes, prove_joined
from holdfast.formats.sources import all_of, file
from holdfast.formats.stored import Stored
from holdfast.formats.torch_checkpointing.metadata import METADATA, Keys, Metadata, SavedPart, read_metadata
from holdfast.storage.place import Place

TRUSTED = 1 << 20
"""Bytes: smaller tensors that the metadata calls replicated are compared, as the library calls all plain ones so."""

_OF_RANK = re.compile(r"(?P<item>.+)_(?P<rank>0|[1-9][0-9]{0,6})\.(?:pt|json|safetensors)")
_IN_FOLDER = re.compile(r"(?:.+/)?rank_(?P<rank>[0-9]{1,7})/(?P<item>[^/]+)\.(?:pt|json|safetensors)")
_OF_ALL = re.compile(r"(?P<item>[^/]+)\.(?:pt|json|safetensors)")
_COUNTERS = frozenset(["batch", "checkpoint", "ckpt", "epoch", "iter", "iteration", "step"])
"""What stands before a number that is no rank."""

Files = dict[str, dict[int, Place]]
"""By item and rank."""


class Layout(NamedTuple):
    """Which files make up a checkpoint; ``others`` are files whose names name no item."""

    files: Files
    others: dict[str, Place]
    world_size: int


def read(path: Place) -> ForeignState | None:
    """The checkpoint at ``path`` (its folder, a file beside its ``metadata.pkl``, a run's folder), or None.

    Raises Damaged for a missing file of a rank, Unsupported for shards of which nothing says where they belong.
    """
    folder, reading = _folder(path)
    if folder is None:
        return None
    metadata = read_metadata(folder)
    layout = _layout(folder, metadata) if metadata is not None else _plain_layout(folder)
    if layout is None:
        return None
    nodes = {item: [(r, _tree(p, item, r, metadata)) for r, p in by.items()] for item, by in layout.files.items()}
    items = join_nodes(nodes, layout.world_size, f"{folder}: ")
    for item, tree in items.items() if metadata is None else ():
        prove_joined({item: tree}, folder, "save with a resharder (ItemSpec(resharder=DefaultResharder()))")
    state, how = own_items(items, folder)
    if folder.name.startswith("tmp_"):
        how.append("its name begins with tmp_, as that of a save under way does")
    return ForeignState(
        "torch_checkpointing", state, step_in(state), layout.world_size,
        {"torch_checkpointing": f"metadata {metadata.version}" if metadata else "without metadata"},
        "; ".join(filter(None, [reading, *how])), layout.others,
    )  # fmt: skip


def _folder(path: Place) -> tuple[Place | None, str]:
    if path.is_file():
        part = path.name == METADATA or _OF_RANK.fullmatch(path.name) is not None
        if not part or read_metadata(path.parent) is None:
            return None, ""
        return path.parent, "" if path.name == METADATA else f"the checkpoint that {path.name} is part of"
    if not path.is_dir():
        return None, ""
    if (path / METADATA).is_file() or _plain_layout(path) is not None:
        return path, ""
    return newest(path, _is_complete) or (None, "")


def _is_complete(folder: Place) -> bool:
    if folder.name.startswith("tmp_"):
        return False
    try:
        metadata = read_metadata(folder)
        return (_plain_layout(folder) if metadata is None else _layout(folder, metadata)) is not None
    except Damaged:
        return False


def _layout(folder: Place, metadata: Metadata) -> Layout:
    """The files that the metadata names, and those of the items that it does not speak of.

    Raises Damaged if a file is missing that holds a part of a tensor.
    """
    files: Files = {}
    for item, by_rank in metadata.files.items():
        named = {rank: name or f"{item}_{rank}.pt" for rank, name in sorted(by_rank.items())}
        held = [rank for rank, name in named.items() if by_rank[rank] is not None or (folder / name).is_file()]
        cut = any(not place.is_whole for places in metadata.places.get(item, {}).values() for place in places.values())
        if len(held) == 1 and not cut:  # an item of one rank is listed like an item of all
            named = {rank: named[rank] for rank in held}
        files[item] = {rank: members.member(folder, name, METADATA) for rank, name in named.items()}
    claimed = {path for by_rank in files.values() for path in by_rank.values()}
    others: dict[str, Place] = {}
    for name in _names(folder):
        try:
            path = members.member(folder, name)
        except Damaged as error:
            log.warning("%s: %s is no part of it: %s", folder, name, error)
            continue
        if path in claimed or name == METADATA:
            continue
        known, rank = _item_of(name, metadata.world_size)
        if known is None or known in metadata.files or rank in files.get(known, {}):
            others[name] = path
        else:
            files.setdefault(known, {})[rank] = path
    return Layout(files, others, metadata.world_size)


def _names(folder: Place, below: str = "", depth: int = 0) -> list[str]:
    names = [f"{below}{name}" for name in members.listed(folder / below)]
    for inner in members.folders(folder / below) if depth < 4 else ():
        if not (folder / below / inner).is_symlink():
            names += _names(folder, f"{below}{inner}/", depth + 1)
    return names


def _item_of(name: str, world_size: int) -> tuple[str | None, int]:
    """The item and the rank that a file is of; one without a rank was written by one for all."""
    match = _OF_RANK.fullmatch(name) or _IN_FOLDER.fullmatch(name)
    if match is not None and int(match["rank"]) < world_size:
        return match["item"], int(match["rank"])
    whole = _OF_ALL.fullmatch(name)
    return (whole["item"], 0) if whole is not None else (None, 0)


def _plain_layout(folder: Place) -> Layout | None:
    """The files of a folder in which all of torch are ``<item>_<rank>.pt``, of ranks 0 to the last; else None."""
    names = members.listed(folder)
    matches = {name: m for name in names if (m := _OF_RANK.fullmatch(name)) is not None}
    saved = [name for name in names if name.endswith((".pt", ".safetensors"))]
    if not saved or any(name not in matches for name in saved) or METADATA in names:
        return None
    by_item: dict[str, dict[int, str]] = {}
    for name, match in matches.items():
        by_item.setdefault(match["item"], {})[int(match["rank"])] = name
    ranks = {rank for by_rank in by_item.values() for rank in by_rank}
    if ranks != set(range(len(ranks))) or not _is_of_ranks(folder, by_item):
        return None
    files = {i: {r: members.member(folder, by_rank[r]) for r in sorted(by_rank)} for i, by_rank in by_item.items()}
    return Layout(files, {name: folder / name for name in names if name not in matches}, len(ranks))


def _tree(path: Place, item: str, rank: int, metadata: Metadata | None) -> Any:
    """What a rank saved of an item; tensors of which only the metadata says where they belong are shares."""
    places = metadata.places.get(item, {}).get(rank, {}) if metadata is not None else {}
    if path.suffix == ".json":
        return read_json(path)
    data = all_of(file(path))
    if safetensors_files.is_safetensors(data):
        return _nested(safetensors_files.load_file(data).tensors, places, path)
    tree = torch_files.load_file(data)
    for keys, place in places.items():
        if not place.is_whole:
            _place(tree, keys, place, path)
    return tree


def _nested(tensors: Mapping[str, Stored], places: Mapping[Keys, SavedPart], path: Place) -> dict[Any, Any]:
    """The tensors of a safetensors file, whose names are ways joined by dots, under their own keys again."""
    ways = {".".join(map(str, keys)): (keys, place) for keys, place in places.items()}
    tree: dict[Any, Any] = {}
    for name, tensor in tensors.items():
        keys, place = ways.get(name, ((name,), None))
        at = tree
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        trusted = place is not None and (not place.is_whole or tensor.nbytes > TRUSTED)
        at[keys[-1]] = place.share(tensor, f"{path}: {name}") if place is not None and trusted else tensor
    return tree


def _place(tree: Any, keys: Keys, place: SavedPart, path: Place) -> None:
    """Put a share in place of a tensor that is a part by the metadata alone; a DTensor says itself what it is."""
    *way, last = keys
    try:
        for key in way:
            tree = tree[key]
        leaf = tree[last]
    except (LookupError, TypeError):
        return  # a hole, if any, is found when all ranks are joined
    if isinstance(leaf, Stored):
        tree[last] = place.share(leaf, f"{path}: {'.'.join(map(str, keys))}")


def _is_of_ranks(folder: Place, by_item: Mapping[str, Mapping[int, str]]) -> bool:
    """Whether the numbers in the names are ranks, not steps or epochs."""
    item, *others = by_item
    if not others and item != "model" and (len(by_item[item]) > 1 or item in _COUNTERS):
        return False  # `rank_files` reads those of ranks
    one = folder / next(iter(by_item[item].values()))
    return one.suffix != ".pt" or torch_files.is_torch_file(all_of(file(one)))
