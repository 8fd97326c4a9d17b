"""The commit: all parts joined into one manifest, created last, whole or not at all.

The first rank calls `draft`, `complete` and `commit` while it settles a save, `parts` long after. Never replaces a
manifest that it was not told to.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from pathlib import Path
from platform import python_version
from typing import Any

import msgspec
import torch

from holdfast import events
from holdfast.commit.citations import Cited, citations_of, cited_beside, let_go, root_of
from holdfast.commit.folder import delete_hint, taken
from holdfast.errors import Damaged, HoldfastError, StorageError, Unsupported
from holdfast.ondisk import blocks, manifest, names, signature, values
from holdfast.ondisk.cells import TensorRecord
from holdfast.ondisk.cited import is_cited
from holdfast.ondisk.containers import Note
from holdfast.ondisk.manifest import FileRecord, Manifest
from holdfast.plan.layout import OwnedJoin
from holdfast.plan.owners import Owned, PlannedTensor
from holdfast.plan.plan import Plan
from holdfast.plan.volumes import file_of
from holdfast.state import Collected
from holdfast.state.layers import KEY, encode_kinds
from holdfast.storage import storage
from holdfast.storage.cloud.conditions import STALE
from holdfast.storage.links import without_links_out
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.wrappers.retrying import is_transient
from holdfast.version import __version__

Attached = Mapping[str, str | os.PathLike[str] | bytes]
"""Files to keep beside the state: name below ``attachments/`` to a path or the bytes themselves."""


@dataclass(frozen=True)
class Identity:
    """What a save is called: its own id, its run's, its step, how many ranks make it, and which of them were lost."""

    save: str
    run: str
    step: int | None
    world_size: int
    lost: tuple[int, ...] = ()


def draft(
    identity: Identity, plan: Plan, state: Collected, owned: OwnedJoin, attachments: list[tuple[str, int, str]]
) -> Manifest:
    """The manifest of a save, all but the sizes and digests of its files, which only their writers know."""
    index = _files_of(plan, identity.world_size)
    leaves, containers = _leaves(state, owned)
    drafted = Manifest(
        save=identity.save,
        run=identity.run,
        step=identity.step,
        created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        producer=_producer(state, identity.lost),
        world_size=identity.world_size,
        files=[
            [file_of(section, writer, identity.world_size, identity.save, volume, plan.volumes), 0, 0, ""]
            for (section, volume), writers in index.items()
            for writer in writers
        ],
        tensors=_records(plan, index),
        values=leaves,
        containers={**plan.containers, **containers},
        aliases=plan.aliases,
        per_rank={path: manifest.ranges(index[names.section_of(path), 0].values()) for path in plan.per_rank},
        attachments=attachments,
    )
    return manifest.versioned(drafted, least=plan.version)


def _producer(state: Collected, lost: tuple[int, ...]) -> dict[str, str]:
    """What made it, without which ranks; and what kind of layer each module was, as far as the first rank has them."""
    made = {"holdfast": __version__, "torch": str(torch.__version__), "python": python_version()}
    if lost:
        made["lost"] = manifest.ranges(lost)
    if kinds := encode_kinds(state.kinds):
        made[KEY] = kinds
    return made


def complete(drafted: Manifest, files: Sequence[FileRecord]) -> Manifest:
    """The manifest with what the ranks wrote. Raises HoldfastError if that is not what was planned."""
    written = {file.path: file for file in files}
    planned = [str(row[0]) for row in drafted.files]
    odd = set(written).symmetric_difference(planned)
    if odd:
        raise HoldfastError(f"{min(odd)} was planned and not written, or the other way round; a fault of holdfast")
    return msgspec.structs.replace(drafted, files=[manifest.file_row(written[path]) for path in planned])


def commit(folder: Place, record: Manifest, *, replaces: bool, signed: bytes | None = None) -> None:
    """Create the manifest, or replace the one that is there; what only the replaced one named is deleted after.

    ``signed`` is the signature, which is there before the manifest is.

    Raises StorageError if another save has committed to the folder in the meantime; one that is not ``settled`` if a
    store has not answered, and may have the manifest all the same, or a disk has it, but perhaps not for good.
    """
    try:
        if signed is not None:
            place_signature(folder, record, signed)
        _commit(folder, record, replaces)
    except StorageError as error:
        if is_transient(error) or is_transient(error.__cause__) or standing(folder, record.save):
            error.settled = False
        raise


def standing(folder: Place, save: str) -> Manifest | None:
    """The manifest in a folder if it is that of this save; None also if it cannot be read."""
    target = folder / manifest.FILE_NAME
    try:
        found = manifest.decode(target.read_small(), str(target))
    except (HoldfastError, OSError):  # then there is none of ours, as far as anybody can tell
        return None
    return found if found.save == save else None


def place_signature(folder: Place, record: Manifest, signed: bytes) -> None:
    """Put a signature beside the manifest that it is of, or that is to come; whole or not at all, and durable."""
    name = signature.file_name(record)
    (folder / name).replace_small(signed, f".{name}.{secrets.token_hex(4)}.tmp")


def _commit(folder: Place, record: Manifest, replaces: bool) -> None:
    target, data = folder / manifest.FILE_NAME, manifest.encode(record)
    # Two processes may commit one save late, at once: each has a name of its own for the moments before.
    temporary = f".manifest.{record.save}.{secrets.token_hex(4)}.tmp"
    if replaces:
        previous = _previous(target)
        target.replace_small(data, temporary)
        if previous is not None:
            remove_old_files(folder, previous, record)
    elif not target.create_small(data, temporary):
        try:
            winner = manifest.decode(target.read_small(), str(target))
        except FileNotFoundError:
            raise taken(f"another save has claimed {target} before this one (if it died, for {STALE:.0f} s)") from None
        if winner.save != record.save:  # else our own answer was lost
            raise taken(f"{folder} was committed by another save ({winner.save}) in the meantime")


def _files_of(plan: Plan, world_size: int) -> dict[tuple[str, int], dict[int, int]]:
    """Section and volume to writing rank to its file, by rank: so that the ranks of a tensor are few ranges.

    A section with a PerRank value has a file of every rank.
    """
    owned: dict[tuple[str, int], set[Owned]] = {}
    for name, _, pieces in plan.owned():
        part = (names.section_of(name), plan.volumes.get(name, 0))
        owned.setdefault(part, set()).add(pieces)  # a handful, which thousands of tensors share
    writers = {part: {rank for pieces in found for rank in pieces.owners} for part, found in owned.items()}
    for path in plan.per_rank:
        writers.setdefault((names.section_of(path), 0), set()).update(range(world_size))
    numbers = count()
    return {part: dict(zip(sorted(ranks), numbers)) for part, ranks in writers.items()}  # noqa: B905


def _records(plan: Plan, index: Mapping[tuple[str, int], Mapping[int, int]]) -> dict[str, TensorRecord]:
    made: dict[tuple[Owned, PlannedTensor, tuple[str, int]], TensorRecord] = {}
    records = {}
    for name, tensor, pieces in plan.owned():
        key = (pieces, tensor, (names.section_of(name), plan.volumes.get(name, 0)))
        record = made.get(key)
        if record is None:
            record = made[key] = _record(tensor, pieces, index[key[2]])
        records[name] = record
    return records


def _record(tensor: PlannedTensor, pieces: Owned, files: Mapping[int, int]) -> TensorRecord:
    if 0 in tensor.shape:
        return TensorRecord(tensor.dtype, tensor.shape, None, "")
    return TensorRecord(tensor.dtype, tensor.shape, pieces.cells, manifest.ranges(files[r] for r in pieces.owners))


def _leaves(state: Collected, joined: OwnedJoin) -> tuple[dict[str, Any], dict[str, Note]]:
    """Leaf values and containers as the manifest has them, parameter groups spelled out."""
    leaves = {**state.values, **joined.values}
    containers: dict[str, Note] = {}
    for path, groups in joined.groups.items():
        tree = [
            {**{k: values.decode_tree(v, _no_tensor) for k, v in settings.items()}, "params": params}
            for settings, params in zip(groups.settings, groups.params, strict=True)
        ]
        _flatten(names.child(path, "param_groups"), tree, leaves, containers)
    return leaves, containers


def _no_tensor(reference: str) -> torch.Tensor:
    raise HoldfastError(f"a parameter group refers to tensor {reference}; a fault of holdfast")


def _flatten(path: str, node: Any, leaves: dict[str, Any], containers: dict[str, Note]) -> None:
    if type(node) in (list, tuple) or (type(node) is dict and all(type(key) is str for key in node)):
        if type(node) is not dict or not node:
            containers[path] = type(node).__name__
        for key, value in node.items() if type(node) is dict else enumerate(node):
            _flatten(names.child(path, str(key)), value, leaves, containers)
    else:  # containers of other kinds are one value
        leaves[path] = values.encode_tree(node, None)


def check_attachment(name: str) -> None:
    parts = name.split("/")
    if "\\" in name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise Unsupported(f"attachment {name!r} must be a relative path that stays below attachments/")


def read_attachments(attachments: Attached) -> dict[str, bytes]:
    """The bytes of the attached files. Raises Unsupported for a name that leaves the checkpoint, StorageError."""
    found = {}
    for name, source in attachments.items():
        check_attachment(name)
        if not isinstance(source, bytes):
            with naming(source, "read the attachment"):
                source = Path(source).read_bytes()
        found[name] = source
    return found


def readable_attachments(attachments: Attached) -> dict[str, bytes]:
    """The same, of those that can be read here; the others may lie on the first rank's disk alone."""
    found: dict[str, bytes] = {}
    for name, source in attachments.items():
        try:
            found |= read_attachments({name: source})
        except (StorageError, OSError) as error:
            events.log.debug("the attachment %r cannot be read on this rank: %s", name, error)
    return found


def place_attachments(
    attachments: Mapping[str, bytes], save: str, *, fresh: bool
) -> tuple[list[tuple[str, int, str]], list[tuple[str, bytes]]]:
    """Records of attached files, and their relative paths with their bytes.

    Beside an older checkpoint they go into a folder of this save, so that nothing is changed.
    """
    below = "attachments" if fresh else f"attachments/{save}"
    records = [(f"{below}/{name}", len(data), blocks.digest(data)) for name, data in attachments.items()]
    return records, [(f"{below}/{name}", data) for name, data in attachments.items()]


def _previous(target: Place) -> Manifest | None:
    """The checkpoint to be replaced, or None if it can no longer be read: what it named is then left to a sweep."""
    try:
        return manifest.decode(target.read_small(), str(target))
    except (Damaged, Unsupported) as error:
        events.log.warning("overwriting a checkpoint that cannot be read: %s", error)
        return None


def remove_old_files(folder: Place, old: Manifest, new: Manifest, cited: Cited | None = None) -> bool:
    """Delete what only the replaced checkpoint needed: its files, and those that it cited elsewhere.

    What other checkpoints cite stays: ``cited`` if the caller knows, else they are all asked. The new one is committed,
    so a failure here loses space alone: False then.
    """
    kept = {f.path for f in new.data_files} | {path for path, _, _ in new.attachments}
    own = [*(f.path for f in old.data_files if not is_cited(f.path)), *(path for path, _, _ in old.attachments)]
    try:
        root, name = root_of(folder)
        cited = cited_beside(folder) if cited is None else cited
        gone = without_links_out(
            folder, [path for path in own if path not in kept and path not in cited.get(name, set())]
        )
        signed = {signature.file_name(old)} - {signature.file_name(new)}
        storage.delete(*gone, *(folder / path for path in signed))
        if new.save != old.save:
            delete_hint(folder)  # what saves through holdfast.dcp leave is written anew after the commit
        for above in {path.parent for path in gone}:
            above.delete_if_empty()
        now = citations_of(new)
        let_go(root, {at: paths - now.get(at, set()) for at, paths in citations_of(old).items()}, cited)
    except (StorageError, Unsupported) as error:
        events.log.warning("the checkpoint is committed, but older files stay: %s", error)
        return False
    return True
