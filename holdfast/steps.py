"""The steps of a run on disk: which are there, which is the newest whole one, what may go.

The manager owns one for its root. Never trusts a name: only a committed manifest counts.
"""

from __future__ import annotations

import re
import string
import threading
import time
from collections.abc import Container
from pathlib import Path

import msgspec

from holdfast.checkpoint import Checkpoint, read_manifest
from holdfast.engine.folder import delete_checkpoint, sweep_beside, sweep_dead
from holdfast.engine.parts import commit_late
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.keep import Keep
from holdfast.ondisk import manifest

NOTES = "holdfast-manager.json"
"""The attachment in which the metric of a step is kept."""


class _Notes(msgspec.Struct):
    metric: float | None = None


class Steps:
    """The folders below ``root`` that ``name`` makes of step numbers. Raises ValueError if it makes none.

    ``broken`` are names of steps that were committed once and found damaged.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.root, self._name, self._pattern = root, name, _pattern_of(name)
        self.broken: set[str] = set()
        self._sweeping = threading.Lock()

    def path(self, step: int) -> Path:
        """Where a step lies, or will."""
        return self.root / self._name.format(step=step)

    def folders(self) -> list[Path]:
        """All folders that are called like a step."""
        found = self.root.iterdir() if self.root.is_dir() else ()
        return [path for path in found if path.is_dir() and self._pattern.fullmatch(path.name)]

    def committed(self) -> dict[int, Path]:
        """The committed steps, oldest first."""
        found = {}
        for path in self.folders():
            match = self._pattern.fullmatch(path.name)
            if match and (path / manifest.FILE_NAME).exists():
                found[int(match["step"])] = path
        return dict(sorted(found.items()))

    def newest(self, refused: Container[str] = ()) -> Path | None:
        """The newest whole step that was not refused; why one is passed over is logged."""
        for path in reversed(self.committed().values()):
            if path.name in refused:
                continue
            fault = _fault(path)
            if fault is None:
                return path
            self.broken.add(path.name)
            log.warning("%s is passed over: %s", path, fault)
        return None

    def commit_late(self, patience: float) -> None:
        """Commit the saves whose ranks had all finished; waits so many seconds for writers that are still at it."""
        until = time.monotonic() + patience
        for path in sorted(self.folders(), reverse=True):
            try:
                commit_late(path, patience=max(until - time.monotonic(), 0.0))
            except (HoldfastError, OSError) as error:
                log.warning("%s cannot be looked at: %s", path, error)

    def sweep(self, keep: Keep, just_saved: int | None, spare: Container[Path]) -> None:
        """Delete committed steps that no rule keeps (after a save), and what dead saves left.

        Not in the folders to ``spare``, where saves are under way. Failures cost space alone.
        """
        try:
            with self._sweeping:
                committed = self.committed()
                if just_saved is not None and len(committed) > keep.last:
                    metrics = {step: _metric(path) for step, path in committed.items()} if keep.best else {}
                    kept = keep.kept({step: metrics.get(step) for step in committed})
                    for step in sorted(set(committed) - kept - {just_saved}):
                        delete_checkpoint(committed[step])
                for path in self.folders():
                    if path not in spare:
                        _sweep_folder(path)
        except (StorageError, OSError) as error:
            log.warning("sweeping %s failed: %s", self.root, error)


def note_of(metric: float | None) -> bytes:
    """What is attached to a step, for `Steps.sweep` to find its metric."""
    return msgspec.json.encode(_Notes(None if metric is None else float(metric)))


def _sweep_folder(path: Path) -> None:
    try:
        sweep_beside(path, read_manifest(path))
    except NotACheckpoint:
        sweep_dead(path)
    except (Damaged, Unsupported) as error:
        log.debug("not swept: %s", error)


def _pattern_of(name: str) -> re.Pattern[str]:
    parts = list(string.Formatter().parse(name))
    if [field for _, field, _, _ in parts if field is not None] != ["step"]:
        raise ValueError(f"name={name!r} must hold {{step}} once, as in 'step-{{step:09d}}'")
    if "/" in name:
        raise ValueError(f"name={name!r} must be one folder name")
    return re.compile("".join(re.escape(text) + (r"(?P<step>\d+)" if field else "") for text, field, _, _ in parts))


def _fault(path: Path) -> str | None:
    """Why a committed checkpoint is not whole, by its manifest and its files' sizes; None if it is."""
    try:
        for file in read_manifest(path).data_files:
            size = (path / file.path).stat().st_size
            if size != file.bytes:
                return f"{file.path} has {size} bytes instead of {file.bytes}"
    except FileNotFoundError as error:
        return str(error) if isinstance(error, HoldfastError) else f"{error.filename} is missing"
    except (HoldfastError, OSError) as error:
        return str(error)
    return None


def _metric(path: Path) -> float | None:
    try:
        return msgspec.json.decode(Checkpoint(path).attachment(NOTES), type=_Notes).metric
    except (HoldfastError, KeyError, msgspec.MsgspecError):
        return None
