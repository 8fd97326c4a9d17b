"""A merge of four checkpoints of four formats, beside reading the same files raw, out of the page cache.

Run as `python -m benchmarks.merging [--quick]`; prints a table, the ratios and the bars, and writes JSON. Merges run in
fresh processes, in turns with the raw reads, and are held against float64. Never compares figures of two runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from safetensors.torch import save_file

import holdfast
from benchmarks.bar import Bar
from benchmarks.cache import files_in, make_cold
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.repeated import Repeated, times
from benchmarks.report import show_bars
from benchmarks.verify import read_raw

FULL, QUICK = 48, 6
"""Matrices of 16 MiB in each source."""

TURNS, THREADS = 5, (4, 8)
WANTED, MEMORY = 0.8, 256 << 20
RAW, MERGES = "raw read", ("float64", "float32")


@dataclass
class Row(Repeated):
    """Raw reads, or merges with one accumulator: seconds, and peak bytes above those after the import of torch."""

    what: str


def sources(work: Path, count: int) -> list[Path]:
    """Four models in four formats: of holdfast, a hub folder, a file of torch, a folder of torch's DCP."""
    paths = [work / name for name in ("native", "hub", "file", "dcp")]
    for number, path in enumerate(paths):
        generator = torch.Generator().manual_seed(number)
        shapes = {f"layers.{i}.weight": (2048, 2048) for i in range(count)} | {"norm.bias": (2048,)}
        model = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        path.mkdir()
        if path.name == "native":
            holdfast.save({"model": model}, path, overwrite=True)
        elif path.name == "hub":
            save_file(model, path / "model.safetensors")
        elif path.name == "file":
            torch.save(model, path / "model.pt")
        else:
            dcp.save({"model": model}, checkpoint_id=path, no_dist=True)
    return [path / "model.pt" if path.name == "file" else path for path in paths]


def measure(accumulate: str, target: Path, paths: Sequence[Path]) -> None:
    """In a fresh process: merge once; prints seconds and peak memory as JSON."""
    began = time.monotonic()
    holdfast.tools.merge(paths, target, accumulate=getattr(torch, accumulate))
    seconds = time.monotonic() - began
    status = Path("/proc/self/status").read_text()
    print(json.dumps([seconds, (int(status.split("VmHWM:")[1].split()[0]) << 10) - RESIDENT]))


RESIDENT = int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) << 10


def run(work: Path, count: int, turns: int) -> tuple[dict[str, Row], int]:
    """Raw reads and merges in turns, each from a cold cache; the rows, and the bytes of all sources."""
    paths = sources(work, count)
    files = [file for path in paths for file in ([path] if path.is_file() else files_in(path))]
    rows = {what: Row(what) for what in (RAW, *MERGES)}
    for turn in range(turns):
        ways = (*MERGES, RAW) if turn % 2 else (RAW, *MERGES)
        for what in ways:
            target = work / f"merged-{what}"
            shutil.rmtree(target, ignore_errors=True)
            make_cold(work)
            if what == RAW:
                seconds = []
                for threads in THREADS:
                    began = time.monotonic()
                    read_raw(files, threads, direct=True)
                    seconds.append(time.monotonic() - began)
                rows[what].seconds.append(min(seconds))
            else:
                command = [sys.executable, "-m", "benchmarks.merging", "--one", what, str(target), *map(str, paths)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                took, memory = json.loads(done.stdout.splitlines()[-1])
                rows[what].seconds.append(took)
                rows[what].memory.append(memory)
            say(f"{what}: {rows[what].seconds[-1]:.2f} s")
    compare(paths, work / f"merged-{MERGES[0]}")
    return rows, sum(file.stat().st_size for file in files)


def compare(paths: Sequence[Path], target: Path) -> None:
    """Raise if the merge is not the mean in float64, rounded once."""
    opened, merged = [holdfast.open(path) for path in paths], holdfast.open(target)
    for name in merged.tensors:
        mean = sum(one.read(name).double().mul_(1 / len(opened)) for one in opened)
        if not isinstance(mean, torch.Tensor) or not torch.equal(merged.read(name), mean.float()):
            raise ValueError(f"{name} is not the mean")


def show(rows: dict[str, Row], nbytes: int, *, judged: bool) -> list[Bar]:
    """Print the medians and the bars."""
    print(f"\n{'':12} {'seconds':>8} {'GB/s':>7} {'memory':>10}")
    for row in rows.values():
        memory = f"{max(row.memory) / 2**20:6.0f} MiB" if row.memory else ""
        print(f"{row.what:12} {median(row.seconds):8.2f} {nbytes / median(row.seconds) / 1e9:7.2f} {memory:>10}")
    bars = []
    for what in MERGES if judged else ():
        raw, merge = rows[RAW], rows[what]
        bars.append(Bar(f"rate of the raw read, {what}", times(raw, merge), times(raw, merge, best=True), least=WANTED))
        bars.append(Bar(f"memory, {what}", max(merge.memory) / 2**20, most=MEMORY / 2**20, unit=" MiB"))
    if bars:
        print("\na merge of four, its target durable, beside a raw read of the four:")
        show_bars(Console(), bars)
    return bars


def main() -> int:
    """The command."""
    parser = options_of("merging", __doc__, quick="an eighth of the bytes, three turns, no bars")
    parser.add_argument("--one", nargs="+", metavar="WHAT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        accumulate, target, *paths = options.one
        measure(accumulate, Path(target), [Path(path) for path in paths])
        return 0
    count, turns = (QUICK, 3) if options.quick else (FULL, TURNS)
    with folder(options.dir, "merging") as work:
        rows, nbytes = run(work, count, turns)
    bars = show(rows, nbytes, judged=not options.quick)
    write(options.out, {"bytes": nbytes, "turns": turns, **machine()}, [vars(row) for row in rows.values()], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
