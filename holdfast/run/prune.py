"""The steps of a run by rules: which stay and why, which go, and how many bytes that frees.

``holdfast prune`` calls it. Never deletes the newest whole step, nor a file that a step which stays has borrowed.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.commit.folder import what_is_there
from holdfast.commit.reused import ReusedPaths, Reuses
from holdfast.errors import HoldfastError, NotACheckpoint, StorageError
from holdfast.ondisk import manifest
from holdfast.repair.drop import Dropped, drop_from
from holdfast.run.keep import Keep, Kept
from holdfast.run.retention import KeptSteps
from holdfast.run.tiers.nodes import MARK
from holdfast.run.whole import fault_of
from holdfast.storage.local import disk
from holdfast.storage.place import Place
from holdfast.storage.urls import location
from holdfast.storage.wrappers.layers import with_deadline

DEADLINE = 600.0
"""Seconds to wait for any one answer of a store."""


@dataclass(frozen=True)
class Fate:
    """What becomes of one step.

    ``goes``: "nothing", "optimizer" (the sections that `Keep` drops) or "all". ``why``: the rules that keep it, or what
    is wrong with it. ``nbytes``: of its files, ``freed``: of those that nobody has afterwards, ``lent``: of those that
    stay where they are, or on the disk, since steps that stay have borrowed them.
    """

    step: int
    name: str
    goes: str
    why: tuple[str, ...]
    nbytes: int
    freed: int = 0
    lent: int = 0


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do: the ``steps`` of ``root``, oldest first, and the bytes that are ``freed``.

    ``others``: folders that are called otherwise, and left alone.
    """

    root: str
    done: bool
    steps: tuple[Fate, ...]
    freed: int
    others: tuple[str, ...]


def prune(
    root: str | os.PathLike[str] | Place,
    keep: Keep,
    *,
    name: str | None = None,
    dry_run: bool = True,
    deadline: float = DEADLINE,
) -> Pruned:
    """Delete of the steps below ``root`` what ``keep`` does not keep; with ``dry_run`` only tell what would go.

    The newest step that is whole stays as it is, whatever the rules and whatever was saved after it. The rules do
    not count steps that training left behind when it went back; these stay until training has passed them. ``name``:
    what step folders are called (``"step-{step}"``); by default it follows from the folders. Files that steps which
    stay have borrowed stay. A run may be under way: its manager's newest step is never touched.
    Raises NotACheckpoint if no steps are there, ValueError if ``root`` is a fast tier or names are mixed, StorageError.
    """
    place = with_deadline(location(root), deadline)
    if (place / MARK).is_file():
        raise ValueError(
            f"{place} is the fast tier of a run, where steps wait that are not in its store yet: its manager prunes it "
            "(keep_fast=); prune the store instead"
        )
    steps = KeptSteps(place, name or name_of(place))
    committed = steps.committed()
    if not committed:
        raise NotACheckpoint(f"{place} holds no step: {what_is_there(place)}")
    faults, lost = _looked_at(committed)
    behind = steps.behind(committed)
    counting = [step for step in committed if step not in behind] or list(committed)
    keep = steps.judged(keep, {step: committed[step] for step in counting})
    rated = {step: steps.metric(committed[step]) if keep.best else None for step in counting}
    later = [step for step in behind if step > max(counting)]
    kept = _kept(keep, rated, faults, lost).and_whole(later)  # these stay as with a manager, until training passes them
    others = tuple(sorted({*place.folder_names()} - {path.name for path in steps.folders()}))
    why = {step: _reasons(step, keep, rated, kept, faults) for step in committed}
    fates = _fates(place, committed, kept, why, others)
    if not dry_run:
        steps.prune(kept, committed)
        left = steps.committed()
        gone = {fate.step for fate in fates if fate.goes == "all"}
        if gone & set(left):
            raise StorageError(f"{place}: steps {sorted(gone & set(left))} are still there; saves under way hold them")
    return Pruned(str(place), not dry_run, fates, sum(fate.freed for fate in fates), others)


def name_of(root: Place) -> str:
    """What the steps below ``root`` are called, as a template.

    Raises NotACheckpoint if there are none, ValueError if they are called in several ways.
    """
    names = root.folder_names()
    if (root / manifest.FILE_NAME).is_file():
        raise ValueError(f"{root} is one checkpoint: give the folder of its run, {root.parent}")
    steps = [name for name in names if (root / name / manifest.FILE_NAME).is_file()]
    shapes = Counter(shape for name in steps if (shape := _shape(name)) is not None)
    if not shapes:
        raise NotACheckpoint(f"{root} holds no step: {what_is_there(root)}")
    if len(shapes) > 1:
        counts = ", ".join(f"{n} called {shape}" for shape, n in shapes.most_common())
        raise ValueError(f"{root} holds checkpoints of several names ({counts}): say which with --name")
    return next(iter(shapes))


def _shape(name: str) -> str | None:
    """``step-000001`` is ``step-{step}``; None for a name without a number."""
    match = re.fullmatch(r"(.*?)(\d+)(\D*)", name)
    if match is None:
        return None
    before, after = (text.replace("{", "{{").replace("}", "}}") for text in (match[1], match[3]))
    return f"{before}{{step}}{after}"


def _looked_at(committed: dict[int, Place]) -> tuple[dict[int, str], set[int]]:
    """What is wrong with which step; and those that have lost sections."""
    faults: dict[int, str] = {}
    lost: set[int] = set()
    for step, path in committed.items():
        dropped: list[str] = []
        fault = fault_of(path, dropped)
        if fault is not None:
            faults[step] = fault
        if dropped:
            lost.add(step)
    return faults, lost


def _kept(keep: Keep, rated: dict[int, float | None], faults: dict[int, str], lost: set[int]) -> Kept:
    whole = [step for step in rated if step not in faults]
    best = [step for step in whole if step not in lost] or whole or list(rated)
    return keep.verdict(rated).and_whole([max(best), max(rated)])


def _reasons(step: int, keep: Keep, rated: dict[int, float | None], kept: Kept, faults: dict[int, str]) -> list[str]:
    if step not in rated:
        return ["left behind", *([f"damaged: {faults[step]}"] if step in faults else [])]
    reasons = []
    if step in Keep(last=keep.last).kept(rated):
        reasons.append("newest" if keep.last == 1 else f"newest {keep.last}")
    if keep.every is not None and step % keep.every == 0:
        reasons.append(f"multiple of {keep.every}")
    if keep.best and step in _best(keep, rated):
        reasons.append(f"best {keep.best} (metric {rated[step]:g})")
    if keep.model_every is not None and step % keep.model_every == 0 and step not in kept.whole:
        reasons.append(f"model of each {keep.model_every}")
    if step in kept.steps and not reasons:
        reasons.append("newest whole step")
    if step in faults:
        reasons.append(f"damaged: {faults[step]}")
    return reasons or ["no rule keeps it"]


def _best(keep: Keep, rated: dict[int, float | None]) -> set[int]:
    """The best ones by their metric: with a newest step that has none, so that no other rule brings one in."""
    beyond = max(rated) + 1
    return Keep(last=1, best=keep.best, mode=keep.mode).kept({**rated, beyond: None}) - {beyond}


def _fates(
    root: Place, committed: dict[int, Place], kept: Kept, why: dict[int, list[str]], others: Collection[str]
) -> tuple[Fate, ...]:  # fmt: skip
    going = [committed[step].name for step in committed if step not in kept.steps]
    stay = [path.name for path in committed.values() if path.name not in going]
    cited = Reuses(root).by([*stay, *others])
    account = _Account(root, cited)
    loose = _loose(root, going)
    fates = []
    for step, path in committed.items():
        sizes = path.sizes_below()
        fate = Fate(step, path.name, "nothing", tuple(why[step]), sum(sizes.values()))
        if path.name in going:
            freed = account.of(path.name, sizes)
            lent = fate.nbytes - freed
            freed += sum(account.of(name, _sizes_of(root / name, paths)) for name, paths in loose[path.name].items())
            fate = replace(fate, goes="all", freed=freed, lent=lent)
        elif step in kept.steps and step not in kept.whole:
            lost = _without_optimizer(path, kept, cited)
            fate = replace(fate, goes="optimizer", freed=lost.nbytes) if lost is not None else fate
        fates.append(fate)
    return tuple(fates)


def _loose(root: Place, going: Sequence[str]) -> dict[str, ReusedPaths]:
    """What the steps that go cite in folders that are no steps any more: each file at the last one that cites it."""
    citations = Reuses(root)
    citations.by(going)  # all at once
    last = {
        (folder, path): name
        for name in going
        for folder, paths in citations.by([name]).items()
        if folder not in going
        for path in paths
    }
    loose: dict[str, ReusedPaths] = {name: {} for name in going}
    for (folder, path), name in last.items():
        loose[name].setdefault(folder, set()).add(path)
    return loose


def _sizes_of(folder: Place, paths: Iterable[str]) -> dict[str, int]:
    if (folder / manifest.FILE_NAME).is_file():  # a checkpoint still: all of it stays
        return {}
    sizes = folder.sizes_below()
    return {path: sizes[path] for path in paths if path in sizes}


def _without_optimizer(path: Place, kept: Kept, cited: ReusedPaths) -> Dropped | None:
    """What a step loses, if it loses anything."""
    try:
        done = drop_from(path, kept.loses, dry_run=True, cited=cited)
    except (HoldfastError, ValueError):  # the step keeps all it has, and dropping logs why
        return None
    return done if isinstance(done, Dropped) and done.files else None


class _Account:
    """Bytes that deleting frees: a file that is cited stays, and one with several names is free with its last name."""

    def __init__(self, root: Place, cited: ReusedPaths) -> None:
        self._root, self._cited = root, cited
        self._names_left: dict[tuple[int, int], int] = {}

    def of(self, name: str, sizes: dict[str, int]) -> int:
        """Of the files of one folder that goes; folders are asked for in the order in which they go."""
        stays = self._cited.get(name, set())
        return sum(nbytes for path, nbytes in sizes.items() if path not in stays and self._is_last(name, path))

    def _is_last(self, name: str, path: str) -> bool:
        if not self._root.has_links:
            return True
        try:
            status = disk.stat(self._root / name / path)
        except FileNotFoundError:  # deleted meanwhile
            return False
        key = (status.st_dev, status.st_ino)
        left = self._names_left[key] = self._names_left.get(key, status.st_nlink) - 1
        return left == 0
