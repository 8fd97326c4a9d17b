"""Verifying beside reading: every byte checked, and the same files only read, by as many threads, directly.

Run as `python -m benchmarks.verify [--quick]`; prints a table, the ratios and the bar, and writes JSON. The two take
turns on the same files, once out of the page cache and once in it. Never compares figures of two runs.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
import xxhash

import holdfast
from benchmarks.bar import Bar
from benchmarks.cache import files_in, make_cold, make_warm
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.repeated import Repeated

FULL, QUICK = 8 << 30, 1 << 30
FILES = 4
"""Sections, and so data files, that the bytes are spread over."""

SPAN = 8 << 20
PART = 1 << 20
"""Bytes that are read and then summed while the caches have them."""

THREADS = (4, 8, 16)
"""The raw read takes the best of these: what the disk gives, however it is asked."""

WANTED = 0.8


@dataclass
class Row(Repeated):
    """What one way took, turn by turn; ``beside``: how the raw reads are called that it is held against.

    ``floor``: it does only what no check can do without.
    """

    what: str
    nbytes: int
    beside: str | None
    floor: bool = False


class Rows:
    """All of one run, in the order in which they first came."""

    def __init__(self) -> None:
        self.found: dict[str, Row] = {}

    def spend(
        self, what: str, nbytes: int, action: Callable[[], Any], beside: str | None = None, *, floor: bool = False
    ) -> Any:
        """Do ``action`` and note what it took; its result."""
        began, cpu = time.monotonic(), time.process_time()
        result = action()
        row = self.found.setdefault(what, Row(what, nbytes, beside, floor))
        row.seconds.append(time.monotonic() - began)
        row.cpu.append(time.process_time() - cpu)
        say(f"{what}: {nbytes / row.seconds[-1] / 1e9:.2f} GB/s")
        return result

    def ratio(self, row: Row) -> float | None:
        """To the best raw read of the same turn, by the median of the turns."""
        raw = [r for r in self.found.values() if row.beside and r.what.startswith(row.beside)]
        if not raw:
            return None
        best = [min(times) for times in zip(*(r.seconds for r in raw), strict=True)]
        return median(limit / own for limit, own in zip(best, row.seconds, strict=True))


def save(path: Path, nbytes: int) -> None:
    """A checkpoint of so many bytes of noise."""
    rows = nbytes // FILES // 4 // 4096
    torch.manual_seed(0)
    state = {f"part{n}": {"w": torch.randn(rows, 4096), "b": torch.randn(1000)} for n in range(FILES)}
    holdfast.save(state, path)


def windows(count: int) -> list[mmap.mmap]:
    """Memory for direct reads, every page of it there already: the raw read is not to wait for pages."""
    found = [mmap.mmap(-1, SPAN) for _ in range(count)]
    for window in found:
        window.write(bytes(SPAN))
    return found


MEMORY = windows(max(THREADS))


def read_raw(files: Sequence[Path], threads: int, *, direct: bool) -> None:
    """Read every byte of the files once, by so many threads, a span at a time, and look at none."""
    _read(files, threads, os.O_DIRECT if direct else 0, _read_span)


def read_and_sum(files: Sequence[Path], threads: int) -> None:
    """The same from the page cache, and sum every span, a part at a time."""
    _read(files, threads, 0, _sum_span)


def _read_span(fd: int, at: int, memory: mmap.mmap) -> None:
    os.preadv(fd, [memory], at)


def _sum_span(fd: int, at: int, memory: mmap.mmap) -> None:
    total, part = xxhash.xxh3_64(), memoryview(memory)[:PART]
    for begin in range(at, at + SPAN, PART):
        total.update(part[: os.preadv(fd, [part], begin)])
    total.digest()


def _read(files: Sequence[Path], threads: int, flags: int, read: Callable[[int, int, mmap.mmap], None]) -> None:
    opened = [(os.open(file, os.O_RDONLY | flags), file.stat().st_size) for file in files]
    spans = [(fd, at) for fd, size in opened for at in range(0, size, SPAN)]

    def run(number: int) -> None:
        for fd, at in spans[number::threads]:
            read(fd, at, MEMORY[number])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))
    for fd, _ in opened:
        os.close(fd)


def check(path: Path) -> None:
    """Verify; raises unless every byte was checked and is right."""
    report = holdfast.tools.verify(path)
    if report.nbytes != holdfast.open(path).nbytes or report.unverified:
        raise ValueError("not every byte was checked")


def turn(path: Path, rows: Rows, nbytes: int, number: int) -> None:
    """Each way once, cold and warm; another way comes first in each turn."""
    files = [file for file in files_in(path) if file.suffix == ".safetensors"]
    for kind, direct in (("cold", True), ("warm", False)):
        ways = [(f"raw {kind}, {threads} threads", threads) for threads in THREADS] + [(f"verify {kind}", 0)]
        if not direct:
            make_warm(path)
            for threads in THREADS:
                what = f"floor warm, {threads} threads"
                rows.spend(what, nbytes, lambda t=threads: read_and_sum(files, t), f"raw {kind}", floor=True)
        for what, threads in ways[number % len(ways) :] + ways[: number % len(ways)]:
            if direct:
                make_cold(path)
            if threads:
                rows.spend(what, nbytes, lambda t=threads, d=direct: read_raw(files, t, direct=d))
            else:
                rows.spend(what, nbytes, lambda: check(path), f"raw {kind}")
    make_cold(path)
    rows.spend("verify cold, shallow", nbytes, lambda: holdfast.tools.verify(path, deep=False))


def bars_of(rows: Rows) -> list[Bar]:
    """What is wanted. The floor is the best of the reads that sum."""
    checks = [row for row in rows.found.values() if row.beside and not row.floor]
    return [
        Bar(f"{row.what}, of the raw read", rows.ratio(row), least=WANTED, floor=_floor(rows, row)) for row in checks
    ]


def _floor(rows: Rows, check: Row) -> float | None:
    found = (rows.ratio(row) for row in rows.found.values() if row.floor and row.beside == check.beside)
    return max((ratio for ratio in found if ratio is not None), default=None)


def show(rows: Rows) -> None:
    """Print the medians, and each ratio with the bar."""
    print(f"\n{'':26} {'seconds':>8} {'GB/s':>7} {'processor':>10}  of the raw read")
    for row in rows.found.values():
        ratio, seconds = rows.ratio(row), median(row.seconds)
        verdict = "" if ratio is None else f"{ratio:.2f}"
        if ratio is not None and not row.floor:
            verdict += f"  (wanted: at least {WANTED:g}) {'met' if ratio >= WANTED else 'MISSED'}"
        rate = "" if "shallow" in row.what else f"{row.nbytes / seconds / 1e9:.2f}"
        print(f"{row.what:26} {seconds:8.2f} {rate:>7} {median(row.cpu):10.2f}  {verdict}")


def main() -> int:
    """The command."""
    small = f"{QUICK >> 30} GiB in place of {FULL >> 30}, three turns"
    options = options_of("verify", __doc__, quick=small).parse_args()
    nbytes, turns = (QUICK, 3) if options.quick else (FULL, 5)
    rows = Rows()
    with folder(options.dir, "verify") as work:
        save(work / "c", nbytes)
        total = holdfast.open(work / "c").nbytes
        for number in range(turns):
            turn(work / "c", rows, total, number)
    show(rows)
    facts = {"bytes": total, "turns": turns, **machine()}
    write(options.out, facts, [vars(row) for row in rows.found.values()], bars_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
