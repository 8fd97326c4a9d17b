"""Where the bytes are: of one checkpoint by section, module and dtype; of a root, with what steps share counted once.

`holdfast du` asks here. Reads manifests and lists files; deletes nothing, though it tells what deleting would free.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod

from holdfast.checkpoint import Checkpoint, read_manifest
from holdfast.commit.absent import what_is_there
from holdfast.errors import HoldfastError, NotACheckpoint
from holdfast.events import log
from holdfast.inspect.survey import ASKERS
from holdfast.inspect.tree import Leaf, Node, tree
from holdfast.ondisk import manifest, names
from holdfast.ondisk.cited import is_cited, sibling_of
from holdfast.ondisk.manifest import Manifest
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
    found: dict[str, list[int]] = {}
    for name, elements, nbytes in amounts:
        total = found.setdefault(name, [0, 0, 0])
        for at, n in enumerate((1, elements, nbytes)):
            total[at] += n
    return tuple(sorted((Amount(name, *total) for name, total in found.items()), key=lambda a: -a.nbytes))


@dataclass(frozen=True)
class StepUsage:
    """One step of a root. ``nbytes``: all files that it needs; ``shared`` of them are needed by other steps too.

    ``frees``: bytes that deleting this step alone would free: its folder's files that nobody else cites, and files of
    steps deleted earlier that only this one still cites.
    """

    name: str
    nbytes: int
    shared: int
    frees: int


@dataclass(frozen=True)
class RootUsage:
    """The steps of a root. ``nbytes``: all files below it, each once; ``leavings``: of folders without a manifest."""

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
        found = dict(zip(folders, pool.map(lambda name: _files(home / name), folders), strict=True))
        steps = [name for name in folders if manifest.FILE_NAME in found[name]]
        needs = dict(zip(steps, pool.map(lambda name: _needs(home, name, found), steps), strict=True))
    if not steps:
        raise NotACheckpoint(what_is_there(home))
    nbytes = {file: n for files in found.values() for file, n in files.values()}
    needed: dict[Hashable, set[str]] = {}
    for step, files in needs.items():
        for file in files:
            needed.setdefault(file, set()).add(step)
    held: dict[Hashable, set[str]] = {}  # by which steps' folders, whether these need it or not
    for step in steps:
        for file, _ in found[step].values():
            held.setdefault(file, set()).add(step)
    told = []
    for step, files in sorted(needs.items()):
        shared = {file for file in files if len(needed[file]) > 1}
        # With a step all files of its folder go that nobody else needs, leavings of dead saves too.
        own = {file for file, _ in found[step].values()}
        goes = {file for file in own | files if needed.get(file, set()) | held.get(file, set()) <= {step}}
        told.append(StepUsage(step, *(sum(nbytes.get(file, 0) for file in some) for some in (files, shared, goes))))
    leavings = sum(n for file, n in nbytes.items() if file not in needed and file not in held)
    return RootUsage(str(home), sum(nbytes.values()), leavings, tuple(told))


def _files(folder: Place) -> dict[str, tuple[Hashable, int]]:
    """The files of a folder: what tells each from all others, whatever names it has, and its bytes."""
    sizes = folder.sizes_below()
    if not folder.has_links:
        return {path: (f"{folder}/{path}", n) for path, n in sizes.items()}
    found: dict[str, tuple[Hashable, int]] = {}
    for path, n in sizes.items():
        with suppress(FileNotFoundError):  # deleted meanwhile
            stat = disk.stat(folder / path)
            found[path] = (stat.st_dev, stat.st_ino), n  # a step that borrows on disk has hard links
    return found


def _needs(root: Place, name: str, found: Mapping[str, Mapping[str, tuple[Hashable, int]]]) -> set[Hashable]:
    """The files that a step needs: its data files wherever they lie, and the rest of its folder."""
    own = found[name]
    try:
        record: Manifest = read_manifest(root / name)
    except HoldfastError as error:
        log.warning("%s: what it needs cannot be told: %s", root / name, error)
        return {file for file, _ in own.values()}
    places = [sibling_of(file.path) if is_cited(file.path) else (name, file.path) for file in record.data_files]
    places += [(name, path) for path in own if path == manifest.FILE_NAME or path.startswith("attachments/")]
    return {found[folder][path][0] for folder, path in places if path in found.get(folder, {})}
