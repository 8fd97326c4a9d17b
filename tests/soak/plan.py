"""What an episode does: ranks, mesh, manager, fault and its moment, all from a seed.

The loop and the ranks read it. Pure: the same seed and number give the same episode, and no file or clock is asked.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from holdfast import Keep, Upload

LONGEST = 8
"""Episodes that one run, in one folder, lasts at most."""

STAGES = ("save", "plan", "planned", "staging", "staged", "handed", "durable", "committing", "committed", "parts")
"""Moments of a save, in order, at which ranks can be stopped; those of the commit are the first rank's alone."""

MESHES = {
    1: ["one process"],
    2: ["DDP 2", "FSDP2 2", "TP 2"],
    3: ["FSDP2 3"],
    4: ["FSDP2 4", "HSDP 2x2", "FSDP2 x TP 2x2"],
}
"""Layouts of `tests.meshes` that a run can be resumed on, by world size."""

VERBS = (
    "any", "any", "create", "open", "write", "write", "read", "sync", "sync folder", "reserve", "link", "replace",
    "delete", "make folder", "remove folder", "list", "stat",
)  # fmt: skip
"""Calls of `holdfast.storage.local.disk` that can be made to fail."""

OFTEN = ("any", "create", "open", "write", "read", "sync", "stat")
"""Those that a save makes many times."""

WEIGHTS = {
    "none": 10, "kill": 30, "freeze": 12, "full": 40, "limit": 6, "signal": 8, "disk": 16, "delete": 6, "damage": 10,
    "lose fast": 20, "stop writers": 12,
}  # fmt: skip
"""How often each fault is drawn, relative to the others.

"stop writers" is a freeze: they stand still before they have written anything, and are then killed. What is committed
meanwhile is lost.
"""


@dataclass(frozen=True)
class Run:
    """What stays the same as long as episodes go on in one folder.

    ``module``: a model and AdamW are part of the state. ``rows``: of the large tensor. ``tiers``: saves go to a fast
    folder and from there to a store. ``small``: the folder is a file system of its own, of a few times a checkpoint.
    """

    seed: int
    first: int
    module: bool
    rows: int
    tiers: bool
    small: bool

    @property
    def key(self) -> str:
        """What the contents of its tensors are made of."""
        return f"{self.seed}:{self.first}"


@dataclass(frozen=True)
class Fault:
    """What is done to an episode.

    ``step``: in which save, counted from the first of the episode. ``stage``: where the ranks wait for it; None: at a
    random moment, ``delay`` seconds after that save has begun. ``whom``: "trainers", "writers" or "both", of these
    ``ranks``. ``hold``: how long it lasts, in seconds, if it ends. ``then``: what ends it. ``number`` and ``error`` are
    for calls to the disk: which one, and what it raises (0: it is slow).
    """

    kind: str
    step: int
    stage: str | None
    delay: float
    whom: str
    ranks: tuple[int, ...]
    hold: float
    then: str
    verb: str
    number: int
    error: int


@dataclass(frozen=True)
class Episode:
    """One start of a run: restore, train for ``steps`` steps, a fault, the end."""

    seed: int
    number: int
    run: Run
    world: int
    mesh: str
    steps: int
    every: int
    keep: Keep
    keep_fast: Keep
    upload: Upload
    manager: dict[str, Any]
    fresh: bool
    pause: float
    fault: Fault
    restart: bool

    @property
    def name(self) -> str:
        return f"{self.seed}:{self.number}"

    @property
    def deadline(self) -> float:
        return float(self.manager["deadline"])


def begins(seed: int, number: int) -> bool:
    """Whether this episode begins a new run; else it goes on where the one before ended."""
    return number == 0 or random.Random(f"begin {seed}:{number}").random() < 0.2


def first_of(seed: int, number: int) -> int:
    """The episode with which the run of this one began."""
    start = next(at for at in range(number, -1, -1) if begins(seed, at))
    return number - (number - start) % LONGEST


def run_of(seed: int, number: int) -> Run:
    first = first_of(seed, number)
    chance = random.Random(f"run {seed}:{first}")
    tiers = chance.random() < 0.2
    small = not tiers and chance.random() < 0.25
    rows = chance.choice([64, 1024] if small else [64, 1024, 4096, 16384])  # a small disk has room for all that is kept
    return Run(seed, first, module=chance.random() < 0.5, rows=rows, tiers=tiers, small=small)


def episode_of(seed: int, number: int) -> Episode:
    run = run_of(seed, number)
    chance = random.Random(f"episode {seed}:{number}")
    world = chance.choice([1, 2, 2, 3, 4])
    steps, every = chance.randint(3, 9), chance.choice([1, 1, 1, 2])
    fault = _fault(chance, run, world, steps // every)
    manager = _manager(chance, fault)
    if manager["worker"] == "none" and fault.stage in ("staged", "parts"):  # a save that training waits for has neither
        fault = replace(fault, stage=None)
    return Episode(
        seed, number, run, world, mesh=chance.choice(MESHES[world]), steps=steps, every=every,
        keep=_keep(chance), keep_fast=Keep(last=chance.choice([1, 2, 3])),
        upload=chance.choice([Upload(), Upload(every=2), Upload(every=3, newest=False)]),
        manager=manager, fresh=chance.random() < 0.5, pause=chance.choice([0.0, 0.0, 0.01, 0.05]),
        fault=fault, restart=chance.random() < 0.3,
    )  # fmt: skip


def metric_of(step: int) -> float:
    """What training tells the manager of a step, for ``Keep(best=…)``."""
    return float(step * 7919 % 101)


def _keep(chance: random.Random) -> Keep:
    found: dict[str, Any] = {"last": chance.choice([1, 2, 2, 3, 5])}
    if chance.random() < 0.3:
        found["every"] = chance.choice([3, 4, 7])
    if chance.random() < 0.3:
        found["best"] = chance.choice([1, 2])
    if chance.random() < 0.3:
        found["optimizer_last"] = chance.choice([1, 2])
    if chance.random() < 0.2:
        found["model_every"] = chance.choice([2, 5])
    return Keep(**found)


def _manager(chance: random.Random, fault: Fault) -> dict[str, Any]:
    """Arguments of the CheckpointManager. A deadline is short only where ranks have to wait for it to pass."""
    # Calls of a writer process are out of reach: it is an interpreter of its own.
    workers = ["process", "thread", "none"] if fault.kind == "disk" else ["process", "process", "thread", "none"]
    worker = chance.choice(workers)
    return {
        "worker": worker,
        "incremental": chance.random() < 0.4,
        "slots": chance.choice([1, 1, 2]),
        "busy": chance.choice(["wait", "wait", "skip"]),
        "memory_limit": chance.choice([None, None, 64 << 20]),
        "deadline": 5.0 if fault.kind in ("kill", "freeze") else 40.0,
    }


def _fault(chance: random.Random, run: Run, world: int, saves: int) -> Fault:
    weights = {
        kind: weight
        for kind, weight in WEIGHTS.items()
        if not (kind == "lose fast" and not run.tiers) and not (kind == "full" and not run.small)
    }
    verb = chance.choice(VERBS)
    kind = chance.choices(list(weights), list(weights.values()))[0]
    ranks = (
        tuple(range(world)) if chance.random() < 0.5 else tuple(chance.sample(range(world), chance.randint(1, world)))
    )
    fault = Fault(
        kind, step=chance.randint(1, max(saves, 1)), stage=chance.choice(STAGES) if chance.random() < 0.6 else None,
        delay=chance.choice([0.0, 0.002, 0.01, 0.03, 0.1]) * chance.random(),
        whom=chance.choice(["trainers", "trainers", "writers", "both"]), ranks=ranks,
        hold=chance.choice([0.2, 1.0, 3.0, 8.0]) * chance.uniform(0.5, 1.0),
        then=chance.choice(["go on", "go on", "kill"]),
        verb=verb,
        number=chance.randint(1, 12 if verb in OFTEN else 2), error=chance.choice([5, 28, 28, 0]),  # EIO, ENOSPC, slow
    )  # fmt: skip
    if kind == "stop writers":
        return replace(fault, kind="freeze", stage="planned", whom="writers", then="kill", hold=max(fault.hold, 1.0))
    return fault
