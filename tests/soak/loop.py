"""One episode after the other: start the ranks, hear what they restored, inject, wait for the end, check.

`__main__` calls `Soak.episode`; `moments` is how faults come. Counts what happened; raises Violation at the first thing
that does not hold.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.soak import check, faults, moments
from tests.soak.check import Found, Spoiled
from tests.soak.content import Mark, State
from tests.soak.model import Model
from tests.soak.plan import Episode, episode_of, first_of, metric_of
from tests.soak.rank import LOST, manager_of
from tests.soak.world import Violation, World

WARM = 40
"""Episodes after which this process has everything that it needs, and grows no more."""

GROWTH = 128 << 20
"""Bytes that it may grow all the same: later runs may have larger states, and use more threads."""

_libc = ctypes.CDLL(None)

RESTARTED = 1_000_000
"""Added to the number of an episode: the mark of the step that a restart in this process saves after it."""


class Soak:
    """The runs of one seed below ``folder``."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.counts: Counter[str] = Counter()
        self.base = folder
        self.model, self.spoiled, self.found, self.stored = Model(), Spoiled(), Found(), Found()
        self._mounted = False
        self._deleted: int | None = None
        self._held: tuple[int, int] | None = None
        self._memory = 0

    def episode(self, number: int) -> dict[str, Any]:
        """Play one episode; a line of what happened."""
        episode = episode_of(self.seed, number)
        if number == first_of(self.seed, number) or self.base == self.folder:
            self._begin_run(episode)
        began, before = time.monotonic(), Counter(self.counts)
        world = World(episode, self.base)
        try:
            self._play(episode, world)
        finally:
            world.close()
        self._after(episode, world)
        shutil.rmtree(world.words)
        self._check_self()
        self.counts["episodes"] += 1
        line = {"episode": number, "seconds": round(time.monotonic() - began, 2), "fault": episode.fault.kind}
        line |= {"world": episode.world, "mesh": episode.mesh if episode.run.module else "plain"}
        return line | {key: n - before[key] for key, n in self.counts.items() if n > before[key] and key != "episodes"}

    # Runs

    @property
    def root(self) -> Path:
        """Where saves are committed: with tiers the fast folder."""
        return self.base / "root"

    def _begin_run(self, episode: Episode) -> None:
        self.close()
        self.base = self.folder / f"run-{episode.run.first}"
        shutil.rmtree(self.base, ignore_errors=True)
        self.root.mkdir(parents=True)
        self._mounted = episode.run.small and faults.mounted(self.root)
        self.model, self.found, self.stored = Model(), Found(), Found()
        self.counts["runs"] += 1

    def close(self) -> None:
        """The run is over, and nothing of it is wanted any more."""
        self.spoiled.close()
        if self.base == self.folder:
            return
        if self._mounted:
            faults.unmount(self.root)
        self._mounted = False
        shutil.rmtree(self.base)
        self.base = self.folder

    def abandon(self) -> None:
        """Leave the files of the run where somebody can look at them, on a file system that stays."""
        self.spoiled.close()
        if self._mounted:
            shutil.copytree(self.root, self.base / "root-copied", symlinks=True)
            faults.unmount(self.root)

    # One episode

    def _play(self, episode: Episode, world: World) -> None:
        world.wait(lambda: len({line[0] for line in world.of("restored")}) == episode.world, "restore on all ranks")
        started = len(world.of("restored")) == episode.world
        if started:
            self._judge_restored(episode, world)
            world.say("train")
            self._inject(episode, world)
        world.say("train")
        world.say("go")
        world.wait(lambda: len(world.of("trained")) >= len(world.living), "the end of training")
        world.say("healed")
        world.end()
        world.await_writers()
        self._judge_told(episode, world)

    def _inject(self, episode: Episode, world: World) -> None:
        kind = episode.fault.kind
        if kind in moments.AFTERWARDS:
            return
        if kind == "full" and not self._mounted:
            self.counts["full: not permitted here"] += 1
            return
        if not moments.wait_for(episode, world):
            self.counts[f"{kind}: missed"] += 1
            return
        self.counts[f"{kind}: injected"] += 1
        self.counts[f"{kind}: in the middle of a save"] += check.interrupted(self.root)
        self._deleted = moments.inject(episode, world, self.root)
        if self._deleted is not None:
            self.model.forget([self._deleted])

    def _judge_restored(self, episode: Episode, world: World) -> None:
        """All ranks have the same step, the newest that there is, bit by bit."""
        told = world.of("restored")
        if len({str(line[1:3]) for line in told}) != 1:
            raise Violation(f"ranks have restored different steps: {told}")
        if told[0][1] is None:
            self._judge_choice(None)
            return
        step, mark, unverified = told[0][1], (told[0][2][0], told[0][2][1]), any(line[4] for line in told)
        wrong = {line[0]: line[3] for line in told if line[3]}
        if wrong:
            # Blocks that are read only in part cannot be proved, and the load says so: read/ranges.py has why.
            if step not in self.found.spoiled or not unverified:
                raise Violation(f"step {step} was restored with other bits than were saved: {wrong}")
            self.counts["altered bytes in blocks read in part"] += 1
        else:
            self._judge_choice((step, mark))
        self.counts["restores"] += 1
        self._judge_litter("after the restore")

    def _judge_choice(self, chosen: tuple[int, Mark] | None) -> None:
        """What was restored is the newest whole step, or a newer one that could be committed late or not be proved."""
        there = {**self.stored.complete, **self.found.complete} or {**self.stored.good, **self.found.good}
        newest = max(there, default=0)
        step, mark = chosen if chosen is not None else (0, None)
        if step < newest:
            raise Violation(f"step {step} was restored, but {newest} is whole")
        if step == newest and mark is not None and mark not in (self.found.good.get(step), self.stored.good.get(step)):
            raise Violation(f"step {step} was restored as of {mark}, but there was {there[step]}")
        if step > newest and step not in self.found.parts and step not in self.found.spoiled:
            raise Violation(f"step {step} was restored, but was not there; whole was {newest}")
        if step > newest and step in self.found.parts:
            self.counts["committed late"] += 1
            assert mark is not None
            if not self.model.began(mark):
                raise Violation(f"step {step} of {mark} was committed late, but nobody had begun it")
            self.model.found_late(mark)

    def _judge_litter(self, when: str) -> None:
        if left := check.litter(self.root, self.spoiled):
            raise Violation(f"{when} there stay: {left[:6]}")

    def _judge_told(self, episode: Episode, world: World) -> None:
        """What the ranks say of their saves and of themselves, together."""
        for rank, text in world.of("crashed"):
            raise Violation(f"rank {rank} ended with {text}")
        fault, number = episode.fault, episode.number
        killed = {-signal.SIGKILL} if fault.kind in ("kill", "freeze") else set()
        for rank, code in world.codes.items():
            if code not in {0, LOST} | killed:
                raise Violation(f"rank {rank} ended with status {code}")
            self.counts["ranks gone because another was late"] += code == LOST and not killed
        for _, step in world.of("saving"):
            self.model.begin((number, step), metric_of(step))
        done = {step for _, step in world.of("done")}
        for _, step, failure in [*world.of("failed"), *world.of("raised")]:
            told = failure["settled"] and step > 0
            if told and step in done and [_ for _ in world.of("failed") if _[1] == step and _[2] == failure]:
                again = step == max(done) and "trained" in {line[0] for line in world.told}
                if not again:  # the last save is tried again
                    raise Violation(f"some ranks were told that step {step} is committed, others: {failure['text']}")
            if told and not failure["lost"] and step not in done and [_ for _ in world.of("failed") if _[1] == step]:
                self.model.refuse((number, step))
        for step in done:
            self.model.acknowledge((number, step))
        self.counts["saves acknowledged"] += len(done)
        self.counts["saves failed"] += len({line[1] for line in world.of("failed")} - done)
        self.counts["saves skipped"] += len({line[1] for line in world.of("skipped")})
        ended = world.of("ended")
        for rank, last, _, left in ended:
            if left:
                raise Violation(f"rank {rank} has closed its manager and still holds {left}")
            if fault.kind != "signal" and last not in done:
                raise Violation(f"rank {rank} ended with step {last}, which nobody was told is committed")
        if len({line[1] for line in ended}) > 1:
            raise Violation(f"ranks ended at different steps: {ended}")
        for _, safe in [*world.of("safe"), *((line[0], line[2]) for line in ended)]:
            for step in safe:
                mark = (number, step) if step in done else self.model.mark_of(step)
                if mark is not None:
                    self.model.safe[step] = mark

    # Afterwards

    def _after(self, episode: Episode, world: World) -> None:
        if self._deleted is not None:
            self.model.forget([self._deleted])  # it may have been acknowledged after it was gone
        self._deleted = None
        self.model.retention(episode.keep_fast if episode.run.tiers else episode.keep)
        self._read_back(episode)
        clean = episode.fault.kind == "none" and set(world.codes.values()) == {0}
        if clean and not world.of("failed") and not world.of("skipped") and not episode.run.tiers:
            self._judge_retention(episode)
        if episode.fault.kind == "damage":
            self._damage(episode)
        if episode.fault.kind == "lose fast":
            self._lose_fast(episode)
        if episode.restart:
            self._restart(episode)
        self.model.settle({**self.stored.good, **self.found.good}, self.found.spoiled)

    def _read_back(self, episode: Episode) -> None:
        run = episode.run
        self.found = check.read_back(self.root, run, self.spoiled)
        check.held(self.found, self.model)
        self.stored = Found()
        if run.tiers:
            self.stored = check.read_back(
                self.base / "store" / "run", run, self.spoiled, place=check.store_of(self.base)
            )
            newest = max(self.model.safe, default=0)
            if max(self.stored.good, default=0) < newest:
                raise Violation(f"step {newest} was said to be in the store; there are {sorted(self.stored.good)}")
        self.counts["steps verified"] += self.found.verified + self.stored.verified
        self.counts["bytes verified"] += self.found.nbytes + self.stored.nbytes

    def _judge_retention(self, episode: Episode) -> None:
        """After an end without a fault there is what the rules keep, and no more than coming saves may need."""
        there = set(self.found.good) | set(self.found.spoiled)
        excess = there - episode.keep.kept({step: self.model.metrics.get(step) for step in there})
        if len(excess) > (episode.manager["slots"] + 1 if episode.manager["incremental"] else 0):
            raise Violation(f"steps {sorted(excess)} stay, although {episode.keep} keeps them no more")
        self._judge_litter("after an end without a fault")

    def _damage(self, episode: Episode) -> None:
        """Alter a file of a committed step; one whole step is left."""
        chance = random.Random(f"damage {episode.name}")
        if len(self.found.complete) < 2 and not self.stored.complete:
            return
        self.model.seen(self.found.good)
        steps = sorted(self.found.complete)
        step = chance.choice(steps[-2:]) if steps else 0
        if not step:
            return
        path = chance.choice(check.named(check.folders(self.root)[step])[0 if chance.random() < 0.15 else 1 :])
        if not path.exists() or path.stat().st_size == 0:
            return
        others = [
            s
            for s in steps
            if not any(p.samefile(path) for p in check.named(check.folders(self.root)[s]) if p.exists())
        ]
        if not others and not self.stored.complete:
            return
        how = chance.choice(["delete", "cut", "flip", "flip"])
        if how == "delete" and path.name == "manifest.json":
            how = "cut"  # without one the step is no step any more
        self.spoiled.note(path, deleted=how == "delete")
        faults.spoil(path, how, chance)
        self.counts["damage: injected"] += 1
        self.counts[f"damage: {how}"] += 1
        self._read_back(episode)

    def _lose_fast(self, episode: Episode) -> None:
        if not self.stored.complete:
            return
        shutil.rmtree(self.root)
        self.root.mkdir()
        self.counts["lose fast: injected"] += 1
        self.model.must = {}
        self._read_back(episode)

    def _restart(self, episode: Episode) -> None:
        """The same in this process, on one rank: restore, save a step more, and nothing stays behind."""
        state = State(episode)
        manager = manager_of(self.base, episode, signals=(), worker="thread", busy="wait")
        try:
            loaded = manager.restore(state.tree)
            if loaded is None or loaded.step is None:
                self._judge_choice(None)
                return
            mark = state.tree["episode"], state.tree["step"]
            if wrong := state.faults(loaded.checkpoint.world_size):
                raise Violation(f"step {loaded.step} was restored on one rank with other bits than were saved: {wrong}")
            self._judge_choice((loaded.step, mark))
            self._judge_litter("after the restart")
            step = loaded.step + 1
            mark = (RESTARTED + episode.number, step)
            self.model.begin(mark, metric_of(step))
            state.set(mark)
            if state.optimizer is not None:
                state.optimizer.step()
            manager.save(step, state.tree, metric=metric_of(step))
            self.model.acknowledge(mark)
            self.counts["restores"] += 1
            self.counts["saves acknowledged"] += 1
        finally:
            manager.close()
        self.model.retention(episode.keep_fast if episode.run.tiers else episode.keep)
        self._read_back(episode)

    # This process itself

    def _holds(self) -> tuple[int, int]:
        """Descriptors and threads of this process."""
        return len(os.listdir("/proc/self/fd")) - len(self.spoiled.altered), len(os.listdir("/proc/self/task"))

    def _check_self(self) -> None:
        """No descriptor, no thread and no memory is lost from episode to episode."""
        held = self._holds()
        until = time.monotonic() + 10  # threads that ask stores wait a while for the next call
        while self._held is not None and held[1] > self._held[1] and time.monotonic() < until:
            time.sleep(0.05)
            held = self._holds()
        if self.counts["episodes"] == WARM:
            self._held, self._memory = held, _resident()
        if self._held is not None:
            if held[0] > self._held[0] + 2 or held[1] > self._held[1] + 2:
                names = [thread.name for thread in threading.enumerate()]
                raise Violation(f"this process held {self._held} descriptors and threads, now {held}: {names}")
            resident = _resident()
            if resident > self._memory + GROWTH:
                raise Violation(f"this process took {self._memory} bytes, now {resident}")


def _resident() -> int:
    """Bytes of this process in memory, without what the allocator keeps of freed ones: that goes up and down."""
    _libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
