"""Disk usage: of a checkpoint by section, module and dtype; of a root, with files that steps share counted once."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from holdfast.checkpoint import Checkpoint
from holdfast.commit.folder import what_is_there
from holdfast.errors import HoldfastError, NotACheckpoint
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.inspect.survey import ASKERS
from holdfast.inspect.tree import Leaf, Node, tree
from holdfast.ondisk import manifest, names
from holdfast.ondisk.manifest import Manifest, is_reused, sibling_of
from holdfast.ondisk.patterns import TENSOR, Patterns, selector
from holdfast.ranks.ranks import DEADLINE
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline


@dataclass(frozen=True)
class Amount:
    """Some tensors together: how many, of how many elements and bytes."""

    name: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Usage:
    """The bytes of one checkpoint. Tied tensors count once; values that differ by rank are among the files alone.

    ``tensors``: bytes of all tensors; ``files``: of all data files, ``cited`` of which were written by earlier saves;
    ``attached``: of attached files.
    """

    path: str
    format: str
    tensors: int
    files: int
    cited: int
    attached: int
    by_section: tuple[Amount, ...]
    by_dtype: tuple[Amount, ...]


def usage(checkpoint: Checkpoint, *, only: Patterns = "*") -> Usage:
    """Where the bytes of a checkpoint of any format are, or of those of its tensors that fit ``only``.

    Raises Mismatch for a pattern that fits no tensor.
    """
    wanted = _selected(checkpoint, only)
    records = {name: r for name, r in checkpoint.manifest.tensors.items() if wanted(name)}
    amounts = [(name, r.dtype, prod(r.shape), r.nbytes) for name, r in records.items()]
    files = checkpoint.manifest.data_files
    return Usage(
        str(checkpoint.path), checkpoint.format, sum(r.nbytes for r in records.values()),
        sum(file.bytes for file in files), sum(file.bytes for file in files if file.save is not None),
        sum(checkpoint.attachments.values()),
        _added((names.section_of(name), elements, nbytes) for name, _, elements, nbytes in amounts),
        _added((dtype, elements, nbytes) for _, dtype, elements, nbytes in amounts),
    )  # fmt: skip


def modules(checkpoint: Checkpoint, *, only: Patterns = "*", fold: bool = True) -> Node:
    """The tensors of a checkpoint by module; tied ones count where they are stored. Raises Mismatch as `usage` does."""
    wanted = _selected(checkpoint, only)
    return tree(
        (
            Leaf(name, r.nbytes, prod(r.shape), (r.dtype, r.shape))
            for name, r in checkpoint.manifest.tensors.items()
            if wanted(name)
        ),
        fold=fold,
    )


def _selected(checkpoint: Checkpoint, only: Patterns) -> Callable[[str], bool]:
    return selector(only, checkpoint.manifest.tensors, checkpoint.path, said="", what=TENSOR)


def _added(amounts: Iterable[tuple[str, int, int]]) -> tuple[Amount, ...]:
    totals: dict[str, list[int]] = {}
    for name, elements, nbytes in amounts:
        total = totals.setdefault(name, [0, 0, 0])
        for at, n in enumerate((1, elements, nbytes)):
            total[at] += n
    return tuple(sorted((Amount(name, *total) for name, total in totals.items()), key=lambda a: -a.nbytes))


@dataclass(frozen=True)
class StepUsage:
    """One step of a root. ``nbytes``: all files that it needs; ``shared`` of them are needed by other steps too.

    ``frees``: bytes that deleting this step alone would free: its folder's files that no other step reuses, and files
    of steps deleted earlier that only this one still reuses.
    """

    name: str
    nbytes: int
    shared: int
    frees: int


@dataclass(frozen=True)
class RootUsage:
    """The steps of a root. ``nbytes``: all files below it, each once; ``leavings``: in folders without a manifest."""

    path: str
    nbytes: int
    leavings: int
    steps: tuple[StepUsage, ...]


def usage_of_root(root: str | os.PathLike[str] | Place) -> RootUsage:
    """What the steps of a root take together, and what each of them alone. Raises NotACheckpoint, StorageError.

    A step whose manifest cannot be read is taken to need all files of its folder.
    """
    home = with_default_deadline(location(root), DEADLINE)
    folders = [name for name in home.folder_names() if not name.startswith(".")]
    with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-usage") as pool:
        files_of = dict(zip(folders, pool.map(lambda name: _files(home / name), folders), strict=True))
        steps = [name for name in folders if manifest.FILE_NAME in files_of[name]]
        needs = dict(zip(steps, pool.map(lambda name: _needs(home, name, files_of), steps), strict=True))
    if not steps:
        raise NotACheckpoint(what_is_there(home))
    nbytes = {file: n for files in files_of.values() for file, n in files.values()}
    needed: dict[Hashable, set[str]] = {}
    for step, files in needs.items():
        for file in files:
            needed.setdefault(file, set()).add(step)
    held: dict[Hashable, set[str]] = {}  # by which steps' folders, whether these need it or not
    for step in steps:
        for file, _ in files_of[step].values():
            held.setdefault(file, set()).add(step)
    steps_usage = []
    for step, files in sorted(needs.items()):
        shared = {file for file in files if len(needed[file]) > 1}
        # Deleting a step frees all files of its folder that no other step needs, orphans of dead saves too.
        own = {file for file, _ in files_of[step].values()}
        freed = {file for file in own | files if needed.get(file, set()) | held.get(file, set()) <= {step}}
        sizes = (sum(nbytes.get(file, 0) for file in some) for some in (files, shared, freed))
        steps_usage.append(StepUsage(step, *sizes))
    leavings = sum(n for file, n in nbytes.items() if file not in needed and file not in held)
    return RootUsage(str(home), sum(nbytes.values()), leavings, tuple(steps_usage))


def _files(folder: Place) -> dict[str, tuple[Hashable, int]]:
    """The files of a folder: what tells each from all others, whatever names it has, and its bytes."""
    sizes = folder.sizes_below()
    if not folder.has_links:
        return {path: (f"{folder}/{path}", n) for path, n in sizes.items()}
    files: dict[str, tuple[Hashable, int]] = {}
    for path, n in sizes.items():
        with suppress(FileNotFoundError):  # deleted meanwhile
            stat = disk.stat(folder / path)
            files[path] = (stat.st_dev, stat.st_ino), n  # a step that reuses files on disk has hard links
    return files


def _needs(root: Place, name: str, files_of: Mapping[str, Mapping[str, tuple[Hashable, int]]]) -> set[Hashable]:
    """The files that a step needs: its data files wherever they lie, and the rest of its folder."""
    own = files_of[name]
    try:
        record: Manifest = read_manifest(root / name)
    except HoldfastError as error:
        log.warning("%s: cannot say which files it needs: %s", root / name, error)
        return {file for file, _ in own.values()}
    places = [sibling_of(file.path) if is_reused(file.path) else (name, file.path) for file in record.data_files]
    places += [(name, path) for path in own if path == manifest.FILE_NAME or path.startswith("attachments/")]
    return {files_of[folder][path][0] for folder, path in places if path in files_of.get(folder, {})}
