"""A checkpoint by the keys that torch's programs know: ours as it is, torch's own folders by torch's own keys."""

from __future__ import annotations

import copy
import os
from typing import Any

import msgspec

from holdfast.checkpoint import Checkpoint, open_checkpoint
from holdfast.commit.folder import HINT, is_our_hint
from holdfast.errors import HoldfastError
from holdfast.formats.assemble import ForeignState, assemble
from holdfast.formats.dcp.dcp import read_folder
from holdfast.ondisk import containers, manifest, names, packing, values
from holdfast.ondisk.containers import Note
from holdfast.storage.place import Place
from holdfast.storage.urls import location


def as_torch_has_it(path: Place) -> str | os.PathLike[str]:
    """A path as torch's own objects hold it."""
    return str(path) if path.is_remote else path


def may_be_a_path(path: str | os.PathLike[str]) -> bool:
    """Whether this is a path that holdfast can take, on disk or in a store."""
    try:
        location(path)
    except (HoldfastError, ValueError):
        return False
    return True


def open_by_key(path: str | os.PathLike[str] | Place) -> Checkpoint:
    """`holdfast.open`, but a folder that torch's engine wrote keeps its keys: a program that changes one line goes on.

    `holdfast.open` gives the model and the optimizer in it holdfast's names, whatever that program called them.
    """
    folder = location(path)
    if not is_of_torch(folder):
        return taken_apart(open_checkpoint(path))
    state = read_folder(folder)
    foreign = ForeignState("torch.distributed.checkpoint", state.tree, world_size=state.world_size)
    return Checkpoint(folder, reader=assemble(foreign, folder))


def is_of_torch(folder: Place) -> bool:
    """Whether torch's own engine saved what lies in a folder: a save of ours leaves `.metadata` there as well."""
    if not any((folder / name).is_file() for name in (HINT, "__0.metadata")):
        return False
    return not (folder / manifest.FILE_NAME).exists() and not is_our_hint(folder)


def taken_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The same with a name for each value of a dict, as torch has it, where holdfast keeps a long dict as one value."""
    record = checkpoint.manifest
    long = [path for path, value in record.values.items() if values.version_of(value) > manifest.VERSION]
    apart = {path: tree for path in long if _has_keys(tree := checkpoint.value(path))}
    if not apart:
        return checkpoint
    leaves = {path: value for path, value in record.values.items() if path not in apart}
    notes = dict(record.containers)
    for path, tree in apart.items():
        _take_apart(path, tree, leaves, notes)
    copied = copy.copy(checkpoint)
    vars(copied).pop("values", None)
    vars(copied)["manifest"] = manifest.versioned(msgspec.structs.replace(record, values=leaves, containers=notes))
    return copied


def _take_apart(path: str, node: Any, leaves: dict[str, Any], notes: dict[str, Note]) -> None:
    if not _has_keys(node):
        leaves[path] = values.encode(node) if containers.kind_of(node) is None else packing.packed(node)
        return
    named = containers.key_names(node) if isinstance(node, dict) else [(str(i), i) for i in range(len(node))]
    note = containers.note_of(node, named, ordered=isinstance(node, dict), exact=True)
    if note is not None:
        notes[path] = note
    for (name, _), child in zip(named, containers.children(node), strict=True):
        _take_apart(names.child(path, name), child, leaves, notes)


def _has_keys(node: Any) -> bool:
    """Whether torch has several keys for what a value holds: for each of a dict, and of a list that holds dicts."""
    return isinstance(node, dict) or (type(node) is list and any(map(_has_keys, node)))
