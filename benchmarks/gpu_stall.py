"""What a save costs a training run on a GPU: how long it stands still, and how fast its state comes to the host.

Run as `python -m benchmarks.gpu_stall`, on one GPU and one rank; prints a table and bars, writes JSON.
Never says anything where there is no GPU, unless `--device cpu` asks for the same code in small.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks import report, stall_job, stall_report
from benchmarks.bars import Bar
from benchmarks.frame import folder, machine, write
from benchmarks.stall_job import Course
from benchmarks.stall_rows import Row
from benchmarks.stall_systems import DCP, HOLDFAST, NOTHING, check
from benchmarks.stall_train import Size

SYSTEMS = [NOTHING, *HOLDFAST, *(name for name, (_, overlap) in DCP.items() if overlap)]
STALL, RATE = 10, 0.85
PROBE = 4 << 30


def size_of(gigabytes: float, device: str) -> Size:
    """A GPT whose parameters and moments take so much; a step on the GPU is longer than the copy of them."""
    small = Size(width=256, depth=0, vocabulary=32000)
    large = Size(width=2048, depth=0, vocabulary=32000, context=1024, batch=4, parts=16)
    size = large if device == "cuda" else small
    block = replace(size, depth=1).nbytes - size.nbytes
    return replace(size, depth=max(1, -(-round(gigabytes * 1e9 - size.nbytes) // block)))


def raw_rate() -> float:
    """GB/s of one large copy from the GPU into pinned memory, with nothing beside it."""
    source = torch.ones(PROBE, dtype=torch.uint8, device="cuda")
    target = torch.empty(PROBE, dtype=torch.uint8, pin_memory=True)
    seconds = []
    for _ in range(6):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    return PROBE / median(seconds[1:]) / 1e9


def copy_rate(row: Row) -> float | None:
    """GB/s of the copies to the host, by the median save."""
    seen = [save.copying for ranks in row.segments for segment in ranks for save in segment.saves]
    rates = [nbytes / seconds / 1e9 for seconds, nbytes in filter(None, seen) if seconds > 0]
    return median(rates) if rates else None


def measure(rows: dict[str, Row], work: Path, course: Course, rounds: int) -> None:
    """All systems in turns; every save is looked at, then deleted."""
    for _ in range(rounds):
        for name, row in rows.items():
            if row.error:
                continue
            folder = work / name.replace(" ", "-")
            folder.mkdir()
            try:
                here = course if name != NOTHING else replace(course, every=0)
                row.segments.append([stall_job.segment(name, folder, here)])
                for number in range(here.saves):
                    check(name, folder / f"save-{number}")
                print(stall_report.line(row), file=sys.stderr, flush=True)
            except Exception as error:
                row.error = f"{type(error).__name__}: {error}"
            shutil.rmtree(folder)


def judge(rows: dict[str, Row], raw: float) -> list[Bar]:
    """The bars of both workers."""
    bars = []
    for name in HOLDFAST:
        stall, rate = rows[name].middle("stall"), copy_rate(rows[name])
        bars.append(
            Bar(f"{name}: stall, call and hook", None if stall is None else stall * 1e3, most=STALL, unit=" ms")
        )
        bars.append(Bar(f"{name}: copy rate over the raw pinned one", rate / raw if rate else None, least=RATE))
    return bars


def show(rows: dict[str, Row], bars: list[Bar], facts: dict[str, object]) -> None:
    """Print everything."""
    console = Console() if sys.stdout.isatty() else Console(width=146)
    for name, value in facts.items():
        console.print(f"[dim]{name}: {value}[/dim]", highlight=False)
    table = Table(title="saves beside training on one GPU", title_justify="left", title_style="bold")
    columns = ("system", "training s", "call ms", "hook ms", "waited s", "copy GB/s", "durable s")
    for column in columns:
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in rows.values():
        figures = [
            median(row.seconds) if row.seconds else None,
            *(None if (value := row.middle(figure)) is None else value * 1e3 for figure in ("call", "hook")),
            row.middle("waited"), copy_rate(row), row.middle("end_to_end"),
        ]  # fmt: skip
        table.add_row(row.system, *("" if value is None else f"{value:.2f}" for value in figures))
    console.print(table)
    for row in rows.values():
        if row.error:
            console.print(f"  [red]{row.system} failed[/red]: {row.error}", highlight=False, soft_wrap=True)
    if bars:
        report.show_bars(console, bars)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_stall", description=__doc__)
    parser.add_argument("--gb", type=float, default=20.0, help="gigabytes of parameters and optimizer state")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: only to see that it runs")
    parser.add_argument("--steps", type=int, default=16, help="of a segment")
    parser.add_argument("--every", type=int, default=8, help="steps from one save to the next")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--dir", type=Path, default=Path("bench-out/work"), help="where to write (then removed)")
    parser.add_argument("--out", type=Path, default=Path("bench-out/gpu-stall.json"), help="the figures as JSON")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so there is nothing to measure; --device cpu runs the same code in small.")
        return 0
    raw = raw_rate() if options.device == "cuda" else None
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("cpu:gloo,cuda:nccl" if raw else "gloo", store=store, rank=0, world_size=1)
    size = size_of(options.gb, options.device)
    rows = {name: Row(name) for name in SYSTEMS}
    try:
        with folder(options.dir, "gpu-stall") as work:
            nbytes = stall_job.hold(size, options.device)
            measure(rows, work, Course(options.steps, options.every), options.rounds)
    finally:
        dist.destroy_process_group()
    facts = {
        "training": f"GPT of {size.parameters / 1e6:.0f} million parameters, AdamW: {nbytes / 1e9:.2f} GB of state",
        "device": torch.cuda.get_device_name() if raw else "the CPU, for a try: the figures mean nothing",
        "raw pinned copy": f"{raw:.1f} GB/s" if raw else "none",
        **machine(),
    }
    bars = judge(rows, raw) if raw else []
    show(rows, bars, facts)
    write(options.out, facts, [asdict(row) for row in rows.values()], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
