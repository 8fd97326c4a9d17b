"""What a rank is asked to do: some steps of training, with a save at every so many of them.

Called by name in the rank processes of a pool, or directly where there is one rank only.
Never looks at what was saved; its clock is the monotonic one, which all processes of a machine share.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.stall_systems import Started, System, make
from benchmarks.stall_train import Size, Training
from benchmarks.stall_watch import cpu_seconds

_libc = ctypes.CDLL(None)
_held: list[Training] = []  # at most one
SETTLING = 4
"""Steps until those of a new training take as long as later ones."""


@dataclass(frozen=True)
class Course:
    """``steps`` of training after some to warm up, with a save before the first of every ``every`` (0: none)."""

    steps: int
    every: int
    warm_up: int = 2

    @property
    def saves(self) -> int:
        return -(-self.steps // self.every) if self.every else 0

    def saves_before(self, step: int) -> bool:
        return self.every > 0 and step % self.every == 0


@dataclass(frozen=True)
class Save:
    """One save as one rank saw it, in seconds.

    ``waited`` for the save before, ``call`` in the call itself, ``hook`` between backward and the optimizer's step.
    ``began`` and ``durable``: times of the clock. ``copying``: seconds and bytes of the copy to host memory.
    """

    began: float
    waited: float
    call: float
    hook: float
    durable: float
    copying: tuple[float, int] | None


@dataclass(frozen=True)
class Segment:
    """``steps``: when each began, and when the last one ended. ``cpu``: seconds, until the last save ended."""

    steps: list[float]
    cpu: float
    nbytes: int
    saves: list[Save]

    @property
    def began(self) -> float:
        return self.steps[0]

    @property
    def ended(self) -> float:
        return self.steps[-1]


def hold(size: Size, device: str = "cpu") -> int:
    """Have a training of this size under way; this rank's bytes of it."""
    if not _held or _held[0].size != size:
        _held.clear()
        _held.append(Training(size, device))
        for _ in range(SETTLING):
            _held[0].step()
    return _held[0].local_bytes


def segment(system: str, folder: Path, course: Course) -> Segment:
    """Go on training for a while, saving with this system to ``folder``."""
    training = _held[0]
    gc.collect()
    _libc.malloc_trim(0)  # memory kept from an earlier segment would hide what this one takes
    saver = make(system, training)
    try:
        saver.prepare(folder, course.saves)
        for _ in range(course.warm_up):
            training.step()
        training.synchronize()
        if dist.get_rank() == 0:
            os.sync()  # what was written before is not part of what comes
        dist.barrier()
        return _train(training, saver, folder, course)
    finally:
        saver.close()


@dataclass
class _UnderWay:
    """A save of which not all is known yet."""

    began: float
    waited: float
    call: float
    started: Started
    hook: float = 0.0

    def end(self) -> Save:
        """Wait until it is durable."""
        durable = self.started.durable.result()
        hook = self.hook + self.started.hooked()
        return Save(self.began, self.waited, self.call, hook, durable, self.started.copying())


def _train(training: Training, saver: System, folder: Path, course: Course) -> Segment:
    saves: list[_UnderWay] = []
    steps: list[float] = []
    cpu = cpu_seconds(os.getpid())
    for step in range(course.steps):
        steps.append(time.monotonic())
        if course.saves_before(step):
            saves.append(_start(training, saver, folder, saves))
        training.learn()
        training.synchronize()  # so that what is waited for next is the copy alone
        if course.saves_before(step):
            saves[-1].hook = _seconds(saves[-1].started.staged)
        training.update()
    training.synchronize()
    steps.append(time.monotonic())
    ends = [save.end() for save in saves]
    dist.barrier()
    return Segment(steps, cpu_seconds(os.getpid()) - cpu, training.local_bytes, ends)


def _start(training: Training, saver: System, folder: Path, before: list[_UnderWay]) -> _UnderWay:
    training.synchronize()
    waited = _seconds(before[-1].started.durable.result) if before else 0.0
    saver.gather(training.steps)
    began = time.monotonic()
    started = saver.save(folder / f"save-{len(before)}", training.steps)
    return _UnderWay(began, waited, time.monotonic() - began, started)


def _seconds(wait: Callable[[], object]) -> float:
    began = time.monotonic()
    wait()
    return time.monotonic() - began
