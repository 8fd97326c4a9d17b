"""What the tests of devices stand on: a real CUDA device where there is one, else the stand-in.

Tests ask the `Lab` for delays and counts instead of `torch.cuda`, so that nearly all of their code runs on both. Never
changes a setting of the device.
"""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.buffers import device as staging
from tests.gpu import standin

REAL = torch.cuda.is_available()

needs_cuda = pytest.mark.skipif(not REAL, reason="needs a CUDA device: the stand-in has nothing of the kind")

LIMIT = float(os.environ.get("HOLDFAST_GPU_LIMIT", "250"))
"""Seconds that a process of a test may take, wherever it runs; `make gpu` has less to spare."""

_CYCLES = 1_500_000
"""Of a device's clock in a millisecond, about."""


@dataclass
class Lab:
    """A device to test on. ``kind`` is where tests make tensors: the stand-in's lie on the host and pretend."""

    fake: standin.Device | None
    copied: list[int] = field(default_factory=list)
    """Bytes of each tensor, or part of one, that was queued to be copied to the host."""

    @property
    def kind(self) -> str:
        return "cuda" if self.fake is None else "cpu"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0) if self.fake is None else standin.DEVICE

    def synchronize(self) -> None:
        """Wait until the device has done all it was told."""
        if self.fake is None:
            torch.cuda.synchronize()

    def busy(self, milliseconds: float = 100.0) -> None:
        """Keep the stream that trains from doing what is queued next. The stand-in's does everything at once."""
        if self.fake is None:
            torch.cuda._sleep(int(milliseconds * _CYCLES))

    def late(self, milliseconds: float = 100.0) -> None:
        """Keep the side stream from copying. The stand-in's copies nothing before somebody waits for it."""
        if self.fake is None:
            side = staging._side.setdefault(self.device, torch.cuda.Stream(self.device))
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(milliseconds * _CYCLES))

    def under_way(self) -> bool:
        """Whether the side stream has not done all it was told."""
        if self.fake is None:
            return self.device in staging._side and not staging._side[self.device].query()
        return any(stream.left for stream in self.fake.streams)

    def watch_memory(self) -> Callable[[], tuple[int, int]]:
        """A call that tells by how many bytes the device's memory grew at the most: allocated, and kept for that.

        The stand-in has none.
        """
        if self.fake is not None:
            return lambda: (0, 0)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return lambda: (torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - kept)

    @contextmanager
    def full(self) -> Iterator[None]:
        """No memory left on the device, for anybody of this process."""
        if self.fake is not None:
            self.fake.full = True
            yield
            self.fake.full = False
            return
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / total)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    def break_down(self) -> None:
        """Fail for good, as after an assertion in a kernel: for a process that is to end after it."""
        if self.fake is not None:
            standin.Stream.broken = True
            return
        torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]

    def another_stream(self) -> AbstractContextManager[Any]:
        """Train on another stream than the default one."""
        if self.fake is None:
            return torch.cuda.stream(torch.cuda.Stream())
        return nullcontext()

    def stuck(self) -> Callable[[], bool]:
        """Keep the stream that trains from doing anything more for seconds; a call that tells whether it still is.

        For tests of who waits for it: nobody should. The stand-in's stream does everything at once.
        """
        if self.fake is not None:
            return lambda: True
        self.busy(3000)
        passed = torch.cuda.Event()
        passed.record()
        return lambda: not passed.query()


@contextmanager
def a_lab() -> Iterator[Lab]:
    """The device, or the stand-in in its place; copies are counted."""
    with pytest.MonkeyPatch.context() as patch:
        fake = None
        if not REAL:
            fake = standin.pretend(patch)
            standin.pretend_states(patch)
        lab = Lab(fake)
        real = staging.Copier.copy

        def copy(self: staging.Copier, tensor: torch.Tensor, start: int, nbytes: int, address: int) -> None:
            lab.copied.append(nbytes)
            real(self, tensor, start, nbytes, address)

        patch.setattr(staging.Copier, "copy", copy)
        yield lab
        lab.synchronize()
        gc.collect()


def trials(seconds: float, least: int, most: int) -> Iterable[random.Random]:
    """Seeded draws for a property: at least so many, then more until the time is over. A failure names its seed."""
    until = time.monotonic() + seconds
    for seed in range(most):
        if seed >= least and time.monotonic() > until:
            return
        yield random.Random(seed)
