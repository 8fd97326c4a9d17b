"""A Hugging Face folder from the memory of two ranks, beside a native save of the same state.

Run as `python -m benchmarks.live_export [--quick]`; prints a table, the ratios of throughput and the memory, and writes
JSON. The systems take turns, and the folder is compared with the save, bit by bit. Never compares figures of two runs.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

os.environ["OMP_NUM_THREADS"] = "1"  # before torch, here and in the ranks

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from benchmarks.bar import Bar
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.gauge import Spent, spend
from benchmarks.pool import Pool
from benchmarks.repeated import Repeated, times
from benchmarks.report import show_bars
from benchmarks.states import Sharded

FULL, QUICK = Sharded(width=1152, depth=8, vocabulary=40000), Sharded(width=416, depth=6, vocabulary=12000)
RANKS, TURNS = 2, 5
MEMORY = 128 << 20

State = dict[str, dict[str, torch.Tensor]]


def _save(state: State, path: Path) -> None:
    holdfast.save(state, path)


def _export(state: State, path: Path) -> None:
    holdfast.convert(state, path, to="huggingface")


NATIVE, EXPORT = "holdfast.save", "convert to huggingface"
SYSTEMS: dict[str, Callable[[State, Path], None]] = {NATIVE: _save, EXPORT: _export}
CUTS = {"rows": 0, "columns": 1}
"""FSDP2 cuts every tensor by rows; tensor parallelism cuts half of the matrices by columns."""


@dataclass
class Row(Repeated):
    """One system with one way to cut the tensors."""

    system: str
    cut: str


_held: dict[str, State] = {}


def build(spec: Sharded) -> None:
    """On each rank: all tensors of the spec as those of one model, cut in both ways; they share the memory."""
    flat = {name: tensor for part in spec.build(dist.get_rank(), RANKS).values() for name, tensor in part.items()}
    mesh = init_device_mesh("cpu", (RANKS,))
    _held["rows"] = {"model": flat}
    columns = dict(flat)
    for name, tensor in flat.items():
        if isinstance(tensor, DTensor) and tensor.dim() == 2 and len(tensor) % RANKS == 0:
            local = tensor.to_local()
            shape = torch.Size((len(local), local.shape[1] * RANKS))
            columns[name] = DTensor.from_local(
                local, mesh, [Shard(1)], run_check=False, shape=shape, stride=(shape[1], 1)
            )
    _held["columns"] = {"model": columns}


def measured(system: str, cut: str, path: Path) -> Spent:
    return spend(lambda: SYSTEMS[system](_held[cut], path))[0]


def run(work: Path, spec: Sharded, turns: int) -> list[Row]:
    """All systems in turns."""
    rows = {(name, cut): Row(name, cut) for cut in CUTS for name in SYSTEMS}
    names = list(SYSTEMS)
    pool = Pool(RANKS)
    try:
        pool.run(build, spec)
        for turn in range(turns + 1):  # the first is not counted
            for cut in CUTS:
                paths = {name: work / f"{number}-{cut}" for number, name in enumerate(names)}
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    os.sync()  # what was deleted or written before is not part of what comes
                    spent = pool.run(measured, name, cut, paths[name])
                    if turn:
                        rows[name, cut].add_spent(spent)
                        say(f"{name}, {cut}: {rows[name, cut].seconds[-1]:.2f} s")
                if not turn:
                    compare(paths[NATIVE], paths[EXPORT])
                for path in paths.values():
                    shutil.rmtree(path)
    finally:
        pool.close()
    return list(rows.values())


def compare(saved: Path, exported: Path) -> None:
    """Raise if the two do not hold the same tensors."""
    a, b = holdfast.open(saved), holdfast.open(exported)
    if a.tensors.keys() != b.tensors.keys():
        raise ValueError("the two hold other names")
    for name in a.tensors:
        if not torch.equal(a.read(name), b.read(name)):
            raise ValueError(f"the two hold another {name}")


def show(rows: list[Row], nbytes: int, *, judged: bool) -> list[Bar]:
    """Print the medians and the bars."""
    print(f"\n{'system':24} {'cut by':8} {'seconds':>8} {'best':>6} {'GB/s':>6} {'CPU':>6} {'memory':>10}")
    bars = []
    for cut in CUTS:
        ours = {row.system: row for row in rows if row.cut == cut}
        for row in ours.values():
            middle = median(row.seconds)
            print(
                f"{row.system:24} {cut:8} {middle:8.2f} {min(row.seconds):6.2f} {nbytes / middle / 1e9:6.2f} "
                f"{median(row.cpu):6.2f} {median(row.memory) / 2**20:6.0f} MiB"
            )
        share = times(ours[NATIVE], ours[EXPORT]), times(ours[NATIVE], ours[EXPORT], best=True)
        if cut == "rows":
            bars.append(Bar("export, share of a native save's throughput", *share, least=0.8))
            if judged:
                peak = median(ours[EXPORT].memory) / 2**20
                bars.append(Bar("export, memory above the state", peak, most=MEMORY / 2**20, unit=" MiB"))
        else:
            bars.append(Bar("export of tensors cut by columns, the same share", *share, least=0.0))
    show_bars(Console(), bars)
    return bars


def main() -> int:
    """The command."""
    parser = options_of("live_export", __doc__, quick="a ninth of the bytes and three turns")
    options = parser.parse_args()
    spec, turns = (QUICK, 3) if options.quick else (FULL, TURNS)
    print(f"{spec.nbytes / 1e9:.2f} GB in {spec.tensors} tensors on {RANKS} ranks; {turns} turns of each")
    with folder(options.dir, "live_export") as work:
        rows = run(work, spec, turns)
        bars = show(rows, spec.nbytes, judged=not options.quick)
    facts = {"bytes": spec.nbytes, "tensors": spec.tensors, **machine()}
    write(options.out, facts, [vars(row) for row in rows], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
