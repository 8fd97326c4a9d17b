"""Verifying beside reading: every byte checked, and the same files only read, by as many threads, directly.

Run as `python -m benchmarks.verify [--quick]`; prints a table, the ratios and the bar, and writes JSON. The two take
turns on the same files, once out of the page cache and once in it. Never compares figures of two runs.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch

import holdfast
from benchmarks.cache import files_in, make_cold, make_warm, on_disk

FULL, QUICK = 8 << 30, 1 << 30
FILES = 4
"""Sections, and so data files, that the bytes are spread over."""

SPAN = 8 << 20
THREADS = (4, 8, 16)
"""The raw read takes the best of these: what the disk gives, however it is asked."""

WANTED = 0.8


@dataclass
class Row:
    """What one way took, turn by turn; ``beside``: the row of the raw read that it is held against."""

    what: str
    nbytes: int
    beside: str | None = None
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """GB/s, by the median."""
        return self.nbytes / median(self.seconds) / 1e9


class Rows:
    """All of one run, in the order in which they first came."""

    def __init__(self) -> None:
        self.found: dict[str, Row] = {}

    def spend(self, what: str, nbytes: int, action: Callable[[], Any], beside: str | None = None) -> Any:
        """Do ``action`` and note what it took; its result."""
        began, cpu = time.monotonic(), time.process_time()
        result = action()
        row = self.found.setdefault(what, Row(what, nbytes, beside))
        row.seconds.append(time.monotonic() - began)
        row.cpu.append(time.process_time() - cpu)
        print(f"{what}: {nbytes / row.seconds[-1] / 1e9:.2f} GB/s", file=sys.stderr, flush=True)
        return result

    def ratio(self, row: Row) -> float | None:
        """To the best raw read of the same turn, by the median of the turns."""
        raw = [r for r in self.found.values() if row.beside and r.what.startswith(row.beside)]
        if not raw:
            return None
        best = [min(times) for times in zip(*(r.seconds for r in raw), strict=True)]
        return median(limit / own for limit, own in zip(best, row.seconds, strict=True))


def save(folder: Path, nbytes: int) -> None:
    """A checkpoint of so many bytes of noise."""
    rows = nbytes // FILES // 4 // 4096
    torch.manual_seed(0)
    state = {f"part{n}": {"w": torch.randn(rows, 4096), "b": torch.randn(1000)} for n in range(FILES)}
    holdfast.save(state, folder)


def windows(count: int) -> list[mmap.mmap]:
    """Memory for direct reads, every page of it there already: the raw read is not to wait for pages."""
    found = [mmap.mmap(-1, SPAN) for _ in range(count)]
    for window in found:
        window.write(bytes(SPAN))
    return found


MEMORY = windows(max(THREADS))


def read_raw(folder: Path, threads: int, *, direct: bool) -> None:
    """Read every byte of the data files once, by so many threads, a span at a time, and look at none."""
    flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
    opened = [(os.open(path, flags), path.stat().st_size) for path in files_in(folder) if path.suffix == ".safetensors"]
    spans = [(fd, at) for fd, size in opened for at in range(0, size, SPAN)]

    def run(number: int) -> None:
        for fd, at in spans[number::threads]:
            os.preadv(fd, [MEMORY[number]], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    for fd, _ in opened:
        os.close(fd)


def check(folder: Path) -> None:
    """Verify; raises unless every byte was checked and is right."""
    report = holdfast.verify(folder)
    if report.nbytes != holdfast.open(folder).nbytes or report.unverified:
        raise ValueError("not every byte was checked")


def turn(folder: Path, rows: Rows, nbytes: int, number: int) -> None:
    """Each way once, cold and warm; another way comes first in each turn."""
    for kind, direct in (("cold", True), ("warm", False)):
        ways = [(f"raw {kind}, {threads} threads", threads) for threads in THREADS] + [(f"verify {kind}", 0)]
        if not direct:
            make_warm(folder)
        for what, threads in ways[number % len(ways) :] + ways[: number % len(ways)]:
            if direct:
                make_cold(folder)
            if threads:
                rows.spend(what, nbytes, lambda t=threads, d=direct: read_raw(folder, t, direct=d))
            else:
                rows.spend(what, nbytes, lambda: check(folder), f"raw {kind}")
    make_cold(folder)
    rows.spend("verify cold, shallow", nbytes, lambda: holdfast.verify(folder, deep=False))


def show(rows: Rows) -> None:
    """Print the medians, and each ratio with the bar."""
    print(f"\n{'':26} {'seconds':>8} {'GB/s':>7} {'processor':>10}  of the raw read")
    for row in rows.found.values():
        ratio = rows.ratio(row)
        verdict = "" if ratio is None else f"{ratio:.2f}"
        if ratio is not None:
            verdict += f"  (wanted: at least {WANTED:g}) {'met' if ratio >= WANTED else 'MISSED'}"
        rate = "" if "shallow" in row.what else f"{row.rate:.2f}"
        print(f"{row.what:26} {median(row.seconds):8.2f} {rate:>7} {median(row.cpu):10.2f}  {verdict}")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK >> 30} GiB in place of {FULL >> 30}, three turns")
    parser.add_argument("--dir", type=Path, default=Path("bench-out/work"), help="where to write (made, then removed)")
    parser.add_argument("--out", type=Path, default=Path("bench-out/verify.json"), help="the figures as JSON")
    options = parser.parse_args()
    nbytes, turns = (QUICK, 3) if options.quick else (FULL, 5)
    work = options.dir.resolve() / f"verify-{os.getpid()}"
    work.mkdir(parents=True)
    rows = Rows()
    try:
        save(work / "c", nbytes)
        taken = on_disk(work / "c")
        total = holdfast.open(work / "c").nbytes
        for number in range(turns):
            turn(work / "c", rows, total, number)
    finally:
        shutil.rmtree(work)
    show(rows)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"bytes": total, "on_disk": taken, "turns": turns, "cpus": os.cpu_count(), "load": os.getloadavg()[0]}
    ratios = {row.what: ratio for row in rows.found.values() if (ratio := rows.ratio(row)) is not None}
    text = json.dumps({"facts": facts, "ratios": ratios, "rows": [vars(r) for r in rows.found.values()]}, indent=1)
    options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
