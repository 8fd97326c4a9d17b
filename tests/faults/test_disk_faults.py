"""A disk that fails at every call of every story: a clear error and nothing lost, or all of it done all the same."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import holdfast
from holdfast import CheckpointManager, Keep, Saver
from holdfast.storage.storage import JOURNAL
from holdfast.testing import count_calls, faults
from tests.programs import run_code

GUARD = 60.0
"""Seconds after which a story is taken to hang: far more than any of them needs."""

OLD, BASE, NEW = 1, 2, 3

ERRORS: dict[str, tuple[str, ...]] = {
    "create": ("ENOSPC", "EACCES", "EROFS", "EDQUOT", "EIO"),
    "reserve": ("ENOSPC", "EDQUOT", "EIO"),
    "write": ("ENOSPC", "EIO", "EDQUOT"),
    "sync": ("EIO", "ENOSPC", "ESTALE"),
    "cut": ("EIO",),
    "link": ("ENOSPC", "EROFS", "EIO"),
    "replace": ("ENOSPC", "EROFS", "EIO"),
    "rename": ("ENOSPC", "EROFS", "EIO"),
    "exchange": ("ENOSPC", "EROFS", "EIO"),
    "delete": ("EACCES", "EROFS", "EIO"),
    "make folder": ("ENOSPC", "EACCES", "EROFS"),
    "remove folder": ("EACCES", "EIO"),
    "sync folder": ("EIO", "ESTALE"),
    "open": ("EACCES", "EIO", "ESTALE"),
    "read": ("EIO", "ESTALE"),
    "list": ("EACCES", "EIO", "ESTALE"),
    "stat": ("EACCES", "EIO", "ESTALE"),
}
"""What each call may fail with on a real disk. (EINTR never reaches a program: Python calls again.)"""

LOSING = ("link", "replace", "delete", "make folder", "create", "write", "cut", "remove folder")
"""Calls that a network file system may carry out, and say that they failed."""


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(3000.0) + step, "same": torch.arange(2000.0)},
        "frozen": {"f": torch.ones(500)},
        "optimizer": {"m": torch.full((700,), float(step))},
        "mine": holdfast.PerRank([step], elsewhere="first"),
        "step": step,
    }


def is_step(path: Path, *steps: int, without: str = "") -> int:
    """The checkpoint is whole, and one of these steps and of no other; which."""
    opened = holdfast.open(path)
    opened.verify()
    found = opened.state_dict()
    step = found["step"]
    assert step in steps, f"{path} is step {step}"
    expected = state_of(step)
    expected.pop(without, None)
    for section in ("model", "frozen", "optimizer"):
        if section in expected:
            assert found[section].keys() == expected[section].keys(), f"{path} lacks tensors of {section}"
            assert all(torch.equal(found[section][k], v) for k, v in expected[section].items()), f"{path} is mixed"
    assert opened.per_rank("mine", 0) == [step]
    return int(step)


class Story(NamedTuple):
    """``act`` meets the faults, in a folder that ``before`` has prepared; it returns what it loaded, if it loads.

    ``old`` must be there whatever happens, ``new`` once ``act`` has not raised, and unless it has not at all.
    ``either``: a path that has the one or the other at every moment. ``told``: whether the error has to say so if
    ``new`` is there all the same.
    """

    act: Callable[[Path], dict[str, Any] | None]
    before: Callable[[Path], None] = lambda root: None
    old: str | None = "old"
    new: str | None = None
    either: str | None = None
    without: str = ""
    told: bool = True


def _save(step: int, name: str, **options: Any) -> Callable[[Path], None]:
    return lambda root: holdfast.save(state_of(step), root / name, **options) and None


def _save_beside(worker: Any) -> Callable[[Path], None]:
    def act(root: Path) -> None:
        with Saver(worker=worker) as saver:
            saver.save(state_of(NEW), root / "new").wait()

    return act


def _load(root: Path) -> dict[str, Any]:
    into = state_of(0)
    holdfast.load(root / "old", into)
    return {**into, "step": into["step"]}


def _manager(root: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(root / "run", every=1, worker="none", signals=(), **options)


def _steps(root: Path) -> None:
    for step in (OLD, BASE):
        holdfast.save(state_of(step), root / "run" / f"step-{step:09d}", step=step)


def _sweep(root: Path) -> None:
    with _manager(root, keep=Keep(last=1)) as manager:
        manager.save(NEW, state_of(NEW))


def _restore(root: Path) -> dict[str, Any]:
    into = state_of(0)
    with _manager(root, keep=Keep(last=9)) as manager:
        manager.restore(into)
    return into


def _finished(root: Path) -> None:
    """A save that its writer has finished and nobody has committed."""
    script = (
        "import sys, holdfast.testing; from tests.faults.test_disk_faults import *\n"
        "with holdfast.testing.kill_at('commit'): Saver().save(state_of(NEW), sys.argv[1]).wait()"
    )
    ended = run_code(script, root / "new")
    assert ended.returncode == -9, ended.stderr


STORIES: dict[str, Story] = {
    "save": Story(_save(NEW, "new"), new="new"),
    "overwrite": Story(_save(NEW, "there", overwrite=True), _save(BASE, "there"), either="there"),
    "background process": Story(_save_beside("process"), new="new"),
    "background threads": Story(_save_beside("thread"), new="new"),
    "incremental": Story(lambda root: _save(NEW, "new", base=root / "base")(root), _save(BASE, "base"), new="new"),
    "sweep": Story(_sweep, _steps, new=f"run/step-{NEW:09d}"),
    "load": Story(_load),
    "verify": Story(lambda root: holdfast.open(root / "old").verify() and None),
    "restore": Story(_restore, _steps),
    "convert": Story(
        lambda root: holdfast.convert(root / "source", root / "new") and None, _save(NEW, "source"), new="new"
    ),
    "convert to torch": Story(lambda root: holdfast.convert(root / "old", root / "new.pt", to="torch") and None),
    "drop": Story(
        lambda root: holdfast.tools.drop(root / "there", "optimizer") and None, _save(NEW, "there"), new="there",
        without="optimizer",
    ),
    "copy": Story(lambda root: holdfast.copy(root / "source", root / "new") and None, _save(NEW, "source"), new="new"),
    "late commit": Story(lambda root: holdfast.tools.recover(root / "new") and None, _finished, new="new", told=False),
}  # fmt: skip


class Case(NamedTuple):
    verb: str
    nth: int
    error: str
    done: bool = False


class Records(logging.Handler):
    """What the library logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> Iterator[list[str]]:
    handler, logger = Records(), logging.getLogger("holdfast")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


def bounded(act: Callable[[], Any]) -> Any:
    """What it returns or raises, if it ends at all."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(act).result(GUARD)
    finally:
        pool.shutdown(wait=False)


class Trial:
    """One story, prepared once and tried with fault after fault."""

    def __init__(self, name: str, folder: Path, logged: list[str]) -> None:
        self.story, self.folder, self.logged = STORIES[name], folder, logged
        self.template = folder / "template"
        self.template.mkdir()
        _save(OLD, "old")(self.template)
        self.story.before(self.template)
        self.counts = Counter[str]()
        root = self.fresh()
        with count_calls(under=root) as found:
            bounded(lambda: self.story.act(root))
        self.calls = Counter(hit.verb for hit in found.hits)
        self.expected = names_in(root)
        self.is_new(root)

    def fresh(self) -> Path:
        root = self.folder / "trial"
        if root.exists():
            shutil.rmtree(root)
        # With links as links: the files that a save borrows.
        subprocess.run(["cp", "-a", str(self.template), str(root)], check=True)
        return root

    def cases(self) -> list[Case]:
        """Every call with every error that it may meet."""
        found = []
        for verb, count in self.calls.items():
            for nth in range(1, count + 1):
                found += [Case(verb, nth, error) for error in ERRORS[verb]]
                found += [Case(verb, nth, "EIO", True)] * (verb in LOSING)
        return found

    def some(self) -> list[Case]:
        """The first, the middle and the last call of each verb, and the errors in turn."""
        found = []
        for verb, count in self.calls.items():
            for turn, nth in enumerate(sorted({1, (count + 1) // 2, count})):
                found.append(Case(verb, nth, ERRORS[verb][turn % len(ERRORS[verb])], verb in LOSING and turn == 1))
        return found

    def run(self, case: Case) -> None:
        root, story = self.fresh(), self.story
        self.logged.clear()
        raised: BaseException | None = None
        loaded = None
        with faults(case.verb, nth=case.nth, error=case.error, done=case.done, under=root) as met:
            try:
                loaded = bounded(lambda: story.act(root))
            except (holdfast.HoldfastError, OSError) as error:
                raised = error
        self.counts["met"] += bool(met.hits)
        if story.old is not None:
            is_step(root / story.old, OLD)
        if story.either is not None:
            stands = is_step(root / story.either, BASE, NEW)
            assert raised is not None or stands == NEW
        if raised is not None:
            self.counts["raised"] += 1
            self.is_clear(raised, case, root, met.hits[0].path if met.hits else "")
            if story.new is not None and not story.without:
                with suppress(holdfast.errors.NotACheckpoint):
                    is_step(root / story.new, NEW)
                    assert not story.told or not getattr(raised, "settled", True), (
                        f"it stands, and nobody was told: {raised}"
                    )
                    self.counts["raised unsettled"] += 1
            if getattr(raised, "settled", True):
                bounded(lambda: story.act(root) if not self.is_there(root) else None)  # what failed can be done again
                self.is_new(root)
        else:
            self.is_new(root)
            if loaded is not None and loaded["step"] != self.newest(root):
                assert self.logged, f"step {loaded['step']} is loaded in silence"
            self.counts["logged" if self.logged else "no harm"] += 1
            left = names_in(root) - self.expected
            assert not left or self.logged, f"{left} is left in silence"

    def newest(self, root: Path) -> int:
        return BASE if (root / "run").exists() else OLD

    def is_there(self, root: Path) -> bool:
        """Whether what failed was done all the same."""
        if self.story.new is None or self.story.without:
            return False
        try:
            return is_step(root / self.story.new, NEW) == NEW
        except holdfast.errors.NotACheckpoint:
            return False

    def is_new(self, root: Path) -> None:
        story = self.story
        if story.new is not None:
            is_step(root / story.new, NEW, without=story.without)
        if story.either is not None:
            is_step(root / story.either, NEW)

    def is_clear(self, error: BaseException, case: Case, root: Path, file: str) -> None:
        """It says what failed, and where."""
        text = str(error)
        assert isinstance(error, holdfast.HoldfastError), f"{type(error).__name__}: {error}"
        assert str(root) in text, f"no file is named: {text}"
        assert isinstance(error, holdfast.errors.Damaged) or _reason(case.error) in text, (
            f"the reason is not told: {text}"
        )


def _reason(error: str) -> str:
    import errno

    return os.strerror(getattr(errno, error))


def names_in(root: Path) -> set[str]:
    """Files of a folder, without what differs from save to save, and a journal. (An empty folder costs nothing.)"""
    found = [f.relative_to(root).as_posix() for f in root.rglob("*") if f.is_file() and JOURNAL not in f.parts]
    return {re.sub(r"[0-9a-f]{16}", "·", name) for name in found}


def sweep(trial: Trial, cases: list[Case]) -> None:
    wrong: list[str] = []
    for case in cases:
        try:
            trial.run(case)
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    assert not wrong, f"{len(wrong)} of {len(cases)}:\n" + "\n".join(wrong)
    assert trial.counts["met"] >= 0.9 * len(cases), f"{trial.counts} of {len(cases)}"
    print(len(cases), dict(trial.calls), dict(trial.counts))


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.fast_cases("load", "verify", "restore")
def test_some_calls_fail(name: str, tmp_path: Path, logged: list[str]) -> None:
    trial = Trial(name, tmp_path, logged)
    sweep(trial, trial.some())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STORIES)
def test_every_call_fails_in_every_way(name: str, tmp_path: Path, logged: list[str]) -> None:
    trial = Trial(name, tmp_path, logged)
    sweep(trial, trial.cases())
