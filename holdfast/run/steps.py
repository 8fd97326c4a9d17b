"""The steps of a run on disk: which are there, which is the newest whole one, and of which run.

The manager, the tiers and the command ask it. Never trusts a name: only a committed manifest counts. Never deletes.
"""

from __future__ import annotations

import re
import string
import time
from collections.abc import Container, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from holdfast.commit.commit import commit_late
from holdfast.errors import Damaged, HoldfastError, Mismatch, NotACheckpoint, StorageError, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk import datafile, manifest
from holdfast.run import going_back
from holdfast.run.going_back import WentBack
from holdfast.run.keep import Mode, best_of
from holdfast.run.metrics import Metrics
from holdfast.run.whole import fault_of
from holdfast.storage import storage
from holdfast.storage.place import Place

FEW = 16
"""Folders of a store that are looked into one by one."""


HEAD = 512
"""Bytes of a manifest that tell its run and its time."""

_MADE = re.compile(
    rb'"save":"(?P<save>[0-9a-f]{1,64})","run":"(?P<run>[0-9a-f]{1,64})",.{0,64}?"created":"(?P<created>[^"]{1,64})"'
)


class Made(NamedTuple):
    """Which save of which run made a step, and when (RFC 3339, in UTC)."""

    save: str
    run: str
    created: str


class Steps:
    """The folders below ``root`` that ``name`` makes of step numbers. Raises ValueError if it makes none.

    ``broken`` are names of steps that were committed once and found damaged, ``passed`` of those that a restore passed
    over for an older one, since they have lost sections. Both stand in the way of steps that training makes again.
    """

    def __init__(self, root: Place, name: str) -> None:
        self.root, self._name, self._pattern = root, name, _pattern_of(name)
        self.broken: set[str] = set()
        self.passed: set[str] = set()
        # Names of steps that were seen to be committed: each look into a store costs a request.
        self._known: set[str] = set()
        self.metrics = Metrics(root)
        self._went_back: WentBack | None = None
        self._asked_for_mark = False
        self._counting: set[str] = set()  # names of later steps that were looked at, and count
        self._others: list[str] = []  # folders with other names; if they are checkpoints, they may cite steps

    def path(self, step: int) -> Place:
        """Where a step lies, or will."""
        return self.root / self._name.format(step=step)

    def folders(self) -> list[Place]:
        """All folders that are called like a step."""
        names = self.root.folder_names()
        self._others = [name for name in names if not self._pattern.fullmatch(name) and name != storage.JOURNAL]
        return [self.root / name for name in names if self._pattern.fullmatch(name)]

    def committed(self) -> dict[int, Place]:
        """The committed steps, oldest first."""
        folders = {path.name: path for path in self.folders()}
        # On disk looking costs nothing. Several threads may look at once.
        known = self._known & set(folders) if self.root.is_remote else set()
        known |= self._find_manifests([name for name in folders if name not in known])
        self._known = known
        return dict(sorted((self.step_of(name), folders[name]) for name in known))

    # Steps that training has left behind

    def current(self) -> dict[int, Place]:
        """The committed steps that count, oldest first: not those that training has left behind."""
        committed = self.committed()
        behind = self.behind(committed)
        return {step: path for step, path in committed.items() if step not in behind}

    def behind(self, committed: Mapping[int, Place]) -> set[int]:
        """Those of the committed steps that no longer count, since training went back and on without them."""
        return {step for step, path in committed.items() if self.is_behind(step, path)}

    def is_behind(self, step: int, path: Place) -> bool:
        """Whether a step no longer counts. Raises StorageError, Damaged."""
        mark = self.mark
        if mark is None or step <= mark.to:
            return False
        if path.name in self._counting:
            return False
        made = self.made_by(path)
        if made is not None and mark.leaves(step, made.save):
            return True
        self._counting.add(path.name)
        return False

    @property
    def mark(self) -> WentBack | None:
        """Where training last went back to; None if it never did. Raises StorageError, Damaged."""
        if not self._asked_for_mark:
            self._went_back, self._asked_for_mark = going_back.read(self.root), True
        return self._went_back

    def later_saves(self, step: int) -> set[str]:
        """The ids of the saves that made the steps after ``step``."""
        later = [self.made_by(path) for other, path in self.committed().items() if other > step]
        return {made.save for made in later if made is not None}

    def leave_behind(self, mark: WentBack) -> None:
        """From now on the steps that ``mark`` names do not count."""
        self._went_back, self._asked_for_mark = mark, True
        self._counting.clear()

    def step_of(self, name: str) -> int:
        match = self._pattern.fullmatch(name)
        return int(match["step"]) if match else -1

    def _find_manifests(self, folders: list[str]) -> set[str]:
        """Which of these folders hold a manifest. In a store, many are looked for in one listing."""
        if self.root.is_remote and len(folders) > FEW:
            files = self.root.files_below()
            named = {path.partition("/")[0] for path in files if path.endswith(f"/{manifest.FILE_NAME}")}
            return named & set(folders)
        return {name for name in folders if (self.root / name / manifest.FILE_NAME).is_file()}

    def _is_committed(self, path: Place) -> bool:
        if self.root.is_remote and path.name in self._known:
            return True
        if not (path / manifest.FILE_NAME).is_file():
            return False
        self._known = self._known | {path.name}
        return True

    def made_by(self, path: Place) -> Made | None:
        """Which run made a committed step, and when, from the first bytes of its manifest; None if they do not say.

        Raises StorageError: what cannot be read now is not said to be of another run.
        """
        try:
            head, _ = (path / manifest.FILE_NAME).read_start(HEAD)
        except FileNotFoundError:  # deleted meanwhile
            return None
        match = _MADE.search(head)
        return None if match is None else Made(*(match[part].decode() for part in Made._fields))

    def refuse_another_run(
        self, chosen: Place, refused: Container[str] = (), *, among: Iterable[Place] | None = None
    ) -> None:
        """Raise Mismatch if a step of another run was saved after ``chosen``, although it is called earlier.

        Then it is not clear which run is to go on: a run may have started from scratch in the folder of an older one.
        ``among`` these, by default all committed steps.
        """
        if among is None:
            among = self._committed_since(chosen) if self.root.is_remote else self.committed().values()
        others = {
            path.name: path
            for path in among
            if path != chosen and path.name not in refused and path.name not in self.broken
        }
        if not others:
            return

        def look(path: Place) -> Made | None:
            try:
                return self.made_by(path)
            except StorageError as error:  # it must not keep another step from being loaded
                log.warning("cannot tell which run %s belongs to: %s", path, error)
                return None

        with ThreadPoolExecutor(FEW, thread_name_prefix="holdfast-look") as pool:  # in a store each is a request
            made, *theirs = pool.map(look, [chosen, *others.values()])
        for name, other in zip(others, theirs, strict=True):
            if made is not None and other is not None and other.run != made.run and other.created > made.created:
                raise Mismatch(
                    f"{self.root} holds steps of two runs: {chosen.name} is of run {made.run}, saved {made.created}, "
                    f"and {name} of run {other.run} was saved after it, {other.created}. Say which is to go on: "
                    f'run="{other.run}" or run="{made.run}", or run="any" for the newest step of all; and keep each '
                    "run in a folder of its own"
                )

    def _committed_since(self, chosen: Place) -> list[Place]:
        """In a store: the steps whose manifests are no older than that of ``chosen``, by one listing of the run."""
        written = {}
        for path, modified in self.root.modified_below().items():
            name, _, file = path.partition("/")
            if file == manifest.FILE_NAME and self._pattern.fullmatch(name):
                written[name] = modified
        return [self.root / name for name in written if written[name] >= written.get(chosen.name, 0.0)]

    def newest(
        self, refused: Container[str] = (), *, complete: bool = False, run: str | None = None
    ) -> Place | None:  # fmt: skip
        """The newest whole step that was not refused; why one is passed over is logged. Raises StorageError.

        ``complete``: rather an older one than one that has lost sections, if there is one. ``run``: of this run alone.
        """
        partial: list[Place] = []
        # From the newest name on: in a store the first whole one ends the search, however many steps there are.
        for path in sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True):
            if path.name in refused or not self._is_committed(path):
                continue
            if self.is_behind(self.step_of(path.name), path):
                continue
            maker = self.made_by(path) if run is not None else None
            if run is not None and (maker is None or maker.run != run):
                log.info("%s is passed over: it is not of run %s", path, run)
                continue
            lost: list[str] = []
            fault = fault_of(path, lost)
            if fault is not None and path.is_remote:
                fault = fault_of(path, lost)  # on the way a bit may have flipped
            if fault is None and complete and lost:
                log.info("%s is passed over: it has no %s any more", path, ", ".join(lost))
                partial.append(path)
            elif fault is None:
                self.passed |= {newer.name for newer in partial}
                return path
            else:
                self.broken.add(path.name)
                log.warning("%s is passed over: %s", path, fault)
        return next(iter(partial), None)

    def chosen(self, step: int | Literal["best"], mode: Mode | None) -> Place:
        """The committed step of this number, or the best one that counts.

        Raises NotACheckpoint if there is none, Damaged if it is not whole, StorageError.
        """
        if step == "best":
            path = self.best(mode)
            if path is None:
                raise NotACheckpoint(f"no step in {self.root} was saved with a metric: pass metric= to manager.step")
        else:
            committed = self.committed()
            if step not in committed:
                refuse_uncommitted(self.path(step))
                steps = ", ".join(map(str, committed)) or "none"
                raise NotACheckpoint(f"there is no step {step} in {self.root}; its steps are {steps}")
            path = committed[step]
        fault = fault_of(path)
        if fault is not None:
            raise Damaged(
                f"{path} cannot be restored: {fault}; restore another step, or bring it back, as `holdfast doctor "
                f"{path}` says"
            )
        return path

    def best(self, mode: Mode | None) -> Place | None:
        """Of the steps that count the one with the best metric, the newest of several; None if none has a metric."""
        step = best_step([self], mode)
        return None if step is None else self.path(step)

    def refuse_a_checkpoint(self) -> None:
        """Raise NotACheckpoint if the root is a checkpoint, or a folder of one.

        Training would find no step in it, start from scratch and save into it.
        """
        root, above = self.root, self.root.parent
        if (root / manifest.FILE_NAME).is_file():
            raise NotACheckpoint(f"{root} is one checkpoint: give the folder of its run, {above}")
        if not (above / manifest.FILE_NAME).is_file():
            return
        try:
            files = read_manifest(above).data_files
        except (Damaged, NotACheckpoint, Unsupported):  # then nobody knows what is a part of it
            return
        if any(file.path.startswith(f"{root.name}/") for file in files):
            run = above.parent
            raise NotACheckpoint(f"{root} is a part of the checkpoint {above}: give the folder of its run, {run}")

    def refuse_damaged(self) -> None:
        """Raise NotACheckpoint if the root has steps that proved damaged, for a caller that has found no whole one.

        Training would start from scratch, and replace them.
        """
        damaged = sorted(path.name for path in self.folders() if path.name in self.broken)
        if damaged:
            raise NotACheckpoint(
                f"no checkpoint of {self.root} can be restored: {', '.join(damaged[-5:])} damaged, the log says how. "
                "Try `holdfast repair`, or choose another folder to start from scratch"
            )

    def commit_late(self, patience: float) -> None:
        """Commit the saves whose ranks had all finished; waits so many seconds for writers that are still at it."""
        until = time.monotonic() + patience
        folders = sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True)
        # A manager in a store commits late only what no newer commit has overtaken: old steps are many there.
        for path in folders:
            if self.root.is_remote and self._is_committed(path):
                break
            try:
                commit_late(path, patience=max(until - time.monotonic(), 0.0))
            except (HoldfastError, OSError) as error:
                log.warning("%s cannot be looked at: %s", path, error)

    def metric(self, path: Place) -> float | None:
        """The metric that a step was saved with; None if it was saved without. Raises StorageError."""
        return self.metrics.of(path)


def best_step(tiers: Iterable[Steps], said: Mode | None) -> int | None:
    """The number of the best step that counts, of all ``tiers``; None if none has a metric. Raises StorageError."""
    rated: dict[int, float | None] = {}
    mode: Mode = "min"
    for tier in tiers:
        current = tier.current()
        mode = tier.metrics.mode(said, current) if current else mode
        rated |= {step: tier.metric(path) for step, path in current.items()}
    return best_of(rated, mode)


def refuse_uncommitted(path: Place) -> None:
    """Raise NotACheckpoint if the folder of a step has data and no manifest: its files may be all that is left."""
    if any(datafile.save_of(file) is not None for file in path.files_below()):
        raise NotACheckpoint(
            f"{path} holds data but no manifest.json: a save that never committed, or its manifest was deleted. "
            f"`holdfast doctor {path}` says which; `holdfast rescue {path} --like STEP` brings a whole one back, with "
            "another step of the run as STEP"
        )


def _pattern_of(name: str) -> re.Pattern[str]:
    parts = list(string.Formatter().parse(name))
    if [field for _, field, _, _ in parts if field is not None] != ["step"]:
        raise ValueError(f"name={name!r} must hold {{step}} once, as in 'step-{{step:09d}}'")
    if "/" in name:
        raise ValueError(f"name={name!r} must be one folder name")
    return re.compile("".join(re.escape(text) + (r"(?P<step>\d+)" if field else "") for text, field, _, _ in parts))
