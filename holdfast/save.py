"""The story of a save: collect, exchange layouts, plan, write what this rank owns, settle, commit.

Users and the manager call `save`. Never leaves a moment without a whole checkpoint, and never commits half of one.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from math import prod
from pathlib import Path, PurePosixPath
from platform import python_version
from time import monotonic
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from holdfast import events
from holdfast.checkpoint import Checkpoint
from holdfast.engine import storage
from holdfast.engine.layout import (
    JoinedGroups,
    Layout,
    OwnedJoin,
    OwnedValues,
    digest_of,
    join_owned,
    join_values,
    layout_of,
    owned_values,
)
from holdfast.engine.memory import no_collection
from holdfast.engine.plan import Plan, make_plan
from holdfast.engine.ranks import DEADLINE, Call, Ranks, ranks_of
from holdfast.engine.state import Collected, collect
from holdfast.engine.write import Image, OpenFiles, write_images
from holdfast.errors import Damaged, HoldfastError, RankLost, StorageError, Unsupported
from holdfast.ondisk import blocks, datafile, manifest, names, values
from holdfast.ondisk.box import Box, covers, relative
from holdfast.ondisk.datafile import Piece
from holdfast.ondisk.manifest import FileRecord, Manifest, TensorRecord
from holdfast.version import __version__

_RUN = secrets.token_hex(8)
_REMEMBERED = 8  # layouts and plans kept for later saves of the same state


def save(
    state: Mapping[str, Any], path: str | os.PathLike[str], *, overwrite: bool = False, step: int | None = None,
    files: Mapping[str, str | os.PathLike[str] | bytes] | None = None, group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE, run: str | None = None,
) -> Checkpoint:  # fmt: skip
    """Save ``state`` to the folder ``path`` and return once it is committed and durable.

    Called by every rank of ``group`` (default: the default process group; without one, this process alone) with
    the same ``path``. ``state`` is a nested dict of tensors, values and objects with ``state_dict()``. ``step``
    defaults to ``state["step"]`` if that is an int. ``files`` are kept beside the state, by name, from a path or
    from bytes. Each phase may take ``deadline`` seconds. ``run`` (16 hex digits) marks which run made it.

    Host memory beyond the state stays below 128 MiB a rank, whatever its size. Raises SaveFailed, the same on every
    rank and also the built-in error of its cause (OSError, TypeError, ValueError, TimeoutError); then nothing was
    committed, training may go on, and an older checkpoint at ``path`` is as it was.
    """
    folder = local_folder(path)
    if step is None and isinstance(state, dict) and type(state.get("step")) is int:
        step = state["step"]
    ranks = ranks_of(group)
    began = monotonic()
    label = f"save {folder} (step {step})"
    with no_collection(), ranks.call(label, deadline=deadline, saving=True) as call:
        work = _Save(call, state, folder, step, dict(files or {}), overwrite, run or _RUN)
        work.run()
    return Checkpoint(folder, monotonic() - began)


def local_folder(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a local folder. Raises Unsupported for a URL."""
    text = os.fspath(path)
    if "://" in text:
        raise Unsupported(f"{text} is a URL; this version saves to local folders only")
    return Path(os.path.abspath(os.path.expanduser(text)))


class _PlanNote(msgspec.Struct, array_like=True):
    layout: str
    values: str
    owned: str


class _Decision(msgspec.Struct, array_like=True):
    """What the first rank decides before anything is planned, and what it still has to be told."""

    save: str
    layouts: list[str]
    layout_of: list[int]
    tell_layout: list[int]
    tell_values: list[int]
    tell_owned: list[int]


class _Told(msgspec.Struct, array_like=True):
    layout: Layout | None = None
    values: dict[str, Any] | None = None
    owned: OwnedValues | None = None


class _Part(msgspec.Struct, array_like=True):
    """What one rank did: its durable files, and the plan that it followed."""

    files: list[tuple[str, int, int, str]]
    plan: str


@dataclass
class _Memory:
    """Layouts and plans of earlier saves of one group; every rank has seen the same ones in the same order."""

    layouts: dict[str, Layout] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)

    def trim(self) -> None:
        for known in (self.layouts, self.plans):
            while len(known) > _REMEMBERED * 64:
                del known[next(iter(known))]


def _memory_of(ranks: Ranks) -> _Memory:
    memory: _Memory = ranks.remembered.setdefault("save", _Memory())
    return memory


@dataclass
class _Save:
    """One save under way on one rank."""

    call: Call
    state: Mapping[str, Any]
    folder: Path
    step: int | None
    attachments: dict[str, str | os.PathLike[str] | bytes]
    overwrite: bool
    run_id: str
    collected: Collected = field(default_factory=Collected)
    plan: Plan | None = None
    joined: OwnedJoin | None = None
    save_id: str = ""

    def run(self) -> None:
        ranks, memory = self.call.ranks, _memory_of(self.call.ranks)
        opened = OpenFiles()
        leave = False
        try:
            with events.task("save", str(self.folder), ranks.rank) as task:
                decision = self.call.exchange("plan", self._describe, self._decide, _Decision)
                if decision.tell_layout or decision.tell_values or decision.tell_owned:
                    told = self.call.exchange(
                        "layout", lambda: self._tell(decision), lambda notes: self._join(decision, notes), list[Layout]
                    )
                    memory.layouts.update((digest_of(layout), layout) for layout in told)
                leave = self._settle(decision, opened, task)
        finally:
            if not leave and not self._is_committed():
                _remove(opened.paths, self.folder)
            opened.close()
            memory.trim()

    def _settle(self, decision: _Decision, opened: OpenFiles, task: events.Task) -> bool:
        """Write, report, commit. True if this rank's files are to stay where they are."""
        self.save_id = decision.save
        try:
            self.call.settle(
                "write", lambda: self._write(decision, opened, task), lambda parts: self._commit(decision, parts), str
            )
        except RankLost as lost:
            # The first rank may have died after the commit and before it could tell, or may still be at it: the
            # manifest is the truth, and files that it may name are left to a later sweep.
            opened.paths.clear()
            if not self._is_committed():
                raise
            events.log.warning("%s is committed, although the ranks could not settle it: %s", self.folder, lost.cause)
        return True

    def _is_committed(self) -> bool:
        """Whether the manifest that stands in the folder is this save's."""
        try:
            found = manifest.decode(storage.read_small(self.folder / manifest.FILE_NAME), str(self.folder))
        except (HoldfastError, OSError):
            return False
        return found.save == self.save_id

    # What every rank does before the plan.

    def _describe(self) -> _PlanNote:
        self.collected = collect(self.state, self.call.ranks)
        self.layout = layout_of(self.collected)
        for name in self.attachments:
            _check_attachment(name)
        return _PlanNote(
            digest_of(self.layout), digest_of(self.collected.values), digest_of(owned_values(self.collected))
        )

    def _tell(self, decision: _Decision) -> _Told:
        rank = self.call.ranks.rank
        return _Told(
            self.layout if rank in decision.tell_layout else None,
            self.collected.values if rank in decision.tell_values else None,
            owned_values(self.collected) if rank in decision.tell_owned else None,
        )

    # What the first rank decides.

    def _decide(self, notes: list[_PlanNote]) -> _Decision:
        _prepare(self.folder, overwrite=self.overwrite)
        known = _memory_of(self.call.ranks).layouts
        layouts = list(dict.fromkeys(n.layout for n in notes))
        index = {digest: i for i, digest in enumerate(layouts)}
        return _Decision(
            secrets.token_hex(8),
            layouts,
            [index[n.layout] for n in notes],
            [rank for digest, rank in _first_with(n.layout for n in notes).items() if digest not in known],
            _unless_one(_first_with(n.values for n in notes)),
            _unless_one(_first_with((n.owned, n.layout) for n in notes), len({n.owned for n in notes})),
        )

    def _join(self, decision: _Decision, notes: list[_Told]) -> list[Layout]:
        told_values = [(rank, note.values) for rank, note in enumerate(notes) if note.values is not None]
        if told_values:
            join_values(told_values)
        told = [note.layout for note in notes if note.layout is not None]
        known = {**_memory_of(self.call.ranks).layouts, **{digest_of(layout): layout for layout in told}}
        if decision.tell_owned:
            owned = [(r, decision.layout_of[r], n.owned) for r, n in enumerate(notes) if n.owned is not None]
            self.joined = join_owned([known[d] for d in decision.layouts], owned)
        return told

    # What every rank writes.

    def _write(self, decision: _Decision, opened: OpenFiles, task: events.Task) -> _Part:
        ranks, memory = self.call.ranks, _memory_of(self.call.ranks)
        key = digest_of([decision.layouts, decision.layout_of])
        if key not in memory.plans:
            memory.plans[key] = make_plan([memory.layouts[d] for d in decision.layouts], decision.layout_of)
        self.plan = memory.plans[key]
        images = _images(self.collected, self.plan, ranks, decision.save)
        task.total = sum(p.nbytes for image in images for p in image.pieces)
        for image in images:
            storage.make_folder(self.folder / image.section)
        written = write_images(
            images, self.folder, save=decision.save, rank=ranks.rank, files=opened, progress=task.advance
        )
        for image in images:
            storage.sync_folder(self.folder / image.section)
        return _Part([(w.path, w.bytes, w.header_bytes, w.header_digest) for w in written], key)

    # The commit, on the first rank.

    def _commit(self, decision: _Decision, parts: list[_Part]) -> str:
        assert self.plan is not None
        if len({part.plan for part in parts}) > 1:
            raise HoldfastError("the ranks followed different plans; this is a fault of holdfast, please report it")
        world = len(parts)
        files = _file_records(parts)
        index = {file.path: i for i, file in enumerate(files)}

        def file_of(name: str, rank: int) -> int:
            return index[datafile.file_name(names.section_of(name), rank, world, decision.save)]

        if self.joined is None:
            told = [(0, 0, owned_values(self.collected))]
            self.joined = join_owned([self.layout], told)
        leaves, containers = _manifest_values(self.collected, self.joined)
        target = self.folder / manifest.FILE_NAME
        exists = self.overwrite and target.exists()
        previous = _previous(target) if exists else None
        record = Manifest(
            save=decision.save,
            run=self.run_id,
            step=self.step,
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            producer={"holdfast": __version__, "torch": str(torch.__version__), "python": python_version()},
            world_size=world,
            files=[manifest.file_row(f) for f in files],
            tensors={
                name: _record(tensor.dtype, tensor.shape, [(box, file_of(name, r)) for box, r in tensor.pieces])
                for name, tensor in self.plan.tensors.items()
            },
            values=leaves,
            containers={**self.plan.containers, **containers},
            aliases=self.plan.aliases,
            per_rank={p: manifest.ranges(file_of(p, r) for r in range(world)) for p in self.plan.per_rank},
            attachments=_write_attachments(self.attachments, self.folder, decision.save, fresh=not exists),
        )
        data = manifest.encode(record)
        temporary = self.folder / f".manifest.{decision.save}.tmp"
        if exists:
            storage.replace_small(target, data, temporary)
            if previous is not None:
                _remove_old_files(self.folder, previous, record)
        elif not storage.create_small(target, data, temporary):
            winner = manifest.decode(storage.read_small(target), str(target))
            if winner.save != decision.save:
                raise _taken(f"{self.folder} was committed by another save ({winner.save}) in the meantime")
        return decision.save


def _first_with(keys: Any) -> dict[Any, int]:
    """Each distinct key with the first rank that has it."""
    found: dict[Any, int] = {}
    for rank, key in enumerate(keys):
        found.setdefault(key, rank)
    return found


def _unless_one(found: dict[Any, int], distinct: int | None = None) -> list[int]:
    return list(found.values()) if (len(found) if distinct is None else distinct) > 1 else []


def _images(state: Collected, plan: Plan, ranks: Ranks, save: str) -> list[Image]:
    """This rank's data files: the pieces it owns and its own PerRank values, by section."""
    sections: dict[str, list[tuple[Piece, torch.Tensor, tuple[int, ...]]]] = {}

    def add(name: str, key: str, dtype: str, source: torch.Tensor, shape: tuple[int, ...]) -> None:
        piece = Piece(key, dtype, tuple(source.shape), source.nbytes)
        sections.setdefault(names.section_of(name), []).append((piece, source, shape))

    for name, tensor, box in plan.written_by(ranks.rank):
        key = datafile.key_of(names.in_section(name), box, tensor.shape)
        add(name, key, tensor.dtype, _source(state, name, box), tensor.shape)
    for path, leaf in state.per_rank.items():
        own = f"{names.in_section(path)}@{ranks.rank}"
        text = bytearray(msgspec.json.encode(leaf.encoded))
        add(path, own, "uint8", torch.frombuffer(text, dtype=torch.uint8), (len(text),))
        for reference, inner in leaf.tensors.items():
            add(path, f"{own}/{reference}", _dtype_name(path, inner), inner, tuple(inner.shape))
    images = []
    for section, found in sections.items():
        by_key = {piece.key: (source, shape) for piece, source, shape in found}
        if len(by_key) < len(found):
            raise Unsupported(f"two tensors of section {section!r} have the same key: rename the one at the top")
        pieces = datafile.arrange(piece for piece, _, _ in found)
        shapes = {datafile.base_of(p.key): by_key[p.key][1] for p in pieces if "[" in p.key or _shape_is_lost(p)}
        path = datafile.file_name(section, ranks.rank, ranks.size, save)
        images.append(Image(path, section, pieces, [by_key[p.key][0] for p in pieces], shapes))
    return images


def _shape_is_lost(piece: Piece) -> bool:
    # A single number of a type kept as bytes is stored as one row of bytes, as a vector of one would be.
    return not piece.lengths and datafile.stored_as_bytes(piece.dtype)


def _dtype_name(path: str, tensor: torch.Tensor) -> str:
    from holdfast.engine.state.tensors import dtype_name

    return dtype_name(path, tensor)


def _source(state: Collected, name: str, box: Box) -> torch.Tensor:
    """This rank's memory of one planned piece: a view, or a part of one."""
    for view in state.entries[name].views:
        if view.box == box:
            return view.tensor
        if all(a >= b for a, b in zip(box.offsets, view.box.offsets, strict=True)) and all(
            a <= b for a, b in zip(box.ends, view.box.ends, strict=True)
        ):
            part = view.tensor
            for dim, (start, length) in enumerate(zip(*relative(box, view.box), strict=True)):
                part = part.narrow(dim, start, length)
            return part
    if not state.entries[name].views and covers(box, state.entries[name].shape) and box.size == 0:
        return torch.empty(box.lengths, dtype=getattr(torch, state.entries[name].dtype))
    raise HoldfastError(f"this rank was to write {name}{box} and does not hold it; this is a fault of holdfast")


def _record(dtype: str, shape: tuple[int, ...], pieces: Sequence[tuple[Box, int]]) -> TensorRecord:
    if 0 in shape:
        return TensorRecord(dtype, shape, None, "")
    cells, order = _cells(shape, tuple(box for box, _ in pieces))
    return TensorRecord(dtype, shape, cells, manifest.ranges(pieces[i][1] for i in order))


@lru_cache(maxsize=1024)
def _cells(shape: tuple[int, ...], boxes: tuple[Box, ...]) -> Any:
    if sum(box.size for box in boxes) != prod(shape):
        raise HoldfastError(f"pieces {list(map(str, boxes))} do not tile shape {list(shape)}; a fault of holdfast")
    return manifest.cells_for(shape, boxes)


def _file_records(parts: Sequence[_Part]) -> list[FileRecord]:
    """All files, by section and then by rank, so that the ranks of a tensor are one range."""
    found = [FileRecord(*file) for part in parts for file in part.files]
    sections = {section: i for i, section in enumerate(dict.fromkeys(f.path.partition("/")[0] for f in found))}
    return sorted(found, key=lambda f: sections[f.path.partition("/")[0]])


def _manifest_values(state: Collected, joined: OwnedJoin) -> tuple[dict[str, Any], dict[str, str]]:
    """Leaf values and containers as the manifest has them, parameter groups spelled out."""
    leaves = {**state.values, **joined.values}
    containers: dict[str, str] = {}
    for path, groups in joined.groups.items():
        found: JoinedGroups = msgspec.convert(groups, JoinedGroups) if not isinstance(groups, JoinedGroups) else groups
        tree = [
            {**{k: values.decode_tree(v, _no_tensor) for k, v in settings.items()}, "params": params}
            for settings, params in zip(found.settings, found.params, strict=True)
        ]
        _flatten(names.child(path, "param_groups"), tree, leaves, containers)
    return leaves, containers


def _no_tensor(reference: str) -> torch.Tensor:
    raise HoldfastError(f"a parameter group refers to tensor {reference}; a fault of holdfast")


def _flatten(path: str, node: Any, leaves: dict[str, Any], containers: dict[str, str]) -> None:
    if isinstance(node, (dict, list, tuple)) and type(node) is not torch.Size:
        if not isinstance(node, dict) or not node:
            containers[path] = "dict" if isinstance(node, dict) else "list" if isinstance(node, list) else "tuple"
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            _flatten(names.child(path, str(key)), value, leaves, containers)
    else:
        leaves[path] = values.encode(node)


def _check_attachment(name: str) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or "\\" in name or any(p in (".", "..") for p in parts):
        raise Unsupported(f"attachment {name!r} must be a relative path that stays below attachments/")


def _write_attachments(
    attachments: Mapping[str, str | os.PathLike[str] | bytes], folder: Path, save: str, *, fresh: bool
) -> list[tuple[str, int, str]]:
    """Write the attached files; beside an older checkpoint under a folder of this save, so that nothing is changed."""
    below = "attachments" if fresh else f"attachments/{save}"
    records = []
    for name, source in attachments.items():
        if not isinstance(source, bytes):
            with storage.naming(source, "read the attachment"):
                source = Path(source).read_bytes()
        path = folder / below / name
        storage.make_folder(path.parent)
        storage.write_small(path, source)
        records.append((f"{below}/{name}", len(source), blocks.digest(source)))
    return records


def _prepare(folder: Path, *, overwrite: bool) -> None:
    """Create the folder, or make sure that it may take a save; leavings of dead saves are removed."""
    if (folder / manifest.FILE_NAME).exists():
        if not overwrite:
            raise _taken(f"{folder} already holds a committed checkpoint")
        return
    if folder.exists() and not folder.is_dir():
        raise _taken(f"{folder} is a file")
    found = storage.files_below(folder)
    ours = [f for f in found if is_leaving(f)]
    foreign = [f for f in found if f not in ours and not (ours and f.startswith("attachments/"))]
    if foreign:
        raise _taken(f"{folder} holds other files ({foreign[0]}{' and more' if len(foreign) > 1 else ''})")
    if any(storage.in_use(folder / f) for f in ours if datafile.save_of(f)):
        raise _taken(f"another save is writing to {folder} right now")
    for f in found:
        storage.delete(folder / f)
    storage.make_folder(folder)


def is_leaving(path: str) -> bool:
    """Whether a file of an uncommitted folder, by its relative path, is what a save of ours leaves."""
    return (
        datafile.save_of(path) is not None
        or (path.startswith(".manifest.") and path.endswith(".tmp"))
        or (path.startswith("parts/") and path.endswith(".json"))
    )


def _taken(text: str) -> StorageError:
    error = StorageError(f"{text}; choose another path" + ("" if "holds other" in text else ", or pass overwrite=True"))
    error.errno = errno.EEXIST
    return error


def _previous(target: Path) -> Manifest | None:
    """The checkpoint to be replaced, or None if it can no longer be read: what it named is then left to a sweep."""
    try:
        return manifest.decode(storage.read_small(target), str(target))
    except (Damaged, Unsupported) as error:
        events.log.warning("overwriting a checkpoint that cannot be read: %s", error)
        return None


def _remove_old_files(folder: Path, old: Manifest, new: Manifest) -> None:
    """Delete what only the replaced checkpoint named. It is committed over, so a failure here loses space alone."""
    kept = {f.path for f in new.data_files} | {path for path, _, _ in new.attachments}
    for path in [*(f.path for f in old.data_files if f.save is None), *(path for path, _, _ in old.attachments)]:
        if path in kept:
            continue
        try:
            storage.delete(folder / path)
            storage.delete_if_empty((folder / path).parent)
        except StorageError as error:
            events.log.warning("the checkpoint is committed, but an older file stays: %s", error)


def _remove(paths: Sequence[Path], folder: Path) -> None:
    """Delete what this rank wrote for a save that did not commit; the last rank to do so takes the folder away."""
    for path in paths:
        try:
            storage.delete(path)
        except StorageError as error:
            events.log.warning("a failed save leaves a file behind, to be swept later: %s", error)
    storage.delete_empty_folders(folder)
