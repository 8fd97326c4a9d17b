"""What a load costs in memory, each case in a process of its own: run by tests/buffers/test_memory.py.

Forks for each case, since a peak never comes down: a fork's begins at what it has. Prints one JSON object a case.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.storage.local.local import Local
from holdfast.storage.local.local_place import LocalPlace
from holdfast.storage.store_place import StorePlace
from tests.ondisk.test_format import thread_save

ROWS, COLUMNS, TENSORS = 2048, 8192, 4
"""256 MiB of float32; the largest tensor, 64 MiB, is larger than a window should be."""

LARGER = 24
"""Tensors of a larger state, 1.5 GiB."""


def figure(name: str) -> int:
    """Bytes, as the kernel counts them: VmHWM is the peak, RssAnon what is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def saved(row: int, columns: slice = slice(0, COLUMNS)) -> torch.Tensor:
    """What row of any tensor holds."""
    return (torch.arange(COLUMNS)[columns] % 251 + row % 7).float()


def tensors(make: Callable[[], Any], count: int = TENSORS) -> dict[str, Any]:
    return {f"w{i}": make() for i in range(count)}


def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 0, dtype=dtype)


def columns(dtype: torch.dtype) -> Callable[[], holdfast.Shard]:
    """The columns that a rank of eight takes."""
    return lambda: holdfast.Shard(full(ROWS, COLUMNS // 8, dtype=dtype), (ROWS, COLUMNS), (0, COLUMNS // 8))


LOADS: dict[str, Callable[[], Any]] = {
    "plain": lambda: full(ROWS, COLUMNS),
    "cast": lambda: full(ROWS, COLUMNS, dtype=torch.float64),
    "cast down": lambda: full(ROWS, COLUMNS, dtype=torch.bfloat16),
    "transposed": lambda: full(COLUMNS, ROWS).t(),
    "columns": columns(torch.float32),
    "columns cast": columns(torch.float64),
}


def in_a_fork(case: Callable[[], dict[str, int]]) -> dict[str, Any]:
    """The figures of a case, or under "failed" why there are none."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = json.dumps(case())
        except BaseException:
            answer = json.dumps({"failed": traceback.format_exc()})
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    return dict(json.loads(text)) if text else {"failed": f"ended without a word, with status {status}"}


def load(where: Any, kind: str, verify: Any, count: int = TENSORS, **options: Any) -> dict[str, int]:
    state = {"model": tensors(LOADS[kind], count)}
    peak = figure("VmHWM")
    loaded = holdfast.load(where, state, cast="cast" in kind, verify=verify, **options)
    above = figure("VmHWM") - peak
    for value in state["model"].values():
        tensor = value.tensor if isinstance(value, holdfast.Shard) else value
        part = slice(COLUMNS // 8, COLUMNS // 4) if isinstance(value, holdfast.Shard) else slice(0, COLUMNS)
        for row in (0, 5, ROWS - 1):
            assert torch.equal(tensor[row].float(), saved(row, part).to(tensor.dtype).float())
    return {"above": above, "needed": loaded.bytes_needed, "read": loaded.bytes_read}


def state_dict(where: Path, **options: Any) -> dict[str, int]:
    own, peak = figure("RssAnon"), figure("VmHWM")
    state = holdfast.open(where).state_dict(**options)
    above = figure("VmHWM") - peak
    for tensor in state["model"].values():
        assert torch.equal(tensor[5], saved(5)) and float(tensor[:, 0].sum()) == sum(r % 7 for r in range(ROWS))
    return {"above": above, "own": figure("RssAnon") - own}


def convert(where: Path, target: Path, **options: Any) -> dict[str, int]:
    peak = figure("VmHWM")
    holdfast.convert(where, target, **options)
    return {"above": figure("VmHWM") - peak}


def opened(where: Path) -> dict[str, int]:
    peak = figure("VmHWM")
    holdfast.open(where)
    return {"above": figure("VmHWM") - peak}


def half(model: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """The columns of one rank of two."""
    width = COLUMNS // 2
    parts = {name: tensor[:, rank * width : (rank + 1) * width] for name, tensor in model.items()}
    return {"model": {name: holdfast.Shard(p, (ROWS, COLUMNS), (0, rank * width)) for name, p in parts.items()}}


def verify(where: Path) -> dict[str, int]:
    peak = figure("VmHWM")
    holdfast.open(where).verify()
    return {"above": figure("VmHWM") - peak}


def save(where: Any, make: Callable[[], torch.Tensor], **background: Any) -> dict[str, int]:
    state = {"model": tensors(make)}
    peak = figure("VmHWM")
    if background:
        with holdfast.Saver(**background) as saver:
            saver.save(state, where).wait()
    else:
        holdfast.save(state, where)
    return {"above": figure("VmHWM") - peak}


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rows = torch.arange(ROWS)[:, None] % 7
    model = {"model": tensors(lambda: (torch.arange(COLUMNS) % 251 + rows).float())}
    holdfast.save(model, folder / "c")
    small = {"a": torch.ones(3, 3).t()}  # what is imported or made once is not a load's
    holdfast.save(small, folder / "small")
    holdfast.load(folder / "small", small)
    holdfast.convert(folder / "small", folder / "small.pt", to="torch")
    torch.save(model, folder / "c.pt")
    store = StorePlace(Local(folder), "c")
    larger = {"model": {f"w{i}": model["model"][f"w{i % TENSORS}"].clone() for i in range(LARGER)}}
    holdfast.save(larger, folder / "larger")
    del larger
    thread_save(2, partial(half, model["model"]), LocalPlace(folder / "cells"))
    del model
    cases: dict[str, Callable[[], dict[str, int]]] = {}
    for kind in LOADS:
        cases[f"load {kind} blocks"] = partial(load, folder / "c", kind, "blocks")
    for kind in ("plain", "transposed", "columns cast"):
        cases[f"load {kind}"] = partial(load, folder / "c", kind, True)
    for kind in ("plain", "cast down"):
        cases[f"load {kind} store"] = partial(load, store, kind, True)
        cases[f"load {kind} torch"] = partial(load, folder / "c.pt", kind, True)
    cases["cached load"] = partial(load, store, "plain", True, cache=folder / "cache")
    cases["cached load again"] = partial(load, store, "plain", True, cache=folder / "cache")
    cases["larger load store"] = partial(load, StorePlace(Local(folder), "larger"), "plain", True, count=LARGER)
    cases["load plain resharded"] = partial(load, folder / "cells", "plain", "blocks")
    cases["load columns cast resharded"] = partial(load, folder / "cells", "columns cast", "blocks")
    cases["open"] = partial(opened, folder / "c")
    cases["state_dict read"] = partial(state_dict, folder / "c")
    cases["state_dict mmap"] = partial(state_dict, folder / "c", mmap=True)
    cases["state_dict mmap unverified"] = partial(state_dict, folder / "c", mmap=True, verify=False)
    cases["state_dict mmap torch"] = partial(state_dict, folder / "c.pt", mmap=True)
    cases["convert torch"] = partial(convert, folder / "c", folder / "t.pt", to="torch", dtype=torch.bfloat16)
    cases["convert one byte"] = partial(convert, folder / "c", folder / "bytes", dtype=torch.float8_e4m3fn)
    cases["convert dcp"] = partial(convert, folder / "c.pt", folder / "dcp", to="dcp")
    cases["convert holdfast"] = partial(convert, folder / "c.pt", folder / "ours")
    cases["unshard"] = partial(convert, folder / "cells", folder / "whole")
    plain, transposed = LOADS["plain"], LOADS["transposed"]
    cases["save"] = partial(save, folder / "saved", plain)
    cases["save transposed"] = partial(save, folder / "saved.t", transposed)
    cases["save store"] = partial(save, StorePlace(Local(folder), "put"), plain)
    cases["save background"] = partial(save, folder / "behind", plain, worker="process")
    cases["save background limited"] = partial(save, folder / "lim", plain, worker="process", memory_limit=64 << 20)
    cases["verify"] = partial(verify, folder / "c")
    for name, case in cases.items():
        sys.stdout.write(json.dumps({"case": name, **in_a_fork(case)}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
