"""A DDP state loaded by four ranks: with shared reading, without it, and by torch DCP.

Run as `python -m benchmarks.share [--quick]`; prints a table and its bars, writes JSON. The systems take turns, cold
and warm, and every load is proved. Never compares figures of two runs.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks

from rich.console import Console

from benchmarks import jobs, share_job
from benchmarks.bar import Bar
from benchmarks.cache import make_cold, make_warm
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.pool import Pool
from benchmarks.repeated import Repeated, times
from benchmarks.report import show_bars
from benchmarks.share_job import ALONE, DCP, SHARED, Cost
from benchmarks.states import Replicated, Sharded

FULL = Replicated(Sharded(width=640, depth=12, vocabulary=24000))
QUICK = Replicated(Sharded(width=416, depth=6, vocabulary=12000))
RANKS, TURNS = 4, 7


@dataclass
class Row(Repeated):
    """One system, cold or warm; one element a repetition.

    Bytes of all ranks together over those of one copy: by read calls, from the disk, and as the system says.
    """

    system: str
    how: str
    called: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    def add(self, costs: list[Cost], nbytes: int) -> None:
        """One repetition, as its ranks measured it."""
        spent = [cost.spent for cost in costs]
        self.add_spent(spent)
        self.called.append(sum(s.read for s in spent) / nbytes)
        self.disk.append(sum(s.device for s in spent) / nbytes)
        told = [cost.told for cost in costs if cost.told is not None]
        self.told.append(sum(told) / nbytes if told else float("nan"))


def run(work: Path, spec: Replicated, turns: int) -> list[Row]:
    """Save with each, then load in turns."""
    rows = {(how, name): Row(name, how) for how in ("cold", "warm") for name in (SHARED, ALONE, DCP)}
    folders = {SHARED: work / "holdfast", ALONE: work / "holdfast", DCP: work / "dcp"}
    pool = Pool(RANKS)
    try:
        pool.run(jobs.build, spec)
        pool.run(jobs.save, "holdfast", folders[SHARED])
        pool.run(jobs.save, "torch DCP", folders[DCP])
        for name, folder in folders.items():
            pool.run(share_job.load, name, folder)  # each has run once
        for turn in range(turns):
            for how, prepare in (("cold", make_cold), ("warm", make_warm)):
                for name in [SHARED, ALONE, DCP][turn % 3 :] + [SHARED, ALONE, DCP][: turn % 3]:
                    prepare(folders[name])
                    row = rows[how, name]
                    row.add(pool.run(share_job.load, name, folders[name]), spec.nbytes)
                    say(f"{how} {name}: {row.seconds[-1]:.3f} s")
    finally:
        pool.close()
    return list(rows.values())


def show(rows: list[Row]) -> list[Bar]:
    """Print the medians and the bars."""
    print(
        f"\n{'system':24} {'':5} {'seconds':>8} {'best':>7} {'CPU s':>7} {'MiB a rank':>11}"
        f"   copies read: {'by calls':>8} {'from disk':>9} {'as told':>8}"
    )
    found = {(row.how, row.system): row for row in rows}
    for row in rows:
        print(
            f"{row.system:24} {row.how:5} {median(row.seconds):8.3f} {min(row.seconds):7.3f} {median(row.cpu):7.2f} "
            f"{median(row.memory) / 2**20:11.0f}   {'':12} {max(row.called):9.2f} {max(row.disk):9.2f} "
            f"{max(row.told):8.2f}"
        )
    cold, warm = found["cold", SHARED], found["warm", SHARED]
    bars = [
        Bar("copies read from storage, cold", max(cold.told + cold.called), most=1.05),
        # Each rank takes for itself what memory has already: that is faster than to be handed it.
        Bar("copies read from the disk, warm", max(warm.disk), most=1.05),
    ]
    for how in ("cold", "warm"):
        fair = (times(found[how, SHARED], found[how, DCP], best=best) for best in (False, True))
        bars.append(Bar(f"seconds over those of DCP, {how}", *fair, most=1.0))
    alone = (times(warm, found["warm", ALONE], best=best) for best in (False, True))
    bars.append(Bar('seconds over those with share="off", warm', *alone, most=1.1))
    show_bars(Console(), bars)
    return bars


def main() -> int:
    """The command."""
    options = options_of("share", __doc__, quick="a fifth of the bytes and three turns").parse_args()
    spec, turns = (QUICK, 3) if options.quick else (FULL, TURNS)
    with folder(options.dir, "share") as work:
        rows = run(work, spec, turns)
    print(f"{spec.nbytes / 1e9:.2f} GB in {spec.tensors} tensors, the same on {RANKS} ranks of one machine")
    bars = show(rows)
    write(options.out, {"bytes": spec.nbytes, **machine()}, [vars(row) for row in rows], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
