"""What comparing replicas and signing cost: saves with and without, and raw passes over the same memory beside them.

Run as `python -m benchmarks.replicas [--quick]`, on two ranks that hold the same tensors as plain ones,
as under DDP; prints a table, writes JSON. Each save is verified; a flipped bit at the end has to be found.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch
import torch.distributed as dist
import xxhash

import holdfast
from benchmarks.frame import folder, machine, options_of, write
from benchmarks.pool import Pool

FULL, QUICK = 48, 6
"""Layers of 32 MiB, held by each rank."""

RANKS, TURNS, KEY = 2, 5, bytes(range(32))
MIB = 1 << 20


def state_of(layers: int) -> dict[str, Any]:
    """The same bytes on every rank."""
    made = torch.Generator().manual_seed(1)
    return {"model": {f"layer.{i}": torch.randn(2048, 4096, generator=made) for i in range(layers)}}


def _hashed(state: dict[str, Any], make: Callable[[], Any]) -> None:
    for tensor in state["model"].values():
        data, total = memoryview(tensor.numpy()).cast("B"), make()
        for at in range(0, len(data), MIB):
            total.update(data[at : at + MIB])
        total.digest()


def job(work: str, layers: int, turns: int) -> dict[str, list[float]]:
    """On each rank: seconds of each turn of each row; ranks begin every row together."""
    state, rows = state_of(layers), {}
    above = Path(work)
    key: Any = KEY if dist.get_rank() == 0 else True
    systems: dict[str, Callable[[str], object]] = {
        "save": lambda path: holdfast.save(state, path),
        "save, replicas compared": lambda path: holdfast.save(state, path, check_replicas=True),
        "save, signed": lambda path: holdfast.save(state, path, sign=key),
        "save, compared and signed": lambda path: holdfast.save(state, path, check_replicas=True, sign=key),
        "one pass of XXH3-64, one thread": lambda path: _hashed(state, xxhash.xxh3_64),
        "one pass of SHA-256, one thread": lambda path: _hashed(state, hashlib.sha256),
    }
    for turn in range(turns):
        for system, run in list(systems.items())[:: 1 if turn % 2 else -1]:
            path = above / f"{turn} {system}"
            dist.barrier()
            began = time.monotonic()
            run(str(path))
            rows.setdefault(system, []).append(time.monotonic() - began)
            dist.barrier()
            if dist.get_rank() == 0 and path.exists():
                holdfast.open(path).verify()
                shutil.rmtree(path)
    _flipped(state, above)
    return {system: rows[system] for system in systems}


def _flipped(state: dict[str, Any], above: Path) -> None:
    """Raise if a flipped bit is not found."""
    if dist.get_rank() == 1:
        state["model"]["layer.3"].view(torch.int32)[7, 7] ^= 1
    try:
        holdfast.save(state, above / "flipped", check_replicas=True)
    except holdfast.SaveFailed as error:
        if "model/layer.3: between rank 0 (" not in str(error):
            raise
    else:
        raise ValueError("a flipped bit was saved")


def show(rows: dict[str, list[float]], nbytes: int) -> None:
    """The medians; what each adds to a plain save; and GB/s over all that a rank holds."""
    plain = median(rows["save"])
    print(f"\n{'':36} {'seconds':>8} {'best':>7} {'over save':>10} {'GB/s a rank':>12}")
    for system, seconds in rows.items():
        more = f"{median(seconds) - plain:+9.3f}s" if system.startswith("save,") else ""
        print(
            f"{system:36} {median(seconds):8.3f} {min(seconds):7.3f} {more:>10} {nbytes / 1e9 / median(seconds):12.2f}"
        )


def main() -> int:
    """The command."""
    options = options_of("replicas", __doc__, quick="an eighth of the bytes and two turns").parse_args()
    layers, turns = (QUICK, 2) if options.quick else (FULL, TURNS)
    nbytes = layers * 2048 * 4096 * 4
    print(f"{RANKS} ranks hold the same {nbytes / 1e9:.2f} GB; {turns} turns of each")
    with folder(options.dir, "replicas") as work:
        pool = Pool(RANKS)
        try:
            told = pool.run(job, str(work), layers, turns)
        finally:
            pool.close()
    rows = {system: [max(turn) for turn in zip(*(rank[system] for rank in told), strict=True)] for system in told[0]}
    show(rows, nbytes)
    facts = {"bytes": nbytes, "ranks": RANKS, **machine()}
    write(options.out, facts, [{"system": system, "seconds": seconds} for system, seconds in rows.items()])
    return 0


if __name__ == "__main__":
    sys.exit(main())
