"""Each operation of the library that is checked against power cuts: done for real, small, and recorded as a `Run`.

Whatever promises something says so by a mark. The tests, the command and the mutants call these. Never judges.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import holdfast
from holdfast import Keep
from holdfast.storage.local import disk
from tests.crash.model import Tree
from tests.crash.profiles import State
from tests.crash.record import Rule, recorded
from tests.crash.runs import (
    Run,
    Wrong,
    blank,
    folder,
    load_at,
    manager,
    quiet,
    restore_run,
    save_at,
    state_of,
    together,
    train_on,
    version_of,
    whole_state,
)


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


@contextmanager
def small_files_too() -> Iterator[None]:
    """Borrow files however small they are."""
    with mock.patch("holdfast.policies.incremental.reuse.SMALLEST", 1):
        yield


def incremental(*, rule: Rule | None = None) -> Run:
    """Saves that link what has not changed, and bases that are swept."""
    with small_files_too():
        run = training("incremental", 5, 2, keep=Keep(last=2), incremental=True, rule=rule)
    if not any(call.startswith("link") and "/frozen/" in call for call in run.trace.calls):
        raise AssertionError("nothing was borrowed")
    return run


def no_links(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
    """A file system without hard links for data files."""
    if call.verb == "link" and call.target.endswith(".safetensors"):
        raise OSError(errno.EPERM, "no links here", call.path)
    return do()


def citing(*, rule: Rule = no_links) -> Run:
    """The same where files cannot be linked, and are cited where they lie."""
    with small_files_too():
        return training("citing", 5, 2, keep=Keep(last=2), incremental=True, rule=rule)


def background(*, rule: Rule | None = None) -> Run:
    """Saves in the background, whose parts lie on disk before the commit; swept as they go."""
    return training("background", 3, 2, keep=Keep(last=2), worker="thread", rule=rule)


def late_commit(*, rule: Rule | None = None) -> Run:
    """A background save whose ranks had all finished when everything died; the next start commits it."""
    before = background().trace
    cut = max(i for i, call in enumerate(before.calls) if call.startswith("create") and ".manifest." in call)
    tree, how = before.replay(cut).tree(), {"keep": Keep(last=2)}
    return _on(tree, before.root, "late commit", lambda at: restore_run(at, **how), first=2, rule=rule)


def again(run: Run, state: State) -> Run:
    """What restoring does after a cut, for a second one in the middle of it."""
    promised = max([run.first, *(v for at, v in run.trace.marks() if at < state.cut)])
    made = _on(state.tree, run.trace.root, f"{run.name}, again", run.restore, first=promised)
    return replace(made, restore=run.restore, save_on=run.save_on, keeps=min(run.keeps, 1))


def _on(
    tree: Tree, at: Path, name: str, restore: Callable[[Path], int | None], *, first: int, rule: Rule | None = None
) -> Run:
    with folder(at) as root:
        tree.materialise(root)
        with recorded(root, rule) as seen:
            version = restore(root)
            if version is not None:
                seen.mark(version)
    return Run(name, seen.trace, restore, lambda at, version: train_on(at, version, keep=Keep(last=2)), first=first)


def drop(*, rule: Rule | None = None) -> Run:
    """A checkpoint loses its optimizer."""
    with folder() as root:
        together(4, lambda rank: holdfast.save(state_of(1, rank, 4), root / "latest"))
        with recorded(root, rule) as seen:
            holdfast.tools.drop(root / "latest", "optimizer")
            seen.mark(1)

    def restore(at: Path) -> int | None:
        state = blank()
        holdfast.load(at / "latest", state, only=["model", "frozen", "step", "version"])
        return version_of(state, ("model", "frozen"))

    return Run("drop", seen.trace, restore, save_at("latest"), first=1)


def copy(*, rule: Rule | None = None) -> Run:
    """From one folder to another that is new; then over it another checkpoint."""
    with folder() as root:
        for version in (1, 2):
            together(2, lambda rank: holdfast.save(state_of(version, rank, 2), root / f"source-{version}"))
        with recorded(root, rule) as seen:
            for version in (1, 2):
                holdfast.copy(root / f"source-{version}", root / "latest", overwrite=True)
                seen.mark(version)

    def copy_again(at: Path, version: int) -> None:
        holdfast.copy(at / "source-2", at / "latest", overwrite=True)
        if load_at("latest")(at) != 2:
            raise Wrong("what was copied is not there")

    return Run("copy", seen.trace, load_at("latest"), copy_again, keeps=0)


def tiers(*, rule: Rule | None = None) -> Run:
    """A fast folder and the root behind it, both on disks that lose power at once."""
    how: dict[str, Any] = {"keep": Keep(last=2), "keep_fast": Keep(last=1), "worker": "none"}
    with folder() as root:
        (root / "fast").mkdir()
        (root / "slow").mkdir()
        with recorded(root, rule) as seen, manager(root / "slow", fast=root / "fast", **how) as found:
            found.restore(blank())
            for version in (1, 2, 3):
                found.step(version, whole_state(version))
                found.wait()
                seen.mark(version)

    def restore(at: Path) -> int | None:
        return restore_run(at / "slow", fast=at / "fast", **how)

    def save_on(at: Path, version: int) -> None:
        train_on(at / "slow", version, fast=at / "fast", **how)

    return Run("tiers", seen.trace, restore, save_on, keeps=1, retires=True)


def no_exchange(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
    """A file system with no more than rename(2)."""
    return False if call.verb in ("rename", "exchange") else do()


def convert(to: str = "holdfast", *, rule: Rule | None = None) -> Run:
    """A checkpoint made of another one, over one that is there; a call that was cut off goes on where it was."""
    name = "made.pt" if to == "torch" else "made"

    def make(at: Path) -> None:
        holdfast.convert(at / "source", at / name, to=to, overwrite=True, max_shard_bytes=2500)

    def restore(at: Path) -> int | None:
        if to == "torch":
            return version_of(torch.load(at / name, weights_only=True)) if (at / name).exists() else None
        aside = "made.partial/old"  # where an exchange is not to be had, nothing is at its place for a moment
        return load_at(aside if not (at / name).exists() and (at / aside).exists() else name)(at)

    def make_again(at: Path, version: int) -> None:
        with in_small_steps():
            make(at)
        if restore(at) != 2:
            raise Wrong("what was converted is not there")

    with folder() as root, in_small_steps():
        holdfast.save(whole_state(1), root / "source")
        make(root)
        holdfast.save(whole_state(2), root / "source", overwrite=True)
        with recorded(root, rule) as seen:
            make(root)
            seen.mark(2)
    told = f"convert to {to}" if rule is None else "convert without exchange"
    return Run(told, seen.trace, restore, make_again, keeps=0, first=1, always_on=True)


@contextmanager
def in_small_steps() -> Iterator[None]:
    """Note each unit of a conversion as soon as it is durable."""
    with mock.patch("holdfast.export.copying.SYNC", 1):
        yield


def killed(at: int, *, managed: bool = True) -> Run:
    """A process dies at one of its operations, what it did stays; another goes on after it; then the power is cut."""
    dead = False

    def rule(number: int, call: disk.Call, do: Callable[[], Any]) -> Any:
        if dead and number >= at:
            raise OSError(errno.EIO, "the process is dead", call.path)
        return do()

    def save(root: Path, version: int) -> None:
        if managed:
            with manager(root, keep=Keep(last=2)) as found:
                found.restore(blank())
                found.step(version, whole_state(version))
        else:
            holdfast.save(whole_state(version), root / "latest", overwrite=True)

    with folder() as root, quiet(), recorded(root, rule) as seen:
        dead = True
        with suppress(holdfast.SaveFailed):
            save(root, 1)
        dead = False
        since = len(seen.trace.ops)
        save(root, 2)
        seen.mark(2)
    name = f"killed at {at}" + ("" if managed else ", at one path")
    if not managed:
        return Run(name, seen.trace, load_at("latest"), save_at("latest"), since=since)
    how: dict[str, Any] = {"keep": Keep(last=2)}
    return Run(
        name, seen.trace, lambda at: restore_run(at, **how), lambda at, version: train_on(at, version, **how),
        since=since,
    )  # fmt: skip


def calls_of_a_save(*, managed: bool = True) -> int:
    """How many operations `killed` can die at."""
    whole = killed(1 << 30, managed=managed)
    return whole.since


OPERATIONS: dict[str, Callable[[], Run]] = {
    "save": plain_save,
    "save over": save_over,
    "sweep": sweep,
    "thin": thin,
    "incremental": incremental,
    "citing": citing,
    "background": background,
    "late commit": late_commit,
    "drop": drop,
    "copy": copy,
    "tiers": tiers,
    "convert to holdfast": partial(convert, "holdfast"),
    "convert to torch": partial(convert, "torch"),
    "convert without exchange": partial(convert, rule=no_exchange),
}
