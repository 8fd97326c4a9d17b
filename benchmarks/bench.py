"""Holdfast beside torch DCP, `torch.save` and safetensors, and the disk they all write to.

Run as `python -m benchmarks.bench [--quick]`; prints tables and bars, writes JSON.
Never compares figures of two runs: repetitions of all systems are interleaved, and every load is proved.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks


from benchmarks import jobs, report
from benchmarks.bars import COLD, SAVE, SMALL_LOAD, SMALL_SAVE, WARM, judge, resharding
from benchmarks.cache import make_cold, make_warm, on_disk
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.gauge import Spent
from benchmarks.jobs import LoadCost
from benchmarks.pool import JobFailed, Pool
from benchmarks.rows import RAW, RAW_HUGE, Row, Rows
from benchmarks.states import Sharded, Small, Spec
from benchmarks.systems import SAVERS, SYSTEMS

RESHARDINGS = [(1, 4), (3, 4), (4, 2)]
RANKS = 2
RAWS = (RAW, RAW_HUGE)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    state: Sharded
    small: Small
    saves: int
    loads: int
    reshards: int
    smalls: int


FULL = Scale(Sharded(width=896, depth=16, vocabulary=32000), Small(20_000), saves=7, loads=5, reshards=3, smalls=5)
QUICK = Scale(Sharded(width=416, depth=16, vocabulary=20000), Small(20_000), saves=5, loads=3, reshards=1, smalls=2)


@dataclass
class Bench:
    """One run under way: where it writes, its ranks, its rows."""

    work: Path
    rows: Rows = field(default_factory=Rows)
    pools: dict[int, Pool] = field(default_factory=dict)
    cold: set[str] = field(default_factory=set)
    building: dict[int, Spec] = field(default_factory=dict)

    def hold(self, ranks: int, spec: Spec) -> None:
        """Ranks of this world hold this state, those of the other worlds none; each system has run once."""
        for size, pool in self.pools.items():
            if size != ranks and size in self.building:
                pool.run(jobs.drop)
                del self.building[size]
        if ranks not in self.pools:
            self.pools[ranks] = Pool(ranks)
            self._warm_up(ranks)
        self.pools[ranks].run(jobs.build, spec)
        self.building[ranks] = spec

    def _warm_up(self, ranks: int) -> None:
        self.pools[ranks].run(jobs.build, Sharded(width=32, depth=1, vocabulary=64))
        for name in SYSTEMS:
            folder = self.work / f"warm-up-{name}"
            try:
                self.pools[ranks].run(jobs.save, name, folder)
                self.pools[ranks].run(jobs.load, name, folder)
            except JobFailed as error:
                say(f"warm-up of {name} on {ranks} ranks: {error}")
                self.pools[ranks].run(jobs.build, Sharded(width=32, depth=1, vocabulary=64))
            _delete(folder)

    def measure(self, row: Row, ranks: int, job: Callable[..., Spent | LoadCost], *args: object) -> None:
        """One repetition into its row; a failure is noted there, and the ranks come back with their state."""
        if row.error:
            return
        try:
            answers = self.pools[ranks].run(job, *args)
        except JobFailed as error:
            row.error = str(error)
            say(f"{row.work}: {row.system}: {error}")
            self.pools[ranks].run(jobs.build, self.building[ranks])
            return
        row.add_load([a for a in answers if isinstance(a, LoadCost)])
        row.add_spent([a for a in answers if isinstance(a, Spent)])
        say(report.line(row))

    def saves(self, work: str, ranks: int, spec: Spec, names: list[str], count: int, disk: bool = False) -> None:
        """Save in turns, always to a fresh folder; the last one of each system stays at `last`."""
        self.hold(ranks, spec)
        for turn in range(count):
            for name in _rotated(names, turn):
                _delete(self.last(name))
                os.sync()  # what was deleted or written before is not part of what comes
                row = self.rows.of(work, name, spec.nbytes)
                if name in RAWS:
                    self.measure(row, ranks, jobs.raw_write, self.last(name), name == RAW_HUGE)
                else:
                    self.measure(row, ranks, jobs.save, name, self.last(name))
                if disk and not row.error:
                    row.disk = on_disk(self.last(name))

    def loads(self, work: str, ranks: int, spec: Spec, names: list[str], count: int, *, cold: bool) -> None:
        """Load in turns what `last` holds."""
        self.hold(ranks, spec)
        for turn in range(count):
            for name in _rotated(names, turn):
                folder = self.last(name)
                row = self.rows.of(work, name, spec.nbytes, mapped=name in SYSTEMS and SYSTEMS[name].mapped)
                if cold:
                    self.cold.add(make_cold(folder))
                else:
                    make_warm(folder)
                if name in RAWS:
                    self.measure(row, ranks, jobs.raw_read, folder, name == RAW_HUGE)
                else:
                    self.measure(row, ranks, jobs.load, name, folder)

    def last(self, name: str) -> Path:
        """Where the latest save of a system lies, or that of the system whose checkpoints it loads."""
        system = SYSTEMS.get(name)
        return self.work / (system.of if system and system.of else name).replace(" ", "-")

    def clear(self) -> None:
        """Delete all that was saved."""
        for name in [*RAWS, *SYSTEMS]:
            _delete(self.last(name))

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def measure_all(bench: Bench, scale: Scale) -> None:
    """Every work of the bench."""
    systems = list(SYSTEMS)
    bench.saves(SAVE, RANKS, scale.state, [*RAWS, *SAVERS], scale.saves, disk=True)
    loaders = [name for name, system in SYSTEMS.items() if not system.floor]
    bench.loads(COLD, RANKS, scale.state, [*RAWS, *loaders], scale.loads, cold=True)
    bench.loads(WARM, RANKS, scale.state, systems, scale.loads, cold=False)
    bench.clear()
    resharders = [name for name, system in SYSTEMS.items() if system.reshards]
    for saved, loaded in RESHARDINGS:
        savers = [name for name in resharders if name in SAVERS]
        bench.saves(f"{resharding(saved, loaded)}: the save", saved, scale.state, savers, 1)
        bench.loads(resharding(saved, loaded), loaded, scale.state, resharders, scale.reshards, cold=True)
        bench.clear()
    bench.saves(SMALL_SAVE, 1, scale.small, SAVERS, scale.smalls, disk=True)
    bench.loads(SMALL_LOAD, 1, scale.small, systems, scale.smalls, cold=False)


def facts_of(bench: Bench, scale: Scale, seconds: float) -> dict[str, object]:
    """What one must know to read the figures."""
    return {
        "state": f"{scale.state.nbytes / 1e9:.2f} GB in {scale.state.tensors} tensors, float32, sharded on axis 0; "
        f"and {scale.small.tensors} tensors of 4 KiB on one rank",
        "repetitions": f"{scale.saves} saves, {scale.loads} loads, {scale.reshards} resharded, {scale.smalls} small; "
        "interleaved, order rotated, fresh folders",
        "cold": "; ".join(sorted(bench.cold)),
        "memory": "peak resident bytes above those at the start (VmHWM); pages mapped from files count",
        **machine(),
        "seconds": round(seconds, 1),
    }


def main() -> int:
    """The command."""
    small = "half a gigabyte and fewer repetitions, under 3 minutes"
    options = options_of("bench", __doc__, quick=small).parse_args()
    scale = QUICK if options.quick else FULL
    began = time.monotonic()
    with folder(options.dir, "bench") as work:
        bench = Bench(work)
        try:
            measure_all(bench, scale)
        finally:
            bench.close()
    bars = judge(bench.rows, RESHARDINGS)
    facts = facts_of(bench, scale, time.monotonic() - began)
    report.show(bench.rows, bars, facts)
    write(options.out, facts, bench.rows.plain(), bars)
    return 0


def _rotated(names: list[str], turn: int) -> list[str]:
    at = turn % len(names)
    return names[at:] + names[:at]


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


if __name__ == "__main__":
    sys.exit(main())
