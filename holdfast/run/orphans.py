"""What dead saves, copies, conversions and benchmarks left behind: listed, and deleted on request.

``holdfast prune --orphans`` calls it. It has the rules of the manager's own sweep: it never deletes what a living
process may still need, what a checkpoint names or cites, or what holdfast did not write.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial

import msgspec

from holdfast.commit.commit import finished
from holdfast.commit.folder import goes_along, is_orphan, standing_save, what_is_lent, what_is_there
from holdfast.commit.reused import Reuses, reused_in, root_of, who_reuses
from holdfast.errors import Damaged, Mismatch, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.export.partial import OURS, Partial
from holdfast.export.to_store import MARK
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest, signature
from holdfast.ondisk.manifest import Manifest
from holdfast.repair.rescue import rescuable
from holdfast.storage import storage
from holdfast.storage.local import disk
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.naming import naming
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

DEADLINE = 600.0
"""Seconds to wait for any one answer of a store."""

BENCH = ".holdfast-bench-"
"""What folders of ``holdfast doctor --bench`` begin with; each holds a file ``lock``, which a living one has locked."""


@dataclass(frozen=True)
class Orphan:
    """What can go of one folder: so many files and bytes, of what (``what``).

    ``warning``: why you may want it back, and how to get it; empty if there is no such reason.
    """

    path: str
    what: str
    files: int
    nbytes: int
    warning: str = ""


@dataclass(frozen=True)
class Spared:
    """What looks like an orphan and stays, and ``why``."""

    path: str
    why: str


class Collected(msgspec.Struct, frozen=True, rename={"orphans": "leavings"}):
    """What `collect` did, or would do. In JSON the orphans have an older name, which programs read."""

    root: str
    done: bool
    orphans: tuple[Orphan, ...]
    spared: tuple[Spared, ...]
    nbytes: int


def collect(root: str | Place, *, dry_run: bool = True, deadline: float = DEADLINE) -> Collected:
    """Delete what dead processes left at ``root``, a checkpoint or a folder of them; with ``dry_run`` only tell it.

    Whatever a living process has locked stays, in a store whatever is younger than six hours. A save that all its ranks
    had finished stays: `holdfast.tools.rescue` commits it. Raises NotACheckpoint if there is nothing at all,
    StorageError.
    """
    place = with_deadline(location(root), deadline)
    if not (place.files_below() or (place.has_folders and place.is_dir())):
        raise NotACheckpoint(what_is_there(place))
    orphans: list[Orphan] = []
    spared: list[Spared] = []
    for look in _looks(place):
        outcome = look()
        if isinstance(outcome, Spared):
            spared.append(outcome)
        elif outcome is not None:
            paths, orphan = outcome
            try:
                if not dry_run:
                    _delete(place if orphan.path == str(place) else place / orphan.path.rpartition("/")[2], paths)
                orphans.append(orphan)
            except StorageError as error:
                if error.errno != errno.EBUSY:
                    raise
                spared.append(Spared(orphan.path, str(error)))
    return Collected(str(place), not dry_run, tuple(orphans), tuple(spared), sum(one.nbytes for one in orphans))


Found = tuple[list[Place], Orphan] | Spared | None
"""Files (or whole folders) that can go and what is said of them; or why they stay; or nothing."""


def _looks(place: Place) -> Iterator[Callable[[], Found]]:
    """A look into each folder, made when it is called: right before what it finds is deleted."""
    if place.has_folders and place.name.endswith(".partial") and (place / "lock").is_file():
        yield partial(_conversion, place)
        return
    if (place / manifest.FILE_NAME).is_file() or _is_step(place):
        yield partial(_step, place, partial(reused_in, place), Reuses(root_of(place)[0]))
        return
    names = place.folder_names()
    citations = Reuses(place)
    for name in names:
        folder = place / name
        if folder.is_symlink():
            continue  # it may lead out of the root
        if name.startswith(BENCH):
            yield partial(_bench, folder)
        elif name.endswith(".partial") and folder.has_folders:
            yield partial(_conversion, folder)
        else:
            yield partial(_step, folder, partial(_cited, citations, names, name), citations)


def _cited(citations: Reuses, names: Collection[str], name: str) -> Collection[str]:
    return citations.by(other for other in names if other != name).get(name, set())


def _is_step(place: Place) -> bool:
    """Whether a folder without a manifest is what a save left, and not the root of a run."""
    return any(datafile.save_of(path) and path.count("/") == 1 for path in place.files_below())


def _step(folder: Place, cited: Callable[[], Collection[str]], citations: Reuses) -> Found:
    try:
        record: Manifest | None = read_manifest(folder)
    except NotACheckpoint:
        record = None
    except Damaged:
        return Spared(str(folder), f"its manifest is damaged: holdfast rescue {folder}")
    except Unsupported as error:
        return Spared(str(folder), str(error))
    except StorageError as error:
        if folder.is_remote:
            raise
        return Spared(str(folder), str(error))
    sizes = folder.sizes_below()
    if MARK in sizes:
        return Spared(str(folder), "a conversion is being uploaded, or broke off: the same call would go on from it")
    ours = [path for path in sizes if is_orphan(path)]
    if record is not None:
        named = {file.path for file in record.data_files}
        ours = [path for path in ours if path not in named and signature.save_of(path) != record.save]
    if not ours:
        return None
    lent_to = who_reuses(folder, ours, citations) if record is None else []
    if lent_to:
        return Spared(str(folder), what_is_lent(lent_to))
    if folder.may_live(ours):
        sure = folder.has_locks and folder.living(ours)
        why = "a save is under way" if sure else "younger than six hours, with no locks there: a save may be under way"
        return Spared(str(folder), why)
    if standing_save(folder) != (None if record is None else record.save):
        return Spared(str(folder), "a save has just committed there")
    if record is None:
        save = finished(folder)
        if save is not None:
            return Spared(str(folder), f"all ranks had finished save {save}: holdfast rescue {folder} commits it")
        if all(path in ours or goes_along(folder, path) for path in sizes) and any(map(_is_of_save, ours)):
            ours = list(sizes)
    kept = cited()
    going = [path for path in ours if path not in kept]
    if not going:
        return None
    what = "a save that never committed" if record is None else "files beside a checkpoint that no manifest names"
    return _found(folder, what, going, sizes, warning="" if record is not None else _warning(folder))


def _warning(folder: Place) -> str:
    """What is said of a dead save that may be a step whose manifest was deleted by hand."""
    try:
        rescuable(folder)
        advice = "its data files are whole: if its manifest was deleted, holdfast rescue brings it back"
        return f"{advice}; ask holdfast doctor {folder}"
    except Mismatch:  # files of several saves, or sections of which headers tell too little
        return (
            f"its manifest may have been deleted: holdfast doctor {folder} tells what holdfast rescue could bring back"
        )
    except (Damaged, NotACheckpoint, Unsupported):
        return ""


def _is_of_save(path: str) -> bool:
    return datafile.save_of(path) is not None or path.startswith(("parts/", ".manifest."))


def _found(
    folder: Place, what: str, going: Collection[str], sizes: dict[str, int], *, warning: str = ""
) -> Found:  # fmt: skip
    nbytes = sum(sizes[path] for path in going)
    return [folder / path for path in going], Orphan(str(folder), what, len(going), nbytes, warning)


def _conversion(folder: Place) -> Found:
    """What a conversion that was killed left: the same call would go on from there."""
    names = [path.name for path in folder.iterdir()]
    if "lock" not in names or not all(any(fnmatch(name, ours) for ours in OURS) for name in names):
        return None  # another program's
    target = folder.with_name(folder.name.removesuffix(".partial"))
    if any(path.in_use() for path in [folder / "lock", *(folder / "journal").glob("*")]):
        return Spared(str(folder), "a conversion is under way")
    if (folder / "old").exists() and not target.exists():
        return Spared(
            str(folder), f"it holds what was at {target} before: convert to it again, or move it back by hand"
        )
    sizes = folder.sizes_below()
    what = f"a conversion to {target.name} that broke off (the same call would go on from it)"
    return [folder], Orphan(str(folder), what, len(sizes), sum(sizes.values()))


def _bench(folder: Place) -> Found:
    sizes = folder.sizes_below()
    if folder.living(["lock"]):
        return Spared(str(folder), "a benchmark is under way, or was a short while ago")
    if folder.has_folders:
        return [folder], Orphan(str(folder), "a benchmark that was killed", len(sizes), sum(sizes.values()))
    return _found(folder, "a benchmark that was killed", list(sizes), sizes)


def _delete(folder: Place, paths: list[Place]) -> None:
    log.info("%s: deleting %d orphans", folder, len(paths))
    if folder.name.endswith(".partial") and paths == [folder]:
        Partial(LocalPlace(folder.with_name(folder.name.removesuffix(".partial")))).give_up()
        return
    if paths == [folder]:
        with naming(folder, "delete"):
            disk.delete_all(folder)
        return
    storage.delete(*paths)
    if folder.has_folders and not (folder / manifest.FILE_NAME).is_file():
        folder.delete_empty_folders()
    (folder / "parts").delete_if_empty()
