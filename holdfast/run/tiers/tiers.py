"""The two homes of a run's steps: a fast folder, in which each save is committed, and the store that they go to.

The manager owns one if it has ``fast=``. Never lets training wait for the store, and never mixes two saves of a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import Any

from holdfast.checkpoint import Checkpoint
from holdfast.errors import HoldfastError, StorageError
from holdfast.events import log
from holdfast.load import Loaded
from holdfast.ondisk import manifest
from holdfast.policies.signing.keys import signing
from holdfast.ranks.ranks import Ranks
from holdfast.run import going_back
from holdfast.run.going_back import WentBack
from holdfast.run.keep import Kept
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.retention import KeptSteps
from holdfast.run.steps import Steps, best_step
from holdfast.run.tiers.backlog import Backlog
from holdfast.run.tiers.home import Durability
from holdfast.run.tiers.nodes import News, bring_manifest, bytes_of, find_nodes
from holdfast.run.tiers.survey import Survey
from holdfast.run.tiers.uploader import Uploader
from holdfast.run.whole import fault_of
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

HEARSAY = 60.0
"""Seconds to wait for what the first rank tells after a commit."""

ASK = 30.0
"""Seconds to wait for the store's answer to a small question."""


class Tiers:
    """A run's steps in the folder ``fast`` and at ``root``. Made by all ranks at once; meets them.

    Raises ValueError for a ``fast`` that is no local folder of its own, Mismatch if it belongs to another root.
    """

    def __init__(self, root: Place, options: ManagerOptions, ranks: Ranks, key: str) -> None:
        fast, name, deadline = options.fast, options.name, options.deadline
        folder = location(fast or "")
        if folder.is_remote:
            raise ValueError(f"fast={str(fast)!r} is to be a folder on local disk")
        if not root.is_remote and (folder == root or folder in root.parents or root in folder.parents):
            raise ValueError(f"fast={str(fast)!r} and the root {root} lie in each other: give each its own folder")
        self._root, self._keep_fast, self._deadline = root, options.keep_fast, deadline
        self._mode = options.keep.mode
        sign = signing(options.sign)
        self.fast = KeptSteps(folder, name, sign=sign)
        self.store = KeptSteps(with_deadline(root, deadline), name, sign=sign)
        self._asked = Steps(with_deadline(root, min(ASK, deadline)), name)
        with ranks.call(f"tiers of {root}", deadline=deadline) as call:
            self._nodes = find_nodes(call, folder, str(root), key)
        self._newest_word = (-1, Kept(frozenset(), frozenset()))
        self._hearing = threading.Lock()
        self._survey = Survey(self.fast, self.store, self._nodes, options)
        self._backlog = Backlog(self.fast, self.store, upload=options.upload, keep=options.keep)
        self._uploader = Uploader(self.fast, self.store, self._backlog, self._nodes, options)

    # After a save

    def label(self, step: int) -> str | None:
        """The folder may be called another way on each node."""
        return f"save step {step} of {self._root}"

    def committed(self, number: int, step: int, writing_to: set[Place]) -> None:
        """Spread the news of a save that has committed, sweep the fast tier, let the uploader know.

        See `Home.committed`.
        """
        nodes, path = self._nodes, self.fast.path(step)
        self.fast.broken.discard(path.name)
        self.fast.renewed(step)
        try:
            if nodes.first:
                kept = self.fast.kept(self._keep_fast)
                if kept is not None:
                    # What is to be uploaded is uploaded whole.
                    held = self._backlog.held(self.fast.committed())
                    kept = kept.and_whole({step, self._uploader.current or step} | held)
                if nodes.several:
                    nodes.tell(f"save/{number}", News(bytes_of(path), kept))
                if kept is not None:
                    self.fast.retire(kept, step)
                if not nodes.several:  # else a folder without a manifest may still receive it
                    self.fast.clean(writing_to)
            elif nodes.leads:
                news = nodes.hear(f"save/{number}", HEARSAY, len(nodes.followers))
                if news is None:
                    log.warning("%s has no manifest yet: the first rank has not sent it", path)
                elif news.manifest:
                    bring_manifest(path, news.manifest)
                if news is not None and news.kept is not None:
                    # Saves may overlap, and be heard of in any order: the newest word counts.
                    with self._hearing:
                        newest, kept_then = self._newest_word = max(
                            (step, news.kept), self._newest_word, key=lambda word: word[0]
                        )
                    self.fast.retire(kept_then, newest)
            elif nodes.leader:
                self._await_manifest(step)
        except (HoldfastError, OSError) as error:  # the save is committed all the same
            log.warning("%s is committed, but not all nodes know: %s", path, error)
        self._start()
        self._uploader.wake(step)
        writing_to.discard(path)

    def _await_manifest(self, step: int) -> None:
        """Until the leader of this node has brought the manifest of a step; saves that overlap may have swept it."""
        until = time.monotonic() + HEARSAY
        while time.monotonic() < until and max(self.fast.committed(), default=-1) < step:
            time.sleep(0.01)

    def _start(self) -> None:
        if self._nodes.leads:
            self._uploader.start()

    def restore(
        self, state: dict[str, Any], options: RestoreOptions, patience: float, spare: Collection[Place]
    ) -> Loaded | None:  # fmt: skip
        """`Survey.restore`; uploads begin after it, as they would take disk and network from it."""
        if isinstance(options.step, int):  # what lacks a manifest may be what is asked for
            spare = {*spare, self.fast.path(options.step)}
        try:
            return self._survey.restore(state, options, patience, spare)
        finally:
            self._start()

    def leave_behind(self, step: int) -> WentBack:
        """Note it in the store, if there are later steps in one of the tiers; see `Home.leave_behind`."""
        mark = WentBack(step, frozenset(self.fast.later_saves(step) | self.store.later_saves(step)))
        if mark.saves or self.store.mark is not None:
            going_back.write(self.store.root, mark)
        return mark

    def went_back(self, mark: WentBack) -> None:
        """See `Home.went_back`."""
        notes = self._nodes.leads and (mark.saves or self.fast.mark is not None)
        for steps in (self.fast, self.store, self._asked):
            steps.leave_behind(mark)
        self._backlog.forget()
        if notes:
            try:
                going_back.write(self.fast.root, mark)
            except StorageError as error:  # the store has it
                log.warning("%s", error)

    # What there is

    def best(self) -> Checkpoint | None:
        """The step with the best metric, of both tiers; the fast one's if both have it. Raises StorageError."""
        step = best_step((self._asked, self.fast), self._mode)
        if step is None:
            return None
        return Checkpoint((self.fast if step in self.fast.current() else self._asked).path(step))

    def newest_fast(self) -> Checkpoint | None:
        """The newest step of the fast tier, as far as this node can tell."""
        for path in reversed(list(self.fast.current().values())):
            if self._nodes.several or fault_of(path) is None:
                return Checkpoint(path, beside=self.store.root / path.name if self._nodes.several else None)
        return None

    def latest(self) -> Checkpoint | None:
        """The newest whole step of both tiers; of the fast one alone, with a warning, if the store does not answer."""
        fast = self.newest_fast()
        try:
            stored = self._asked.newest()
        except StorageError as error:
            log.warning("the newest step of the store is not known: %s", error)
            return fast
        if stored is None or (
            fast is not None and self.fast.step_of(fast.path.name) >= self.store.step_of(stored.name)
        ):
            return fast
        return Checkpoint(stored)

    def steps(self) -> list[int]:
        """The committed steps of both tiers. Raises StorageError."""
        return sorted({*self.fast.current(), *self._asked.current()})

    def durability(self, step: int) -> Durability:
        """Where a step is safe: one look at the disk, and one question to the store."""
        try:
            stored: bool | None = (self._asked.path(step) / manifest.FILE_NAME).is_file()
        except StorageError as error:
            log.debug("the store does not tell whether it has step %d: %s", step, error)
            stored = None
        shown = self._uploader.current if self._nodes.leads else self._nodes.shown()
        return Durability(step, (self.fast.path(step) / manifest.FILE_NAME).is_file(), stored, shown == step)

    def backlog(self) -> int | None:
        """How many steps of the fast tier are still to go to the store, as far as is known: a look at the disk."""
        try:
            return len(self._backlog.unsafe())
        except (HoldfastError, OSError) as error:
            log.debug("what is still to go to the store is not known: %s", error)
            return None

    def close(self, timeout: float | None) -> None:
        """Wait for uploads, no longer than ``timeout`` seconds, and say what is not in the store. Idempotent."""
        if not self._nodes.leads:
            return
        if self._nodes.several or self.fast.committed():
            self._start()
            self._uploader.close(timeout=timeout, patience=self._deadline)
        else:
            self._uploader.stop()  # it waits for a first step, and must not find one of the next manager
        unsafe = self._backlog.unsafe() if self._nodes.first else []
        if unsafe:
            log.warning(
                "not in %s yet: steps %s. They are in %s, and a manager with the same tiers uploads them",
                self.store.root, ", ".join(map(str, unsafe)), self.fast.root,
            )  # fmt: skip

    def leave(self) -> None:
        """Stop uploading without waiting; what was being sent is continued by the next start."""
        self._uploader.stop()
