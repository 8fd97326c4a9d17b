"""The saves of a run, past and in progress: from its journal, and from manifests of steps that no journal has."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise

from holdfast.commit.commit import sizes_of_save
from holdfast.commit.folder import what_is_there
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest, part
from holdfast.run.journal import ASK, Entry, Now, Reader, joined, printable
from holdfast.run.steps import Steps
from holdfast.run.tiers.nodes import root_of_fast
from holdfast.run.whole import metric_of
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

ASKERS = 16
"""Folders that are looked into at once."""


@dataclass(frozen=True)
class Underway:
    """A save that has not committed: ``since`` when, in unix seconds, None if not known. ``durable`` ranks have
    all their files in place, of ``ranks``; ``bytes`` are there, or reserved.
    """

    name: str
    step: int | None
    since: float | None
    bytes: int
    durable: int
    ranks: int | None


@dataclass(frozen=True)
class History:
    """A run at one moment, ``at`` unix seconds.

    ``entries``: every known save, the oldest first. Those that are in no journal have no ``start``; their
    ``seconds`` and ``stall`` are not known and 0. ``there``: names of the folders that hold a committed step now, by
    step. ``now``: where training was when it last said so. ``saving``: the saves under way. ``unreadable``: folders
    that cannot be looked into, with why. ``fast_of``: the root that this is the fast tier of, None if it is none.
    ``behind``: the steps that are there and no longer count, since training went back and on without them.
    """

    at: float
    entries: list[Entry]
    there: dict[int, str]
    now: Now | None
    saving: list[Underway]
    unreadable: dict[str, str] = field(default_factory=dict)
    fast_of: str | None = None
    behind: frozenset[int] = frozenset()

    @property
    def saved(self) -> list[Entry]:
        """Those that committed, each step as it was saved last."""
        return list({entry.step: entry for entry in self.entries if entry.outcome == "saved"}.values())


class Past:
    """Looks at the run in ``root``, a path or a URL."""

    def __init__(self, root: str | os.PathLike[str] | Place) -> None:
        self.root = with_deadline(location(root), ASK)
        self._reader = Reader(self.root)
        self._committed: dict[str, Entry | None] = {}  # by folder; None for what is no step, or cannot be read

    def look(self) -> History:
        """The run as it is now. Raises NotACheckpoint if there is neither a journal nor a step, ValueError for a step,
        and StorageError."""
        journal = self._reader.read()
        names = [name for name in self.root.folder_names() if not name.startswith(".")]
        self._committed = {name: entry for name, entry in self._committed.items() if name in names}
        unknown = [name for name in names if name not in self._committed]
        refused: dict[str, str] = {}
        with ThreadPoolExecutor(ASKERS, thread_name_prefix="holdfast-history") as pool:
            whole = dict(zip(unknown, pool.map(lambda name: self._is_committed(name, refused), unknown), strict=True))
            fresh = [name for name in unknown if whole[name]]
            read = zip(fresh, pool.map(lambda name: self._step_of(name, refused), fresh), strict=True)
            self._committed.update((name, entry) for name, entry in read if name not in refused)
        there = {entry.step: name for name, entry in self._committed.items() if entry is not None}
        known = {entry.step for entry in journal.entries if entry.outcome == "saved"}
        others = [entry for entry in self._committed.values() if entry is not None and entry.step not in known]
        lacking = [name for name in unknown if not whole[name] and name not in refused]
        saving = self._underway(lacking, journal.now, journal.entries, refused)
        if not (journal.entries or there or saving or journal.now):
            root = self.root
            if (root / manifest.FILE_NAME).is_file():
                raise ValueError(f"{root} is one checkpoint: give the folder of its run, {root.parent}")
            if refused:
                raise StorageError(refused[min(refused)])
            raise NotACheckpoint(what_is_there(root))
        entries = joined([*journal.entries, *others])
        return History(
            time.time(), entries, dict(sorted(there.items())), journal.now, saving,
            dict(sorted(refused.items())), self._fast_of() if journal.now is None else None,
            self._behind(there, entries),
        )  # fmt: skip

    def _behind(self, there: dict[int, str], entries: Sequence[Entry]) -> frozenset[int]:
        if all(entry.step < later.step for entry, later in pairwise(entries)):
            return frozenset()  # training never went back: in a store, asking for the mark costs a request
        try:
            steps = Steps(self.root, "{step}")
            return frozenset(step for step, name in there.items() if steps.is_behind(step, self.root / name))
        except HoldfastError as error:  # the mark cannot be read: a restore says so
            log.debug("%s", error)
            return frozenset()

    def _fast_of(self) -> str | None:
        root = root_of_fast(self.root) if self.root.has_folders else None
        return None if root is None else printable(root)

    def _refuses(self, name: str, error: OSError, refused: dict[str, str]) -> None:
        """Note a folder of a disk that cannot be looked into: the others still can. Of a store the next look tells."""
        if self.root.is_remote:
            raise error
        refused[name] = str(error)

    def _is_committed(self, name: str, refused: dict[str, str]) -> bool:
        try:
            return (self.root / name / manifest.FILE_NAME).size() is not None
        except StorageError as error:
            self._refuses(name, error, refused)
            return False

    def _step_of(self, name: str, refused: dict[str, str]) -> Entry | None:
        """A committed step, by its manifest alone."""
        try:
            record = read_manifest(self.root / name)
        except StorageError as error:
            self._refuses(name, error, refused)
            return None
        except (NotACheckpoint, Damaged, Unsupported) as error:
            log.debug("%s is passed over: %s", name, error)
            return None
        if record.step is None or record.step < 0:
            return None
        try:
            created = datetime.fromisoformat(record.created.replace("Z", "+00:00")).timestamp()
        except ValueError:
            created = 0.0
        files = record.data_files
        return Entry(
            record.step, created, created, 0.0, 0.0, sum(file.bytes for file in files), record.world_size,
            self._metric(name), "saved", written=sum(file.bytes for file in files if file.save is None),
        )  # fmt: skip

    def _metric(self, name: str) -> float | None:
        try:
            return metric_of(self.root / name)
        except (HoldfastError, OSError):  # swept meanwhile
            return None

    def _underway(
        self, names: Sequence[str], now: Now | None, entries: Sequence[Entry], refused: dict[str, str]
    ) -> list[Underway]:  # fmt: skip
        """Folders with files of a save and without a manifest, in which something lives, and what training says."""
        saves = []
        ranks = now.ranks if now is not None else entries[-1].ranks if entries else None
        for name in names:
            folder = self.root / name
            try:
                sizes = sizes_of_save(folder)
            except OSError as error:
                self._refuses(name, error, refused)
                continue
            files = [path for path in sizes if datafile.save_of(path)]
            parts = [path for path in sizes if part.save_of(path)]
            announced = now is not None and now.saving is not None and ends_with(name, now.saving)
            if not announced and not (files and self._lives(folder, files)):
                continue
            saves.append(
                Underway(
                    name, now.saving if announced and now else None, now.since if announced and now else None,
                    sum(sizes[path] for path in files), len(parts), ranks,
                )
            )  # fmt: skip
        if now is not None and now.saving is not None and not saves:
            saves.append(Underway("", now.saving, now.since, 0, 0, ranks))  # nothing is on the disk yet, or to be seen
        return saves

    def _lives(self, folder: Place, files: list[str]) -> bool:
        if not folder.has_locks:
            return False  # a store does not tell who still writes; training does
        try:
            return bool(folder.living(files))
        except StorageError:  # committed, or swept, while we looked
            return False


def ends_with(name: str, step: int) -> bool:
    digits = name[len(name.rstrip("0123456789")) :]
    return digits != "" and int(digits[-18:]) == step
