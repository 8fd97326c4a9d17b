"""What goes of the steps of a run: whole steps and sections that no rule keeps, and what dead saves left behind.

The manager owns one for each of its roots. Never deletes what a committed step, or a save under way, may need.

Steps may share files: an incremental save reuses those of older steps. Why no file goes that is still needed:

- What a committed step cites is read from its manifest before anything is deleted, and spared (`Reuses`).
- A save under way has no manifest yet. It cites what its base names, and nothing else: files of the base itself, and
  files that the base cites, from where they lie. The base was committed when it was chosen, and is held (`hold`) until
  the save has ended: a held step is neither deleted nor loses a section. So whatever the save will cite is named by a
  committed step. If that base was itself under way when a sweep looked around, it has its citations from *its* base,
  and so on, down to one that was committed by then, and seen.
- `hold` and the choice of what goes exclude each other (`_holding`): a step is either held or on its way out.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from holdfast.commit.folder import delete_checkpoints, may_hold_orphans, sweep_beside, sweep_dead
from holdfast.commit.reused import ReusedPaths, Reuses
from holdfast.errors import Damaged, NotACheckpoint, StorageError, Unsupported, Untrusted
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.policies.signing.keys import Signer
from holdfast.repair.drop import Dropped, drop_from
from holdfast.run.keep import Keep, Kept
from holdfast.run.lost import Lost, data_files_in, lost_step
from holdfast.run.steps import FEW, Steps
from holdfast.storage.place import LIVING, Place


class KeptSteps(Steps):
    """Steps of which some are kept by rules and the others deleted. ``sign`` signs steps again that lose sections."""

    def __init__(self, root: Place, name: str, *, sign: Callable[[], Signer] | None = None) -> None:
        super().__init__(root, name)
        self._sign = sign
        self._sweeping = threading.Lock()
        self._swept: dict[str, float] = {}  # names of steps, and the moment from which on each is worth another look
        self._citations = Reuses(root)
        self._holding = threading.Lock()
        self._held: Counter[str] = Counter()
        self._going: frozenset[str] = frozenset()  # names of steps that are being deleted or lose sections
        self._dropped: set[str] = set()  # names of steps that have lost what they are to lose
        self._left_alone: dict[str, Lost] = {}  # steps without a manifest that are kept, by their names
        self._warned = False

    # What saves under way need

    def hold(self, path: Place) -> bool:
        """Let a step be the base of a save that begins: it stays as it is until `free`. False if it is on its way out.

        Never waits for a sweep.
        """
        with self._holding:
            if path.name in self._going:
                return False
            self._held[path.name] += 1
            return True

    def free(self, path: Place) -> None:
        """A save that had this step as its base has ended, and all that sweeps here knows what it cites."""
        with self._holding:
            self._held[path.name] -= 1
            self._held += Counter()  # drops the entries that are 0

    @contextmanager
    def _leave(self, names: Iterable[str]) -> Iterator[list[str]]:
        """Those of ``names`` that no save holds; none can hold them until the block ends."""
        with self._holding:
            going = [name for name in names if name not in self._held]
            self._going = frozenset(going)
        try:
            yield going
        finally:
            self._going = frozenset()

    def renewed(self, step: int) -> None:
        """There is a new save of a step: what is remembered of an older one of that name no longer holds."""
        self._citations.forget([self.path(step).name])
        self._dropped.discard(self.path(step).name)
        self._left_alone.pop(self.path(step).name, None)
        self.passed.discard(self.path(step).name)
        self._counting.add(self.path(step).name)

    # What goes

    def sweep(self, keep: Keep, just_saved: int | None, spare: Collection[Place]) -> None:
        """Delete committed steps, and sections of them, that no rule keeps (after a save), and what dead saves left.

        Not in the folders to ``spare``, where saves are under way. On disk a step that has lost its manifest, and that
        the rules keep, stays: it can be rescued. Failures cost space alone.
        """
        with self._gently():
            if just_saved is not None:
                self.renewed(just_saved)
                committed = self.committed()
                kept = self._verdict(keep, committed).and_whole([just_saved])
                self._retire(committed, kept, max(committed, default=0), spare)
            self._clean(spare, keep)

    def kept(self, keep: Keep) -> Kept | None:
        """What of the committed steps a rule keeps; None if that is not known."""
        kept = None
        with self._gently():
            kept = self._verdict(keep, self.committed())
        return kept

    def retire(self, kept: Kept, upto: int) -> None:
        """Delete the committed steps up to and with ``upto`` that are not ``kept``, and what the others are to lose.

        Failures cost space alone.
        """
        with self._gently():
            self._retire(self.committed(), kept, upto, ())

    def prune(self, kept: Kept, among: Container[int]) -> None:
        """`retire` of the steps ``among`` these, for a caller that has to know that it was done.

        A step that is committed meanwhile is not one of them: no rule was asked of it.
        Raises StorageError, Unsupported.
        """
        with self._sweeping:
            committed = {step: path for step, path in self.committed().items() if step in among}
            self._retire(committed, kept, max(committed, default=0), ())

    def clean(self, spare: Container[Place]) -> None:
        """Delete what dead saves left, but not in the folders to ``spare``. Failures cost space alone."""
        with self._gently():
            self._clean(spare, None)

    def _verdict(self, keep: Keep, committed: dict[int, Place]) -> Kept:
        """What the rules keep of the steps that count. The others stay until a newer step counts."""
        behind = self.behind(committed)
        counted = {step: path for step, path in committed.items() if step not in behind}
        newest = max(counted, default=-1)
        if len(counted) > keep.last:
            keep = self.judged(keep, counted)
        return keep.verdict(self._rated(keep, counted)).and_whole(step for step in behind if step > newest)

    def judged(self, keep: Keep, committed: Mapping[int, Place]) -> Keep:
        """The same rules, with the mode that the steps have recorded if they say none. Raises StorageError."""
        return replace(keep, mode=self.metrics.mode(keep.mode, committed)) if keep.best else keep

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
            if step in kept.steps and step not in kept.whole and name not in self._dropped:
                with self._leave([name]) as losing:
                    if losing and not (self.root / name).is_symlink():
                        self._lose(self.root / name, kept.loses)

    def _cited(self, but: Collection[str] = ()) -> ReusedPaths:
        """What all checkpoints of the root cite, those of these names left out.

        Looked for now: a save may just have been committed, and its base be held no more.
        """
        names = [path.name for path in self.committed().values() if path.name not in but]
        if self.root.is_remote:
            self._citations.forget(self._others)  # they may change at any time
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
        self._dropped.add(path.name)

    def _look_again(self, *names: str) -> None:
        for name in names:
            self._swept.pop(name, None)

    def _clean(self, spare: Container[Place], keep: Keep | None) -> None:
        now = time.monotonic()
        everything = self.folders()
        folders = [path for path in everything if not path.is_remote or now >= self._swept.get(path.name, now)]
        littered = self._littered(folders)
        cited = cache(self._cited)
        for path in folders:
            if path not in spare:
                done = path.name not in littered
                if not done:
                    done = self._sweep_folder(path, lambda folder: cited().get(folder.name, set()), keep)
                self._swept[path.name] = math.inf if done else now + LIVING
        self._swept = {path.name: self._swept[path.name] for path in everything if path.name in self._swept}

    def _sweep_folder(self, path: Place, cited: Callable[[Place], Collection[str]], keep: Keep | None) -> bool:
        """Whether nothing was left for later: what a living save may still need is."""
        try:
            record = read_manifest(path)
        except NotACheckpoint:
            return sweep_dead(path, cited, lambda going: self._is_left_alone(path, going, keep))
        except (Damaged, Unsupported) as error:
            log.debug("not swept: %s", error)
            return True
        return sweep_beside(path, record, cited)

    def _is_left_alone(self, path: Place, going: Collection[str], keep: Keep | None) -> bool:
        """Whether a folder without a manifest is a step that was committed once and that the rules still keep.

        The journal knows what was committed; without one nothing is left alone. What the rules do not keep goes, and so
        does a step that was being deleted. In a store deleting the manifest is how steps are deleted by hand: there the
        data goes too, but not in silence.
        """
        data = data_files_in(going)
        if not data:
            return False
        known = self._left_alone.pop(path.name, None)
        lost = known or lost_step(self.root, path, self.step_of(path.name))
        if lost is None:
            return False
        if keep is not None and not self._keeps(keep, lost):
            return False
        if keep is None or not lost.recorded or path.is_remote:
            log.warning("%s holds %d data files and no manifest.json: they are deleted", path, len(data))
            return False
        self._left_alone[path.name] = lost
        if known is None:
            log.warning(
                "%s was committed and has lost its manifest.json: it is left alone. `holdfast rescue %s --like STEP`, "
                "with another step of the run, brings it back; `holdfast prune %s --orphans --yes` deletes it",
                path, path, path,
            )  # fmt: skip
        return True

    def _keeps(self, keep: Keep, lost: Lost) -> bool:
        """Whether the rules would keep a step if it were still committed."""
        committed = self.committed()
        rated = {**self._rated(keep, committed), lost.step: lost.metric}
        return lost.step in self.judged(keep, committed).kept(rated)

    def _littered(self, folders: list[Place]) -> set[str]:
        """Names of those folders that may hold what dead saves left. In a store, many are looked at in one listing."""
        if not self.root.is_remote or len(folders) <= FEW:
            return {path.name for path in folders}
        files: dict[str, list[str]] = {path.name: [] for path in folders}
        for file in self.root.files_below():
            name, _, path = file.partition("/")
            if name in files:
                files[name].append(path)
        return {name for name, paths in files.items() if may_hold_orphans(paths)}

    @contextmanager
    def _gently(self) -> Iterator[None]:
        """Sweep, one thread at a time; a failure costs space alone."""
        try:
            with self._sweeping:
                yield
        except (Damaged, StorageError, OSError, Unsupported) as error:
            log.warning("sweeping %s failed: %s", self.root, error)
