"""Lists the checkpoints at a root, steps of a run or other formats: how old, how large, and in what health.

It reads manifests and lists files; data files are opened only to check their headers, on request.
"""

from __future__ import annotations

import os
import re
import shlex
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Literal

from holdfast.checkpoint import open_checkpoint
from holdfast.commit.commit import finished, sizes_of_save
from holdfast.commit.folder import is_orphan, what_is_lent, what_is_there
from holdfast.commit.reused import Reuses, who_reuses
from holdfast.commit.sections import dropped_of
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest, part
from holdfast.ondisk.manifest import Manifest
from holdfast.ranks.ranks import DEADLINE
from holdfast.read.files import DataFiles
from holdfast.read.source import ReadStats
from holdfast.run import going_back
from holdfast.run.going_back import WentBack
from holdfast.run.keep import Mode
from holdfast.run.tiers.nodes import MARK
from holdfast.run.whole import lacking_files, notes_of
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_default_deadline

ASKERS = 16
"""Folders that are looked into at once."""

MOST_FILES = 1000
"""Single files of a root that are looked at, each of which may be a checkpoint of torch.save or safetensors."""

_NUMBERED = re.compile(r"(?:^|step|iter|iteration|checkpoint|ckpt|ba)[-_=]?(?P<step>\d{1,17})(?=\D|$)", re.IGNORECASE)

Health = Literal[
    "whole", "opens", "partly here", "pending", "writing", "lent", "unfinished", "damaged", "unreadable", "left behind"
]


@dataclass(frozen=True)
class Step:
    """One checkpoint of a root.

    ``name``: of the folder or file below the root, empty for the root itself. ``step``: None if it is not known.
    ``created``: RFC 3339 in UTC; of formats that do not record it the time of the newest file, None in a store.
    ``nbytes``: all files that it needs; ``own`` of them it wrote itself, the rest is reused from older steps.
    ``mode``: whether less or more of ``metric`` is better, if that was recorded. ``lost``: sections that it has lost
    since it was saved. ``reading``: which of several readings of the path was
    taken, where a format allows for more than one.

    ``health``, of which ``fault`` says why:

    - ``whole``: every file is there, as long as the manifest says; if headers were asked for, these are right too.
    - ``left behind``: every file is there, but training went back to an earlier step and goes on without this one.
    - ``opens``: another format, whose description is consistent.
    - ``partly here``: on a fast tier, of which each node has the files of its own ranks.
    - ``pending``: all ranks had finished, and the save was not committed: `holdfast.tools.rescue` commits it.
    - ``writing``: a living process writes it, or may: a store cannot say.
    - ``lent``: no longer a step; what is left are files that later steps reuse.
    - ``unfinished``: a save that died; the next manager sweeps it.
    - ``damaged``.
    - ``unreadable``: not enough rights, a store that does not answer, a format that is newer than this holdfast.
    """

    name: str
    path: str
    tier: str
    format: str
    health: Health
    step: int | None = None
    created: str | None = None
    nbytes: int = 0
    own: int = 0
    world_size: int | None = None
    run: str | None = None
    metric: float | None = None
    mode: Mode | None = None
    lost: tuple[str, ...] = ()
    fault: str = ""
    reading: str = ""


def survey(
    root: str | os.PathLike[str] | Place, *, fast: str | os.PathLike[str] | None = None, headers: bool = False
) -> list[Step]:  # fmt: skip
    """Every checkpoint at or right below ``root``, and with ``fast`` on that fast tier too, oldest step first.

    ``headers``: read the header of each data file and compare it with the manifest. Raises NotACheckpoint if there is
    none at all, saying what is there instead, and StorageError if the root cannot be listed.
    """
    home = with_default_deadline(location(root), DEADLINE)
    tiers: list[tuple[str, Place]] = [("store" if fast is not None else "", home)]
    if fast is not None:
        tiers.append(("fast", there := location(fast)))
        if not there.is_remote and not there.is_dir():  # a slip of the pen must not read like "nothing there"
            raise NotACheckpoint(f"there is no folder {there}, which is to be the fast tier")
    steps = [step for tier, folder in tiers for step in _look(folder, tier, headers=headers)]
    if not steps:
        open_checkpoint(home)  # it says best what is there instead
        raise NotACheckpoint(what_is_there(home))
    return sorted(steps, key=lambda s: (s.step is None, s.step or 0, s.name, s.tier))


def _look(root: Place, tier: str, *, headers: bool) -> list[Step]:
    if (root / manifest.FILE_NAME).is_file() or (not root.is_remote and root.is_file()):
        return [_seen(root, "", tier, headers=headers)]
    names = [name for name in root.folder_names() if not name.startswith(".")]
    mark = _mark(root)
    with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-survey") as pool:
        ours = [step for step in pool.map(lambda n: _ours(root / n, n, tier, mark, headers=headers), names) if step]
    citations = Reuses(root)
    ours = [_or_lent(root / step.name, step, citations) for step in ours]
    named = {step.name for step in ours}
    if not ours and not root.is_remote and (root.parent / manifest.FILE_NAME).is_file():
        return []  # a part of a checkpoint: its files say less each than all of them
    if not ours:
        itself_ours = _ours(root, "", tier, headers=headers)
        itself = _or_lent(root, itself_ours) if itself_ours is not None else _foreign(root, "", tier)
        if itself is not None and not _is_of_a_run(itself, names):
            return [itself]
    folders = [_foreign(root / name, name, tier) for name in names if name not in named]
    files = [_foreign(root / name, name, tier) for name in _files_in(root)]
    # A file that says which step is the latest is none itself.
    single = [step for step in files if step is not None and not _is_of_a_run(step, names)]
    return [*ours, *(step for step in folders if step is not None), *single]


def _mark(root: Place) -> WentBack | None:
    try:
        return going_back.read(root)
    except HoldfastError as error:  # the steps are listed nevertheless
        log.warning("%s", error)
        return None


def _is_of_a_run(step: Step, folders: list[str]) -> bool:
    """Whether opening the root of a run opened one of its steps: the reader says which it took."""
    return any(name in step.reading for name in folders if re.search(r"\d", name))


def _files_in(root: Place) -> list[str]:
    names = root.file_names() if root.is_remote or root.is_dir() else []
    if root.has_links:
        names = [name for name in names if (root / name).is_file()]  # a link in a circle is none
    return [name for name in sorted(names) if not name.startswith(".")][:MOST_FILES]


def _seen(path: Place, name: str, tier: str, *, headers: bool) -> Step:
    step = _ours(path, name, tier, headers=headers) or _foreign(path, name, tier)
    if step is None:
        raise NotACheckpoint(what_is_there(path))
    return step


def _ours(path: Place, name: str, tier: str, mark: WentBack | None = None, *, headers: bool) -> Step | None:
    """A step of holdfast in any state; None if there is none."""
    if path.has_folders and not path.is_dir():
        return None
    blank = Step(name, str(path), tier, manifest.FORMAT, "unreadable", step=_number_of(path.name))
    try:
        # Checked first: reading would look for what is there instead, for an error that is not shown.
        if not path.is_remote and (path / manifest.FILE_NAME).size() is None:
            return _uncommitted(path, blank)
        record = read_manifest(path)
    except NotACheckpoint:
        return _uncommitted(path, blank)
    except Damaged as error:
        return replace(blank, health="damaged", fault=str(error))
    except HoldfastError as error:
        return replace(blank, fault=str(error))
    files = record.data_files
    attached = sum(nbytes for _, nbytes, _ in record.attachments)
    step = replace(
        blank, step=blank.step if record.step is None else record.step, created=record.created,
        nbytes=sum(file.bytes for file in files) + attached,
        own=sum(file.bytes for file in files if file.save is None) + attached,
        world_size=record.world_size, run=record.run, lost=tuple(dropped_of(record)),
    )  # fmt: skip
    try:
        health, fault = _health(path, record, headers=headers)
        if health == "whole" and mark is not None and mark.leaves(step.step, record.save):
            health = "left behind"
        notes = notes_of(path)
        return replace(step, health=health, fault=fault, metric=notes.metric, mode=notes.mode)
    except (HoldfastError, OSError) as error:
        return replace(step, fault=str(error))


def _health(path: Place, record: Manifest, *, headers: bool) -> tuple[Health, str]:
    lacking = lacking_files(path, record)
    if lacking:
        fault = next(iter(lacking.values()))
        absent = all(" is missing" in text for text in lacking.values())
        partly = absent and len(lacking) < len(record.files) and (path.parent / MARK).is_file()
        return ("partly here" if partly else "damaged"), fault
    if headers:
        files = DataFiles(path, record.data_files)
        try:
            files.prepare(range(len(record.files)), ReadStats())
            for index in range(len(record.files)):
                files.header(index)
        except Damaged as error:
            return "damaged", str(error)
    return "whole", ""


def _uncommitted(path: Place, blank: Step) -> Step | None:
    """A save that was not committed; None if no file there is one of a save of holdfast."""
    try:
        sizes = sizes_of_save(path)
        ours = [name for name in sizes if datafile.save_of(name) or part.save_of(name)]
        if not ours:
            return None
        nbytes = sum(sizes[name] for name in ours if datafile.save_of(name))
        step = replace(blank, created=_newest(path, ours), nbytes=nbytes, own=nbytes)
        written = bool(path.living([name for name in ours if datafile.save_of(name)]))
        if written and path.has_locks:
            return replace(step, health="writing", fault="a living process writes it")
        if finished(path) is not None:
            return replace(step, health="pending", fault=_FINISHED.format(path=shlex.quote(str(path))))
        if written:
            return replace(step, health="writing", fault="too young to know whether a process still writes it")
        return replace(step, health="unfinished", fault=_DEAD)
    except StorageError as error:
        return replace(blank, fault=str(error))


_FINISHED = "all its ranks had finished: holdfast rescue {path} commits it"
_DEAD = "it never committed, or its manifest was deleted: holdfast doctor says which; the next start may delete it"


def _or_lent(path: Place, step: Step, citations: Reuses | None = None) -> Step:
    """A save that was not committed, or the files of a swept step that others reuse."""
    if step.health not in ("writing", "unfinished"):
        return step
    try:
        names = who_reuses(path, [name for name in path.files_below() if is_orphan(name)], citations)
    except StorageError as error:
        return replace(step, health="unreadable", fault=str(error))
    if not names:
        return step
    return replace(step, health="lent", fault=what_is_lent(names))


def _foreign(path: Place, name: str, tier: str) -> Step | None:
    """A checkpoint of another format; None if there is none."""
    blank = Step(name, str(path), tier, "", "unreadable", step=_number_of(path.name))
    try:
        checkpoint = open_checkpoint(path)
    except NotACheckpoint:
        return None
    except (Damaged, Unsupported) as error:
        return replace(blank, health="damaged" if isinstance(error, Damaged) else "unreadable", fault=str(error))
    except HoldfastError as error:
        return replace(blank, fault=str(error))
    except OSError as error:
        log.debug("%s is passed over: %s", path, error)
        return None
    files = [file.path for file in checkpoint.manifest.data_files]
    return replace(
        blank, format=checkpoint.format, health="opens", created=_newest_of(files),
        step=blank.step if checkpoint.step is None else checkpoint.step, nbytes=checkpoint.nbytes,
        own=checkpoint.nbytes, world_size=checkpoint.world_size, reading=checkpoint.reading,
    )  # fmt: skip


def _number_of(name: str) -> int | None:
    """The step in the name of a folder: the number after a word as "step" or "ckpt", or all of the name."""
    match = _NUMBERED.search(name)
    return int(match["step"]) if match else None


def _newest(path: Place, files: list[str]) -> str | None:
    return None if path.is_remote else _newest_of([str(path / file) for file in files])


def _newest_of(files: list[str]) -> str | None:
    """When the newest of these local files was written, as RFC 3339; None if none of them is a local file."""
    times = []
    for file in files:
        with suppress(OSError, ValueError):  # a place in a store, or a part of an archive
            times.append(disk.stat(file).st_mtime)
    if not times:
        return None
    return datetime.fromtimestamp(max(times), timezone.utc).isoformat(timespec="seconds")
