"""What the tiers hold at a restart, on all nodes together, and what of it is restored.

The tiers of a manager own one. Never mixes two saves of a step, and never ignores the store because it is down.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from functools import partial
from typing import Any, Literal

import msgspec

from holdfast.checkpoint import Checkpoint
from holdfast.commit.sections import dropped_of
from holdfast.errors import Damaged, HoldfastError, NotACheckpoint, StorageError, Unsupported, Untrusted
from holdfast.events import log
from holdfast.formats.own import read_manifest
from holdfast.load import Loaded, load_opened
from holdfast.ondisk import datafile, manifest
from holdfast.ondisk.manifest import Manifest
from holdfast.policies.signing.keys import Keys
from holdfast.run.attempts import Attempts
from holdfast.run.options import ManagerOptions, RestoreOptions
from holdfast.run.retention import KeptSteps
from holdfast.run.steps import best_step, refuse_uncommitted
from holdfast.run.tiers.nodes import News, Nodes, bring_manifest, bytes_of
from holdfast.run.whole import lacking_files
from holdfast.storage.place import Place


class Choice(msgspec.Struct, array_like=True, frozen=True):
    """What to restore: the step of this ``name`` from one tier, or (with ``beside``) what it lacks from the other."""

    tier: str = ""
    name: str = ""
    beside: bool = False


class _Seen(msgspec.Struct, array_like=True):
    """What one leader has of a step: a manifest's save and time (empty without one), and saves it has files of."""

    name: str
    save: str
    created: str
    files: list[str]
    lost: bool = False  # sections, since it was saved


class _Sight(msgspec.Struct, array_like=True):
    """All that one leader has."""

    steps: list[_Seen]


class _FastStep(msgspec.Struct, array_like=True):
    """A step of the fast tier: the save that counts, who tells its manifest, and who has files of it and none."""

    name: str
    save: str
    created: str
    teller: int
    lacking: list[int]
    lost: bool = False


class _Candidate(msgspec.Struct):
    """A step that could be restored from the fast tier; ``missing``: files that are on no node."""

    step: _FastStep
    missing: set[int]


class Survey:
    """A look at the fast folders of all nodes and at the store. All ranks make the same calls."""

    def __init__(self, fast: KeptSteps, store: KeptSteps, nodes: Nodes, options: ManagerOptions) -> None:
        self.fast, self.store, self._nodes, self._deadline = fast, store, nodes, options.deadline
        self._mode = options.keep.mode
        self._ranks = nodes.ranks
        self._candidates: dict[int, _Candidate] = {}
        self._restores = 0

    def restore(
        self, state: dict[str, Any], options: RestoreOptions, patience: float, spare: Container[Place]
    ) -> Loaded | None:  # fmt: skip
        """Load the newest step that is whole on the fast tier or in the store; None if there is none.

        All ranks call it. Waits up to ``patience`` seconds for writers that live on.
        """
        refused: set[tuple[str, str]] = set()
        untrusted: Untrusted | None = None
        self._gather(patience, spare)
        try:
            with Attempts() as attempts:
                while True:
                    with self._ranks.call(f"restore {self.store.root}", deadline=self._deadline) as call:
                        choose = partial(self._choose, refused, options)
                        choice = call.exchange("choose", options.check, lambda notes: choose(), Choice)
                    if not choice.name:
                        if untrusted is not None:
                            raise untrusted
                        if refused:
                            names = "; ".join(f"{name} ({tier})" for tier, name in sorted(refused))
                            raise NotACheckpoint(f"no checkpoint of {self.store.root} can be restored: {names}")
                        return None
                    try:
                        opening, label = partial(self._open, choice, options.require), f"restore {choice.name}"
                        return load_opened(
                            opening, state, f"{label} of {self.store.root}", self._ranks, options.of_load,
                            deadline=self._deadline,
                        )  # fmt: skip
                    except (Damaged, NotACheckpoint, Untrusted) as error:
                        if options.step is not None:
                            raise
                        untrusted = error if isinstance(error, Untrusted) else untrusted
                        why = attempts.failed(error)
                        log.warning("%s (%s) cannot be restored, trying another: %s", choice.name, choice.tier, why)
                        refused.add((choice.tier, choice.name))
                        # It gives way to its successor, and is not uploaded.
                        (self.fast if choice.tier == "fast" else self.store).broken.add(choice.name)
        finally:
            self._candidates = {}

    def _gather(self, patience: float, spare: Container[Place]) -> None:
        """See what the fast folders of all nodes hold, and sweep them.

        Saves that all ranks of a node had finished are committed first; manifests that a node lacks are sent to it.
        """
        self._restores += 1
        with self._ranks.call(f"look at the tiers of {self.store.root}", deadline=self._deadline) as call:
            look = partial(self._see, patience)
            held = call.exchange("look", look, _join, list[_FastStep])
            call.exchange("spread", lambda: self._spread(held, spare), partial(self._keep_in_mind, held), bool)

    def _see(self, patience: float) -> _Sight:
        if not self._nodes.leads:
            return _Sight([])
        self.fast.commit_late(patience)
        seen = []
        for path in self.fast.folders():
            save = created = ""
            lost = False
            try:
                record = read_manifest(path)
                save, created, lost = record.save, record.created, bool(dropped_of(record))
            except NotACheckpoint:
                pass  # another node may have its manifest
            except (Damaged, Unsupported) as error:
                log.warning("%s is passed over: %s", path, error)
                self.fast.broken.add(path.name)
            saves = {datafile.save_of(file) for file in path.files_below()} - {None}
            if save or saves:
                seen.append(_Seen(path.name, save, created, sorted(map(str, saves)), lost))
        return _Sight(seen)

    def _spread(self, held: list[_FastStep], spare: Container[Place]) -> list[str | None]:
        """Tell and take manifests; then what this node lacks of each step, None if that is all of it."""
        me, lacks = self._ranks.rank, []
        for step in held:
            if step.lacking and me == step.teller:
                self._nodes.tell(self._spreads(step), News(bytes_of(self.fast.root / step.name), None))
        for step in held:
            if me in step.lacking:
                news = self._nodes.hear(self._spreads(step), self._deadline, len(step.lacking))
                if news is not None and news.manifest:
                    bring_manifest(self.fast.root / step.name, news.manifest)
                    self.fast.broken.discard(step.name)
        if self._nodes.leads:
            self.fast.clean(spare)
            lacks = [self._lack(step) for step in held]
        return lacks

    def _spreads(self, step: _FastStep) -> str:
        return f"spread/{self._restores}/{step.name}"

    def _lack(self, step: _FastStep) -> str | None:
        path = self.fast.root / step.name
        try:
            record = read_manifest(path)
        except (NotACheckpoint, Damaged, Unsupported):
            return None
        return manifest.ranges(lacking_files(path, record)) if record.save == step.save else None

    def _keep_in_mind(self, held: list[_FastStep], notes: list[list[str | None]]) -> bool:
        """On the first rank: which steps could be restored from the fast tier."""
        self._candidates = {}
        for at, step in enumerate(held):
            lacks = [set(manifest.expand(lack)) for note in notes if note and (lack := note[at]) is not None]
            if lacks:
                self._candidates[self.fast.step_of(step.name)] = _Candidate(step, set.intersection(*lacks))
        return True

    def _choose(self, refused: set[tuple[str, str]], options: RestoreOptions) -> Choice:
        """On the first rank: the step that was asked for, or the newest whole one, rather of all its sections.

        Raises StorageError if the fast tier has none and the store does not answer.
        """
        try:
            names = {self.store.step_of(path.name) for path in self.store.folders()}
            silence = None
        except StorageError as error:
            names, silence = set(), error
        best, passed = None, set()
        mark = (self.store.mark if silence is None else None) or self.fast.mark
        if mark is not None:  # a node's disk may be new, or have missed the last one
            self.fast.leave_behind(mark)
            self.store.leave_behind(mark)
        steps = sorted({*self._candidates, *names}, reverse=True)
        for step in steps if options.step is None else [self._asked_for(options.step, steps)]:
            for choice, lost in self._choices(step, step in names):
                if (choice.tier, choice.name) in refused:
                    continue
                if options.step is not None:
                    return self._chosen(choice, silence)
                if self._is_behind(step, choice):
                    continue
                if options.complete and lost:
                    log.info("%s is passed over: it has lost sections since it was saved", self._folder(choice))
                    best = best or choice
                    passed.add(choice.name)
                    continue
                self.fast.passed |= passed - {choice.name}
                return self._chosen(choice, silence)
        if best is not None:
            return self._chosen(best, silence)
        if silence is not None:  # training must not begin again because the store is down
            raise silence
        if isinstance(options.step, int):
            for path in (self.store.path(options.step), self.fast.path(options.step)):
                if not (path / manifest.FILE_NAME).is_file():
                    refuse_uncommitted(path)
        if options.step is not None:
            raise NotACheckpoint(f"step {options.step} of {self.store.root} is whole in neither tier")
        self.store.refuse_a_checkpoint()
        if not refused:  # steps of the fast tier that went with their node are no reason: that may happen
            self.store.refuse_damaged()
        return Choice()

    def _asked_for(self, step: int | Literal["best"], steps: list[int]) -> int:
        if step != "best":
            if step not in steps:
                refuse_uncommitted(self.fast.path(step))
                there = ", ".join(map(str, reversed(steps))) or "none"
                raise NotACheckpoint(f"there is no step {step} of {self.store.root} in either tier; there are {there}")
            return step
        best = best_step((self.store, self.fast), self._mode)
        if best is None:
            raise NotACheckpoint(f"no step of {self.store.root} was saved with a metric: pass metric= to manager.step")
        return best

    def _is_behind(self, step: int, choice: Choice) -> bool:
        return (self.fast if choice.tier == "fast" else self.store).is_behind(step, self._folder(choice))

    def _chosen(self, choice: Choice, silence: StorageError | None) -> Choice:
        if silence is not None:
            log.warning("what is in the store is not known, it does not answer: %s", silence)
        log.info("restoring %s from %s", choice.name, self._folder(choice))
        return choice

    def _choices(self, step: int, in_store: bool) -> Iterator[tuple[Choice, bool]]:
        """Where a step can be restored from, the best first, and if it has lost sections; why it cannot is logged."""
        name = self.fast.path(step).name
        candidate = self._candidates.get(step)
        try:
            theirs = self._stored(name) if in_store else None
        except StorageError as error:
            if candidate is None or candidate.missing:
                raise  # an older step would be taken for the newest
            log.warning("%s is not looked at, the store does not answer: %s", self.store.root / name, error)
            theirs = None
        same = candidate is not None and theirs is not None and theirs.save == candidate.step.save
        choices = []
        if theirs is not None:
            choices.append((theirs.created, Choice("store", name), bool(dropped_of(theirs))))
        if candidate is not None and candidate.missing and not same:
            log.warning(
                "%s is passed over: %d of its files are on no node, and it is not in the store", self.fast.path(step),
                len(candidate.missing),
            )  # fmt: skip
            self.fast.broken.add(name)
        elif candidate is not None:
            choices.append((candidate.step.created, Choice("fast", name, beside=same), candidate.step.lost))
        # Two saves of one step are never mixed: the one that was made last counts. Of the same save the fast copy.
        for _, choice, lost in sorted(choices, key=lambda at: (at[0], at[1].tier == "fast"), reverse=True):
            yield choice, lost

    def _stored(self, name: str) -> Manifest | None:
        """The manifest of a step that is whole in the store."""
        path = self.store.root / name
        try:
            record = read_manifest(path)
            fault = next(iter(lacking_files(path, record).values()), None)
        except NotACheckpoint:
            return None
        except StorageError:
            raise
        except (HoldfastError, OSError) as error:
            fault = str(error)
        if fault is not None:
            log.warning("%s is passed over: %s", path, fault)
            self.store.broken.add(name)
            return None
        return record

    def _folder(self, choice: Choice) -> Place:
        return (self.fast if choice.tier == "fast" else self.store).root / choice.name

    def _open(self, choice: Choice, require: Keys | None) -> Checkpoint:
        beside = self.store.root / choice.name if choice.beside else None
        opened = Checkpoint(self._folder(choice), beside=beside, require=require)
        opened.manifest  # noqa: B018 - reading it is the check
        return opened


def _join(notes: list[_Sight]) -> list[_FastStep]:
    """On the first rank: of each step the save that counts, and which ranks need its manifest."""
    seen: dict[str, list[tuple[int, _Seen]]] = {}
    for rank, note in enumerate(notes):
        for one in note.steps:
            seen.setdefault(one.name, []).append((rank, one))
    held = []
    for name, sights in seen.items():
        # Where nodes know different saves of a step, the last commit has not reached all of them; nor has the last drop
        # of sections, where one has lost some.
        created, save, lost, rank = max(
            ((one.created, one.save, one.lost, -rank) for rank, one in sights if one.save), default=("", "", False, 0)
        )
        if save:
            lacking = [rank for rank, one in sights if _lacks(one, save, lost)]
            held.append(_FastStep(name, save, created, -rank, lacking, lost))
    return held


def _lacks(one: _Seen, save: str, lost: bool) -> bool:
    """Whether a node has files of a save, and not its manifest as it is now."""
    # All of its files may be links to those of older saves: then nothing in the folder tells which save it is of.
    return (one.save, one.lost) != (save, lost) and (one.save == save or save in one.files or not one.save)
