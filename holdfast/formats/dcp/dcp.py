"""Checkpoints of torch.distributed.checkpoint: a pickled `.metadata`, and `.distcp` files of many small archives."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.buffers.memory import no_collection
from holdfast.commit.folder import HINT_BEGINS
from holdfast.errors import Damaged, NotACheckpoint, Unsupported
from holdfast.formats import members
from holdfast.formats.assemble import ForeignState
from holdfast.formats.dcp import distcp
from holdfast.formats.dcp import metadata as dcp_metadata
from holdfast.formats.dcp.distcp import Entry
from holdfast.formats.dcp.metadata import DATA_FILE
from holdfast.formats.dcp.names import own_names, step_of
from holdfast.formats.machine.pickles import Record
from holdfast.formats.machine.torch_files import load_path
from holdfast.formats.simplified import PerRank
from holdfast.formats.sources import file
from holdfast.formats.stored import Opaque
from holdfast.storage.place import Place

MAX_HOLES = 10_000
"""How many places of a list in a row may hold nothing: empty containers leave no trace."""

_STEP = re.compile(r"step[-_](\d+)")
"""What folders of steps are called, by torchtitan and in scripts."""


def read(path: Place) -> ForeignState | None:
    """The checkpoint of DCP at ``path``: its folder, a file in it, or a run folder with torchtitan's ``step-<n>``."""
    folder, reading = _folder(path)
    if folder is None:
        return None
    content = read_folder(folder)
    state, how = own_names({**content.tree, **_beside(folder, content.tree)}, folder)
    version = content.metadata[0].get("version")
    step = step_of(state)
    if step is None and (named := _STEP.fullmatch(folder.name)):
        step = int(named[1])
    return ForeignState(
        "torch.distributed.checkpoint", state, step, content.world_size,
        {"dcp": str(version)} if version else {}, "; ".join(filter(None, [reading, *how])),
    )  # fmt: skip


@dataclass(frozen=True)
class DcpState:
    """What a folder of DCP holds.

    ``flat``: flat key to `Stored` or value. ``tree``: the same, nested by the key paths that the planner kept; a key
    without a path stands at the top. ``metadata``: the records as pickled, for formats that keep more in them.
    """

    flat: dict[str, Any]
    tree: dict[str, Any]
    world_size: int
    metadata: tuple[Record, ...] = field(repr=False)


def read_folder(folder: Place) -> DcpState:
    """All that ``folder`` holds, its tensors unread. Raises NotACheckpoint, Damaged, Unsupported, StorageError."""
    paths = dcp_metadata.metadata_files(folder)
    if not paths:
        raise NotACheckpoint(f"{folder} holds no .metadata: it is no checkpoint of DCP, or one that never finished")
    files = dcp_metadata.Files(folder)
    tensors: dict[str, dcp_metadata.Tensor] = {}
    objects: dict[str, dict[int, Entry]] = {}
    key_paths: dict[str, tuple[Any, ...]] = {}
    with no_collection():
        records = tuple(map(dcp_metadata.load, paths))
        for rank, (path, record) in enumerate(zip(paths, records, strict=True)):
            dcp_metadata.collect(record, path, files, rank, tensors, objects)
            key_paths.update(_key_paths(record, path))
        values: dict[str, Any] = {key: tensor.stored(key_paths.get(key, ())) for key, tensor in tensors.items()}
        values.update(_values(objects, len(paths)))
        # The planner lists keys in the order of the state; the plans of the ranks shuffle them.
        order = [*(key for key in key_paths if key in values), *(key for key in values if key not in key_paths)]
        flat = {key: values[key] for key in order}
        tree = _nested(flat, key_paths, folder)
    return DcpState(flat, tree, max(len(paths), files.world_size()), records)


def _folder(path: Place) -> tuple[Place | None, str]:
    """The folder that a path means, and why it is that one."""
    if path.suffix == ".distcp" or path.name.endswith(".metadata"):
        return (path.parent, f"the checkpoint that {path.name} is part of") if path.is_file() else (None, "")
    if not path.is_dir():
        return None, ""
    names = set(members.names(path))
    data = any(map(DATA_FILE.fullmatch, names))
    if _is_metadata(path / ".metadata") or (data and (path / ".metadata").is_file()):
        both = "__0.metadata" in names
        return path, "the save with collectives, not the one without that left its files here too" if both else ""
    if "__0.metadata" in names:
        return path, ""
    if data:
        raise NotACheckpoint(
            f"{path} holds data files of DCP but no .metadata, which is written last: that save never finished. "
            "Take another step"
        )
    steps = sorted((int(m[1]), name) for name in names if (m := re.fullmatch(r"step-(\d+)", name)))
    for _, name in reversed(steps):
        if _is_metadata(path / name / ".metadata"):
            return path / name, f"the last of {len(steps)} steps, {name}"
    return None, ""


def _is_metadata(path: Place) -> bool:
    if not path.is_file():
        return False
    start = file(path).read(0, 256)
    return b"torch.distributed.checkpoint.metadata" in start and not start.startswith(HINT_BEGINS)


def _beside(folder: Place, tree: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning keeps in a file of its own: epoch, step, loops, schedulers, callbacks."""
    path = folder / "meta.pt"
    if not path.is_file():
        return {}
    try:
        content = load_path(path)
    except Unsupported as error:
        return {"meta": Opaque(str(error))}
    return content if isinstance(content, dict) and not content.keys() & tree.keys() else {"meta": content}


def _values(entries: Mapping[str, Mapping[int, Entry]], ranks: int) -> dict[str, Any]:
    """The objects by key; all of them where each rank wrote its own and they differ."""
    data = distcp.blobs(entry for by_rank in entries.values() for entry in by_rank.values())
    known: dict[bytes, Any] = {}
    objects: dict[str, Any] = {}
    for key, by_rank in entries.items():
        if len({data.get(entry, entry) for entry in by_rank.values()}) == 1:
            by_rank = dict([next(iter(by_rank.items()))])
        try:
            values = {rank: distcp.value(entry, data.get(entry), known) for rank, entry in by_rank.items()}
        except Unsupported as error:
            objects[key] = Opaque(str(error))
            continue
        if len(values) == 1:
            (objects[key],) = values.values()
        else:
            objects[key] = PerRank(tuple(values.get(rank) for rank in range(ranks)))
    return objects


def _key_paths(record: Record, path: Place) -> dict[str, tuple[Any, ...]]:
    """The key path of each flat key, if the planner flattened the state."""
    key_paths = record.get("planner_data") or {}
    if not isinstance(key_paths, dict) or not all(
        isinstance(steps, (tuple, list)) and steps and all(type(step) in (int, str) for step in steps)
        for steps in key_paths.values()
    ):
        raise Damaged(f"{path} has no valid key paths")
    return {key: tuple(steps) for key, steps in key_paths.items()}


def _nested(flat: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]], folder: Place) -> dict[str, Any]:
    """Flat keys back to dicts and lists: a number in a path is a place in a list."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        path = paths.get(key, (key,))
        at: Any = root
        for step, following in zip(path, [*path[1:], None], strict=True):
            if type(step) is int and isinstance(at, list) and 0 <= step <= len(at) + MAX_HOLES:
                at.extend([None] * (step + 1 - len(at)))
            elif not (isinstance(step, str) and isinstance(at, dict)):
                raise Damaged(f"{folder}: the key path {path} of {key} contradicts that of another key")
            held = at[step] if isinstance(at, list) else at.get(step)
            if held is None:
                at[step] = held = value if following is None else [] if type(following) is int else {}
            elif following is None:
                raise Damaged(f"{folder}: the key path {path} of {key} is that of another key too")
            at = held
    return root
