"""Long plain values in a state (histories, logs, tables of samples): holdfast beside `torch.save` and `torch.load`.

Run as `python -m benchmarks.values [--quick]`; prints a table, the ratios and the bars, and writes JSON. The systems
take turns on the same values, and everything that is loaded is compared. Never compares figures of two runs.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch

import holdfast
from benchmarks.bars import Bar
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.repeated import Repeated

FULL, QUICK = 1_000_000, 100_000
WANTED = 10.0
"""Times as long as torch, at the most."""

SAVE, LOAD, UNSAFE = "torch.save", "torch.load", "torch.load(weights_only=False)"
OURS = {
    "holdfast.save": (SAVE,), "Saver.save, the call": (SAVE,), "holdfast.load": (LOAD, UNSAFE),
    "open(…).values": (LOAD, UNSAFE),
}  # fmt: skip
"""What holdfast does, and what of torch it is held against: the quicker one."""


@dataclass
class Row(Repeated):
    """What one way took with one kind of values; ``nbytes``: what then lies on disk."""

    kind: str
    what: str
    nbytes: int = 0


class Rows:
    """All of one run, in the order in which they first came."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str], Row] = {}

    def spend(self, kind: str, what: str, action: Callable[[], Any]) -> Any:
        """Do ``action`` and note what it took; its result."""
        began, cpu = time.monotonic(), time.process_time()
        result = action()
        row = self.found.setdefault((kind, what), Row(kind, what))
        row.seconds.append(time.monotonic() - began)
        row.cpu.append(time.process_time() - cpu)
        return result

    def ratio(self, row: Row) -> float | None:
        """Seconds of one of ours by those of torch's quicker way; None for torch's own rows."""
        beside = [median(self.found[row.kind, what].seconds) for what in OURS.get(row.what, ())]
        return median(row.seconds) / min(beside) if beside else None


def kinds(count: int) -> dict[str, Any]:
    """The values, by what they are."""
    draw = random.Random(0)
    return {
        f"list of {count} floats": [draw.random() for _ in range(count)],
        f"list of {count} ints": [draw.randrange(1 << 31) for _ in range(count)],
        f"list of {count} short texts": [f"sample-{n % 997}" for n in range(count)],
        f"list of {count} bools": [draw.random() < 0.5 for _ in range(count)],
        f"list of {count // 10} dicts": [{"step": n, "loss": draw.random()} for n in range(count // 10)],
        f"dict of {count // 5} int keys": {n: draw.random() for n in range(count // 5)},
    }


def compare(loaded: object, saved: object) -> None:
    """Raise unless both are equal."""
    if loaded != saved:
        raise ValueError("what was loaded differs from what was saved")


def turn(work: Path, kind: str, value: Any, rows: Rows) -> None:
    """Each way once."""
    state, file, path = {"history": value, "step": 1}, work / "state.pt", work / "step"
    rows.spend(kind, SAVE, lambda: torch.save(state, file))
    rows.found[kind, SAVE].nbytes = file.stat().st_size
    for what, only in ((LOAD, True), (UNSAFE, False)):
        compare(rows.spend(kind, what, lambda o=only: torch.load(file, weights_only=o)), state)
    with holdfast.Saver(worker="thread") as saver:
        rows.spend(kind, "Saver.save, the call", lambda: saver.save(state, path)).wait()
    shutil.rmtree(path)
    rows.spend(kind, "holdfast.save", lambda: holdfast.save(state, path))
    rows.found[kind, "holdfast.save"].nbytes = (path / "manifest.json").stat().st_size
    into = {"history": type(value)(), "step": 0}
    rows.spend(kind, "holdfast.load", lambda: holdfast.load(path, into))
    compare(into, state)
    compare(rows.spend(kind, "open(…).values", lambda: holdfast.open(path).values), state)
    rows.spend(kind, "open(…).manifest", lambda: holdfast.open(path).manifest)
    shutil.rmtree(path)
    file.unlink()


def bars_of(rows: Rows) -> list[Bar]:
    """What is wanted."""
    return [
        Bar(f"{row.kind}: {row.what}, times as long as torch", ratio, most=WANTED)
        for row in rows.found.values()
        if (ratio := rows.ratio(row)) is not None
    ]


def show(rows: Rows) -> None:
    """Print the medians, and each ratio with the bar."""
    last = ""
    for row in rows.found.values():
        if row.kind != last:
            print(f"\n{row.kind:36} {'ms':>8} {'on disk':>9}  of torch's")
            last = row.kind
        ratio = rows.ratio(row)
        verdict = "" if ratio is None else f"{ratio:.2f}  {'met' if ratio <= WANTED else 'MISSED'}"
        size = f"{row.nbytes / 1e6:.1f} MB" if row.nbytes else ""
        print(f"  {row.what:34} {median(row.seconds) * 1e3:8.1f} {size:>9}  {verdict}")


def main() -> int:
    """The command."""
    options = options_of("values", __doc__, quick=f"{QUICK} values in place of {FULL}, three turns").parse_args()
    count, turns = (QUICK, 3) if options.quick else (FULL, 5)
    rows = Rows()
    with folder(options.dir, "values") as work:
        for kind, value in kinds(count).items():
            for _ in range(turns):
                turn(work, kind, value, rows)
            say(kind)
    show(rows)
    facts = {"values": count, "turns": turns, "wanted": WANTED, **machine()}
    write(options.out, facts, [vars(row) for row in rows.found.values()], bars_of(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
