"""Saves that training waits for, and loads into tensors of the device: holdfast, torch DCP, torch.save, in turns.

All durable, all loads from files that were just written, each checked against what was saved. Run by `benchmarks.gpu`,
alone.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed.checkpoint as dcp

import holdfast
from benchmarks.gpu.part import Part, a_part, synchronize

GIGABYTES = 8.0
TURNS = 2
WRITERS = 2

State = dict[str, dict[str, torch.Tensor]]


def state_of(part: Part) -> State:
    """Layers of a transformer: a few large tensors and many small ones."""
    width, nbytes = (128, 20e6) if part.small else (4096, GIGABYTES * 1e9)
    made: dict[str, torch.Tensor] = {}
    layer = 0
    while sum(tensor.nbytes for tensor in made.values()) < nbytes:
        for name, shape in [("qkv", (3 * width, width)), ("out", (width, width)), ("up", (4 * width, width))]:
            made[f"{layer}.{name}.weight"] = torch.randn(shape, device=part.device)
            made[f"{layer}.{name}.bias"] = torch.randn(shape[0], device=part.device)
        made[f"{layer}.norm.weight"] = torch.ones(width, device=part.device)
        layer += 1
    return {"model": made}


def save_pickle(state: State, path: Path) -> None:
    path.mkdir()
    with (path / "state.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def load_pickle(state: State, path: Path) -> None:
    found = torch.load(path / "state.pt", map_location="cpu", mmap=True, weights_only=True)
    for name, tensor in state["model"].items():
        tensor.copy_(found["model"][name])


def save_dcp(state: State, path: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=True, thread_count=WRITERS), no_dist=True)


def load_dcp(state: State, path: Path) -> None:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)


Call = Callable[[State, Path], object]
SAVES: dict[str, Call] = {
    "holdfast": lambda state, path: holdfast.save(state, path),
    "torch DCP": save_dcp,
    "torch.save": save_pickle,
}
LOADS: dict[str, list[tuple[str, Call]]] = {
    "holdfast": [
        ("holdfast", lambda state, path: holdfast.load(path, state)),
        ("holdfast, sums not checked", lambda state, path: holdfast.load(path, state, verify=False)),
    ],
    "torch DCP": [("torch DCP", load_dcp)],
    "torch.save": [("torch.load, mapped", load_pickle)],
}


def timed(part: Part, call: Call, state: State, path: Path) -> float:
    synchronize(part.device)
    began = time.monotonic()
    call(state, path)
    synchronize(part.device)
    return time.monotonic() - began


def check(state: State, sums: dict[str, float]) -> None:
    """Raise ValueError if a tensor is not what was saved."""
    for name, tensor in state["model"].items():
        if float(tensor.double().sum()) != sums[name]:
            raise ValueError(f"{name} is not what was saved")


def many_small(part: Part, folder: Path) -> None:
    """Tensors of 16 KiB, saved, and loaded from cached files: what each of them costs by itself."""
    count = 200 if part.small else 20_000
    state: State = {"model": {str(n): torch.full((4096,), float(n), device=part.device) for n in range(count)}}
    sums = {name: float(tensor.double().sum()) for name, tensor in state["model"].items()}
    path, system = folder / "small", "holdfast"
    part.row(work=f"save of {count} tensors", system=system, seconds=timed(part, SAVES[system], state, path))
    for name, load in LOADS[system]:
        for tensor in state["model"].values():
            tensor.zero_()
        part.row(work=f"load of {count} tensors", system=name, seconds=timed(part, load, state, path))
        check(state, sums)
    shutil.rmtree(path)


def main() -> None:
    """The part."""
    with a_part("whole") as part:
        state = state_of(part)
        nbytes = sum(tensor.nbytes for tensor in state["model"].values())
        folder, rate = part.place(int(1.2 * nbytes))
        part.fact("state", f"{nbytes / 1e9:.2f} GB in {len(state['model'])} tensors")
        sums = {name: float(tensor.double().sum()) for name, tensor in state["model"].items()}
        seconds: dict[tuple[str, str], list[float]] = {}
        failed: dict[str, str] = {}
        for turn in range(TURNS):
            for system, save in SAVES.items():
                if system in failed or part.left < 5 + 4 * nbytes / 1e9 / rate:
                    failed.setdefault(system, "") if turn == 0 else None
                    continue
                path = folder / f"{turn}-{system.replace(' ', '-')}"
                try:
                    seconds.setdefault(("durable save", system), []).append(timed(part, save, state, path))
                    for name, load in LOADS[system]:
                        for tensor in state["model"].values():
                            tensor.zero_()
                        seconds.setdefault(("load to the device", name), []).append(timed(part, load, state, path))
                        check(state, sums)
                except Exception as error:
                    failed[system] = f"{type(error).__name__}: {error}"
                shutil.rmtree(path, ignore_errors=True)
        for (work, system), taken in seconds.items():
            part.row(work=work, system=system, seconds=median(taken), rate=nbytes / 1e9 / median(taken), each=taken)
        for system, error in failed.items():
            part.row(work="", system=system, error=error or "left out: no time for it")
        many_small(part, folder)


if __name__ == "__main__":
    main()
