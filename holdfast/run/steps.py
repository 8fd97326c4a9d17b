"""The steps of a run on disk: which are there, which is the newest whole one, what may go.

The manager owns one for its root. Never trusts a name: only a committed manifest counts.

Steps may share files: an incremental save cites those of older steps. Why nothing goes that somebody needs:

- What a committed step cites is read from its manifest before anything is deleted, and spared (`Citations`).
- A save under way has no manifest yet. It cites what its base names, and nothing else: files of the base itself, and
  files that the base cites, from where they lie. The base was committed when it was chosen, and is held (`hold`) until
  the save has ended: a held step is neither deleted nor loses a section. So whatever the save will cite is named by a
  committed step. If that base was itself under way when a sweep looked around, it has its citations from *its* base,
  and so on, down to one that was committed by then, and seen.
- `hold` and the choice of what goes exclude each other (`_holding`): a step is either held or on its way out.
"""

from __future__ import annotations

import math
import re
import string
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import msgspec

from holdfast.checkpoint import Checkpoint, read_manifest
from holdfast.commit.citations import Citations, Cited, root_of
from holdfast.commit.folder import delete_checkpoints, may_hold_leavings, sweep_beside, sweep_dead
from holdfast.commit.parts import commit_late
from holdfast.commit.sections import dropped_of
from holdfast.errors import Damaged, HoldfastError, Mismatch, NotACheckpoint, StorageError, Unsupported, Untrusted
from holdfast.events import log
from holdfast.ondisk import manifest
from holdfast.ondisk.cited import is_cited, origin_of, sibling_of
from holdfast.ondisk.manifest import NOTES, Manifest
from holdfast.policies.signing.keys import Signer
from holdfast.repair.drop import Dropped, drop_from
from holdfast.run.keep import Keep, Kept
from holdfast.storage import storage
from holdfast.storage.place import LIVING, Place
from holdfast.storage.store_place import StorePlace

FEW = 16
"""Folders of a store that are looked into one by one."""


class _Notes(msgspec.Struct):
    metric: float | None = None


HEAD = 512
"""Bytes of a manifest that tell its run and its time."""

_MADE = re.compile(rb'"run":"(?P<run>[0-9a-f]{1,64})",.{0,64}?"created":"(?P<created>[^"]{1,64})"')


class Made(NamedTuple):
    """Who made a step, and when (RFC 3339, in UTC)."""

    run: str
    created: str


class Steps:
    """The folders below ``root`` that ``name`` makes of step numbers. Raises ValueError if it makes none.

    ``broken`` are names of steps that were committed once and found damaged, ``passed`` of those that a restore passed
    over for an older one, since they have lost sections. Both stand in the way of steps that training makes again.
    ``sign`` gives what signs steps anew that lose sections.
    """

    def __init__(self, root: Place, name: str, *, sign: Callable[[], Signer] | None = None) -> None:
        self.root, self._name, self._pattern = root, name, _pattern_of(name)
        self.broken: set[str] = set()
        self.passed: set[str] = set()
        self._sign = sign
        # Names of steps that were seen to be committed or were swept, and their metrics: each look into a store costs.
        self._known: set[str] = set()
        self._swept: dict[str, float] = {}  # each with the moment from which on it is worth another look
        self._metrics: dict[str, float | None] = {}
        self._sweeping = threading.Lock()
        self._citations = Citations(root)
        self._others: list[str] = []  # folders that are called otherwise; if they are checkpoints, they may cite steps
        self._holding = threading.Lock()
        self._held: Counter[str] = Counter()
        self._leaving: frozenset[str] = frozenset()  # names of steps that are being deleted or lose sections
        self._warned = False
        self._thin: set[str] = set()  # names of steps that have lost what they are to lose

    def path(self, step: int) -> Place:
        """Where a step lies, or will."""
        return self.root / self._name.format(step=step)

    def folders(self) -> list[Place]:
        """All folders that are called like a step."""
        found = self.root.folder_names()
        self._others = [name for name in found if not self._pattern.fullmatch(name) and name != storage.JOURNAL]
        return [self.root / name for name in found if self._pattern.fullmatch(name)]

    def committed(self) -> dict[int, Place]:
        """The committed steps, oldest first."""
        folders = {path.name: path for path in self.folders()}
        # On disk looking costs nothing. Several threads may look at once.
        known = self._known & set(folders) if isinstance(self.root, StorePlace) else set()
        known |= self._find_manifests([name for name in folders if name not in known])
        self._known = known
        return dict(sorted((self.step_of(name), folders[name]) for name in known))

    def step_of(self, name: str) -> int:
        match = self._pattern.fullmatch(name)
        return int(match["step"]) if match else -1

    def _find_manifests(self, folders: list[str]) -> set[str]:
        """Which of these folders hold a manifest. In a store, many are looked for in one listing."""
        if isinstance(self.root, StorePlace) and len(folders) > FEW:
            found = self.root.files_below()
            named = {path.partition("/")[0] for path in found if path.endswith(f"/{manifest.FILE_NAME}")}
            return named & set(folders)
        return {name for name in folders if (self.root / name / manifest.FILE_NAME).is_file()}

    def made_by(self, path: Place) -> Made | None:
        """Which run made a committed step, and when, from the first bytes of its manifest; None if that is not told.

        Raises StorageError: what cannot be read now is not said to be of another run.
        """
        try:
            head, _ = (path / manifest.FILE_NAME).read_start(HEAD)
        except FileNotFoundError:  # deleted meanwhile
            return None
        found = _MADE.search(head)
        return None if found is None else Made(found["run"].decode(), found["created"].decode())

    def refuse_another_run(
        self, chosen: Place, refused: Container[str] = (), *, among: Iterable[Place] | None = None
    ) -> None:
        """Raise Mismatch if a step of another run was saved after ``chosen``, although it is called earlier.

        Then it is not clear which run is to go on: somebody began afresh in the folder of an older run, say.
        ``among`` these, by default all committed steps.
        """
        others = {
            path.name: path
            for path in (self.committed().values() if among is None else among)
            if path != chosen and path.name not in refused and path.name not in self.broken
        }

        def look(path: Place) -> Made | None:
            try:
                return self.made_by(path)
            except StorageError as error:  # a step that nobody asked for keeps no other from being loaded
                log.warning("whose run %s is of cannot be told: %s", path, error)
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

    def newest(
        self, refused: Container[str] = (), *, complete: bool = False, run: str | None = None
    ) -> Place | None:  # fmt: skip
        """The newest whole step that was not refused; why one is passed over is logged. Raises StorageError.

        ``complete``: rather an older one than one that has lost sections, if there is one. ``run``: of this run alone.
        """
        partial: list[Place] = []
        # From the newest name on: in a store the first whole one ends the search, however many steps there are.
        for path in sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True):
            if path.name in refused or not (path / manifest.FILE_NAME).is_file():
                continue
            made = self.made_by(path) if run is not None else None
            if run is not None and (made is None or made.run != run):
                log.info("%s is passed over: it is not of run %s", path, run)
                continue
            lost: list[str] = []
            fault = fault_of(path, lost)
            if fault is not None and isinstance(path, StorePlace):
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

    def refuse_a_checkpoint(self) -> None:
        """Raise NotACheckpoint if the root is a checkpoint, or a folder of one: who finds no step there begins afresh.

        And then saves into it.
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

    def commit_late(self, patience: float) -> None:
        """Commit the saves whose ranks had all finished; waits so many seconds for writers that are still at it."""
        until = time.monotonic() + patience
        folders = sorted(self.folders(), key=lambda path: self.step_of(path.name), reverse=True)
        # A manager in a store commits late only what no newer commit has overtaken: old steps are many there.
        for path in folders:
            if isinstance(self.root, StorePlace) and (path / manifest.FILE_NAME).is_file():
                break
            try:
                commit_late(path, patience=max(until - time.monotonic(), 0.0))
            except (HoldfastError, OSError) as error:
                log.warning("%s cannot be looked at: %s", path, error)

    def metric(self, path: Place) -> float | None:
        """The metric that a step was saved with; None if it was saved without."""
        if path.name not in self._metrics or not isinstance(path, StorePlace):
            self._metrics[path.name] = metric_of(path)
        return self._metrics[path.name]

    # What saves under way need

    def hold(self, path: Place) -> bool:
        """Let a step be the base of a save that begins: it stays as it is until `free`. False if it is on its way out.

        Never waits for a sweep.
        """
        with self._holding:
            if path.name in self._leaving:
                return False
            self._held[path.name] += 1
            return True

    def free(self, path: Place) -> None:
        """A save that had this step as its base has ended, and all that sweeps here knows what it cites."""
        with self._holding:
            self._held[path.name] -= 1
            self._held += Counter()  # without those that nobody holds

    @contextmanager
    def _leave(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those of ``names`` that nobody holds; nobody will until the block ends."""
        with self._holding:
            going = [name for name in names if name not in self._held]
            self._leaving = frozenset(going)
        try:
            yield going
        finally:
            self._leaving = frozenset()

    def renewed(self, step: int) -> None:
        """There is a new save of a step: what is remembered of an older one of that name no longer holds."""
        self._citations.forget([self.path(step).name])
        self._thin.discard(self.path(step).name)
        self.passed.discard(self.path(step).name)

    # What goes

    def sweep(self, keep: Keep, just_saved: int | None, spare: Collection[Place]) -> None:
        """Delete committed steps, and sections of them, that no rule keeps (after a save), and what dead saves left.

        Not in the folders to ``spare``, where saves are under way. Failures cost space alone.
        """
        with self._gently():
            if just_saved is not None:
                self.renewed(just_saved)
                committed = self.committed()
                kept = keep.verdict(self._rated(keep, committed)).and_whole([just_saved])
                self._retire(committed, kept, max(committed, default=0), spare)
            self._clean(spare)

    def kept(self, keep: Keep) -> Kept | None:
        """What of the committed steps a rule keeps; None if that cannot be told."""
        found = None
        with self._gently():
            found = keep.verdict(self._rated(keep, self.committed()))
        return found

    def retire(self, kept: Kept, upto: int) -> None:
        """Delete the committed steps up to and with ``upto`` that are not ``kept``, and what the others are to lose.

        Failures cost space alone.
        """
        with self._gently():
            self._retire(self.committed(), kept, upto, ())

    def prune(self, kept: Kept, among: Container[int]) -> None:
        """`retire` of the steps ``among`` these, for somebody who has to know that it was done.

        A step that is committed meanwhile is not one of them: no rule was asked of it.
        Raises StorageError, Unsupported.
        """
        with self._sweeping:
            committed = {step: path for step, path in self.committed().items() if step in among}
            self._retire(committed, kept, max(committed, default=0), ())

    def clean(self, spare: Container[Place]) -> None:
        """Delete what dead saves left, but not in the folders to ``spare``. Failures cost space alone."""
        with self._gently():
            self._clean(spare)

    def _rated(self, keep: Keep, committed: dict[int, Place]) -> dict[int, float | None]:
        rated = keep.best and len(committed) > keep.last
        metrics = {step: self.metric(path) for step, path in committed.items()} if rated else {}
        return {step: metrics.get(step) for step in committed}

    def _retire(self, committed: dict[int, Place], kept: Kept, upto: int, spare: Collection[Place]) -> None:
        steps = {step: path.name for step, path in committed.items() if step <= upto}
        with self._leave(name for step, name in steps.items() if step not in kept.steps) as going:
            if going:
                cited, loose = self._cited(but=going), self._citations.by(going)
                self._known = self._known - set(going)
                self._look_again(*going, *loose)  # if this fails in its middle
                delete_checkpoints(self.root, going, cited, loose, spare)
                self._citations.forget(going)
        for step, name in steps.items():
            if step in kept.steps and step not in kept.whole and name not in self._thin:
                with self._leave([name]) as losing:
                    if losing and not (self.root / name).is_symlink():
                        self._lose(self.root / name, kept.loses)

    def _cited(self, but: Collection[str] = ()) -> Cited:
        """What all checkpoints of the root cite, those of these names left out.

        Looked for now: a save may just have been committed, and its base be held no more.
        """
        names = [path.name for path in self.committed().values() if path.name not in but]
        if isinstance(self.root, StorePlace):
            self._citations.forget(self._others)  # nobody tells when they change
        return self._citations.by([*names, *self._others])

    def _lose(self, path: Place, sections: str | tuple[str, ...]) -> None:
        try:
            key = self._sign() if self._sign is not None else None
            done = drop_from(path, sections, cited=self._cited(but=[path.name]), sign=key)
            if not isinstance(done, Dropped) and not self._warned:
                self._warned = True
                log.warning(
                    "%s keeps all it has: no section fits Keep(optimizer=%r); it has %s", path, sections,
                    ", ".join(done) or "none",
                )  # fmt: skip
        except (Damaged, NotACheckpoint, Unsupported, Untrusted, ValueError) as error:
            log.warning("%s keeps all it has: %s", path, error)
        finally:
            self._citations.forget([path.name])
            self._look_again(path.name)
        self._thin.add(path.name)

    def _look_again(self, *names: str) -> None:
        for name in names:
            self._swept.pop(name, None)

    def _clean(self, spare: Container[Place]) -> None:
        now = time.monotonic()
        found = self.folders()
        folders = [path for path in found if not isinstance(path, StorePlace) or now >= self._swept.get(path.name, now)]
        littered = self._littered(folders)
        cited = cache(self._cited)
        for path in folders:
            if path not in spare:
                done = path.name not in littered
                if not done:
                    done = _sweep_folder(path, lambda folder: cited().get(folder.name, set()))
                self._swept[path.name] = math.inf if done else now + LIVING
        self._swept = {path.name: self._swept[path.name] for path in found if path.name in self._swept}

    def _littered(self, folders: list[Place]) -> set[str]:
        """Names of those folders that may hold what dead saves left. In a store, many are looked at in one listing."""
        if not isinstance(self.root, StorePlace) or len(folders) <= FEW:
            return {path.name for path in folders}
        files: dict[str, list[str]] = {path.name: [] for path in folders}
        for found in self.root.files_below():
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
        except (StorageError, OSError, Unsupported) as error:
            log.warning("sweeping %s failed: %s", self.root, error)


def note_of(metric: float | None) -> bytes:
    """What is attached to a step, for `Steps.sweep` to find its metric."""
    return msgspec.json.encode(_Notes(None if metric is None else float(metric)))


def _sweep_folder(path: Place, cited: Callable[[Place], Collection[str]]) -> bool:
    """Whether nothing was left for later: what a living save may still need is."""
    try:
        record = read_manifest(path)
    except NotACheckpoint:
        return sweep_dead(path, cited)
    except (Damaged, Unsupported) as error:
        log.debug("not swept: %s", error)
        return True
    return sweep_beside(path, record, cited)


def _pattern_of(name: str) -> re.Pattern[str]:
    parts = list(string.Formatter().parse(name))
    if [field for _, field, _, _ in parts if field is not None] != ["step"]:
        raise ValueError(f"name={name!r} must hold {{step}} once, as in 'step-{{step:09d}}'")
    if "/" in name:
        raise ValueError(f"name={name!r} must be one folder name")
    return re.compile("".join(re.escape(text) + (r"(?P<step>\d+)" if field else "") for text, field, _, _ in parts))


def fault_of(path: Place, lost: list[str] | None = None) -> str | None:
    """Why a committed checkpoint is not whole, by its manifest and its files' sizes; None if it is.

    ``lost`` takes the sections that it has lost since it was saved, which is no fault. Raises StorageError if a store
    does not tell: that says nothing of the checkpoint, and a run must not go on from an older one for it.
    """
    try:
        record = read_manifest(path)
        if lost is not None:
            lost[:] = dropped_of(record)
        return next(iter(lacking_files(path, record).values()), None)
    except (Damaged, NotACheckpoint, Unsupported) as error:
        return str(error)
    except (HoldfastError, OSError) as error:
        if isinstance(path, StorePlace):
            raise
        return str(error)


def lacking_files(folder: Place, record: Manifest) -> dict[int, str]:
    """Numbers of the data files that a checkpoint does not have as its manifest says, each with what is wrong.

    In a store that is one listing, and one more for each folder that it cites. Raises StorageError.
    """
    files = record.data_files
    places = {sibling_of(file.path)[0] if is_cited(file.path) else "" for file in files}
    folders = {name: root_of(folder)[0] / name if name else folder for name in places}
    sizes = {name: found.sizes_below() for name, found in folders.items()}
    found: dict[int, str] = {}
    for index, file in enumerate(files):
        name, path = sibling_of(file.path) if is_cited(file.path) else ("", file.path)
        size, own = sizes[name].get(path), folders[name] / path
        if size is None:
            found[index] = f"{own} is missing{origin_of(file, folder.name)}"
        elif size != file.bytes:
            found[index] = f"{own} has {size} bytes instead of {file.bytes}{origin_of(file, folder.name)}"
    return found


def metric_of(path: Place) -> float | None:
    """The metric that a manager noted with a step; None if it noted none, or it cannot be read."""
    try:
        return msgspec.json.decode(Checkpoint(path).attachment(NOTES), type=_Notes).metric
    except (HoldfastError, KeyError, msgspec.MsgspecError):
        return None
