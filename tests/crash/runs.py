"""Real runs of the library, small, recorded: each operation whose crash states are checked.

A `Run` is a trace and what must hold after a cut anywhere in it. Ranks are threads of this process. Nothing here knows
how states are built or judged.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import holdfast
from holdfast import CheckpointManager, Keep
from holdfast.engine import disk
from holdfast.engine.ranks import Ranks, ranks_of
from tests.crash.model import Trace, Tree
from tests.crash.record import Recorder, Rule, recorded

ROWS, WIDTH = 12, 40
STEP = "step-{step:09d}"


@dataclass(frozen=True)
class Run:
    """One recorded operation.

    ``restore(root)`` is what a user does after the cut: it returns the version that it got, or None if there is none,
    and raises `Wrong` if what it got is no version. ``save_on(root, version)`` goes on from there. Of versions that
    were promised the newest ``keeps`` must be whole on disk.
    """

    name: str
    trace: Trace
    restore: Callable[[Path], int | None]
    save_on: Callable[[Path, int], None]
    keeps: int = 1
    first: int = 0  # the version that is promised before the run begins; 0: none
    versions: dict[str, int] = field(default_factory=dict)  # by save id; filled by `judge`
    watched: Callable[[Tree], str] | None = None  # what else must hold of a state by itself


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
    with mock.patch("holdfast.manager.ranks_of", _ranks_of), mock.patch("holdfast.saver.ranks_of", _ranks_of):
        with mock.patch("holdfast.save.ranks_of", _ranks_of), mock.patch("holdfast.load.ranks_of", _ranks_of):
            with mock.patch("holdfast.convert.ranks_of", _ranks_of):
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
def folder() -> Iterator[Path]:
    """A new folder in memory."""
    at = Path(tempfile.mkdtemp(prefix="crash-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)).resolve()
    try:
        yield at
    finally:
        shutil.rmtree(at, ignore_errors=True)


# What users do after a cut


def manager(root: Path, **how: Any) -> CheckpointManager:
    return CheckpointManager(root, **{"every": 1, "worker": "none", "signals": (), **how})


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
            holdfast.recover(root / name)
            holdfast.load(root / name, state)
        except holdfast.NotACheckpoint:
            return None
        return version_of(state)

    return load


def save_at(name: str) -> Callable[[Path, int], None]:
    def save(root: Path, version: int) -> None:
        holdfast.save(whole_state(version), root / name, overwrite=True)
        if load_at(name)(root) != version:
            raise Wrong(f"version {version} was saved and is not there")

    return save


# The operations


def plain_save(size: int = 2, *, rule: Rule | None = None) -> Run:
    """One save that training waits for, into a new folder."""
    with folder() as root, recorded(root, rule) as seen:
        def work(rank: int) -> None:
            holdfast.save(state_of(1, rank, size), root / "latest", files={"note": b"one"})
            if rank == 0:
                seen.mark(1)

        together(size, work)
    return Run("save", seen.trace, load_at("latest"), save_at("latest"))


def save_over(size: int = 2, *, rule: Rule | None = None) -> Run:
    """``overwrite=True``, twice, over a checkpoint that is durable."""
    with folder() as root:
        together(size, lambda rank: holdfast.save(state_of(1, rank, size), root / "latest", files={"note": b"1"}))
        with recorded(root, rule) as seen:
            def work(rank: int) -> None:
                for version in (2, 3):
                    state = state_of(version, rank, size)
                    holdfast.save(state, root / "latest", overwrite=True, files={"note": b"%d" % version})
                    if rank == 0:
                        seen.mark(version)

            together(size, work)
    return Run("save over", seen.trace, load_at("latest"), save_at("latest"), first=1)


def training(name: str, steps: int, size: int, *, rule: Rule | None = None, keeps: int = 2, **how: Any) -> Run:
    """A run of a manager from its first step."""
    with folder() as root, recorded(root, rule) as seen:
        def work(rank: int) -> None:
            with manager(root, **how) as found:
                found.restore(blank())
                for version in range(1, steps + 1):
                    found.step(version, state_of(version, rank, size))
                    found.wait()
                    if rank == 0:
                        seen.mark(version)

        together(size, work)
    again = {key: value for key, value in how.items() if key != "worker"}
    return Run(
        name, seen.trace, lambda at: restore_run(at, **again), lambda at, version: train_on(at, version, **again), keeps
    )


def sweep(*, rule: Rule | None = None) -> Run:
    """Steps that go: ``Keep(last=2)``."""
    return training("sweep", 5, 2, keep=Keep(last=2), rule=rule)


def thin(*, rule: Rule | None = None) -> Run:
    """Sections that go: optimizers of older steps, and steps that stay as models."""
    return training("thin", 5, 2, keep=Keep(last=2, optimizer_last=1, model_every=2), rule=rule)


def incremental(*, rule: Rule | None = None) -> Run:
    """Saves that link what has not changed, and bases that are swept."""
    return training("incremental", 5, 2, keep=Keep(last=2), incremental=True, rule=rule)


def no_links(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
    """A file system without hard links for data files."""
    if call.verb == "link" and call.target.endswith(".safetensors"):
        raise OSError(errno.EPERM, "no links here", call.path)
    return do()


def citing(*, rule: Rule = no_links) -> Run:
    """The same where files cannot be linked, and are cited where they lie."""
    return training("citing", 5, 2, keep=Keep(last=2), incremental=True, rule=rule)


def background(*, rule: Rule | None = None) -> Run:
    """Saves in the background, whose parts lie on disk before the commit; swept as they go."""
    return training("background", 3, 2, keep=Keep(last=2), worker="thread", rule=rule)
