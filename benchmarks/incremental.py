"""Fine-tuning with 99 % of the parameters frozen: the first save, and the second one, which has little to write.

Run as `python -m benchmarks.incremental [--quick]`, on one process; prints a table and its bars, writes JSON. DCP saves
the same state twice beside it. What the second save holds is compared bit by bit, whole and in other pieces.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from rich.console import Console

import holdfast
from benchmarks.bar import Bar
from benchmarks.frame import folder, machine, options_of, say, write
from benchmarks.repeated import Repeated, times
from benchmarks.report import show_bars
from holdfast.ondisk.manifest import FILE_NAME as MANIFEST

FULL, QUICK = 48, 8
"""Layers of 32 MiB that never change; adapters and their moments add 1 %."""

TURNS, WIDTH, RANK = 5, 4096, 7
BYTES, TIME = 0.015, 1 / 8
FLOOR, SUMMERS, BLOCK = "floor: sums, changed part written", 2, 8 << 20


def state_of(layers: int) -> dict[str, Any]:
    """A model of frozen layers, each with a small adapter that trains with Adam."""
    made = torch.Generator().manual_seed(1)
    model = {f"layer.{i}.weight": torch.randn(WIDTH // 2, WIDTH, generator=made) for i in range(layers)}
    adapters = {f"layer.{i}.lora_{ab}": torch.zeros(RANK, WIDTH // 2) for i in range(layers) for ab in "ab"}
    moments = {name: {"exp_avg": value.clone(), "exp_avg_sq": value.clone()} for name, value in adapters.items()}
    return {"model": {**model, **adapters}, "optim": moments, "step": 0}


def train(state: dict[str, Any], step: int) -> None:
    """Change all that trains."""
    for name, moments in state["optim"].items():
        for tensor in (state["model"][name], *moments.values()):
            tensor.normal_(generator=torch.Generator().manual_seed(step))
    state["step"] = step


@dataclass
class Row(Repeated):
    """One kind of save; each turn's, and the bytes that it added to the disk."""

    system: str
    written: list[int] = field(default_factory=list)

    def take(self, folder: Path, save: Callable[[], object]) -> None:
        """Save once, on a disk that has nothing else to do."""
        os.sync()
        before, began, cpu = _used(folder), time.monotonic(), time.process_time()
        save()
        self.seconds.append(time.monotonic() - began)
        self.cpu.append(time.process_time() - cpu)
        self.written.append(_used(folder) - before)


def _used(folder: Path) -> int:
    """Bytes on disk; a file with several names counts once."""
    found = {path.stat().st_ino: path for path in folder.rglob("*") if path.is_file()}
    return sum(path.stat().st_blocks * 512 for path in found.values())


def run(work: Path, layers: int, turns: int) -> list[Row]:
    """All systems in turn, each in a folder of its own that is removed after it."""
    names = [
        "holdfast, first", "holdfast, second", "holdfast in the background, second", FLOOR, "DCP, first", "DCP, second",
    ]  # fmt: skip
    rows = {name: Row(name) for name in names}
    state = state_of(layers)
    for turn in range(turns):
        for system in ("holdfast", "holdfast in the background", "DCP")[:: 1 if turn % 2 else -1]:
            folder = work / f"{turn} {system}"
            folder.mkdir()
            train(state, 1)
            if system == "DCP":
                rows["DCP, first"].take(folder, lambda: dcp.save(state, checkpoint_id=folder / "1"))
                train(state, 2)
                rows["DCP, second"].take(folder, lambda: dcp.save(state, checkpoint_id=folder / "2"))
            elif system == "holdfast":
                rows["holdfast, first"].take(folder, lambda: holdfast.save(state, folder / "1"))
                train(state, 2)
                rows["holdfast, second"].take(folder, lambda: holdfast.save(state, folder / "2", base=folder / "1"))
                compare(folder / "2", state)
                rows[FLOOR].take(folder, lambda: least(state, folder / "floor", (folder / "2" / MANIFEST).read_bytes()))
            else:
                with holdfast.Saver() as saver:
                    saving = saver.save(state, folder / "1")
                    saving.wait()
                    train(state, 2)
                    row = rows["holdfast in the background, second"]
                    row.take(folder, lambda: saver.save(state, folder / "2", base=saving).wait())
                compare(folder / "2", state)
            shutil.rmtree(folder)
            say(f"turn {turn + 1}, {system}: done")
    return list(rows.values())


def least(state: dict[str, Any], path: Path, manifest: bytes) -> None:
    """Do what no such save can do without, in a new folder.

    Sum every byte that may have changed, on two cores, beside writing what did; then a manifest, since it holds the
    sums; each file is on the disk before the next one.
    """
    path.mkdir()
    trained = {name: tensor for name, tensor in state["model"].items() if name in state["optim"]}
    moments = [tensor for two in state["optim"].values() for tensor in two.values()]
    frozen = [tensor for name, tensor in state["model"].items() if name not in trained]
    blocks = [
        view[at : at + BLOCK]
        for view in map(_bytes, (*frozen, *trained.values(), *moments)) for at in range(0, len(view), BLOCK)
    ]  # fmt: skip
    with ThreadPoolExecutor(SUMMERS) as pool:
        sums = pool.map(xxhash.xxh3_64_hexdigest, blocks)
        _write(path / "data", map(_bytes, (*trained.values(), *moments)))
        deque(sums, maxlen=0)
    _write(path / "manifest", [memoryview(manifest)])


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write(path: Path, parts: Iterable[memoryview]) -> None:
    with path.open("wb", buffering=0) as file:
        for part in parts:
            file.write(part)
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def compare(path: Path, state: dict[str, Any]) -> None:
    """Raise if the checkpoint is not this state, read whole and read as halves of each tensor."""
    checkpoint = holdfast.open(path)
    found = checkpoint.state_dict()
    for name, tensor in state["model"].items():
        cut, rows = tensor.shape[0] // 2, tensor.shape[0]
        halves = [checkpoint.read(f"model/{name}", [(0, cut)]), checkpoint.read(f"model/{name}", [(cut, rows)])]
        if not torch.equal(found["model"][name], tensor) or not torch.equal(torch.cat(halves), tensor):
            raise ValueError(f"{path} holds another {name}")
    for name, moments in state["optim"].items():
        if not all(torch.equal(found["optim"][name][key], tensor) for key, tensor in moments.items()):
            raise ValueError(f"{path} holds another optim/{name}")


def show(rows: list[Row], nbytes: int) -> list[Bar]:
    """Print the medians and the bars."""
    print(f"\n{'save':36} {'seconds':>8} {'best':>7} {'CPU s':>6} {'written':>12} {'of the state':>13}")
    for row in rows:
        written = median(row.written)
        print(
            f"{row.system:36} {median(row.seconds):8.3f} {min(row.seconds):7.3f} {median(row.cpu):6.2f} "
            f"{written / 1e6:9.1f} MB {100 * written / nbytes:12.2f}%"
        )
    found = {row.system: row for row in rows}
    first, second = found["holdfast, first"], found["holdfast, second"]
    floor = times(found[FLOOR], first)
    bars = [
        Bar("bytes of the second save over those of the state", max(second.written) / nbytes, most=BYTES),
        Bar("time of the second save over that of the first", *_fair(second, first), most=TIME, floor=floor),
        Bar("time of the second save over that of DCP's", *_fair(second, found["DCP, second"]), most=1.0),
    ]
    show_bars(Console(), bars)
    return bars


def _fair(over: Row, under: Row) -> tuple[float | None, float | None]:
    return times(over, under), times(over, under, best=True)


def main() -> int:
    """The command."""
    options = options_of("incremental", __doc__, quick="a sixth of the bytes and two turns").parse_args()
    layers, turns = (QUICK, 2) if options.quick else (FULL, TURNS)
    torch.set_num_threads(1)
    state = state_of(layers)
    nbytes = sum(tensor.nbytes for tensor in state["model"].values())
    nbytes += sum(tensor.nbytes for moments in state["optim"].values() for tensor in moments.values())
    trains = 1 - layers * WIDTH * WIDTH * 2 / nbytes
    print(f"{nbytes / 1e9:.2f} GB, of which {100 * trains:.2f} % train; {turns} turns of each")
    with folder(options.dir, "incremental") as work:
        rows = run(work, layers, turns)
    bars = show(rows, nbytes)
    write(options.out, {"bytes": nbytes, "trains": trains, **machine()}, [vars(row) for row in rows], bars)
    return 0


if __name__ == "__main__":
    sys.exit(main())
