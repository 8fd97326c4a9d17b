"""What saves and loads take of the device's memory beyond the state: allocated, kept by torch, and gone by the driver.

Run by `benchmarks.gpu`, alone: the driver counts for all processes. Never trains, so that only saves allocate.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from benchmarks.bar import Bar
from benchmarks.gpu.part import Part, a_part

MOST = 64.0
"""MiB beyond the state, for a save."""


class State:
    """A model of large and small parameters with momentum, on the device."""

    def __init__(self, part: Part) -> None:
        count, large = (2, 1 << 18) if part.small else (8, 1 << 24)
        sizes = [large] * count + [1000 + n for n in range(100 if part.small else 2000)]
        made = [torch.full((n,), float(n), device=part.device) for n in sizes]
        self.model = torch.nn.ParameterList([torch.nn.Parameter(tensor) for tensor in made])
        self.optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9, lr=0.1)
        for parameter in self.model:
            self.optimizer.state[parameter] = {"momentum_buffer": torch.ones_like(parameter)}

    @property
    def tensors(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    @property
    def nbytes(self) -> int:
        return 2 * sum(parameter.nbytes for parameter in self.model)


def watched(part: Part, what: str, call: Callable[[], object]) -> dict[str, float]:
    """By how many MiB the memory of the device grew at the most, and what of it the driver still lacks afterwards."""
    if part.small:
        call()
        figures = {"allocated": 0.0, "kept": 0.0, "driver": 0.0}
    else:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before, kept = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free = torch.cuda.mem_get_info()[0]
        call()
        torch.cuda.synchronize()
        grown = (
            torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - kept,
            free - torch.cuda.mem_get_info()[0],
        )  # fmt: skip
        figures = dict(zip(("allocated", "kept", "driver"), (nbytes / 2**20 for nbytes in grown), strict=True))
    part.row(what=what, **figures)
    return figures


def background(state: State, folder: Path, worker: str) -> None:
    """Three saves of one Saver."""
    with holdfast.Saver(worker=worker) as saver:
        saver.prepare(state.tensors)
        for number in range(3):
            saver.save(state.tensors, folder / worker / str(number)).wait()
            shutil.rmtree(folder / worker / str(number))


def incremental(state: State, folder: Path) -> None:
    """Fingerprints of everything, three times, and little that changed."""
    with holdfast.Saver() as saver:
        base = None
        for number in range(3):
            with torch.no_grad():
                state.model[-1].add_(1)
            path = folder / "incremental" / str(number)
            saver.save(state.tensors, path, base=base).wait()
            base = path


def main() -> None:
    """The part."""
    with a_part("memory") as part:
        state = State(part)
        folder, _ = part.place(3 * state.nbytes)
        part.fact("state", f"{state.nbytes / 1e9:.2f} GB in {2 * len(state.model)} tensors")
        for worker in ("process", "thread"):
            grown = watched(part, f"background save, {worker}", lambda worker=worker: background(state, folder, worker))
            part.bar(Bar(f"{worker}: device memory", grown["kept"], most=MOST, unit=" MiB"))
        watched(part, "save that training waits for", lambda: holdfast.save(state.tensors, folder / "c"))
        watched(part, "load into the device", lambda: holdfast.load(folder / "c", state.tensors))
        shutil.rmtree(folder / "c")
        watched(part, "incremental saves", lambda: incremental(state, folder))


if __name__ == "__main__":
    main()
