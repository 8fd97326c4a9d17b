"""Whether a state of the disk is one that a user can live with: restore runs on it, and what comes back is judged.

`judge` takes a `Run`, builds its states and checks each distinct one once. It never trusts the library for what it can
see itself: which checkpoints are whole is told from the bytes that the run wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import HoldfastError
from holdfast.ondisk import manifest
from holdfast.ondisk.manifest import Manifest
from tests.crash.model import Tree
from tests.crash.profiles import Limits, Profile, states
from tests.crash.runs import Run, Wrong, folder, quiet

SAVE_ON = 8
"""Every so many-th distinct state is saved to once it is restored."""

SHOWN = 5
"""Violations that are told of each kind."""


@dataclass
class Report:
    """What was checked: ``states`` that were built, ``distinct`` ones of them, those that were ``saved_to`` after.

    ``calls``: of the run. ``by_profile``: how many distinct ones each was the first to allow.
    """

    run: str
    calls: int = 0
    states: int = 0
    distinct: int = 0
    saved_to: int = 0
    by_profile: Counter[str] = field(default_factory=Counter)
    restored: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    caught_by: set[str] = field(default_factory=set)

    def named(self, name: str) -> Report:
        self.run = name
        return self

    def joined(self, other: Report) -> Report:
        """The sums of both."""
        self.calls += other.calls
        self.states += other.states
        self.distinct += other.distinct
        self.saved_to += other.saved_to
        self.by_profile += other.by_profile
        self.restored += other.restored
        self.faults += other.faults
        self.violations += other.violations
        self.caught_by |= other.caught_by
        return self


@dataclass(frozen=True)
class _Outcome:
    """What restoring one tree came to. ``fault``: what is wrong whatever was promised."""

    version: int | None
    whole: frozenset[int]
    fault: tuple[str, str] | None


def judge(
    run: Run, profiles: Iterable[Profile], limits: Limits = Limits(), *, seed: int = 0, every: int = 1,
    enough: int | None = None,
) -> Report:  # fmt: skip
    """Check the states of a run; with ``enough``, stop at so many violations."""
    report, truth = Report(run.name, len(run.trace.ops)), _Truth(run)
    outcomes: dict[bytes, _Outcome] = {}
    with quiet():
        for profile in profiles:
            for state in states(run.trace, profile, limits, seed, every=every, since=run.since):
                report.states += 1
                digest = state.tree.digest()
                outcome = outcomes.get(digest)
                if outcome is None:
                    save_on = run.always_on or digest[0] % SAVE_ON == 0
                    outcome = outcomes[digest] = _look(run, truth, state.tree, save_on=save_on)
                    report.by_profile[profile.name] += 1
                    report.saved_to += save_on
                    report.restored["nothing" if outcome.version is None else f"version {outcome.version}"] += 1
                fault = outcome.fault or truth.broken_promise(outcome, state.cut)
                if fault is not None:
                    kind, text = fault
                    report.faults[kind] += 1
                    report.caught_by.add(profile.name)
                    if report.faults[kind] <= SHOWN:
                        report.violations.append(f"{kind}: {text}; {profile.name}, {_where(run, state.cut)}")
                    if enough is not None and report.faults.total() >= enough:
                        report.distinct = len(outcomes)
                        return report
    report.distinct = len(outcomes)
    return report


def _where(run: Run, cut: int) -> str:
    calls = run.trace.calls
    return f"cut {cut} of {len(calls)}, after {calls[cut - 1] if cut else 'nothing'}"


class _Truth:
    """What a run has written and promised."""

    def __init__(self, run: Run) -> None:
        self._run = run
        # Data files and attachments are written once: what they hold in the end is what they were to hold.
        self._files = run.trace.replay().files
        self._promised = [(0, run.first)] if run.first else []
        self._promised += [(index + 1, version) for index, version in run.trace.marks()]

    def seen(self, tree: Tree) -> _Seen:
        """What the checkpoints of a tree are, by the bytes that were written."""
        versions, needed, broken = set(), {}, ""
        for path, (_, data) in tree.files.items():
            if not path.endswith(manifest.FILE_NAME) or ".partial/" in path:
                continue
            record = _decoded(data)
            named = _named(path.rpartition("/")[0], record) if record is not None else []
            lacking = [at for at in named if not self._is_whole(tree, at)]
            if record is None or lacking:
                broken = f"{path} stands" + (f", and {lacking[0]} is not whole" if lacking else " and cannot be read")
            else:
                versions.add(int(record.values["version"]))
                needed[path] = named
        return _Seen(frozenset(versions), needed, broken)

    def _is_whole(self, tree: Tree, path: str) -> bool:
        number, data = tree.files.get(path, (-1, b""))
        return number in self._files and data == self._files[number]

    def broken_promise(self, outcome: _Outcome, cut: int) -> tuple[str, str] | None:
        promised = sorted(version for index, version in self._promised if index <= cut)
        if not promised:
            return None
        if outcome.version is None or outcome.version < promised[-1]:
            return "lost", f"version {promised[-1]} was promised and version {outcome.version} restored"
        least = promised[-self._run.keeps :] if self._run.keeps else []
        there = [version for version in outcome.whole if not least or version >= least[0]]
        if len(there) < len(least):
            return "lost", f"versions {least} were promised, and of those and newer ones {there} are whole"
        return None


class _Seen(NamedTuple):
    """``whole``: versions that are there with every byte; ``needed``: by the paths of their manifests, their files.

    ``broken``: the manifest of a checkpoint that is not whole: a folder with a manifest has to be.
    """

    whole: frozenset[int]
    needed: dict[str, list[str]]
    broken: str


@lru_cache(maxsize=1024)
def _decoded(data: bytes) -> Manifest | None:
    try:
        return manifest.decode(data, "a manifest")
    except HoldfastError:
        return None


def _named(folder: str, record: Manifest) -> list[str]:
    found = []
    for path in [*(file.path for file in record.data_files), *(path for path, _, _ in record.attachments)]:
        above, below = folder, path
        if path.startswith("../"):
            above, below = folder.rpartition("/")[0], path[3:]
        found.append(f"{above}/{below}" if above else below)
    return found


def _look(run: Run, truth: _Truth, tree: Tree, *, save_on: bool) -> _Outcome:
    whole, needed, broken = truth.seen(tree)
    if broken:
        return _Outcome(None, whole, ("broken", broken))
    with folder(run.trace.root) as at:
        tree.materialise(at)
        try:
            version = run.restore(at)
        except Wrong as error:
            return _Outcome(None, whole, ("mixed", str(error)))
        except Exception as error:  # whatever it is, a user would not get on
            return _Outcome(None, whole, ("refused", _told(error, at)))
        kept = [path for path in needed if not run.retires or (at / path).is_file()]
        gone = [path for main in kept for path in (main, *needed[main]) if not (at / path).is_file()]
        if gone:
            return _Outcome(version, whole, ("swept", f"restore took {gone[0]}, which a checkpoint needs"))
        if save_on:
            try:
                run.save_on(at, (version or 0) + 1)
            except Exception as error:
                return _Outcome(version, whole, ("stuck", f"the next save failed: {_told(error, at)}"))
        return _Outcome(version, whole, None)


def _told(error: Exception, at: Path) -> str:
    return f"{type(error).__name__}: {error}".replace(str(at), "")
