"""When a fault comes, and what the program does then: waits for its moment, kills, freezes, fills, and lets go.

The loop calls `wait_for`, then `inject`. Judges nothing; what a rank does to itself is in `faults`.
"""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path

from tests.soak import check, faults
from tests.soak.faults import send
from tests.soak.plan import Episode
from tests.soak.world import World

AFTERWARDS = ("none", "damage", "lose fast")
"""Faults that need no moment: they come when all processes are gone, or never."""


def wait_for(episode: Episode, world: World) -> bool:
    """Until the moment of the fault has come; False if training ended before it."""
    fault = episode.fault

    def over() -> bool:
        return not world.living or len(world.of("trained")) + len(world.codes) >= episode.world

    if fault.kind == "disk":
        world.wait(lambda: bool(world.of("hit")) or over(), "a call to the disk that fails")
        return bool(world.of("hit"))
    if fault.stage is not None and fault.kind != "delete":
        come = 1 if fault.stage in ("committing", "committed") else episode.world
        world.wait(lambda: bool(world.of("at")) or over(), f"a rank at {fault.stage}")
        world.wait(lambda: len(world.of("at")) >= come or over(), "all ranks there", seconds=2)
        return bool(world.of("at"))
    world.wait(lambda: len({line[1] for line in world.of("saving")}) >= fault.step or over(), "a save")
    world.wait(lambda: False, "", seconds=fault.delay)
    return not over()


def inject(episode: Episode, world: World, root: Path) -> int | None:
    """Do it, let ranks go that wait for it, and end it if it ends. The step that was deleted, if one was."""
    play = {"kill": _kill, "freeze": _freeze, "limit": _limit, "signal": _signal}
    chance = random.Random(episode.name)
    deleted = None
    if episode.fault.kind == "full":
        _fill(episode, world, root, chance)
    elif episode.fault.kind == "delete":
        deleted = _delete(root, chance)
    elif episode.fault.kind in play:
        play[episode.fault.kind](episode, world, chance)
    world.say("go")
    return deleted


def _victims(episode: Episode, world: World) -> list[int]:
    """The processes that the fault is meant for."""
    fault = episode.fault
    found = [world.pids[r] for r in fault.ranks if r in world.living] if fault.whom != "writers" else []
    if fault.whom != "trainers":
        found += [pid for rank in fault.ranks for pid in world.writers.get(rank, ())[-1:]]
    return found


def _kill(episode: Episode, world: World, chance: random.Random) -> None:
    for pid in _victims(episode, world):
        send(pid, signal.SIGKILL, group=pid in world.pids)


def _freeze(episode: Episode, world: World, chance: random.Random) -> None:
    pids = _victims(episode, world)
    for pid in pids:
        send(pid, signal.SIGSTOP)
    world.say("go")
    world.wait(lambda: False, "", seconds=episode.fault.hold)
    for pid in pids:
        send(pid, signal.SIGKILL if episode.fault.then == "kill" else signal.SIGCONT)


def _fill(episode: Episode, world: World, root: Path, chance: random.Random) -> None:
    ballast = faults.fill(root, leave=chance.choice([0, 4096, 100_000, 3_000_000]))
    world.say("go")
    world.wait(lambda: bool(world.of("trained")), "", seconds=episode.fault.hold)
    ballast.unlink()


def _limit(episode: Episode, world: World, chance: random.Random) -> None:
    pids, nbytes = _victims(episode, world), chance.choice([0, 5000, 60_000, 1_000_000])
    for pid in pids:
        faults.limit(pid, nbytes)
    world.say("go")
    world.wait(lambda: bool(world.of("trained")), "", seconds=episode.fault.hold)
    for pid in {*pids, *_victims(episode, world)}:  # a writer started meanwhile has the limit from its trainer
        faults.limit(pid, None)


def _signal(episode: Episode, world: World, chance: random.Random) -> None:
    send(world.pids[episode.fault.ranks[0]], signal.SIGTERM)


def _delete(root: Path, chance: random.Random) -> int | None:
    """A user removes a step that is not the newest, while training goes on."""
    there = {step: folder for step, folder in check.folders(root).items() if (folder / "manifest.json").exists()}
    older = sorted(there)[:-1]
    if not older:
        return None
    step = chance.choice(older)
    shutil.rmtree(there[step], ignore_errors=True)  # a sweep may be at it too
    return step
