"""Unsharding on one process: holdfast.convert beside torch's dcp_to_torch_save, from the same DCP checkpoint.

Run as `python -m benchmarks.unshard [--quick]`; prints a table, the two ratios, and writes JSON. Each repetition is a
fresh process, the systems take turns, and the two files are compared, bit by bit. Never compares figures of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # or each fresh process would compile this package, and not torch

import torch
from rich.console import Console
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import holdfast
from benchmarks import jobs
from benchmarks.bar import Bar
from benchmarks.cache import make_cold, make_warm
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.pool import Pool
from benchmarks.repeated import Repeated, times
from benchmarks.report import show_bars
from benchmarks.states import Sharded

FULL, QUICK = Sharded(width=896, depth=8, vocabulary=30000), Sharded(width=416, depth=6, vocabulary=12000)
RANKS, TURNS = 2, 5


def _holdfast(source: Path, target: Path) -> None:
    holdfast.convert(source, target, to="torch")


def _torch(source: Path, target: Path) -> None:
    dcp_to_torch_save(source, target)


def _torch_durable(source: Path, target: Path) -> None:
    dcp_to_torch_save(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


OURS, THEIRS, DURABLE = "holdfast.convert", "dcp_to_torch_save", "dcp_to_torch_save + fsync"
SYSTEMS: dict[str, Callable[[Path, Path], None]] = {OURS: _holdfast, THEIRS: _torch, DURABLE: _torch_durable}


@dataclass
class Row(Repeated):
    """One system with a warm or a cold source: seconds, and peak bytes above those after the imports."""

    system: str
    source: str


def measure(system: str, source: Path, target: Path) -> None:
    """In a fresh process: unshard once; prints seconds and peak memory as JSON."""
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    before = _field(status, "VmRSS")
    began = time.monotonic()
    SYSTEMS[system](source, target)
    seconds = time.monotonic() - began
    print(json.dumps([seconds, _field(status, "VmHWM") - before]))


def _field(status: Path, name: str) -> int:
    return int(status.read_text().split(f"{name}:")[1].split()[0]) << 10


def run(work: Path, spec: Sharded, turns: int) -> list[Row]:
    """Save with DCP on some ranks, then unshard in turns."""
    source = work / "source"
    pool = Pool(RANKS)
    try:
        pool.run(jobs.build, spec)
        pool.run(jobs.save, "torch DCP", source)
    finally:
        pool.close()
    rows = {(name, how): Row(name, how) for how in ("warm", "cold") for name in SYSTEMS}
    names = list(SYSTEMS)
    for turn in range(turns):
        for how, prepare in (("warm", make_warm), ("cold", make_cold)):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                target = work / f"{name.split()[0]}.pt"
                target.unlink(missing_ok=True)
                os.sync()  # what was deleted or written before is not part of what comes
                prepare(source)
                command = [sys.executable, "-m", "benchmarks.unshard", "--one", name, str(source), str(target)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                seconds, memory = json.loads(done.stdout.splitlines()[-1])
                rows[name, how].seconds.append(seconds)
                rows[name, how].memory.append(memory)
                say(f"{name}, {how} source: {seconds:.2f} s, {memory >> 20} MiB")
    compare(work / f"{OURS}.pt", work / f"{THEIRS}.pt")
    return list(rows.values())


def compare(ours: Path, theirs: Path) -> None:
    """Raise if the two files do not hold the same tensors."""
    a, b = (torch.load(path, mmap=True, weights_only=True) for path in (ours, theirs))
    if {part: set(tensors) for part, tensors in a.items()} != {part: set(tensors) for part, tensors in b.items()}:
        raise ValueError("the two files hold other names")
    for part, tensors in a.items():
        for name, tensor in tensors.items():
            if not torch.equal(tensor, b[part][name]):
                raise ValueError(f"the two files hold another {part}/{name}")


def show(rows: list[Row], *, judged: bool) -> list[Bar]:
    """Print the medians and the bars; in small the windows weigh too much to judge by that of memory."""
    print(f"\n{'system':28} {'source':6} {'seconds':>8} {'best':>6} {'memory':>10}")
    for row in rows:
        best, middle = min(row.seconds), median(row.seconds)
        print(f"{row.system:28} {row.source:6} {middle:8.2f} {best:6.2f} {median(row.memory) / 2**20:6.0f} MiB")
    bars = []
    for how in ("warm", "cold"):
        found = {row.system: row for row in rows if row.source == how}
        ours, theirs = found[OURS], found[THEIRS]
        fair = (times(ours, theirs), times(ours, theirs, best=True))
        bars.append(Bar(f"seconds, {how}", *fair, most=1.0))
        if judged:
            bars.append(Bar(f"memory, {how}", median(ours.memory) / median(theirs.memory), most=0.25))
    print("\nholdfast.convert over dcp_to_torch_save (holdfast's file is durable, torch's is not):")
    show_bars(Console(), bars)
    return bars


def main() -> int:
    """The command."""
    parser = options_of("unshard", __doc__, quick="a fifth of the bytes and three turns")
    parser.add_argument("--one", nargs=3, metavar=("SYSTEM", "SOURCE", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        measure(options.one[0], Path(options.one[1]), Path(options.one[2]))
        return 0
    spec, turns = (QUICK, 3) if options.quick else (FULL, TURNS)
    print(f"{spec.nbytes / 1e9:.2f} GB in {spec.tensors} tensors, saved by DCP on {RANKS} ranks; {turns} turns of each")
    with folder(options.dir, "unshard") as work:
        rows = run(work, spec, turns)
    bars = show(rows, judged=not options.quick)
    facts = {"bytes": spec.nbytes, "tensors": spec.tensors, **machine()}
    write(options.out, facts, [vars(row) for row in rows], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
