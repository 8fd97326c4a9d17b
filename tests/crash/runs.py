"""What a recorded run of the library is, the states that it saves, its ranks, and what users do after a power cut.

`operations` makes runs of these. Nothing here knows how states of the disk are built or judged.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager
from holdfast.ranks.ranks import Ranks, ranks_of
from tests.crash.model import Trace

ROWS, WIDTH = 12, 40
STEP = "step-{step:09d}"


@dataclass(frozen=True)
class Run:
    """One recorded operation.

    ``restore(root)`` is what a user does after the cut: it returns the version that it got, or None if there is none,
    and raises `Wrong` if what it got is no version. ``save_on(root, version)`` goes on from there. Of versions that
    were promised the newest ``keeps`` must be whole on disk (0: they are no checkpoints of ours, and only restored).
    """

    name: str
    trace: Trace
    restore: Callable[[Path], int | None]
    save_on: Callable[[Path, int], None]
    keeps: int = 1
    first: int = 0  # the version that is promised before the run begins; 0: none
    since: int = 0  # cuts before this one are of no interest
    retires: bool = False  # to restore may delete whole checkpoints, by a rule of what to keep
    always_on: bool = False  # ``save_on`` every state, and not a sample of them


class Wrong(AssertionError):
    """What was restored is not what any save has saved."""


def whole_state(version: int, step: int | None = None) -> dict[str, Any]:
    """The state of a version, every number of which but for the frozen ones tells the version."""
    return {
        "model": {
            "w": torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) + 1000 * version,
            "v": torch.arange(70) + 1000 * version,
        },
        "frozen": {"e": torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) - 7},
        "optimizer": {"m": torch.arange(float(ROWS * WIDTH)).view(ROWS, WIDTH) - 1000 * version, "rate": version / 8},
        "step": version if step is None else step,
        "version": version,
    }


def state_of(version: int, rank: int = 0, size: int = 1, step: int | None = None) -> dict[str, Any]:
    """What one rank has of it: rows of the matrices, all of the rest."""
    state, rows = whole_state(version, step), ROWS // size
    for section, name in (("model", "w"), ("frozen", "e"), ("optimizer", "m")):
        part = state[section][name][rank * rows : (rank + 1) * rows].clone()
        state[section][name] = holdfast.Shard(part, (ROWS, WIDTH), (rank * rows, 0))
    return state


def blank() -> dict[str, Any]:
    state = whole_state(0)
    for section in ("model", "frozen", "optimizer"):
        for value in state[section].values():
            if isinstance(value, torch.Tensor):
                value.fill_(-1)
    return state


def version_of(state: dict[str, Any], only: tuple[str, ...] = ("model", "frozen", "optimizer")) -> int:
    """The version of a restored state. Raises Wrong if it is a mixture."""
    version = state["version"]
    expected = whole_state(version, state["step"])
    for section in only:
        for name, value in expected[section].items():
            found = state[section][name]
            same = torch.equal(found, value) if isinstance(value, torch.Tensor) else found == value
            if not same:
                raise Wrong(f"{section}/{name} is not that of version {version}")
    return int(version)


# Ranks as threads

_mine = threading.local()


def _ranks_of(group: Any = None) -> Ranks:
    return getattr(_mine, "ranks", None) or ranks_of(group)


@contextmanager
def _ranks_by_thread() -> Iterator[None]:
    with ExitStack() as patches:
        for module in ("manager", "saver", "save", "load", "export.conversion"):
            patches.enter_context(mock.patch.object(import_module(f"holdfast.{module}"), "ranks_of", _ranks_of))
        yield


def together(size: int, work: Callable[[int], Any]) -> list[Any]:
    """``work(rank)`` on every rank, each a thread; what the first one that failed raised."""
    store = dist.HashStore()

    def one(rank: int) -> Any:
        _mine.ranks = Ranks(rank, size, store) if size > 1 else Ranks(0, 1)
        return work(rank)

    with _ranks_by_thread(), ThreadPoolExecutor(size) as pool:
        return [future.result() for future in [pool.submit(one, rank) for rank in range(size)]]


@contextmanager
def folder(again: Path | None = None) -> Iterator[Path]:
    """A new folder in memory; or one that was there before, as some files hold the paths of others."""
    if again is not None:
        at = again
        at.mkdir()
    else:
        at = Path(tempfile.mkdtemp(prefix="crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)).resolve()
    try:
        yield at
    finally:
        shutil.rmtree(at, ignore_errors=True)


@contextmanager
def quiet() -> Iterator[None]:
    """The library's log is for people, and what happens here happens on purpose."""
    logger = logging.getLogger("holdfast")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


# What users do after a cut


def manager(root: Path, **how: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"every": 1, "worker": "none", "signals": (), "journal": False, **how})


def restore_run(root: Path, **how: Any) -> int | None:
    """As a training script does that starts again."""
    state = blank()
    with manager(root, **how) as found:
        if found.restore(state) is None:
            return None
    return version_of(state)


def train_on(root: Path, version: int, **how: Any) -> None:
    """Restore, save one step more, restore that."""
    with manager(root, **how) as found:
        found.restore(blank())
        found.step(version, whole_state(version))
        found.wait()
    got = restore_run(root, **how)
    if got != version:
        raise Wrong(f"version {version} was saved and version {got} restored")


def load_at(name: str) -> Callable[[Path], int | None]:
    """As a script does that saves to one path."""

    def load(root: Path) -> int | None:
        state = blank()
        try:
            holdfast.tools.recover(root / name)
            holdfast.load(root / name, state)
        except holdfast.errors.NotACheckpoint:
            return None
        return version_of(state)

    return load


def save_at(name: str) -> Callable[[Path, int], None]:
    def save(root: Path, version: int) -> None:
        holdfast.save(whole_state(version), root / name, overwrite=True)
        if load_at(name)(root) != version:
            raise Wrong(f"version {version} was saved and is not there")

    return save
