"""What there is to run, what each part may take, and how long all of it lasts at the most.

`run` follows it. Plain numbers: nothing here starts anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

LANES = 4
"""Parts of tests at a time: they wait for processes and delays more than for the device."""

STARTING = 25.0
"""Seconds until the first part begins, and after the last one ended: wheels, looks at the device, the page."""

MOST = 530.0
"""Seconds that all of it may take: nine minutes, less what nobody counts."""


@dataclass(frozen=True)
class Part:
    """A process with a limit. Either ``tests``, arguments of pytest below tests/gpu, or a ``module`` that measures."""

    name: str
    what: str
    seconds: float
    tests: tuple[str, ...] = ()
    module: str = ""
    settings: dict[str, str] = field(default_factory=dict)

    stretches: bool = False
    """Whether it may take what the others leave of the time."""

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it."""
        return bool(self.module)


_SEGMENTS = "expandable_segments:True"

PARTS = [
    Part("rates", "raw rates of device, memory and disk", 40, module="benchmarks.gpu.rates"),
    Part("steps", "steps beside saves; torn snapshots, graphs, GradScaler", 85, ("test_steps.py",)),
    Part("trouble", "no memory, a failing kernel, processes that end", 85, ("test_trouble.py",)),
    Part("ranks", "two ranks on the device, NCCL alone, FSDP2, replicas", 85, ("test_ranks.py",)),
    Part(
        "segments", "staging and trouble, with memory that grows in segments", 110,
        ("test_staging.py", "test_trouble.py"),
        settings={"PYTORCH_CUDA_ALLOC_CONF": _SEGMENTS, "PYTORCH_ALLOC_CONF": _SEGMENTS},
    ),
    Part("staging", "copies beside training, pinned memory, device memory", 55, ("test_staging.py",)),
    Part("loads", "loads into the device, random numbers, default device", 50, ("test_loads.py",)),
    Part("incremental", "fingerprints on the device", 45, ("test_incremental.py",)),
    Part("memory", "the device's memory beyond the state", 25, module="benchmarks.gpu.memory"),
    Part("whole", "saves that training waits for, and loads, beside others", 90, module="benchmarks.gpu.whole"),
    Part(
        "training", "background saves of 20 GB in training, beside others", 180, module="benchmarks.gpu.training",
        stretches=True,
    ),
]  # fmt: skip


def chosen(only: Sequence[str], *, small: bool) -> list[Part]:
    """The parts of these names, all if there are none; in small each may take much longer, on whatever is there.

    Raises ValueError for a name that there is not.
    """
    unknown = set(only) - {part.name for part in PARTS}
    if unknown:
        raise ValueError(f"there is no part {', '.join(sorted(unknown))}: {', '.join(part.name for part in PARTS)}")
    found = [part for part in PARTS if not only or part.name in only]
    return [replace(part, seconds=6 * part.seconds) for part in found] if small else found


def in_turn(parts: Sequence[Part]) -> list[list[Part]]:
    """What runs one after another: parts alone, or several tests side by side."""
    turns: list[list[Part]] = []
    for part in parts:
        if part.alone or not turns or turns[-1][0].alone:
            turns.append([])
        turns[-1].append(part)
    return turns


def longest(parts: Sequence[Part], lanes: int = LANES) -> float:
    """Seconds that these parts take at the most."""
    total = STARTING
    for turn in in_turn(parts):
        ends = [0.0] * lanes
        for part in turn:
            ends.sort()
            ends[0] += part.seconds
        total += max(ends)
    return total


def most(parts: Sequence[Part]) -> float:
    """Seconds that these parts take at the most, where one may stretch over what the others leave."""
    return max(MOST, longest(parts)) if any(part.stretches for part in parts) else longest(parts)
