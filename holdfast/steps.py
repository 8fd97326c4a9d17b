"""The steps of a run on disk: which are there, which is the newest whole one, what may go.

The manager owns one for its root. Never trusts a name: only a committed manifest counts.
"""

from __future__ import annotations

import math
import re
import string
import threading
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager

import msgspec

from holdfast.checkpoint import Checkpoint, read_manifest
from holdfast.engine import storage
from holdfast.engine.folder import delete_checkpoint, may_hold_leavings, sweep_beside, sweep_dead
from holdfast.engine.parts import commit_late
from holdfast.engine.stores.place import Location, Place
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.keep import Keep
from holdfast.ondisk import manifest
from holdfast.ondisk.manifest import Manifest

FEW = 16
"""Folders of a store that are looked into one by one."""

NOTES = "holdfast-manager.json"
"""The attachment in which the metric of a step is kept."""


class _Notes(msgspec.Struct):
    metric: float | None = None


class Steps:
    """The folders below ``root`` that ``name`` makes of step numbers. Raises ValueError if it makes none.

    ``broken`` are names of steps that were committed once and found damaged.
    """

    def __init__(self, root: Location, name: str) -> None:
        self.root, self._name, self._pattern = root, name, _pattern_of(name)
        self.broken: set[str] = set()
        # Names of steps that were seen to be committed or were swept, and their metrics: each look into a store costs.
        self._known: set[str] = set()
        self._swept: dict[str, float] = {}  # each with the moment from which on it is worth another look
        self._metrics: dict[str, float | None] = {}
        self._sweeping = threading.Lock()

    def path(self, step: int) -> Location:
        """Where a step lies, or will."""
        return self.root / self._name.format(step=step)

    def folders(self) -> list[Location]:
        """All folders that are called like a step."""
        return [self.root / name for name in storage.folders_in(self.root) if self._pattern.fullmatch(name)]

    def committed(self) -> dict[int, Location]:
        """The committed steps, oldest first."""
        folders = {path.name: path for path in self.folders()}
        # On disk looking costs nothing. Several threads may look at once.
        known = self._known & set(folders) if isinstance(self.root, Place) else set()
        known |= self._find_manifests([name for name in folders if name not in known])
        self._known = known
        return dict(sorted((self.step_of(name), folders[name]) for name in known))

    def step_of(self, name: str) -> int:
        match = self._pattern.fullmatch(name)
        return int(match["step"]) if match else -1

    def _find_manifests(self, folders: list[str]) -> set[str]:
        """Which of these folders hold a manifest. In a store, many are looked for in one listing."""
        if isinstance(self.root, Place) and len(folders) > FEW:
            found = storage.files_below(self.root)
            named = {path.partition("/")[0] for path in found if path.endswith(f"/{manifest.FILE_NAME}")}
            return named & set(folders)
        return {name for name in folders if storage.is_file(self.root / name / manifest.FILE_NAME)}

    def newest(self, refused: Container[str] = ()) -> Location | None:
        """The newest whole step that was not refused; why one is passed over is logged. Raises StorageError."""
        # From the newest name on: in a store the first whole one ends the search, however many steps there are.
        for path in sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True):
            if path.name in refused or not storage.is_file(path / manifest.FILE_NAME):
                continue
            fault = fault_of(path)
            if fault is not None and isinstance(path, Place):
                fault = fault_of(path)  # on the way a bit may have flipped
            if fault is None:
                return path
            self.broken.add(path.name)
            log.warning("%s is passed over: %s", path, fault)
        return None

    def commit_late(self, patience: float) -> None:
        """Commit the saves whose ranks had all finished; waits so many seconds for writers that are still at it."""
        until = time.monotonic() + patience
        folders = sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True)
        # A manager in a store commits late only what no newer commit has overtaken: old steps are many there.
        for path in folders:
            if isinstance(self.root, Place) and storage.is_file(path / manifest.FILE_NAME):
                break
            try:
                commit_late(path, patience=max(until - time.monotonic(), 0.0))
            except (HoldfastError, OSError) as error:
                log.warning("%s cannot be looked at: %s", path, error)

    def _metric(self, path: Location) -> float | None:
        if path.name not in self._metrics or not isinstance(path, Place):
            self._metrics[path.name] = _metric(path)
        return self._metrics[path.name]

    def sweep(self, keep: Keep, just_saved: int | None, spare: Container[Location]) -> None:
        """Delete committed steps that no rule keeps (after a save), and what dead saves left.

        Not in the folders to ``spare``, where saves are under way. Failures cost space alone.
        """
        with self._gently():
            if just_saved is not None:
                committed = self.committed()
                self._retire(committed, self._kept(keep, committed) | {just_saved})
            self._clean(spare)

    def kept(self, keep: Keep) -> set[int] | None:
        """The committed steps that a rule keeps; None if that cannot be told."""
        found = None
        with self._gently():
            found = self._kept(keep, self.committed())
        return found

    def retire(self, kept: Container[int], upto: int) -> None:
        """Delete the committed steps up to and with ``upto`` that are not ``kept``. Failures cost space alone."""
        with self._gently():
            self._retire({step: path for step, path in self.committed().items() if step <= upto}, kept)

    def clean(self, spare: Container[Location]) -> None:
        """Delete what dead saves left, but not in the folders to ``spare``. Failures cost space alone."""
        with self._gently():
            self._clean(spare)

    def _kept(self, keep: Keep, committed: dict[int, Location]) -> set[int]:
        rated = keep.best and len(committed) > keep.last
        metrics = {step: self._metric(path) for step, path in committed.items()} if rated else {}
        return keep.kept({step: metrics.get(step) for step in committed})

    def _retire(self, committed: dict[int, Location], kept: Container[int]) -> None:
        for step, path in committed.items():
            if step not in kept:
                self._known = self._known - {path.name}
                delete_checkpoint(path)

    def _clean(self, spare: Container[Location]) -> None:
        now = time.monotonic()
        found = self.folders()
        folders = [path for path in found if not isinstance(path, Place) or now >= self._swept.get(path.name, now)]
        littered = self._littered(folders)
        for path in folders:
            if path not in spare:
                done = path.name not in littered or _sweep_folder(path)
                self._swept[path.name] = math.inf if done else now + storage.LIVING
        self._swept = {path.name: self._swept[path.name] for path in found if path.name in self._swept}

    def _littered(self, folders: list[Location]) -> set[str]:
        """Names of those folders that may hold what dead saves left. In a store, many are looked at in one listing."""
        if not isinstance(self.root, Place) or len(folders) <= FEW:
            return {path.name for path in folders}
        files: dict[str, list[str]] = {path.name: [] for path in folders}
        for found in storage.files_below(self.root):
            name, _, path = found.partition("/")
            if name in files:
                files[name].append(path)
        return {name for name, paths in files.items() if may_hold_leavings(paths)}

    @contextmanager
    def _gently(self) -> Iterator[None]:
        """Sweep, one thread at a time; a failure costs space alone."""
        try:
            with self._sweeping:
                yield
        except (StorageError, OSError) as error:
            log.warning("sweeping %s failed: %s", self.root, error)


def note_of(metric: float | None) -> bytes:
    """What is attached to a step, for `Steps.sweep` to find its metric."""
    return msgspec.json.encode(_Notes(None if metric is None else float(metric)))


def _sweep_folder(path: Location) -> bool:
    """Whether nothing was left for later: what a living save may still need is."""
    try:
        return sweep_beside(path, read_manifest(path))
    except NotACheckpoint:
        return sweep_dead(path)
    except (Damaged, Unsupported) as error:
        log.debug("not swept: %s", error)
        return True


def _pattern_of(name: str) -> re.Pattern[str]:
    parts = list(string.Formatter().parse(name))
    if [field for _, field, _, _ in parts if field is not None] != ["step"]:
        raise ValueError(f"name={name!r} must hold {{step}} once, as in 'step-{{step:09d}}'")
    if "/" in name:
        raise ValueError(f"name={name!r} must be one folder name")
    return re.compile("".join(re.escape(text) + (r"(?P<step>\d+)" if field else "") for text, field, _, _ in parts))


def fault_of(path: Location) -> str | None:
    """Why a committed checkpoint is not whole, by its manifest and its files' sizes; None if it is.

    Raises StorageError if a store does not tell: that says nothing of the checkpoint, and a run must not go on from an
    older one for it.
    """
    try:
        return next(iter(lacking_files(path, read_manifest(path)).values()), None)
    except (Damaged, NotACheckpoint, Unsupported) as error:
        return str(error)
    except (HoldfastError, OSError) as error:
        if isinstance(path, Place):
            raise
        return str(error)


def lacking_files(folder: Location, record: Manifest) -> dict[int, str]:
    """Numbers of the data files that a folder does not have as its manifest says, each with what is wrong.

    In a store that is one listing. Raises StorageError.
    """
    files = record.data_files
    sizes = storage.sizes_below(folder) if files else {}
    found: dict[int, str] = {}
    for index, file in enumerate(files):
        # Borrowed from a sibling: it lies elsewhere.
        size = sizes.get(file.path) if file.save is None else storage.size_of(folder / file.path)
        if size is None:
            found[index] = f"{folder / file.path} is missing"
        elif size != file.bytes:
            found[index] = f"{file.path} has {size} bytes instead of {file.bytes}"
    return found


def _metric(path: Location) -> float | None:
    try:
        return msgspec.json.decode(Checkpoint(path).attachment(NOTES), type=_Notes).metric
    except (HoldfastError, KeyError, msgspec.MsgspecError):
        return None
