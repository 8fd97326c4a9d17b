"""A DDP state loaded by four ranks: with shared reading, without it, and by torch DCP.

Run as `python -m benchmarks.share [--quick]`; prints a table and its bars, writes JSON. The systems take turns, cold
and warm, and every load is proved. Never compares figures of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks

from benchmarks import jobs, share_job
from benchmarks.cache import make_cold, make_warm
from benchmarks.pool import Pool
from benchmarks.share_job import ALONE, DCP, SHARED, Cost
from benchmarks.states import Replicated, Sharded

FULL = Replicated(Sharded(width=640, depth=12, vocabulary=24000))
QUICK = Replicated(Sharded(width=416, depth=6, vocabulary=12000))
RANKS, TURNS = 4, 7


@dataclass
class Row:
    """One system, cold or warm; one element a repetition.

    Bytes of all ranks together over those of one copy: by read calls, from the disk, and as the system says.
    """

    system: str
    how: str
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    called: list[float] = field(default_factory=list)
    disk: list[float] = field(default_factory=list)
    told: list[float] = field(default_factory=list)

    def add(self, costs: list[Cost], nbytes: int) -> None:
        """One repetition, as its ranks measured it."""
        spent = [cost.spent for cost in costs]
        self.seconds.append(max(s.ended for s in spent) - min(s.began for s in spent))
        self.cpu.append(sum(s.cpu for s in spent))
        self.memory.append(max(s.memory for s in spent))
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
                    print(f"{how} {name}: {row.seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    finally:
        pool.close()
    return list(rows.values())


def show(rows: list[Row]) -> list[tuple[str, float, float]]:
    """Print the medians and the bars: (what, measured, at most)."""
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
    bars = [
        ("copies read from storage, cold", max(found["cold", SHARED].told + found["cold", SHARED].called), 1.05),
        ("copies read from storage, warm", max(found["warm", SHARED].told + found["warm", SHARED].called), 1.05),
    ]
    for how in ("cold", "warm"):
        ratio = median(found[how, SHARED].seconds) / median(found[how, DCP].seconds)
        bars.append((f"seconds over those of DCP, {how}", ratio, 1.0))
    for what, measured, most in bars:
        print(f"  {what:34} {measured:5.2f}  (at most {most}) {'met' if measured <= most else 'MISSED'}")
    return bars


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.share", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a fifth of the bytes and three turns")
    parser.add_argument("--dir", type=Path, default=Path("bench-out/work"), help="where to write (made, then removed)")
    parser.add_argument("--out", type=Path, default=Path("bench-out/share.json"), help="the figures as JSON")
    options = parser.parse_args()
    spec, turns = (QUICK, 3) if options.quick else (FULL, TURNS)
    work = options.dir.resolve() / f"share-{os.getpid()}"
    work.mkdir(parents=True)
    try:
        rows = run(work, spec, turns)
    finally:
        shutil.rmtree(work)
    print(f"{spec.nbytes / 1e9:.2f} GB in {spec.tensors} tensors, the same on {RANKS} ranks of one machine")
    bars = show(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figures = {"nbytes": spec.nbytes, "rows": [vars(row) for row in rows], "bars": bars}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
