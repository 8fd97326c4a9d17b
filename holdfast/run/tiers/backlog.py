"""What of the fast tier is to go to the store: found by comparing the two, remembered nowhere else.

The uploader asks it what is next, the tiers what has to stay. Never writes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, Unsupported
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.ondisk.manifest import Manifest
from holdfast.run.keep import Keep, is_due, next_upload
from holdfast.run.steps import Steps
from holdfast.storage.uploads import Upload


class _Brief(NamedTuple):
    """What is known of a manifest without keeping it."""

    save: str
    run: str
    created: str


def _brief(record: Manifest) -> _Brief:
    return _Brief(record.save, record.run, record.created)


class Backlog:
    """Steps of ``fast`` that are to be in ``store``, which keeps what ``keep`` says, by what ``upload`` says."""

    def __init__(self, fast: Steps, store: Steps, *, upload: Upload, keep: Keep) -> None:
        self._fast, self._store, self._upload, self._keep = fast, store, upload, keep
        self._stored: dict[int, _Brief | None] | None = None  # of each step in the store; None: not looked at yet
        self._given_up: dict[str, int] = {}  # saves that cannot be uploaded, and their steps
        self._was_due = True
        self.waiting = 0
        """Steps that the store lacked at the last look."""

    def next(self) -> int | None:
        """The step to upload now, by what both tiers hold. Raises StorageError."""
        stored = self.look()
        lacking = []
        for step, path in self._fast.committed().items():
            if path.name in self._fast.broken or self._fast.is_behind(step, path):
                continue
            try:
                ours = _brief(read_manifest(path))
            except (HoldfastError, OSError) as error:  # swept meanwhile, or broken; restoring says which
                log.debug("not uploaded: %s", error)
                continue
            if ours.save not in self._given_up and self._goes(step, ours, stored):
                lacking.append(step)
        self.waiting = len(lacking)
        there = [step for step in stored if step not in lacking]
        return next_upload(self._upload, lacking, there, self._keep, was_due=self._was_due)

    def look(self) -> dict[int, _Brief | None]:
        """The steps of the store, which is asked but once. Raises StorageError."""
        if self._stored is None:
            self._stored = {
                step: None for step, path in self._store.current().items() if path.name not in self._store.broken
            }
        return self._stored

    def _goes(self, step: int, ours: _Brief, stored: dict[int, _Brief | None]) -> bool:
        if step not in stored:
            return True
        theirs = stored[step]
        if theirs is None:
            try:
                theirs = _brief(read_manifest(self._store.path(step)))
            except NotACheckpoint:  # deleted meanwhile
                return True
            except (Damaged, Unsupported) as error:
                log.warning("%s cannot be read and is replaced: %s", self._store.path(step), error)
                return True
            stored[step] = theirs
        if theirs.save == ours.save:
            return False
        if theirs.run == ours.run and theirs.created < ours.created:
            return True  # the same step of the same run, made again
        self._given_up[ours.save] = step
        log.warning(
            "%s holds another save of this step (%s, of %s), and is not replaced", self._store.path(step), theirs.save,
            "the same run" if theirs.run == ours.run else "another run",
        )  # fmt: skip
        return False

    def done(self, step: int, record: Manifest) -> None:
        """A step is in the store."""
        self._store.broken.discard(self._store.path(step).name)
        self._stored = {**self.look(), step: _brief(record)}  # other threads may go through the old one
        self._was_due = not self._was_due

    def give_up(self, step: int, error: Exception) -> None:
        """A step cannot be uploaded, as long as it is the same save."""
        self._was_due = not self._was_due
        path = self._fast.path(step)
        try:
            self._given_up[read_manifest(path).save] = step
        except (HoldfastError, OSError):
            log.debug("step %d was swept before it was in the store", step)
            return
        log.warning("step %d of the fast tier cannot be brought to the store: %s", step, error)

    def forget(self) -> None:
        """Training went back: which steps of the store count is looked up again."""
        self._stored = None

    def made_again(self, step: int) -> None:
        """There is a new save of a step."""
        self._given_up = {save: of for save, of in self._given_up.items() if of != step}

    def replaces(self, step: int) -> bool:
        """Whether the store has another save of this step."""
        path = self._store.path(step)
        return step in self.look() or path.name in self._store.broken or self._store.is_behind(step, path)

    def held(self, steps: Iterable[int]) -> set[int]:
        """Those of ``steps`` that have to stay on the fast tier: due and not in the store."""
        stored, hopeless = self._stored or {}, set(self._given_up.values())
        due = {
            step for step in steps if step not in stored and is_due(self._upload, step, stored, self._keep)
        } - hopeless
        return {step for step in due if self._fast.path(step).name not in self._fast.broken}

    def unsafe(self) -> list[int]:
        """Steps of the fast tier that were to be in the store and are not, as far as is known."""
        committed, stored = self._fast.current(), self._stored or {}
        lacking = [step for step in committed if step not in stored]
        newest = {max(committed)} if self._upload.newest and committed and max(committed) in lacking else set()
        return sorted(newest | {step for step in lacking if is_due(self._upload, step, stored, self._keep)})
