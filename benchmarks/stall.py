"""What a save costs a training run that goes on: holdfast beside torch DCP, each by a thread and by a process.

Run as `python -m benchmarks.stall [--quick | --bare]`; prints a table and bars, writes JSON. With `--bare` all of them
save what torch's `get_state_dict` gives, tensors alone.
Never compares figures of two runs: all systems train the same model in turns, round after round.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks


import holdfast
from benchmarks import stall_job, stall_report
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.pool import JobFailed, Pool
from benchmarks.stall_job import Course
from benchmarks.stall_rows import Row, Rows, judge
from benchmarks.stall_systems import BARE, DCP, HOLDFAST, NOTHING, PURE, check
from benchmarks.stall_train import Size
from benchmarks.stall_watch import Watch

RANKS = 2
SYSTEMS = [NOTHING, PURE, *HOLDFAST, *BARE, *DCP]
USUAL = [name for name in SYSTEMS if name != "DCP process" and name not in BARE]
"""Its two variants that overlap, and the better one of those that do as documented; `--only` measures any."""
OF_BARE = [NOTHING, *BARE, "DCP thread", "DCP thread, overlapped"]


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    size: Size
    course: Course
    rounds: int


FULL = Scale(Size(width=896, depth=16, vocabulary=32000), Course(steps=12, every=4), rounds=3)
BARE_ONE = Scale(Size(width=640, depth=16, vocabulary=32000), Course(steps=9, every=3), rounds=3)
QUICK = Scale(Size(width=384, depth=16, vocabulary=20000), Course(steps=12, every=4), rounds=2)


class Bench:
    """One run under way: its ranks, its rows, where it writes."""

    def __init__(self, scale: Scale, work: Path, systems: list[str]) -> None:
        self.scale, self.work = scale, work
        self.rows = Rows(systems, scale.course.every)
        self.pool = Pool(RANKS, daemon=False)  # ranks with processes of their own
        self.checked: list[str] = []

    def measure(self) -> None:
        """Every round; what the last one saved is looked at."""
        names = list(self.rows.all)
        for number in range(self.scale.rounds):
            at = number * len(names) // self.scale.rounds  # nobody always runs at the same point of a round
            for name in names[at:] + names[:at]:
                row = self.rows.all[name]
                if not row.error:
                    self._segment(row, look=number == self.scale.rounds - 1)

    def _segment(self, row: Row, *, look: bool) -> None:
        course = self.scale.course if row.system != NOTHING else replace(self.scale.course, every=0)
        folder = self.work / row.system.replace(" ", "-")
        folder.mkdir()
        try:
            self.pool.run(stall_job.hold, self.scale.size)
            pids = self.pool.run(os.getpid)
            with Watch(pids) as watch:
                answers = self.pool.run(stall_job.segment, row.system, folder, course)
        except JobFailed as error:
            row.error = str(error)
            say(f"{row.system}: {error}")
        else:
            row.segments.append(answers)
            row.peaks.append([watch.peaks[pid] for pid in pids])
            say(stall_report.line(row))
            if look:
                self._check(row, folder, course)
        shutil.rmtree(folder)

    def _check(self, row: Row, folder: Path, course: Course) -> None:
        try:
            for number in range(course.saves):
                check(row.system, folder / f"save-{number}")
        except (holdfast.HoldfastError, OSError) as error:
            row.error = f"a save is not whole: {error}"
        else:
            self.checked.append(row.system)

    def close(self) -> None:
        self.pool.close()


def facts_of(bench: Bench, seconds: float) -> dict[str, object]:
    """What one must know to read the figures."""
    size, course = bench.scale.size, bench.scale.course
    alone = bench.rows.all[NOTHING].intervals(course.every)
    whole = [name for name in bench.checked if name in (*HOLDFAST, *BARE, *DCP)]
    return {
        "training": f"GPT of {size.parameters / 1e6:.0f} million parameters, FSDP2 on {RANKS} gloo ranks of one thread "
        f"each, AdamW; {size.nbytes / 1e9:.2f} GB of float32 parameters and moments",
        "segments": f"{bench.scale.rounds} of {course.steps} steps for each system, in turns; a save before every "
        f"{course.every}th step; what a system needs once comes before (for DCP, its first save)",
        "added": f"seconds from one save to the next, {course.every} steps, over as many without; medians of all",
        "noise": f"{course.every} steps without took {min(alone):.2f} to {max(alone):.2f} s" if alone else "unknown",
        "memory": "peak of a rank and its processes, what they share counted once, over training alone",
        "looked at": "the saves of the last round of " + ("; ".join(whole) or "none"),
        **machine(),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def main() -> int:
    """The command."""
    parser = options_of("stall", __doc__, quick="less than half a gigabyte, under 3 minutes")
    parser.add_argument("--only", nargs="+", choices=SYSTEMS, default=None, metavar="SYSTEM", help="just these")
    parser.add_argument("--bare", action="store_true", help="1.2 GB of bare tensors, as torch's get_state_dict gives")
    options = parser.parse_args()
    only = options.only or (OF_BARE if options.bare else USUAL)
    systems, began = [name for name in SYSTEMS if name == NOTHING or name in only], time.monotonic()
    with folder(options.dir, "stall") as work:
        bench = Bench(QUICK if options.quick else BARE_ONE if options.bare else FULL, work, systems)
        try:
            bench.measure()
        finally:
            bench.close()
    bars, facts = judge(bench.rows), facts_of(bench, time.monotonic() - began)
    stall_report.show(bench.rows, bars, facts)
    write(options.out, facts, bench.rows.plain(), bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
