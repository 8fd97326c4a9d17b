"""The manager of a training loop: when to save, what to keep, where to go on, when to stop.

Training code owns one `CheckpointManager`. Never deletes the last whole checkpoint and never trusts a name: only a
committed manifest counts.
"""

from __future__ import annotations

import math
import os
import re
import signal
import string
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from holdfast.checkpoint import Checkpoint, read_manifest
from holdfast.engine.folder import delete_checkpoint, sweep_beside, sweep_dead
from holdfast.engine.ranks import DEADLINE, ranks_of
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.load import Loaded, load
from holdfast.ondisk import manifest
from holdfast.save import local_folder, save

NOTES = "holdfast-manager.json"
"""The attachment in which the manager keeps a step's metric."""


@dataclass(frozen=True)
class Keep:
    """Which committed steps to keep; a step is kept if any rule keeps it.

    ``last``: the newest so many (at least 1). ``every``: every step that is a multiple of it, for good. ``best``:
    so many with the best ``metric`` given to `CheckpointManager.step`; ``mode`` says whether less or more is better.
    """

    last: int = 2
    every: int | None = None
    best: int = 0
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"Keep(last={self.last}): at least the newest checkpoint is always kept")
        if self.every is not None and self.every < 1:
            raise ValueError(f"Keep(every={self.every}) must be at least 1, or None")
        if self.best < 0 or self.mode not in ("min", "max"):
            raise ValueError(f"Keep(best={self.best}, mode={self.mode!r}): best is 0 or more, mode is 'min' or 'max'")

    def kept(self, steps: Mapping[int, float | None]) -> set[int]:
        """Of committed ``steps`` with their metrics, those to keep."""
        newest = sorted(steps)
        kept = set(newest[-self.last :])
        if self.every is not None:
            kept |= {s for s in newest if s % self.every == 0}
        if self.best:
            rated = [(m if self.mode == "min" else -m, -s) for s, m in steps.items() if m is not None and m == m]
            kept |= {-s for _, s in sorted(rated)[: self.best]}
        return kept


class _Notes(msgspec.Struct):
    metric: float | None = None


class CheckpointManager:
    """Saves a training run's state under ``root`` every ``every`` steps, keeps what ``keep`` says, and restores it.

    One on every rank of ``group``, all with the same arguments. ``name`` formats a step's folder. ``deadline`` is
    what each phase of a save or load may take, in seconds. ``signals`` ask for one last save: the first rank to get
    one tells the others, all save the same step, and `should_stop` turns true everywhere; ranks look for it every
    ``poll`` steps. After a SIGTERM no wait for other ranks lasts longer than ``grace`` seconds, so that a save which
    cannot finish, because the signal came with a rank's death, says so before the launcher kills (torchrun and
    Kubernetes: after 30).

        manager = holdfast.CheckpointManager("/ckpt/run1", every=500)
        manager.restore(state)
        for step in range(state["step"], steps):
            ...
            state["step"] = step + 1
            manager.step(step + 1, state)
            if manager.should_stop:
                break
        manager.close()
    """

    def __init__(
        self, root: str | os.PathLike[str], *, every: int, keep: Keep = Keep(), name: str = "step-{step:09d}",
        files: Mapping[str, str | os.PathLike[str] | bytes] | None = None, group: dist.ProcessGroup | None = None,
        deadline: float = DEADLINE, grace: float = 25.0,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGUSR1), poll: int = 1,
    ) -> None:  # fmt: skip
        if every < 1 or poll < 1:
            raise ValueError(f"every={every} and poll={poll} must be at least 1")
        self.root, self.every, self.keep = local_folder(root), every, keep
        self._name, self._pattern = name, _pattern_of(name)
        self._files, self._group, self._deadline, self._poll = dict(files or {}), group, deadline, poll
        self._ranks = ranks_of(group)
        self._run: str | None = None
        self._saved: int | None = None
        self._broken: set[str] = set()  # committed once, found damaged; known to the first rank, which decides
        self._stop_at: int | None = None
        self._signalled, self._grace = threading.Event(), grace
        # Ranks make their managers in the same order, so the same number means the same manager on each of them.
        made = self._ranks.remembered["managers"] = self._ranks.remembered.get("managers", 0) + 1
        self._stop_key = f"manager/{self._ranks.calls}.{made}/stop"
        self.should_stop = False
        self._handlers = self._watch(signals)

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the signals back to whoever handled them before. Idempotent."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, handler)
        self._handlers = {}
        self._ranks.limit = math.inf

    # Saving

    def step(self, step: int, state: Mapping[str, Any], *, metric: float | None = None) -> Checkpoint | None:
        """Tell that ``step`` steps are done; saves if it is time, and returns the checkpoint if it did.

        ``metric`` is what ``Keep(best=…)`` compares. Raises SaveFailed as `save` does; the steps before stay.
        """
        last = self._agree_to_stop(step)
        if not (last or step % self.every == 0) or step == self._saved:
            self.should_stop = self.should_stop or last
            return None
        checkpoint = self.save(step, state, metric=metric)
        self.should_stop = self.should_stop or last
        return checkpoint

    def save(
        self, step: int, state: Mapping[str, Any], *, metric: float | None = None, overwrite: bool = False
    ) -> Checkpoint:
        """Save ``step`` now, whatever the rhythm, then drop what is no longer to be kept.

        A step that this manager has just saved is not saved again, so this may end a run of any length.
        """
        if step == self._saved and not overwrite:
            return Checkpoint(self.root / self._name.format(step=step))
        if isinstance(state, dict) and type(state.get("step")) is int and state["step"] != step:
            log.warning("saving step %d of a state that says it is at step %d", step, state["step"])
        files = {**self._files, NOTES: msgspec.json.encode(_Notes(None if metric is None else float(metric)))}
        path = self.root / self._name.format(step=step)
        # A step that could not be restored stands in the way of its own successor.
        overwrite = overwrite or path.name in self._broken
        checkpoint = save(
            state, path, step=step, files=files, overwrite=overwrite, group=self._group, deadline=self._deadline,
            run=self._run_id(),
        )  # fmt: skip
        self._saved = step
        if self._ranks.first:
            log.info("saved step %d: %d bytes in %.2f s, %s", step, checkpoint.nbytes, checkpoint.seconds, path)
            self._sweep(step)
        return checkpoint

    def _run_id(self) -> str | None:
        if self._run is None and self._ranks.first:
            newest = self.latest()
            # A run that is resumed is the same run.
            self._run = newest.manifest.run if newest is not None else None
        return self._run

    # Restoring

    def restore(self, state: dict[str, Any]) -> Loaded | None:
        """Load the newest whole checkpoint into ``state``; None if there is none, so that training starts afresh.

        Whole means: committed, it opens, and every file is there in its size. One that is not, or that proves
        damaged while it is read, is passed over for the one before, with a warning that says why. What dead saves
        left is swept. Raises Mismatch if the checkpoint does not fit ``state``.
        """
        if self._ranks.first:
            self._sweep(None)
        refused: list[str] = []
        while True:
            with self._ranks.call(f"restore {self.root}", deadline=self._deadline) as call:
                name = call.exchange("choose", lambda: True, lambda notes: self._choose(refused), str)
            if not name:
                if refused:
                    raise NotACheckpoint(f"no checkpoint of {self.root} can be restored: " + "; ".join(refused))
                return None
            try:
                loaded = load(self.root / name, state, group=self._group, deadline=self._deadline)
            except (Damaged, NotACheckpoint) as error:
                log.warning("%s cannot be restored, trying the one before: %s", name, error)
                refused.append(name)
                self._broken.add(name)
                continue
            self._run, self._saved = loaded.checkpoint.manifest.run, loaded.step
            return loaded

    def _choose(self, refused: list[str]) -> str:
        """The folder of the newest whole checkpoint that was not refused, or ``""``."""
        for _, path in sorted(self._committed(), reverse=True):
            if path.name in refused:
                continue
            fault = _fault(path)
            if fault is None:
                return path.name
            self._broken.add(path.name)
            log.warning("%s is passed over: %s", path, fault)
        return ""

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint under ``root``, opened, or None. Local: any rank may ask."""
        name = self._choose([])
        return Checkpoint(self.root / name) if name else None

    def steps(self) -> list[int]:
        """The committed steps, oldest first."""
        return sorted(step for step, _ in self._committed())

    def _committed(self) -> list[tuple[int, Path]]:
        found = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            match = self._pattern.fullmatch(path.name)
            if match and (path / manifest.FILE_NAME).exists():
                found.append((int(match["step"]), path))
        return found

    # Retention

    def _sweep(self, just_saved: int | None) -> None:
        """Delete committed steps that no rule keeps, and the leavings of dead saves. Failures cost space alone."""
        try:
            committed = dict(self._committed())
            if just_saved is not None and len(committed) > self.keep.last:
                metrics = {step: _metric(path) for step, path in committed.items()} if self.keep.best else {}
                kept = self.keep.kept({step: metrics.get(step) for step in committed})
                for step in sorted(set(committed) - kept - {just_saved}):
                    delete_checkpoint(committed[step])
            self._sweep_orphans()
        except (StorageError, OSError) as error:
            log.warning("sweeping %s failed: %s", self.root, error)

    def _sweep_orphans(self) -> None:
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if path.is_dir() and self._pattern.fullmatch(path.name):
                try:
                    sweep_beside(path, read_manifest(path))
                except NotACheckpoint:
                    sweep_dead(path)
                except (Damaged, Unsupported) as error:
                    log.debug("not swept: %s", error)

    # Signals

    def _watch(self, signals: tuple[signal.Signals, ...]) -> dict[signal.Signals, Any]:
        if threading.current_thread() is not threading.main_thread():
            return {}  # Python delivers signals to the main thread alone
        return {number: signal.signal(number, self._on_signal) for number in signals}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled.set()
        if number == signal.SIGTERM:  # SIGUSR1 comes early, as a warning; after SIGTERM comes SIGKILL
            self._ranks.hurry(self._grace)

    def _agree_to_stop(self, step: int) -> bool:
        """Whether ``step`` is the last one, as all ranks see it.

        Ranks of one training loop are at most one step apart. Whoever is signalled writes the step it is at; every
        rank looks at each polling step and stops at the first one after the step after that, so all have seen it.
        """
        store = self._ranks.store
        if store is None:
            if self._signalled.is_set() and self._stop_at is None:
                self._stop_at = step
        elif self._stop_at is None:
            if self._signalled.is_set():
                told = bytes(store.compare_set(self._stop_key, "", str(step)))
                self._stop_at = self._after(int(told))
            elif step % self._poll == 0 and store.check([self._stop_key]):
                self._stop_at = self._after(int(bytes(store.get(self._stop_key))))
        return self._stop_at is not None and step >= self._stop_at

    def _after(self, told: int) -> int:
        return (told + 1) // self._poll * self._poll + self._poll


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
